"""Observes processes on hosts other than the keeper's: a kernel reports stopped processes only on its own host."""

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
"""Time between two looks, and the shorter time between the two looks that confirm that a process stopped or resumed."""
_ANSWERS_S = 0.5
"""Longest time to an answer, half the time between two heartbeats of a role. A heartbeat posted just after an answer is
seen with the next answer, and until then its member counts as silent."""

Looked = tuple[frozenset[str], list[JsonObject]]
"""Names of the stopped members, and the heartbeats of all members that post theirs on the host."""


class HostWatch:
    """Observes processes of its host when the keeper asks. Keeps nothing between two calls."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = SystemClock() if clock is None else clock

    def look(
        self, members: Mapping[str, Process], known: frozenset[str], board: Path | None
    ) -> Looked:
        """Return which members are stopped, once two looks agree on a change from ``known``, or after half a second.

        Args:
            members: Processes by names of members; a process of another host, or one that has ended, counts as running.
            known: Names of the members that were stopped according to the last answer.
            board: Folder of heartbeats on this host; ``None`` if no member posts them here.
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
    """Start the watch of a node, which ends once its handle is released."""
    return actor_of(HostWatch, "", Start(place=node)).remote()
