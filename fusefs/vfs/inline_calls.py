"""Which calls of a store the mount's loop makes by itself, in place of a thread.

A disk of this machine describes a file in microseconds. A thread that is woken for it, and wakes the loop
again, costs ten times as much. But the loop answers nobody while it waits, and a disk that is busy answers
late: so a call that took long is followed by a time in which threads make the calls.
"""

import time
from collections.abc import Callable
from typing import TypeVar

from fusefs.stores.deadlines import within

__all__ = ["InlineCalls"]

Result = TypeVar("Result")
_QUICK_S = 0.002
"""A call of up to this costs no more than the threads would."""
_REST = 25
"""A longer one is followed by so many times its length without another: slow calls take 4 % of the loop."""


class InlineCalls:
    """Lets calls run on the loop while the store answers quickly. Used on one thread.

    Args:
        answers_at_once: Whether the store is one that does.
        clock: Seconds.
    """

    def __init__(
        self, *, answers_at_once: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._answers_at_once = answers_at_once
        self._clock = clock
        self._not_before = float("-inf")

    @property
    def may_run(self) -> bool:
        """Whether the next call may be made on the loop."""
        return self._answers_at_once and self._clock() >= self._not_before

    def run(self, call: Callable[[], Result]) -> Result:
        """Make a call, and note how long it took. An outage is no reason to wait here.

        Raises:
            UnavailableError: The store did not answer the first attempt; the call may be made again in a thread.
        """
        begun = self._clock()
        try:
            with within(0.0):
                return call()
        finally:
            now = self._clock()
            if (took := now - begun) > _QUICK_S:
                self._not_before = now + _REST * took
