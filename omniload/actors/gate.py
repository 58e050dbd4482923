"""The gate, through which closing waits for calls inside a plane, and the turn, which allows one change at a time.

If Ray is shut down under a call, the process ends; so a gate lets calls end first. Edits of the mix and moves of
sources take turns, and a change that waits names the one that it waits for.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from omniload.base.errors import UnavailableError

__all__ = ["CLOSED", "Gate", "Turn"]

CLOSED = "the data plane was closed; open it again to continue"
"""Message of the error by which a closed plane refuses calls."""
_LIMIT_S = 20.0
"""Shorter than an edit's wait for its answer, so that no edit is made after its caller has given up."""
_LOOK_S = 0.2


class Gate:
    """Counts the calls inside, and admits none once it is closed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Count a call as inside while it lasts.

        Raises:
            UnavailableError: The gate is closed.
        """
        with self._changed:
            # Under the lock, so that a closing gate either waits for this call or refuses it.
            self.check()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def check(self) -> None:
        """Return if the gate is open; calls that wait inside check this often.

        Raises:
            UnavailableError: The gate is closed.
        """
        # No lock is needed: the flag is set only once, and a waiting call checks again.
        if self._closed:
            raise UnavailableError(CLOSED)

    def close(self, limit_s: float) -> bool:
        """Admit no more calls; return whether all calls inside ended within the limit."""
        with self._changed:
            self._closed = True
            return self._changed.wait_for(lambda: self._inside == 0, limit_s)


class Turn:
    """Held during a change of a plane's sources, or of the loaders that serve them."""

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
        """Hold the turn, so that no other change is made meanwhile.

        Args:
            does: What this change does, for the messages of waiting ones: a sentence without its full stop.
            refused: What is not done if another change takes too long, for the message.
            check: Called several times a second; an error that it raises ends the wait.
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
