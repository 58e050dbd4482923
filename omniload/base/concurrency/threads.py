"""Threads that do not delay the end of the process.

Python waits at its end for the threads of ``concurrent.futures``, so a thread that is stuck in a call to a store keeps
a process alive that has nothing left to do. Abandoning such a thread is no better: if it waits in Python below native
code, as a client of a store does below Arrow, it returns while the interpreter is torn down, and aborts the process.
"""

import _thread
import atexit
import ctypes
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, wait
from typing import Any, Self, TypeVar
from weakref import WeakValueDictionary

from omniload.base.errors import UnavailableError
from omniload.base.log import get_logger

__all__ = [
    "DaemonPool",
    "close_dropped",
    "ending",
    "start_thread",
    "wait_for_dropped",
    "was_given_up",
]

_LOG = get_logger(__name__)
_LEAVE_S, _DROPPED_S = 5.0, 60.0
_PATIENT_S, _AGAIN_S = 0.25, 1.0
"""Time before a read is first given up, and between later attempts."""
_END_S = 3.0
"""Longest wait for reads at the end of the process: clients of ``fsspec`` notice within a second."""
_SILENT_S = 5.0
"""Longest wait for a thread without a line in the log."""
_LOOK_S = 0.02
_MANY = 4
"""Number of calls per thread between two looks from which on the calls evidently do not wait."""
Item = TypeVar("Item")
Result = TypeVar("Result")
_of_reads: "WeakValueDictionary[int, DaemonPool]" = WeakValueDictionary()
"""Pools whose calls are given up at the end of the process."""
_closing = set[_thread.LockType]()
"""A lock for each close of something dropped that is under way; it is held until the close has ended."""


class _GivenUp(BaseException):
    """Raised in a thread whose read is no longer waited for."""


