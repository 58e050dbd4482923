"""Threads that do not hold up the end of the process.

The threads of ``concurrent.futures`` are waited for when Python ends: one that is stuck in a
call to a store keeps a process alive that has nothing left to do.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Self, TypeVar

__all__ = ["DaemonPool"]

_LEAVE_S = 5.0
Item = TypeVar("Item")
Result = TypeVar("Result")


class DaemonPool:
    """A few daemon threads that carry out calls in the order they were submitted."""

    def __init__(self, num_threads: int, name: str) -> None:
        """Start no thread yet: each call starts one, up to ``num_threads``."""
        self._most, self._name = num_threads, name
        self._threads: list[threading.Thread] = []
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, call: Callable[[], Result]) -> "Future[Result]":
        """Have a thread carry out a call; after ``close`` the future is cancelled."""
        future: Future[Result] = Future()
        with self._lock:
            if self._closed:
                future.cancel()
                return future
            self._calls.put((future, call))
            if len(self._threads) < self._most:
                name = f"{self._name}_{len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def map(self, call: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Return the results of a call for each item, in their order; the first error is raised."""
        futures = [self.submit(lambda item=item: call(item)) for item in items]  # type: ignore[misc]
        return [future.result() for future in futures]

    def close(self, limit_s: float) -> bool:
        """Cancel what has not begun and wait for what has; return whether it ended within the limit."""
        with self._lock:
            first, self._closed = not self._closed, True
            threads = list(self._threads)
        if first:
            for _ in threads:
                self._calls.put(None)
        until_s = time.monotonic() + limit_s
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # What is stuck stays: whoever waits for it has given up.
        self.close(_LEAVE_S)

    def _run(self) -> None:
        while (taken := self._calls.get()) is not None:
            future, call = taken
            if self._closed:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 -- the future's to raise
                future.set_exception(error)
            del future, call, taken
