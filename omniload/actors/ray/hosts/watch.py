"""What looks at processes on a host other than the keeper's: the kernel calls one stopped on its own host alone."""

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from omniload.actors.heartbeat_board import FolderBoard
from omniload.actors.ray.hosts.starting import Start, actor_of
from omniload.actors.ray.processes import HeldProcess, Process
from omniload.base.clock import Clock, SystemClock
from omniload.base.state import JsonObject

__all__ = ["HostWatch", "Looked", "begin_watch"]

_LOOK_S, _LOOK_AGAIN_S = 0.25, 0.1
"""Between two looks, and between those by which another process is stopped, or goes on again."""
_ANSWERS_S = 0.5
"""Longest time to an answer, twice as often as roles give heartbeats: one that was given just behind an answer is seen
with the next, and until then its member is taken for silent."""

Looked = tuple[frozenset[str], list[JsonObject]]
"""Names of the members that are stopped, and the heartbeats of all that post theirs on the host."""


class HostWatch:
    """Looks at processes of its host when the keeper asks. Holds nothing between two calls."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = SystemClock() if clock is None else clock

    def look(
        self, members: Mapping[str, Process], known: frozenset[str], board: Path | None
    ) -> Looked:
        """Return which members are stopped: as soon as others are than is known, at two looks, or after half a second.

        Args:
            members: Processes by the names of members; those that are not of this host, or have ended, run.
            known: Names of those that were stopped by the last answer.
            board: Folder of heartbeats on this host; ``None`` where no member posts them here.
        """
        with ExitStack() as held:
            here: dict[str, HeldProcess] = {}
            for name, process in members.items():
                with suppress(ProcessLookupError):
                    here[name] = HeldProcess(process)
                    held.callback(here[name].close)
            stopped = self._changed(here, known & here.keys())
        beats = {} if board is None else FolderBoard(board).read()
        return stopped, [beats[name].to_json() for name in beats.keys() & members.keys()]

    def _changed(self, here: Mapping[str, HeldProcess], known: frozenset[str]) -> frozenset[str]:
        until_s, before = self._clock.now_s() + _ANSWERS_S, known
        while self._clock.now_s() < until_s:
            now = frozenset(name for name, process in here.items() if process.is_stopped())
            if now != known and now == before:
                return now
            before = now
            self._clock.sleep(_LOOK_S if now == known else _LOOK_AGAIN_S)
        return known


def begin_watch(node: str) -> Any:  # noqa: ANN401 -- Ray's handles have no static type
    """Start the watch of a node, which ends once nobody holds what is returned."""
    return actor_of(HostWatch, "", Start(place=node)).remote()
