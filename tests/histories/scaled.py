"""A plane under faults whose loaders follow their load, and whose ranks compute at different speeds between steps.

Time is simulated: a message takes a second. The scaler looks at the cost of reading, which an adversary draws anew
from time to time, and at the coming draws of the mix. It also looks at the roles that the planner waits for and at
how full the read-ahead is; both come from the planner itself. Its decisions are carried out in the same way as by the
mover of a run, while roles are lost.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from omniload.batch.microbatch import Batch
from omniload.machine.messages import HandedOver
from omniload.machine.roster.members import RoleAdded, RoleRetired
from omniload.machine.scaler import (
    LoadersSeen,
    MergeLoader,
    MoveSources,
    Scaler,
    ScalerCommand,
    SplitLoader,
)
from tests.histories.plane import FaultyPlane

__all__ = ["SCALED_SOMETIMES", "ScaledPlane"]

SCALED_SOMETIMES = (
    "the scaler adds a loader",
    "the scaler moves sources to a loader with room",
    "the scaler merges two loaders",
    "a loader that is to be added cannot be started",
    "a loader is lost while the scaler moves sources",
    "a rank computes while its next step is there",
)
_LOOK_EVERY = 12
"""Messages, which are seconds, between two looks of the scaler."""
_LOADS = (0.0, 0.0, 0.02, 0.1, 0.3, 0.6)
_CHANGES_OF_LOAD, _CHANGES_OF_MIX, _NOT_STARTED = 0.1, 0.2, 0.3
"""Shares of looks: the load changes, the mix announces a change, and the start of a split's loader fails."""
_SETTLE_S, _REGAIN_S = 30.0, 600.0


