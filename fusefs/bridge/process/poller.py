"""Descriptors that the one thread of a mount watches, and its wake-up by other threads."""

import os
import select
import threading
from collections.abc import Callable

from fusefs.bridge.process.busy_poll import BusyPoll

__all__ = ["Poller"]


class Poller:
    """Calls what belongs to each descriptor that has something to read. All but ``wake`` is for one thread.

    Args:
        woken: Called there after ``wake``.
    """

    def __init__(self, woken: Callable[[], None]) -> None:
        self._woken = woken
        self._poll = select.poll()
        self._busy = BusyPoll()
        self._calls_of: dict[int, Callable[[], None]] = {}
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._open = threading.RLock()
        """A signal's handler may come while this thread holds it."""
        self._closed = False
        self.watch(self._bell, self._rung)

    def watch(self, descriptor: int, call: Callable[[], None]) -> None:
        """Have ``call`` made whenever ``descriptor`` has something to read."""
        self._calls_of[descriptor] = call
        self._poll.register(descriptor, select.POLLIN)

    def unwatch(self, descriptor: int) -> None:
        """End ``watch``, also for what the ``wait`` under way has found already."""
        del self._calls_of[descriptor]
        self._poll.unregister(descriptor)

    def wait(self, timeout_ms: float | None) -> None:
        """Wait for descriptors no longer than so many milliseconds, and make their calls."""
        for descriptor, _ in self._readable(timeout_ms):
            call = self._calls_of.get(descriptor)
            if call is not None:
                call()

    def _readable(self, timeout_ms: float | None) -> list[tuple[int, int]]:
        looks, poll = self._busy.looks(), self._poll.poll
        for _ in range(looks):
            if found := poll(0):
                self._busy.found()
                return found
        if looks:
            self._busy.slept()
        return poll(timeout_ms)

    def wake(self) -> None:
        """Have ``wait`` return, and ``woken`` called: from any thread, or from a signal's handler."""
        with self._open:
            if not self._closed:
                os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Wake nobody any more."""
        with self._open:
            self._closed = True
            os.close(self._bell)

    def _rung(self) -> None:
        os.eventfd_read(self._bell)
        self._woken()
