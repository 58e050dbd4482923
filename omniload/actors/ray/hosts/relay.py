"""Copies heartbeats of loaders on other hosts to the board of this host, where all its readers look.

The relay never waits for a member. If a member does not answer, its last heartbeat stays on the board and grows old,
like the heartbeat of a member on this host.
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
"""Group of an actor's threads that answer for its heartbeats, even while all other threads are busy."""
_EVERY_S = 1.0


class Relay:
    """Asks members for their heartbeats. For one thread, which also handles the answers."""

    def __init__(self, board: FolderBoard, later: Callable[[Callable[[], None]], None]) -> None:
        """Post the heartbeats on ``board``; ``later`` has a call made in the one thread."""
        self._board, self._later = board, later
        self._members: dict[str, Any] = {}
        self._asked_s: dict[str, float] = {}
        self._waiting: set[str] = set()
        self._ahead_s: dict[str, float] = {}
        """Upper limit of how far this host's clock is ahead of each member's, from the quickest answer."""

    def ask(self, members: Mapping[str, Any], now_s: float) -> None:
        """Ask each of these named members once a second, except while its last answer is outstanding."""
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
            # In threads of their own there: otherwise a loader would seem to hang while all its threads read.
            answer = future_of(actor.heartbeats.options(concurrency_group=BEATS).remote(), name)
            answer.add_done_callback(partial(self._hear, name))

    def forget(self, name: str) -> None:
        """Ignore further answers of a member that has ended."""
        self._members.pop(name, None)

    def _hear(self, name: str, done: "Future[tuple[float, list[JsonObject]]]") -> None:
        heard_s = time.monotonic()
        self._later(partial(self._note, name, heard_s, done))

    def _note(
        self, name: str, heard_s: float, done: "Future[tuple[float, list[JsonObject]]]"
    ) -> None:
        self._waiting.discard(name)
        if name not in self._members or done.exception() is not None:
            return  # the member has ended, or its end is reported in another way
        then_s, roles = done.result()
        ahead_s = min(self._ahead_s.get(name, heard_s - then_s), heard_s - then_s)
        # The quickest of all answers sets the difference. If each answer set it anew, the same heartbeat would look new
        # each time, and a hanging member would seem to make progress.
        self._ahead_s[name] = ahead_s
        for role in roles:
            self._board.note(Progress.from_json(role).moved(ahead_s))