@dataclass(slots=True, kw_only=True)
class ScaledPlane(FaultyPlane):
    """A plane whose loaders and ranks act in simulated time."""

    scaler: int = 0
    """Most loaders; 0 if nothing follows their load."""
    pace: int = 0
    """Most seconds that the slowest rank computes."""
    changed_s: list[float] = field(default_factory=list, init=False)
    """Times at which the scaler has decided for a change."""
    _scaler: Scaler = field(init=False)
    _loads: random.Random = field(init=False)
    """Random numbers for the scaler and for paces alone."""
    _busy_S: list[float] = field(init=False)
    _look_at: int = field(default=_LOOK_EVERY, init=False)
    _changing: bool = field(default=False, init=False)
    """Whether a change is in progress; the next look waits for its end."""
    _killed_before: int = field(default=0, init=False)
    """Loaders that were killed when the change began."""
    _retired: set[int] = field(default_factory=set, init=False)
    _rests_to: dict[int, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        super(ScaledPlane, self).__post_init__()
        self._loads = random.Random(f"loads {self.seed}")
        self._busy_S = [0.0] * len(self._role)
        self._scaler = Scaler(least=1, most=max(self.scaler, self.num_loaders), cost_S={})

    def thrashed(self) -> str | None:
        """Return the promise that the scaler broke: changes come one by one, and few in any time."""
        at_s, most = self.changed_s, self._scaler.most
        if any(b - a < _SETTLE_S for a, b in pairwise(at_s)):
            return f"changes at {at_s} s do not wait for what the one before has done"
        for first, begun_s in enumerate(at_s):
            for number, ended_s in enumerate(at_s[first:], 1):
                if number > most + (ended_s - begun_s) / _REGAIN_S + 1e-9:
                    return (
                        f"{number} changes between {begun_s:g} and {ended_s:g} s, of {most} loaders"
                    )
        return None

    def missing(self) -> list[str]:
        """Return what is missing, merged loaders excepted, and check that no source is left to a merged loader."""
        ended = {f"loader-{number}" for number in self._retired}
        left = [s for s, number in enumerate(self._role) if number in self._retired]
        assert not left, f"sources {left} are left to loaders that have ended"
        return [each for each in super(ScaledPlane, self).missing() if each not in ended]

    def _do_what_is_due(self) -> bool:
        is_due = super(ScaledPlane, self)._do_what_is_due()
        if self.scaler and self._bag.delivered >= self._look_at:
            self._look_at = self._bag.delivered + _LOOK_EVERY
            if not self._changing:
                for command in self._scaler.handle(self._seen()):
                    self._begin(command)
        return is_due

    def _computes(self, rank: int) -> bool:
        if self._rests_to.get(rank, 0) <= self._bag.delivered:
            return False
        self.seen["a rank computes while its next step is there"] += 1
        return True

    def _have(self, rank: int, step: int, number: int, batch: Batch) -> None:
        super(ScaledPlane, self)._have(rank, step, number, batch)
        if self.pace:
            # The last rank takes the longest, because ranks of a job differ.
            longest = self.pace * (rank + 1) // len(self._next)
            self._rests_to[rank] = self._bag.delivered + self._loads.randint(0, longest)

    def _sources_of(self) -> dict[str, tuple[int, ...]]:
        known = len(self.planner.names)
        there: dict[int, list[int]] = {
            n: [] for n in range(self.num_loaders) if n not in self._retired
        }
        for source, number in enumerate(self._role[:known]):
            there[number].append(source)
        return {f"loader-{n}": tuple(sources) for n, sources in there.items()}

    def _seen(self) -> LoadersSeen:
        """Look at all loaders."""
        chance, is_there = self._loads, self._planner_is_there
        known = range(len(self.planner.names))
        if chance.random() < _CHANGES_OF_LOAD:
            self._busy_S = chance.choices(_LOADS, k=len(self._busy_S))
        shares = dict.fromkeys(known, 1 / len(known))
        soon = shares
        if chance.random() < _CHANGES_OF_MIX:
            soon = {s: share * chance.choice((0.0, 1.0, 4.0)) for s, share in shares.items()}
        waits = self.planner.waits().sources if is_there else ()
        return LoadersSeen(
            now_s=float(self._bag.delivered),
            sources_of=self._sources_of(),
            busy_S=dict(enumerate(self._busy_S)),
            tokens_S=dict.fromkeys(known, 100.0),
            shares_S=shares,
            soon_S=soon,
            waited=frozenset(f"loader-{self._role[s]}" for s in waits),
            filled_S=self.planner.filled() if is_there else None,
        )

    def _begin(self, command: ScalerCommand) -> None:
        """Begin a change; its questions to other roles follow in later messages."""
        self.changed_s.append(float(self._bag.delivered))
        self._changing, self._killed_before = True, self.killed
        match command:
            case SplitLoader(sources=sources):
                number = self.num_loaders
                assert number - len(self._retired) < self._scaler.most, "more loaders than may be"
                self.num_loaders += 1
                self._lives.append([])
                added = RoleAdded(f"loader-{number}", self.shadows)
                self._replace(self._roster.handle(added))
                if self._loads.random() < _NOT_STARTED:
                    self._saw("a loader that is to be added cannot be started", "scaler")
                    self._end_loader(number)
                    self._changing = False
                    return
                self._saw("the scaler adds a loader", "scaler")
                self._send(self._wait_for_first, number, sources, waits=True)
            case MoveSources(sources=sources, to=to):
                self._saw("the scaler moves sources to a loader with room", "scaler")
                self._shift(sources, int(to.removeprefix("loader-")), None)
            case MergeLoader(role=role, sources=sources, to=to):
                self._saw("the scaler merges two loaders", "scaler")
                number = int(role.removeprefix("loader-"))
                # This includes sources that an edit will add later: their loader is chosen together with that of
                # another source.
                coming = range(len(self.planner.names), len(self._role))
                more = [s for s in coming if self._role[s] == number]
                self._shift([*sources, *more], int(to.removeprefix("loader-")), number)

    def _wait_for_first(self, number: int, sources: Sequence[int]) -> None:
        if self._roster.holder_of(f"loader-{number}") is None:
            self._put_off(self._wait_for_first, number, sources)
        else:
            self._shift(sources, number, None)

    def _shift(self, sources: Sequence[int], number: int, ends: int | None) -> None:
        """Let another loader serve sources; ``ends`` is a loader that has no source afterwards."""
        assert number not in self._retired, "sources move to a loader that has ended"
        for source in sources:
            for loader in self._lives[before := self._role[source]]:
                if loader is not None:
                    loader.handle(HandedOver(sources=(source,)))
            self._role[source], self._moved_at[source] = number, self._turn + 1
            self._leave(source, before)
        if self._roster.holder_of(f"loader-{number}") is not None:
            self._hand_over(number, sources)
        self._send(self._wait_until_heard, tuple(sources), ends, waits=True)

    def _wait_until_heard(self, sources: Sequence[int], ends: int | None) -> None:
        """End a change once all roles that ask for its sources were notified."""
        if any(self._serving[source].turn < self._moved_at[source] for source in sources):
            self._put_off(self._wait_until_heard, sources, ends)
            return
        if self.killed > self._killed_before:
            self._saw("a loader is lost while the scaler moves sources", "scaler")
        if ends is not None:
            self._end_loader(ends)
        self._changing = False

    def _end_loader(self, number: int) -> None:
        """End a loader that has no source any more; the mover refuses to end any other."""
        left = [source for source, at in enumerate(self._role) if at == number]
        assert not left, f"loader-{number} serves sources {left}; move them first"
        self._retired.add(number)
        self._replace(self._roster.handle(RoleRetired(f"loader-{number}")))
        self._lives[number] = [None] * len(self._lives[number])

    def _find_place(self) -> None:
        if not self._retired:  # look for a place for any loader that exists
            super(ScaledPlane, self)._find_place()
