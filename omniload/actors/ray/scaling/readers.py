"""Further readers of a source on Ray: processes that a loader starts next to itself, and that end with it.

They belong to the loader and are on no roster. A reader keeps no state. If the loader notices that a reader has ended,
is stopped or is stuck, the loader ends the reader, reads its part itself, and starts another.
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
"""A process that the kernel has reported as stopped for this long will not resume by itself; the roster has the same
rule."""


class ReaderActor:
    """Reads parts of a source. Handles one call at a time."""

    def __init__(self, name: str, logs: Path | None) -> None:
        end_by_sigterm()
        spare_host()
        keep_freed()
        speak_for(RoleLogs(logs).of(name))

    def process(self) -> Process:
        """Return the process of this reader."""
        return Process.own()

    def open(self, opening: SourceOpening, passed_on: Mapping[str, str]) -> SourceFacts:
        """Open the source with its loader's environment variables, before any read; return its facts."""
        os.environ.update(passed_on)
        self._opened = opening.open_part()
        return self._opened.source.facts

    def read(self, start: int, stop: int, part: Part, without: tuple[int, ...]) -> PartRead:
        """Read a part of a range."""
        return self._opened.read(start, stop, part, without)


class RayReader(PartReader):
    """The loader's connection to a reader, which it starts itself."""

    def __init__(self, opening: SourceOpening, number: int, loader: str, logs: Path | None) -> None:
        """Start a reader on this node, without waiting until it is ready."""
        self._name = f"{loader}-reader-{opening.number}-{number}"
        self._stuck_s = opening.mix.runtime.stuck_after
        # Never on another node, because a reader passes its blocks through the node's shared memory.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        remote: Any = ray.remote
        actor_of = remote(max_restarts=0, num_cpus=0, scheduling_strategy=here)(ReaderActor)
        # The loader received these variables from the process that opened the plane.
        passed_on = opening.mix.runtime.env.passed_on(os.environ)
        self._actor = actor_of.remote(self._name, logs)
        # The process is asked for first, because calls of an actor are answered in order and opening may take minutes.
        self._process = self._actor.process.remote()
        # The variables are not passed at the start because Ray's tables keep the arguments of a start.
        self._opening = self._actor.open.remote(opening, passed_on)
        self._held: HeldProcess | None = None
        self._stopped_at_s: float | None = None
        """When the reader was first seen stopped, with no look in between at which it ran."""

    @override
    def facts(self) -> SourceFacts | None:
        # This also applies while the reader opens the source, because a stopped reader would block the job forever.
        if self._held is None and ray.wait([self._process], timeout=0)[0]:
            try:
                self._held = HeldProcess(self._got(self._process))
            except ProcessLookupError as error:
                raise ReaderLostError(f"{self._name} has ended: {error}") from None
        # This also applies to an idle reader, because the next read would wait for it.
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
            # Ray ends a running process. If it were killed here, Ray would tell the user that memory may be short.
            if held.is_stopped():
                held.kill()
            held.close()
        with suppress(RayError):
            ray.kill(self._actor, no_restart=True)

    def _wait_for(self, asked: Any) -> None:  # noqa: ANN401 -- Ray's answers have no static type
        """Wait for an answer of a reader that runs."""
        began_s, self._stopped_at_s = time.monotonic(), None
        while not ray.wait([asked], timeout=_TURN_S)[0]:
            # Another thread closed it: when a source is dropped, its readers end even during a read.
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
