"""Calls that are inside a plane, which closing waits for, and the one change at a time that a plane is under.

A call to Ray ends the process where Ray is taken away under it: a gate lets calls end first. Edits of the mix and moves
of sources wait for their turn, and name the change that they wait for.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from omniload.base.errors import UnavailableError

__all__ = ["CLOSED", "Gate", "Turn"]

CLOSED = "the data plane was closed; open it again to go on"
"""Message of the error by which a closed plane refuses calls."""
_LIMIT_S = 20.0
"""Shorter than an edit's wait for its answer, so that no edit is made whose caller has given up."""
_LOOK_S = 0.2


class Gate:
    """Counts the calls inside, and lets none in once it is closed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Count a call as inside for as long as it lasts.

        Raises:
            UnavailableError: The gate is closed.
        """
        with self._changed:
            # In the lock: a gate that closes either waits for this call or refuses it, and misses none between.
            self.check()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def check(self) -> None:
        """Return while the gate is open; calls that wait inside ask this often.

        Raises:
            UnavailableError: It is closed.
        """
        # Without the lock: it is set once, and a call that waits asks again.
        if self._closed:
            raise UnavailableError(CLOSED)

    def close(self, limit_s: float) -> bool:
        """Let no call in any more; return whether all calls inside ended within the limit."""
        with self._changed:
            self._closed = True
            return self._changed.wait_for(lambda: self._inside == 0, limit_s)


class Turn:
    """Held during a change of which sources a plane has, or of which loaders serve them."""

    def __init__(self) -> None:
        self._lock, self._under_way = threading.Lock(), ""

    @contextmanager
    def taken(
        self,
        does: str,
        refused: str,
        *,
        check: Callable[[], None] = lambda: None,
        limit_s: float = _LIMIT_S,
    ) -> Iterator[None]:
        """Hold the turn: no other change is made inside.

        Args:
            does: What is done inside, for messages of changes that wait: a sentence without its full stop.
            refused: What is not done where the other change takes longer, for the message.
            check: Called several times a second; what it raises ends the wait.
            limit_s: Longest wait.

        Raises:
            UnavailableError: Another change took longer; names it.
        """
        until_s = time.monotonic() + limit_s
        while not self._lock.acquire(timeout=min(_LOOK_S, limit_s)):
            check()
            if time.monotonic() >= until_s:
                raise UnavailableError(
                    f"{refused}: {self._under_way}, which has not ended within {limit_s:.0f} s; ask again once it has"
                )
        try:
            self._under_way = does
            yield
        finally:
            self._lock.release()
