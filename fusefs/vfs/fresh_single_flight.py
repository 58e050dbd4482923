"""Single-flight whose answers are fresh: a caller never gets one that was under way before it called.

The processes of a node open one checkpoint in the same moment, and each must learn what the
store holds *now*: what was closed elsewhere before it asked. So no caller may take the answer
of a round that was under way when it called; but all that come meanwhile wait together for
the next round, and share its answer::

    calls     a     b c       d
    round     |--1--|---2---|---3---|
    answered        a       b c     d

However many call at once, the store is asked twice in a row. A change of the same key has a
round of its own, which no caller shares.
"""

from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fusefs.bridge.api.waiting import all_done

__all__ = ["FreshSingleFlight"]

Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class _Round:
    """One call of the function: callers before its beginning share its answer."""

    has_begun: bool
    """True from the first for a change, which is not shared."""
    answer: "Future[Any]" = field(default_factory=Future)
    """Cancelled where the task that ran the function was stopped; those that share it begin anew."""


class FreshSingleFlight:
    """Rounds of calls, one after the other for each key.

    Used on one thread, that of the mount's loop. The first caller of a round runs the function itself; what
    it raises reaches all that share the round. A function must not call with its own key: it would wait for
    itself.
    """

    def __init__(self) -> None:
        self._rounds: dict[Hashable, _Round] = {}
        """The youngest round of each key; none that has ended."""

    async def call(self, key: Hashable, fn: Callable[[], Awaitable[Result]]) -> Result:
        """Return the result of a run of ``fn`` that began after this call.

        Args:
            key: Calls with the same key may share a run.
            fn: Run, unless another call of the same round runs its own.

        Raises:
            Exception: What the run raised.
        """
        while True:
            youngest = self._rounds.get(key)
            if youngest is None or youngest.has_begun:
                return await self._run(key, fn, youngest)
            await all_done((youngest.answer,))
            if not youngest.answer.cancelled():
                answer: Result = youngest.answer.result()
                return answer

    async def exclusive(self, key: Hashable, change: Callable[[], Awaitable[Result]]) -> Result:
        """Run a change of ``key`` while no other run of it is under way."""
        return await self._run(key, change, self._rounds.get(key), is_shared=False)

    async def _run(
        self,
        key: Hashable,
        fn: Callable[[], Awaitable[Result]],
        before: _Round | None,
        *,
        is_shared: bool = True,
    ) -> Result:
        # Before it waits for its turn: calls that come meanwhile must find it, to share it.
        mine = self._rounds[key] = _Round(has_begun=not is_shared)
        try:
            if before is not None:
                await all_done((before.answer,))
            mine.has_begun = True
            answer = await fn()
        except GeneratorExit:
            self._end(key, mine, before)
            mine.answer.cancel()
            raise
        except BaseException as error:
            self._end(key, mine, before)
            mine.answer.set_exception(error)
            raise
        else:
            self._end(key, mine, before)
            mine.answer.set_result(answer)
            return answer
        finally:
            del mine  # or an error, its traceback and the round would hold each other

    def _end(self, key: Hashable, ended: _Round, before: _Round | None) -> None:
        # Else a younger round stands there, which waits for this one by itself.
        if self._rounds[key] is ended:
            if before is not None and not before.answer.done():
                self._rounds[key] = before  # stopped while it waited for its turn
            else:
                del self._rounds[key]
