"""Further readers of a source on Ray: processes that a loader starts beside it, and that end with it.

They are its own, and on no roster: a reader holds nothing, so the loader that notices its end, or
that it is stopped or stuck, ends it, reads its part itself, and starts another.
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from typing_extensions import override

from omniload.actors.ray.answers import plain_error
from omniload.actors.ray.environment import RayError, ray
from omniload.actors.ray.errors.verdict import is_lost
from omniload.actors.ray.processes import HeldProcess, Process, end_by_sigterm
from omniload.actors.roles.sources import SourceOpening
from omniload.base.linux.freed_memory import keep_freed
from omniload.base.linux.huge_pages import spare_host
from omniload.base.log import RoleLogs, speak_for
from omniload.mix.fingerprint import SourceFacts
from omniload.source.parts.reader import PartRead, PartReader, ReaderLostError
from omniload.source.parts.share import Part

__all__ = ["RayReader", "ReaderActor"]

_TURN_S = 0.1
_STOPPED_S = 0.1
"""A process that the kernel has called stopped for so long will not go on by itself, as the roster has it."""


class ReaderActor:
    """Reads parts of a source. One call at a time."""

    def __init__(self, name: str, logs: Path | None) -> None:
        end_by_sigterm()
        spare_host()
        keep_freed()
        speak_for(RoleLogs(logs).of(name))

    def process(self) -> Process:
        """Return where it is."""
        return Process.own()

    def open(self, opening: SourceOpening, passed_on: Mapping[str, str]) -> SourceFacts:
        """Open the source with the variables of its loader, before any read; return what was found."""
        os.environ.update(passed_on)
        self._opened = opening.open_part()
        return self._opened.source.facts

    def read(self, start: int, stop: int, part: Part, without: tuple[int, ...]) -> PartRead:
        """Read a part of a range."""
        return self._opened.read(start, stop, part, without)


class RayReader(PartReader):
    """A way to a reader, for the loader that starts it."""

    def __init__(self, opening: SourceOpening, number: int, loader: str, logs: Path | None) -> None:
        """Start a reader on this node; nobody waits until it stands ready."""
        self._name = f"{loader}-reader-{opening.number}-{number}"
        self._stuck_s = opening.mix.runtime.stuck_after
        # Never elsewhere: a reader hands its blocks over in the node's shared memory.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        remote: Any = ray.remote
        actor_of = remote(max_restarts=0, num_cpus=0, scheduling_strategy=here)(ReaderActor)
        # The loader has them of whoever opened the plane.
        passed_on = opening.mix.runtime.env.passed_on(os.environ)
        self._actor = actor_of.remote(self._name, logs)
        # Asked for first: calls of one actor are answered in turn, and opening may take minutes.
        self._process = self._actor.process.remote()
        # Not as it is started: Ray's tables keep what an actor is started with.
        self._opening = self._actor.open.remote(opening, passed_on)
        self._held: HeldProcess | None = None
        self._stopped_at_s: float | None = None
        """When it was first seen to be stopped, by looks between which it was not seen to run."""

    @override
    def facts(self) -> SourceFacts | None:
        # While it opens the source, too: one that is stopped then would be waited for as long as the job lasts.
        if self._held is None and ray.wait([self._process], timeout=0)[0]:
            try:
                self._held = HeldProcess(self._got(self._process))
            except ProcessLookupError as error:
                raise ReaderLostError(f"{self._name} has ended: {error}") from None
        # Also one that nothing is asked of now: the next read would wait for it.
        self._require_runs()
        if not ray.wait([self._opening], timeout=0)[0]:
            return None
        if self._held is not None and self._held.has_ended():
            raise ReaderLostError(f"{self._name} has ended")
        facts: SourceFacts = self._got(self._opening)
        return facts

    def _require_runs(self) -> None:
        held = self._held
        if held is None or not held.is_stopped():
            self._stopped_at_s = None
            return
        now_s = time.monotonic()
        self._stopped_at_s = now_s if self._stopped_at_s is None else self._stopped_at_s
        if now_s >= self._stopped_at_s + _STOPPED_S:
            raise ReaderLostError(f"{self._name} is stopped")

    @override
    def read(
        self, start: int, stop: int, part: Part, without: tuple[int, ...] = ()
    ) -> Callable[[], PartRead]:
        asked = self._actor.read.remote(start, stop, part, without)

        def answer() -> PartRead:
            self._wait_for(asked)
            read: PartRead = self._got(asked)
            return read

        return answer

    @override
    def close(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            # One that runs is Ray's to end: of a process that is killed Ray tells the user that memory may be short.
            if held.is_stopped():
                held.kill()
            held.close()
        with suppress(RayError):
            ray.kill(self._actor, no_restart=True)

    def _wait_for(self, asked: Any) -> None:  # noqa: ANN401 -- Ray's answers have no static type
        """Wait for an answer of a reader that runs."""
        began_s, self._stopped_at_s = time.monotonic(), None
        while not ray.wait([asked], timeout=_TURN_S)[0]:
            # Closed by another thread: a source that is dropped ends its readers under a read.
            if self._held is None:
                raise ReaderLostError(f"{self._name} was ended")
            self._require_runs()
            if time.monotonic() > began_s + self._stuck_s:
                raise ReaderLostError(f"{self._name} gave no answer within {self._stuck_s:.0f} s")

    def _got(self, answer: Any) -> Any:  # noqa: ANN401 -- as above
        try:
            return ray.get(answer)
        except RayError as error:
            if is_lost(error):
                raise ReaderLostError(f"{self._name} has ended ({type(error).__name__})") from None
            raise plain_error(error, self._name) from None
