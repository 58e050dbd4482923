"""Which calls of a store the mount's loop makes by itself, in place of a thread.

A disk of this machine says in microseconds what is at a path, and takes a small new file in a few more. A
thread that is woken for it, and wakes the loop again, costs ten times as much. But the loop answers nobody
while a call lasts, and a busy disk answers late: so a call that waited long is followed by a time in which
threads make the calls. A call that only lost its core to another program waited for no disk: threads would
have lost it as well.
"""

import resource
import time
from collections.abc import Callable
from typing import TypeVar

from fusefs.stores.deadlines import within

__all__ = ["InlineCalls"]

Result = TypeVar("Result")
_QUICK_S = 0.005
"""A call of up to this delays other requests no more than a large read does."""
_REST = 10
"""A longer one is followed by so many times its length without another: slow calls take a tenth of the loop."""


def _waits_of_thread() -> int:
    """Return how often this thread gave its core away by itself, to wait for something."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class InlineCalls:
    """Lets calls run on the loop while the store answers quickly. Used on one thread.

    Args:
        answers_at_once: Whether the store is one that does.
        clock: Seconds.
        waits: How often this thread has waited so far.
    """

    def __init__(
        self,
        *,
        answers_at_once: bool,
        clock: Callable[[], float] = time.monotonic,
        waits: Callable[[], int] = _waits_of_thread,
    ) -> None:
        self._answers_at_once = answers_at_once
        self._clock, self._waits = clock, waits
        self._not_before = float("-inf")

    @property
    def may_run(self) -> bool:
        """Whether the next call may be made on the loop."""
        return self._answers_at_once and self._clock() >= self._not_before

    def run(self, call: Callable[[], Result]) -> Result:
        """Make a call, and note how long it took. The loop is no place to wait for an outage to end.

        Raises:
            UnavailableError: The store did not answer the first attempt; the call may be made again in a thread.
        """
        begun, waits = self._clock(), self._waits()
        try:
            with within(0.0):
                return call()
        finally:
            now = self._clock()
            if (took := now - begun) > _QUICK_S and self._waits() != waits:
                self._not_before = now + _REST * took
