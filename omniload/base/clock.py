"""Clocks that can be passed as arguments, and limits of waits."""

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
    "TimeOfDay",
    "overslept_s",
    "wait_of",
]

Result = TypeVar("Result")
_LATE_S = 1.0
"""A wait that ends this much too late means that its process was stopped; shorter delays mean a busy machine."""
LONGEST_WAIT_S = 2e9
"""60 years: a wait that locks, sockets and torch's stores accept. For longer ones some raise ``OverflowError``."""


def wait_of(timeout_s: object) -> float | None:
    """Return the wait for a given timeout; ``None`` if the timeout is not a finite number of seconds above 0."""
    # The condition states what must be true, so that NaN fails it.
    if isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf:
        return float(min(timeout_s, LONGEST_WAIT_S))
    return None


def overslept_s(asked_s: float, took_s: float) -> float:
    """Return by how much a wait was too long if its own process was stopped meanwhile; otherwise 0.

    A job that is suspended and continued (by SIGSTOP, a scheduler, or a closed laptop) is not late, and neither are
    the processes that it waits for. Therefore a wait at that moment keeps the rest of its limit.

    Args:
        asked_s: Longest intended duration of the wait.
        took_s: Actual duration of the wait.
    """
    late_s = took_s - asked_s
    return late_s if late_s > _LATE_S else 0.0


class Deadline:
    """The end of a limited wait; time in which this process is stopped does not count.

    Args:
        limit_s: Seconds from now.
        now_s: A monotonic clock.
    """

    def __init__(self, limit_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self.limit_s, self._now_s = limit_s, now_s
        self.until = now_s() + limit_s

    def left_s(self) -> float:
        """Return the remaining seconds."""
        return self.until - self._now_s()

    def renew(self) -> None:
        """Restart the limit."""
        self.until = self._now_s() + self.limit_s

    def wait(self, ended: Callable[[float], Result], longest_s: float) -> Result:
        """Call ``ended`` with the longest time that it may wait, at most ``longest_s``, and return its result."""
        turn_s, began_s = max(0.0, min(self.left_s(), longest_s)), self._now_s()
        try:
            return ended(turn_s)
        finally:
            now_s = self._now_s()
            # At most the whole limit, because the call may have restarted it meanwhile, and others may share the
            # deadline.
            most = max(self.until, now_s + self.limit_s)
            self.until = min(self.until + overslept_s(turn_s, now_s - began_s), most)


class TimeOfDay:
    """Seconds since 1970 for what is compared later, which go on where the machine's clock is set back.

    Set forward, they follow: what was told before a moment stays before it, whichever way the clock was set.
    """

    def __init__(self) -> None:
        self._began_s = -math.inf
        """The time of day at the zero of the monotonic clock: the latest that the machine ever said."""

    def now_s(self) -> float:
        """Return the time of day, never before one that was returned."""
        said_s = time.time()
        # Second: a pause of this thread between the two, in the other order, would put it ahead for good.
        monotonic_s = time.monotonic()
        self._began_s = max(self._began_s, said_s - monotonic_s)
        return self._began_s + monotonic_s


class Clock(Protocol):
    """Monotonic seconds, and a way to wait."""

    def now_s(self) -> float:
        """Return monotonic seconds since a fixed moment."""
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
    """A clock that moves only on request; sleeping moves it."""

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
