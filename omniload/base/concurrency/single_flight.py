"""One call of a function for all threads that want its result at the same time."""

import threading
from collections.abc import Callable, Hashable, Iterable
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
    ``FreshSingleFlight`` in ``fusefs/vfs/session.py``.
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
        mine, theirs_of = self.claim((key,))
        if mine:
            return self._run(key, fn)
        theirs = theirs_of[key]
        # Not ``result(within_s)``: it would raise here what the other's run raised.
        wait([theirs], within_s)
        if theirs.done() and theirs.exception() is None:
            return theirs.result()
        return fn()

    def claim(self, keys: Iterable[Key]) -> tuple[list[Key], dict[Key, "Future[Result]"]]:
        """Part keys into those that this caller brings, and those that another one is bringing.

        For results of which one request brings several. Each key of the first part must be given to
        ``resolve``, whatever happens: others wait for it.

        Returns:
            Keys to bring, in order; of the others the result to come.
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
        """Give the result of a claimed key to all that wait for it."""
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
            # Before the result is told: a call that comes from here on begins a run of its own.
            return self._running.pop(key)
