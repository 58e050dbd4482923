"""Source loaders and data constructors as Ray actors, and the answers of every actor to the keeper of the roster."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from typing_extensions import override

from omniload.actors.heartbeat_board import Activity, Board, FolderBoard, MemoryBoard
from omniload.actors.plane import PlaneSpec
from omniload.actors.ray.cluster import node_here
from omniload.actors.ray.hosts.placing import host_here
from omniload.actors.ray.links.of_constructor import LoaderHolders, Loaders, Serving
from omniload.actors.ray.processes import Process, end_by_sigterm
from omniload.actors.ray.scaling.readers import RayReader
from omniload.actors.roles.build_order import BuildOrder
from omniload.actors.roles.constructor import ConstructorShell
from omniload.actors.roles.first_look import Look, require_samples
from omniload.actors.roles.loader import PATIENT_S, LoaderShell
from omniload.base.concurrency.threads import DaemonPool
from omniload.base.errors import OmniloadError, UnavailableError
from omniload.base.linux.freed_memory import keep_freed
from omniload.base.linux.huge_pages import spare_host
from omniload.base.log import RoleLogs, speak_for
from omniload.base.state import JsonObject
from omniload.machine.data_constructor import DataConstructor
from omniload.machine.messages import ReadAhead, SamplesReported, StepsTaken, TakeOver
from omniload.machine.plans.building import Commands, FetchSlices
from omniload.machine.roster.members import Member
from omniload.mix.columns import ColumnRanges
from omniload.mix.config import MixConfig
from omniload.mix.edits.edit import SkipShard
from omniload.mix.edits.shards import ShardsFound
from omniload.mix.fingerprint import SourceFacts

__all__ = ["ConstructorActor", "LoaderActor", "PresentActor"]

_WINDOWS = 4
"""Windows of steps that are fetched concurrently; fetched windows are built one after the other."""
_TOGETHER_S = 0.1
"""Longest time that the first of several reads waits for the last one to be answered with it."""
_OPEN_S = 60.0
"""Longest time that a call waits for sources that are still being opened."""


class PresentActor:
    """An actor's answers to the keeper of the roster, and to ranks that wait on another host."""

    _told_board: Board
    _lives: threading.Thread

    def _appear(
        self, name: str, board: FolderBoard | None, logs: Path | None, *, reads: bool = False
    ) -> Activity:
        """Post the first heartbeat; return the role's activity. All log records of this process belong to the role.

        Without a board on this host, the actor returns its heartbeats on request.
        """
        end_by_sigterm()
        # Nothing wakes it: it lives as long as the process, and the keeper hears of its end.
        self._lives = threading.Thread(
            target=threading.Event().wait, name="omniload-lives", daemon=True
        )
        self._lives.start()
        log = RoleLogs(logs).of(name)
        # Before anything can fail, because Ray's own log files of the process disappear with its folder.
        speak_for(log)
        activity = Activity(name, reads=reads, log=log, host=host_here())
        if board is None:
            own = MemoryBoard()
            self._told_board = own
            return own.add(activity)
        self._told_board = board
        board.post(activity)
        return activity

    def stay(self) -> None:
        """Never return: the call fails when the process ends, which is how the keeper hears of it."""
        threading.Event().wait()

    def pid(self) -> int:
        """Return the actor's process id."""
        return os.getpid()

    def process(self) -> Process:
        """Return the actor's process, its place and its release."""
        return Process.own(node_here(), self._lives.native_id or 0)

    def heartbeats(self) -> tuple[float, list[JsonObject]]:
        """Return the time of this host's clock, and the heartbeats of all roles of this host in that time."""
        return time.monotonic(), [role.to_json() for role in self._told_board.read().values()]


