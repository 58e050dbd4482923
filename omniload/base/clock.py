"""Time as something that can be handed in."""

import math
import time
from typing import Protocol

from typing_extensions import override

__all__ = ["LONGEST_WAIT_S", "Clock", "FakeClock", "SystemClock", "overslept_s", "wait_of"]

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
