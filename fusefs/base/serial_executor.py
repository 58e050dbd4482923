"""Threads for store calls: serial queues on a shared pool, and a budget of bytes in flight."""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

__all__ = ["ByteBudget", "SerialExecutor", "wait_all"]


class SerialExecutor:
    """Runs tasks one after the other, each on any free pool thread.

    The object of a store takes writes from one thread at a time. A thread for each object would mean
    256 threads for 64 writers of 4 objects; serial executors share a few threads.
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._runs_in: int | None = None
        """Process in which a thread runs the tasks; a process that is forked off has no such thread."""

    def submit(self, task: Callable[[], None]) -> None:
        """Queue ``task``, which must not raise.

        Raises:
            StateError, RuntimeError: The pool takes no more tasks; the task is not queued.
        """
        with self._changed:
            if not self._runs():
                # Submit first, because the pool may refuse: a task that is queued then would never run, and a join
                # never end.
                self._pool.submit(self._run)
                self._runs_in = os.getpid()
            self._waiting.append(task)

    def join(self) -> None:
        """Return when all tasks queued before have run; in a forked process, where none will run, return at once."""
        with self._changed:
            self._changed.wait_for(lambda: not self._runs())

    def _runs(self) -> bool:
        return self._runs_in == os.getpid()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            with self._changed:
                task = self._waiting.popleft()
            try:
                task()
            finally:
                is_last = self._goes_on_elsewhere()

    def _goes_on_elsewhere(self) -> bool:
        """Return whether this thread is done: no task is left, or another turn of the pool takes the next one."""
        with self._changed:
            if not self._waiting:
                self._runs_in = None
                self._changed.notify_all()
                return True
            # Go back to the end of the pool's queue, so that no executor starves another.
            try:
                self._pool.submit(self._run)
            except RuntimeError:
                return False  # the pool is being shut down, so the queued tasks run here
            return True


class ByteBudget:
    """Bytes that may be in flight at once; a request larger than the whole budget runs alone."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._changed = threading.Condition()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes that are taken now."""
        return self._used_bytes

    def acquire(self, size_bytes: int) -> None:
        """Wait for room, then take ``size_bytes``."""
        with self._changed:
            # No limit is needed here: bytes in flight are released at the latest by the deadline of their call.
            self._changed.wait_for(lambda: self._fits(size_bytes))
            self._used_bytes += size_bytes

    def has_room(self, size_bytes: int) -> bool:
        """Return whether ``acquire`` would return at once."""
        with self._changed:
            return self._fits(size_bytes)

    def release(self, size_bytes: int) -> None:
        """Give back bytes."""
        with self._changed:
            self._used_bytes -= size_bytes
            self._changed.notify_all()

    def _fits(self, size_bytes: int) -> bool:
        # A request larger than the whole budget runs alone, or it would wait for ever.
        return self._used_bytes == 0 or self._used_bytes + size_bytes <= self._capacity_bytes


def wait_all(futures: Sequence[Future[None]]) -> None:
    """Wait until all futures are done; after a failure, cancel the calls that have not begun.

    When this returns or raises, none of the calls still runs, so the caller may free the memory that they fill.

    Raises:
        Exception: The exception of the first future that failed, in the order given.
    """
    _, others = wait(futures, return_when=FIRST_EXCEPTION)
    for future in others:
        future.cancel()
    # A running call cannot be cancelled, and may still write to memory that the caller is about to free.
    wait(others)
    for future in futures:
        if not future.cancelled():
            future.result()