class DaemonPool:
    """A few daemon threads that carry out calls in the order of submission.

    Reads in progress are given up when the pool is closed or the process ends: an error is raised in their threads.
    The error ends a wait for a store if the client regularly checks for interrupts, as those of ``fsspec`` do each
    second. A wait in native code continues.
    """

    def __init__(self, num_threads: int, name: str, *, reads: bool = False) -> None:
        """Start no thread yet: each call starts one, up to ``num_threads``; ``reads`` means that calls only read."""
        self._most, self._name, self._reads = num_threads, name, reads
        self._threads: list[threading.Thread] = []
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._closed = False
        self._under_way: set[int] = set()
        """Identifiers of threads that carry out a call; an ended thread's identifier may be reused."""
        if reads:
            _of_reads[id(self)] = self

    def submit(self, call: Callable[[], Result]) -> "Future[Result]":
        """Let a thread carry out a call; after ``close`` the future is cancelled.

        Raises:
            UnavailableError: The system gives no thread, and the pool has none yet.
        """
        future: Future[Result] = Future()
        with self._lock:
            # In one step with ``close``, because a call queued after the threads' end markers would never be carried
            # out.
            if self._closed:
                future.cancel()
                return future
            if len(self._threads) < self._most:
                self._add_thread()
            self._calls.put((future, call))
        return future

    def map(
        self,
        call: Callable[[Item], Result],
        items: Iterable[Item],
        *,
        advance: Callable[[int], object] = lambda _: None,
    ) -> list[Result]:
        """Return the results of a call for each item, in order; the first error is raised.

        One thread begins. Another is added whenever no call ends for a while, and one leaves while many calls end.
        Therefore calls that wait for a store wait together. Calls that do not wait would only pass the interpreter
        back and forth, which made opening 1,000 sources cost three times as much.

        Args:
            call: Function to call with each item.
            items: The items.
            advance: Called now and then with the number of calls that have ended since the last time.

        Raises:
            CancelledError: The pool was closed before all calls had begun.
            BaseException: The exception of ``call`` for the first item that failed.
        """
        every = list(items)
        waiting = deque(enumerate(every))
        answers: dict[int, Future[Result]] = {}

        surplus = threading.Semaphore(0)

        def work() -> None:
            # A permit of ``surplus`` makes one thread leave, whichever takes it.
            while not self._closed and not surplus.acquire(blocking=False):
                try:
                    number, item = waiting.popleft()
                except IndexError:
                    return
                answers[number] = _carried_out(call, item)

        running: set[Future[None]] = set()
        told = 0
        while running or (waiting and not self._closed):
            # The last thread may have left as surplus while items still wait.
            if not running:
                running.add(self.submit(work))
            _, running = wait(running, timeout=_LOOK_S)
            ended = len(answers)
            advance(ended - told)
            if running and waiting and ended == told and len(running) < self._most:
                running.add(self.submit(work))
            elif ended - told >= _MANY * len(running) > _MANY:
                surplus.release()
            told = ended
        if len(answers) < len(every):
            raise CancelledError
        return [answers[number].result() for number in range(len(every))]

    def close(self, limit_s: float) -> bool:
        """Cancel calls that have not begun and wait for the others; return whether they ended within the limit."""
        with self._lock:
            first, self._closed = not self._closed, True
            threads = list(self._threads)
        if first:
            for _ in threads:
                self._calls.put(None)
        now_s = time.monotonic()
        until_s, patient_until_s = now_s + limit_s, now_s + _PATIENT_S
        while True:
            wait_until_s = min(until_s, patient_until_s) if self._reads else until_s
            for thread in threads:
                # One limit for all threads together, so that a hundred threads do not take a hundred times as long.
                thread.join(max(0.0, wait_until_s - time.monotonic()))
            threads = [thread for thread in threads if thread.is_alive()]
            if not threads or wait_until_s == until_s:
                return not threads
            self.give_up()
            # Repeated, because native code may have turned the error into another, after which the store is asked
            # again.
            patient_until_s = time.monotonic() + _AGAIN_S

    def give_up(self) -> None:
        """Raise ``_GivenUp`` in each thread that carries out a call."""
        with self._lock:
            for number in self._under_way:
                thread, error = ctypes.c_ulong(number), ctypes.py_object(_GivenUp)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Stuck threads are left, because the waiting callers have given up.
        self.close(_LEAVE_S)

    def _add_thread(self) -> None:
        name = f"{self._name}_{len(self._threads)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            start_thread(thread)
        except UnavailableError:
            # The existing threads carry out the same calls.
            if not self._threads:
                raise
        else:
            self._threads.append(thread)

    def _run(self) -> None:
        has_ended = False
        while not has_ended:
            try:
                self._carry_out_all()
                has_ended = True
            except _GivenUp:
                # The error came just after the read. Later calls are to be cancelled, and nothing else is to be given
                # up.
                with self._lock:
                    self._under_way.discard(threading.get_ident())

    def _carry_out_all(self) -> None:
        while (taken := self._calls.get()) is not None:
            future, call = taken
            if self._closed:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            with self._lock:
                self._under_way.add(threading.get_ident())
            try:
                _carry_out(call, future)
            finally:
                with self._lock:
                    self._under_way.discard(threading.get_ident())
            # A thread that waits for its next call must not keep the last result alive, which may be a batch.
            del future, call, taken


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        UnavailableError: The system gives no further thread.
    """
    try:
        thread.start()
    except RuntimeError as error:
        # Python says no more, and has no specific class for this error.
        raise UnavailableError(
            f"no thread for {thread.name} ({error}, beside {threading.active_count()} of this process); raise the "
            "number of processes and threads of this user (ulimit -u) and of the container or the job (pids.max of its "
            "cgroup), and the memory of this process where that is limited (ulimit -v), or end some"
        ) from error


def was_given_up(done: "Future[Any]") -> bool:
    """Return whether a call that ended without being cancelled is a read that was given up."""
    return isinstance(done.exception(), _GivenUp)


def ending(
    thread: threading.Thread, ended: threading.Event, limit_s: float, what: str
) -> Callable[[], None]:
    """Return a function that sets ``ended`` and waits for the thread that ends by it.

    Args:
        thread: The thread.
        ended: Event that makes the thread end.
        limit_s: Longest wait; a thread that takes longer is abandoned.
        what: Last action of the thread, for the log if it takes more than some seconds.
    """

    def end() -> None:
        ended.set()
        silent_s = min(_SILENT_S, limit_s)
        thread.join(silent_s)
        if thread.is_alive():
            _LOG.warning("closing waits up to %.0f s more for %s", limit_s - silent_s, what)
            thread.join(limit_s - silent_s)

    return end


def close_dropped(pid: int, close: Callable[[], object]) -> None:
    """Close what a garbage-collected object had opened, without waiting; do nothing in a fork of process ``pid``."""
    if pid != os.getpid():
        return
    ended = _thread.allocate_lock()
    ended.acquire()
    _closing.add(ended)

    def end() -> None:
        _closing.discard(ended)
        ended.release()

    def close_and_end() -> None:
        try:
            close()
        finally:
            end()

    # It has a thread of its own, because a thread that ``close`` waits for may drop the last reference. The collector
    # may have interrupted the locks of ``Thread``.
    try:
        _thread.start_new_thread(close_and_end, ())
    except RuntimeError:
        end()  # the process may have no more threads, so nobody else would ever end a wait for this one
        raise


def wait_for_dropped(what: str) -> None:
    """Wait until all that was dropped before is closed; ``what`` names it in the error.

    Raises:
        UnavailableError: It was not closed within a minute.
    """
    until_s = time.monotonic() + _DROPPED_S
    for ended in _closing.copy():
        if not ended.acquire(timeout=max(0.0, until_s - time.monotonic())):
            raise UnavailableError(
                f"{what} is still being closed after {_DROPPED_S:.0f} s; see the log for what it waits for, or start "
                "this process again"
            )
        ended.release()


def _carry_out(call: Callable[[], Result], future: "Future[Result]") -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 -- the future's to raise
        # ``_GivenUp`` may come just after the result.
        if not future.done():
            future.set_exception(error)


def _carried_out(call: Callable[[Item], Result], item: Item) -> "Future[Result]":
    future: Future[Result] = Future()
    _carry_out(lambda: call(item), future)
    return future


@atexit.register
def _give_up_reads() -> None:
    """End remaining reads, because a thread that returns while the interpreter is torn down aborts the process."""
    pools = [pool for ref in _of_reads.valuerefs() if (pool := ref()) is not None]
    for pool in pools:
        pool.give_up()
    until_s = time.monotonic() + _END_S
    for pool in pools:
        pool.close(max(0.0, until_s - time.monotonic()))


# A forked process has none of these threads.
os.register_at_fork(after_in_child=_of_reads.clear)
os.register_at_fork(after_in_child=_closing.clear)
