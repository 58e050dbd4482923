"""One call of a function for all threads that want its result at the same time."""

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

__all__ = ["SingleFlight"]

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class SingleFlight(Generic[Key, Result]):
    """Calls by key: the first runs, those that come while it runs share its result. Safe in threads.

    ::

        calls of a key     1        2   3            4
        runs               |--------------|          |-----|
        answered                       1, 2, 3             4

    A result may have begun before the call that gets it. Where it must not, see
    ``fusefs/vfs/fresh_single_flight.py``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Key, Future[Result]] = {}

    def call(self, key: Key, fn: Callable[[], Result], *, within_s: float | None = None) -> Result:
        """Return the result of ``fn``, run here or by another thread at this moment.

        A run that failed says nothing of the next, nor does one that takes longer than
        ``within_s``: the caller then runs ``fn`` itself, beside whatever else runs.

        Args:
            key: Calls of one key share a run.
            fn: Must not call with the same key: it would wait for itself.
            within_s: Most seconds to wait for the run of another thread; None: as long as it takes.

        Raises:
            Exception: What this call's own run raised.
        """
        with self._lock:
            theirs = self._running.get(key)
            mine = theirs or self._running.setdefault(key, Future())
        if theirs is None:
            return self._run(key, fn, mine)
        wait([theirs], within_s)
        if theirs.done() and theirs.exception() is None:
            return theirs.result()
        return fn()

    def _run(self, key: Key, fn: Callable[[], Result], mine: Future[Result]) -> Result:
        try:
            result = fn()
        except BaseException as error:
            self._end(key)
            mine.set_exception(error)
            raise
        self._end(key)
        mine.set_result(result)
        return result

    def _end(self, key: Key) -> None:
        with self._lock:
            del self._running[key]
