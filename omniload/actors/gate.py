"""Who is inside a plane, and who alone changes it.

What is taken away under a call ends the process: a gate lets calls end first. Whoever edits the mix, or moves sources,
waits for a turn, and says for whom.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from omniload.base.errors import UnavailableError

__all__ = ["CLOSED", "Gate", "Turn"]

CLOSED = "the data plane was closed; open it again to go on"
"""What whoever uses a closed plane is told."""
_LIMIT_S = 20.0
"""Shorter than whoever asks for an edit waits for an answer: what is refused is not taken up later."""
_LOOK_S = 0.2


class Gate:
    """Counts the calls inside, and lets none in once it is closed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Be inside.

        Raises:
            UnavailableError: The gate is closed.
        """
        with self._changed:
            # In the lock: whoever closes the gate either counts this call or has it refused, and misses none between
            # the two.
            self.check()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def check(self) -> None:
        """Return while the gate is open: whoever waits inside looks often.

        Raises:
            UnavailableError: It is closed.
        """
        # Without the lock: it is set once, and whoever waits looks again.
        if self._closed:
            raise UnavailableError(CLOSED)

    def close(self, limit_s: float) -> bool:
        """Let nobody in any more; return whether everybody left within the limit."""
        with self._changed:
            self._closed = True
            return self._changed.wait_for(lambda: self._inside == 0, limit_s)


class Turn:
    """Held by whoever changes which sources a plane has, or who serves them."""

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
        """Be the only one who changes anything inside.

        Args:
            does: What is done inside, for whoever waits meanwhile: a sentence without an end.
            refused: What comes to nothing where others take longer, for messages.
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
