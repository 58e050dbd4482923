"""Threads for store calls: serial queues on a shared pool, and a budget of bytes in flight."""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

__all__ = ["ByteBudget", "SerialExecutor", "wait_all"]


class SerialExecutor:
    """Runs what it is given one after the other, on whichever pool thread is free.

    A store object takes writes from one thread at a time. A thread per object would be
    256 threads for 64 writers of 4 objects; serial executors share a few.
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._runs_in: int | None = None
        """The process in which a thread carries tasks out: one that is forked off meanwhile has no such thread."""

    def submit(self, task: Callable[[], None]) -> None:
        """Queue ``task``; it must not raise.

        Raises:
            StateError, RuntimeError: The pool takes no more; the task is not queued.
        """
        with self._changed:
            if not self._runs():
                # First, for it may refuse: what is queued then would never run, and a join wait for ever.
                self._pool.submit(self._run)
                self._runs_in = os.getpid()
            self._waiting.append(task)

    def join(self) -> None:
        """Return when everything queued before has run; in a forked process, where none of it will, at once."""
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
        """Return whether this thread is done: nothing is left, or another turn of the pool takes it."""
        with self._changed:
            if not self._waiting:
                self._runs_in = None
                self._changed.notify_all()
                return True
            # Back to the end of the pool's queue, so that no executor starves another.
            try:
                self._pool.submit(self._run)
            except RuntimeError:
                return False  # the pool is being shut down: what was queued before is run here
            return True


class ByteBudget:
    """Bytes that may be in flight at once; one request larger than all of it runs alone."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._changed = threading.Condition()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes taken and not yet given back."""
        return self._used_bytes

    def acquire(self, size_bytes: int) -> None:
        """Wait for room, then take ``size_bytes``."""
        with self._changed:
            # No limit of its own: what is in flight ends by its call's deadline, and is given back then.
            self._changed.wait_for(lambda: self._fits(size_bytes))
            self._used_bytes += size_bytes

    def has_room(self, size_bytes: int) -> bool:
        """Return whether ``acquire`` would return at once."""
        with self._changed:
            return self._fits(size_bytes)

    def release(self, size_bytes: int) -> None:
        """Return what was taken."""
        with self._changed:
            self._used_bytes -= size_bytes
            self._changed.notify_all()

    def _fits(self, size_bytes: int) -> bool:
        # Alone, what is larger than all of it goes through: else it would wait for ever.
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