class LoaderActor(PresentActor, LoaderShell):
    """A source loader; its methods run in several threads.

    Sources are opened by a method, not by the constructor: an error in a constructor
    reaches callers as a dead actor, without what was wrong.
    """

    def __init__(self, name: str, board: FolderBoard | None, logs: Path | None) -> None:
        """Start without sources, so that all processes start together, and post a heartbeat."""
        spare_host()
        keep_freed()
        self._activity = self._appear(name, board, logs, reads=True)
        self._start_reader = partial(RayReader, loader=name, logs=logs)
        self._is_open = threading.Event()

    def open(self, spec: PlaneSpec, sources: Sequence[int], life: int) -> dict[int, SourceFacts]:
        """Open the sources, once and before any other call; return facts about them; ``life`` counts earlier lives."""
        os.environ.update(spec.passed_on)
        if life:
            # A running job can wait for a replacement to open, as long as its reads survive an outage.
            self.opens_again_s = PATIENT_S
        with self._told_where(spec):
            super().__init__(
                spec.history.latest,
                sources,
                base_dir=spec.base_dir,
                cache_dir=spec.cache_dir,
                activity=self._activity,
                start_reader=self._start_reader,
            )
        if life:
            self._activity.rest("stands by, its sources open")
        self._is_open.set()
        return self.facts()

    def read_several(self, commands: Sequence[ReadAhead]) -> list[SamplesReported | OmniloadError]:
        """Read ranges one after the other; return for each the result of ``read_ahead``, or its error.

        After a tenth of a second it answers with the results so far; the caller requests the others again.
        """
        until_s = time.monotonic() + _TOGETHER_S
        found = list[SamplesReported | OmniloadError]()
        for command in commands:
            try:
                found.append(self.read_ahead(command))
            except OmniloadError as error:  # concerns this source only
                found.append(error)
            if time.monotonic() >= until_s:
                break
        return found

    @contextmanager
    def _told_where(self, spec: PlaneSpec) -> Iterator[None]:
        """Add the host to errors inside, if it is not the opener's."""
        try:
            yield
        except OmniloadError as error:
            if spec.mix.runtime.place.loaders is None:
                raise
            raise type(error)(
                f"{error}; looked for on {host_here()}, where runtime.place.loaders has source loaders"
            ) from error

    @override
    def take_over(self, command: TakeOver, *, waits_s: float = 0.0) -> None:
        """Serve the sources of another loader; this one is no longer a shadow."""
        self._activity.go()
        super().take_over(command, waits_s=waits_s)

    @override
    def open_also(self, number: int, mix: MixConfig, look: Look = require_samples) -> SourceFacts:
        """Open another source, after the first ones are open."""
        self._wait_until_open()
        return super().open_also(number, mix, look)

    @override
    def open_more(self, sources: Sequence[int], mix: MixConfig) -> dict[int, SourceFacts]:
        """Open sources of another loader, after the first ones are open."""
        self._wait_until_open()
        return super().open_more(sources, mix)

    @override
    def drop(self, sources: Sequence[int]) -> None:
        """Release sources, after all are open."""
        self._wait_until_open()
        super().drop(sources)

    @override
    def look_for_shard(self, change: SkipShard) -> ShardsFound:
        """Look for a shard, after all sources are open."""
        self._wait_until_open()
        return super().look_for_shard(change)

    @override
    def work(self) -> dict[int, tuple[float, int]]:
        """Return its work so far; nothing before its sources are open."""
        return super().work() if self._is_open.is_set() else {}

    def _wait_until_open(self) -> None:
        if not self._is_open.wait(_OPEN_S):
            raise UnavailableError(f"its sources are not open after {_OPEN_S:.0f} s; ask again")


class ConstructorActor(PresentActor, ConstructorShell):
    """A data constructor that fetches from loader actors."""

    def __init__(
        self,
        machine: DataConstructor,
        loaders: Loaders,
        name: str,
        board: FolderBoard | None,
        logs: Path | None,
    ) -> None:
        self._holders = LoaderHolders(loaders)
        self._builder = DaemonPool(1, "omniload-build")
        self._windows = DaemonPool(_WINDOWS, "omniload-window")
        # On another host only this actor can remove earlier lives from the board. Not for loaders, whose lives overlap.
        role, _, number = name.partition("+")
        if board is not None:
            for life in range(int(number or 0)):
                board.forget(Member(role, life).name)
        activity = self._appear(name, board, logs)
        super().__init__(machine, self._holders.fetch, activity, self._holders.names)

    @override
    def _built(self, of: FetchSlices, slices: ColumnRanges) -> Commands:
        # Arrow keeps pages of 2 MiB for each thread that it worked in, and calls come in any of Ray's threads.
        return self._builder.submit(partial(super()._built, of, slices)).result()

    def carry_out(self, packed: bytes) -> int | tuple[int, StepsTaken]:
        """Carry out an order; answer as ``told_beside`` if it asks for reports of ranks, otherwise as ``build``."""
        order = BuildOrder.unpacked(packed)
        build = partial(self.build, order.plans, order.served, order.released_to)
        if order.heard is None:
            return build()
        # At once, because news of ranks and releases must not wait behind windows that are waiting themselves.
        self.build((), order.served, order.released_to)
        building = self._windows.submit(build)
        return self.told_beside(building, order)

    def replace_loader(self, serving: Serving) -> None:
        """Ask another loader for its sources from now on."""
        self._holders.replace(serving)

    def turns(self, sources: Sequence[int]) -> tuple[int, ...]:
        """Return the last known hand-over of each source."""
        return self._holders.turns(sources)
