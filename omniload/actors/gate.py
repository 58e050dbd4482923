"""What is taken away under a call ends the process: a gate lets calls end first."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from omniload.base.errors import UnavailableError

__all__ = ["CLOSED", "Gate"]

CLOSED = "the data plane was closed; open it again to go on"
"""What whoever uses a closed plane is told."""


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
