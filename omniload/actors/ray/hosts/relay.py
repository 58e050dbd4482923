"""Heartbeats of loaders on other hosts, put on the board of this one, where all who look for them look.

Nobody is waited for: a member that does not answer has the heartbeat that it told last, which
grows old there, as that of a member of this host does.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from omniload.actors.heartbeat_board import FolderBoard
from omniload.actors.ray.answers import future_of
from omniload.base.state import JsonObject
from omniload.machine.progress import Progress

__all__ = ["BEATS", "Relay"]

BEATS = "beats"
"""Threads of an actor that answer for its heartbeats, however busy the others are."""
_EVERY_S = 1.0


class Relay:
    """Asks members for their heartbeats. For one thread, to which answers are brought."""

    def __init__(self, board: FolderBoard, later: Callable[[Callable[[], None]], None]) -> None:
        """Put them on ``board``; ``later`` has a call made in the one thread."""
        self._board, self._later = board, later
        self._members: dict[str, Any] = {}
        self._asked_s: dict[str, float] = {}
        self._waiting: set[str] = set()
        self._ahead_s: dict[str, float] = {}
        """How far this host's clock is ahead of each member's, at most: by the answer that was quickest."""

    def ask(self, members: Mapping[str, Any], now_s: float) -> None:
        """Ask the members that there are by name, each once a second, and none that has not answered yet."""
        self._members = dict(members)
        for kept in (self._asked_s, self._ahead_s):
            for name in kept.keys() - members.keys():
                del kept[name]
        self._waiting &= members.keys()
        for name, actor in members.items():
            if name in self._waiting or now_s - self._asked_s.get(name, -_EVERY_S) < _EVERY_S:
                continue
            self._asked_s[name] = now_s
            self._waiting.add(name)
            # In threads of their own there: a loader whose every thread reads would seem to hang.
            answer = future_of(actor.heartbeats.options(concurrency_group=BEATS).remote(), name)
            answer.add_done_callback(partial(self._hear, name))

    def forget(self, name: str) -> None:
        """Hear nothing more of a member that has ended."""
        self._members.pop(name, None)

    def _hear(self, name: str, done: "Future[tuple[float, list[JsonObject]]]") -> None:
        heard_s = time.monotonic()
        self._later(partial(self._note, name, heard_s, done))

    def _note(
        self, name: str, heard_s: float, done: "Future[tuple[float, list[JsonObject]]]"
    ) -> None:
        self._waiting.discard(name)
        if name not in self._members or done.exception() is not None:
            return  # it has ended, or its end is told by itself
        then_s, roles = done.result()
        ahead_s = min(self._ahead_s.get(name, heard_s - then_s), heard_s - then_s)
        # By the quickest answer of all: by its own, each answer would make another heartbeat of the same one, and a
        # member that hangs would seem to go on.
        self._ahead_s[name] = ahead_s
        for role in roles:
            self._board.note(Progress.from_json(role).moved(ahead_s))
