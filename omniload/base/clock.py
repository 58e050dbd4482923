"""Time as something that can be handed in."""

import math
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from typing_extensions import override

__all__ = [
    "LONGEST_WAIT_S",
    "Clock",
    "Deadline",
    "FakeClock",
    "SystemClock",
    "overslept_s",
    "wait_of",
]

Result = TypeVar("Result")
_LATE_S = 1.0
"""A wait that ends so much later than it was to says that its process did not run; less is a busy machine."""
LONGEST_WAIT_S = 2e9
"""60 years, which every wait bears: locks, sockets and torch's stores raise ``OverflowError`` for some longer ones."""


def wait_of(timeout_s: object) -> float | None:
    """Return how long who allows ``timeout_s`` waits; ``None`` for what is no finite length of time above 0."""
    # The test says what must hold, so that NaN fails it.
    if isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf:
        return float(min(timeout_s, LONGEST_WAIT_S))
    return None


def overslept_s(asked_s: float, took_s: float) -> float:
    """Return how much longer a wait took than it was to, where its own process was stopped in it; else 0.

    A job that is suspended and goes on (SIGSTOP, a scheduler, the lid of a laptop) was late for nobody, and nobody for
    it: what it waits for at that moment has the rest of its limit yet.

    Args:
        asked_s: What the wait was to take at most.
        took_s: What it took.
    """
    late_s = took_s - asked_s
    return late_s if late_s > _LATE_S else 0.0


class Deadline:
    """When what is waited for must be there; time in which this process is stopped does not count.

    Args:
        limit_s: Seconds from now.
        now_s: A clock that never goes back.
    """

    def __init__(self, limit_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self.limit_s, self._now_s = limit_s, now_s
        self.until = now_s() + limit_s

    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self.until - self._now_s()

    def renew(self) -> None:
        """Begin the limit anew."""
        self.until = self._now_s() + self.limit_s

    def wait(self, ended: Callable[[float], Result], longest_s: float) -> Result:
        """Wait for ``longest_s`` at most by a function that is told how long, and return what that does."""
        turn_s, began_s = max(0.0, min(self.left_s(), longest_s)), self._now_s()
        try:
            return ended(turn_s)
        finally:
            now_s = self._now_s()
            # No more than the whole limit: the call may have begun it anew since, and others may wait for it too.
            most = max(self.until, now_s + self.limit_s)
            self.until = min(self.until + overslept_s(turn_s, now_s - began_s), most)


class Clock(Protocol):
    """Monotonic seconds, and a way to wait for them."""

    def now_s(self) -> float:
        """Return monotonic seconds since some fixed moment."""
        ...

    def sleep(self, duration_s: float) -> None:
        """Return after ``duration_s``."""
        ...


class SystemClock(Clock):
    """The machine's monotonic clock."""

    @override
    def now_s(self) -> float:
        return time.monotonic()

    @override
    def sleep(self, duration_s: float) -> None:
        time.sleep(duration_s)


class FakeClock(Clock):
    """A clock that moves only when told to; sleeping moves it."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self.slept_s: list[float] = []

    @override
    def now_s(self) -> float:
        return self._now_s

    @override
    def sleep(self, duration_s: float) -> None:
        self.slept_s.append(duration_s)
        self.advance(duration_s)

    def advance(self, duration_s: float) -> None:
        """Move the clock forward."""
        self._now_s += duration_s
