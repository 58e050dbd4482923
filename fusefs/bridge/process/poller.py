"""Descriptors that the one thread of a mount watches, its wake-up by other threads, and its busy polling.

A program that opens, writes and closes one file after the other sends its next request 5 to 15 microseconds
after each answer. To sleep in between and be woken takes longer than that, most of all in a virtual machine,
which returns an idle core to the host: it cost a fifth of the time of `tar x` on a mount
(docs/design/fusefs/0011). So the loop polls a few times before it sleeps. If no request comes, it stops polling
for a while, because other programs may need the cores.
"""

import os
import select
import threading
from collections.abc import Callable

from omniload.base.linux.cores import cores_here

__all__ = ["BusyPoll", "Poller"]

LOOKS = 30
"""Polls before a sleep: some 15 microseconds."""
_MOST_IN_VAIN = 8
"""Sleeps despite polling, after which polling rests."""
_REST = 100
"""Sleeps without polling before the next trial; a trial ends with the first sleep despite polling."""


class BusyPoll:
    """Decides for each wait of a loop how often to poll.

    Args:
        num_cores: Cores that this process may use; with a single core, no program can ask while the loop polls.
    """

    def __init__(self, num_cores: int | None = None) -> None:
        num_cores = cores_here() if num_cores is None else num_cores
        # On one core no caller could run while the loop polls.
        self._looks = LOOKS if num_cores > 1 else 0
        self._in_vain = 0
        self._rest = 0

    def looks(self) -> int:
        """Return how often to poll before the next sleep."""
        if not self._rest:
            return self._looks
        self._rest -= 1
        return 0

    def found(self) -> None:
        """Note that a poll found something."""
        self._in_vain = 0

    def slept(self) -> None:
        """Note that all polls found nothing."""
        self._in_vain += 1
        if self._in_vain >= _MOST_IN_VAIN:
            # One below the limit: after the rest, a single poll in vain begins the next rest.
            self._in_vain, self._rest = _MOST_IN_VAIN - 1, _REST


class Poller:
    """Calls the function of each descriptor that is readable. All calls but ``wake`` are for one thread.

    Args:
        woken: Called on that thread after ``wake``.
    """

    def __init__(self, woken: Callable[[], None]) -> None:
        self._woken = woken
        self._poll = select.poll()
        self._busy = BusyPoll()
        self._calls_of: dict[int, Callable[[], None]] = {}
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._open = threading.RLock()
        """Reentrant, because a signal handler may run while this thread holds it."""
        self._closed = False
        self.watch(self._bell, self._rung)

    def watch(self, descriptor: int, call: Callable[[], None]) -> None:
        """Call ``call`` whenever ``descriptor`` is readable."""
        self._calls_of[descriptor] = call
        # Use poll, because select takes no descriptor above 1,023.
        self._poll.register(descriptor, select.POLLIN)

    def unwatch(self, descriptor: int) -> None:
        """End ``watch``, also for events that the present ``wait`` has already found."""
        del self._calls_of[descriptor]
        self._poll.unregister(descriptor)

    def wait(self, timeout_ms: float | None) -> None:
        """Wait at most ``timeout_ms`` milliseconds for descriptors, and make their calls."""
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
        """Make ``wait`` return and call ``woken``; may be called from any thread or signal handler."""
        # A thread that ends a future late must not write to a descriptor number that another file has taken over.
        with self._open:
            if not self._closed:
                os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Stop waking the loop."""
        with self._open:
            self._closed = True
            os.close(self._bell)

    def _rung(self) -> None:
        os.eventfd_read(self._bell)
        self._woken()
