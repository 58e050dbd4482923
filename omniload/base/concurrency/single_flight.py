"""One call of a function for all threads that want its result at the same time."""

import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

__all__ = ["SingleFlight"]

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class SingleFlight(Generic[Key, Result]):
    """Calls by key: the first call runs, and calls that come meanwhile share its result. Thread-safe.

    ::

        calls of a key     1        2   3            4
        runs               |--------------|          |-----|
        answered                       1, 2, 3             4

    A shared result may come from a run that began before the call. If this is not acceptable, see
    ``FreshSingleFlight`` in ``fusefs/vfs/session.py``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Key, Future[Result]] = {}

    def call(self, key: Key, fn: Callable[[], Result], *, within_s: float | None = None) -> Result:
        """Return the result of ``fn``, run by this thread or by another thread at this moment.

        If the shared run fails, or takes longer than ``within_s``, the caller runs ``fn`` itself, in parallel to any
        other run.

        Args:
            key: Calls with the same key share a run.
            fn: The function. It must not call with the same key, because it would wait for itself.
            within_s: Longest wait for the run of another thread, in seconds; None for no limit.

        Raises:
            Exception: The exception of this call's own run.
        """
        mine, theirs_of = self.claim((key,))
        if mine:
            return self._run(key, fn)
        theirs = theirs_of[key]
        # Not ``result(within_s)``, because it would raise the exception of the other run here.
        wait([theirs], within_s)
        if theirs.done() and theirs.exception() is None:
            return theirs.result()
        return fn()

    def claim(self, keys: Iterable[Key]) -> tuple[list[Key], dict[Key, "Future[Result]"]]:
        """Divide keys into those that this caller must bring, and those that another caller is bringing.

        For requests that each bring several results. Each key of the first part must be given to ``resolve`` in any
        case, because others wait for it.

        Returns:
            Keys to bring, in order; and for the other keys, their future results.
        """
        mine: list[Key] = []
        theirs: dict[Key, Future[Result]] = {}
        with self._lock:
            for key in keys:
                if (running := self._running.get(key)) is not None:
                    theirs[key] = running
                else:
                    self._running[key] = Future()
                    mine.append(key)
        return mine, theirs

    def resolve(self, key: Key, result: Result) -> None:
        """Give the result of a claimed key to all callers that wait for it."""
        self._ended(key).set_result(result)

    def _run(self, key: Key, fn: Callable[[], Result]) -> Result:
        try:
            result = fn()
        except BaseException as error:
            self._ended(key).set_exception(error)
            raise
        self.resolve(key, result)
        return result

    def _ended(self, key: Key) -> "Future[Result]":
        with self._lock:
            # Before the result is set, so that calls from here on begin their own run.
            return self._running.pop(key)
