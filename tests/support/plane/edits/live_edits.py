"""Random changes of a mix, requested from running planes while ranks come and go, and at rest between their lives.

Nothing is simulated. Each life is a plane of threads or of Ray, and changes, some of them impossible, are requested
as by the command line. The samples of every step, as it was trained last, are kept. A replay of the edits alone must
give the same.
"""

import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import DataPlane, PlaneSpec
from omniload.base.errors import ConfigError, OmniloadError, StateError, UnavailableError
from omniload.batch.digest import batch_digest, combined
from omniload.client import Client
from omniload.commands.edits.asking import change_mix
from omniload.machine.messages import ResizeAsked
from omniload.mix.edits.answers import REQUEST_NAME
from omniload.mix.edits.edit import (
    AddSource,
    Change,
    RetireSource,
    SetWeights,
    SkipShard,
    SkipSteps,
    Undo,
)
from omniload.plan.place_tree import ClientPlaceTree

__all__ = ["LiveRun"]

_FAR = 10_000
_TIMEOUT_S = 60.0


@dataclass(slots=True, kw_only=True)
class LiveRun:
    """A run in several lives."""

    random: random.Random
    spec: PlaneSpec
    """On one rank, with a folder."""
    names: Sequence[str]
    """Names of the sources that changes mention; some sources join later or never."""
    shards: Sequence[str]
    added: Iterator[AddSource]
    open_plane: Callable[[PlaneSpec], DataPlane] = LocalPlane
    kill: Callable[[DataPlane, random.Random], None] = lambda _plane, _chance: None
    """A function that ends a process of the plane."""
    digests: dict[int, int] = field(default_factory=dict)
    """The digest of every step, as it was trained last."""
    pieces: dict[int, Counter[tuple[int, ...]]] = field(default_factory=dict)
    """Pieces of samples in every step."""
    saved: dict[int, dict[str, Any]] = field(default_factory=dict)
    """State before every step."""
    refused: list[OmniloadError] = field(default_factory=list)
    taken: Counter[str] = field(default_factory=Counter)
    """Accepted changes, by kind."""

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        assert self.spec.run_dir is not None
        return self.spec.run_dir

    def live(self, steps: int) -> None:
        """Resume from a saved state, on other ranks, and change the mix between the steps."""
        dp = self.random.choice([1, 2, 3])
        with self._opened(ClientPlaceTree.of(dp=dp)) as plane:
            clients = [Client(plane.handle(rank)) for rank in range(dp)]
            for _ in range(steps):
                clients = self._meddled(plane, clients)
                self._take(clients)
            for client in clients:
                client.close()

    def _opened(self, tree: ClientPlaceTree) -> DataPlane:
        """Open a plane from a random state among those that it accepts."""
        spec = replace(self.spec, tree=tree)
        while self.saved and self.random.random() < 0.9:
            at = self.random.choice(sorted(self.saved))
            try:
                plane = self.open_plane(replace(spec, state=self.saved[at]))
            except StateError as error:
                # The state lies after steps that were skipped since. As the message says, an earlier state is needed.
                self.refused.append(error)
                self._forget(at)
                continue
            self._forget(at + 1)
            return plane
        plane = self.open_plane(spec)
        self._forget(0)
        return plane

    def _forget(self, step: int) -> None:
        for kept in (self.digests, self.pieces):
            for later in [s for s in kept if s >= step - 1]:
                del kept[later]
        for later in [s for s in self.saved if s >= step]:
            del self.saved[later]

    def _take(self, clients: Sequence[Client]) -> None:
        step = clients[0].next_step
        self.saved[step] = json.loads(json.dumps(self.random.choice(clients).state_dict()))
        batches = [client.next_batch() for client in clients]
        self.digests[step] = combined(map(batch_digest, batches))
        self.pieces[step] = Counter(
            tuple(key) for b in batches for m in b.microbatches for key in m.keys_K4.tolist()
        )

    def _meddled(self, plane: DataPlane, clients: list[Client]) -> list[Client]:
        match self.random.randrange(8):
            case 0 | 1:
                self._ask(self._a_change(), self._a_step(clients[0].next_step))
            case 2:
                self._ask_twice(clients[0].next_step)
            case 3:
                (self.folder / REQUEST_NAME).write_text('{"version": 1, "id": "')
            case 4 | 5:
                return self._resize(plane, clients)
            case 6:
                self.kill(plane, self.random)
            case _:
                pass
        return clients

    def _a_change(self) -> Change:
        kind = self.random.randrange(10)
        name = self.random.choice(self.names)
        if kind < 3:
            return SetWeights(weights={name: self.random.choice([0.0, 0.5, 2.0, 9.0])})
        if kind < 5:
            return Undo()
        if kind < 7:
            return SkipShard(file=self.random.choice(self.shards))
        if kind < 8:
            return RetireSource(name=name)
        return next(self.added, Undo())

    def _a_step(self, next_step: int) -> int | None:
        """Return a step that has passed, is next, is soon, or that the run never reaches."""
        chance = self.random
        soon = next_step + chance.randrange(12)
        return chance.choice([None, None, None, soon, soon, chance.randrange(next_step + 1), _FAR])

    def _ask(self, change: Change, step: int | None) -> None:
        try:
            taken = change_mix(self.folder, change, step, _TIMEOUT_S)
        except (ConfigError, StateError, UnavailableError) as error:
            self.refused.append(error)
        else:
            self.taken[taken.edit.change.kind] += 1

    def _ask_twice(self, next_step: int) -> None:
        """Let two shells request different changes at the same time: one is accepted, or one after the other."""
        asked = [(self._a_change(), self._a_step(next_step)) for _ in range(2)]
        shells = [threading.Thread(target=self._ask, args=each) for each in asked]
        for shell in shells:
            shell.start()
        for shell in shells:
            shell.join()

    def _resize(self, plane: DataPlane, clients: list[Client]) -> list[Client]:
        """Change the ranks, and perhaps request a change of the mix meanwhile."""
        dp, step = self.random.choice([1, 2, 3, 4]), clients[0].next_step
        asked = self._a_change(), self._a_step(step)
        shell = threading.Thread(target=self._ask, args=asked)
        shell.start()
        stay = clients[:dp]
        for gone in clients[dp:]:
            gone.close()
        for rank, client in enumerate(stay):
            client.resize(rank, dp, step=step)
        joining = ResizeAsked(dp=dp, step=step)
        come = [Client(plane.handle(rank, 0, joining)) for rank in range(len(stay), dp)]
        shell.join()
        return stay + come

    def rest(self) -> None:
        """Change the mix while no plane runs."""
        for _ in range(self.random.randrange(3)):
            end = 1 + max(self.digests, default=0)
            change, step = self._a_change(), self._a_step(end)
            if self.random.random() < 0.3:
                first = self.random.randrange(end)
                change, step = SkipSteps(first=first, stop=first + self.random.randint(1, 3)), None
            self._ask(change, step)
