"""Questions that many ask at once, and the answers they may share.

The processes of a node open one checkpoint in the same moment, and each must hear what the
store holds *now*: what was closed elsewhere before it asked. So nobody may take the answer
of a question that was under way when it asked; but all who come meanwhile wait together for
the one that follows, and share it::

    asks      a     b c       d
    question  |--1--|---2---|---3---|
    answered        a       b c     d

However many ask at once, the store is asked twice in a row. A change of the same thing has a
round of its own, which nobody shares.
"""

from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fusefs.bridge.api.waiting import all_done

__all__ = ["Sharing"]

Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class _Round:
    """One question: who asks before it has begun shares its answer."""

    has_begun: bool
    """From the first where nobody may share it."""
    answer: "Future[Any]" = field(default_factory=Future)
    """Cancelled where whoever put the question was stopped; those who share it ask anew."""


class Sharing:
    """Rounds of questions, one round after the other for each thing asked about.

    Used on one thread, that of the mount's loop. The first to ask puts the question itself; what
    it raises reaches all who share it. A question must not ask about the same thing: it would wait for
    itself.
    """

    def __init__(self) -> None:
        self._rounds: dict[Hashable, _Round] = {}
        """The youngest round of each thing; none that has ended."""

    async def ask(self, about: Hashable, question: Callable[[], Awaitable[Result]]) -> Result:
        """Return an answer to a question that began after this call.

        Args:
            about: Who asks about the same thing may be given each other's answers.
            question: Put, if nobody puts it who asked in the same round.

        Raises:
            Exception: What the question raised.
        """
        while True:
            youngest = self._rounds.get(about)
            if youngest is None or youngest.has_begun:
                return await self._put(about, question, youngest)
            await all_done((youngest.answer,))
            if not youngest.answer.cancelled():
                answer: Result = youngest.answer.result()
                return answer

    async def alone(self, about: Hashable, change: Callable[[], Awaitable[Result]]) -> Result:
        """Carry out a change while no question about the same is under way, nor another change."""
        return await self._put(about, change, self._rounds.get(about), is_shared=False)

    async def _put(
        self,
        about: Hashable,
        question: Callable[[], Awaitable[Result]],
        before: _Round | None,
        *,
        is_shared: bool = True,
    ) -> Result:
        mine = self._rounds[about] = _Round(has_begun=not is_shared)
        try:
            if before is not None:
                await all_done((before.answer,))
            mine.has_begun = True
            answer = await question()
        except GeneratorExit:
            self._end(about, mine, before)
            mine.answer.cancel()
            raise
        except BaseException as error:
            self._end(about, mine, before)
            mine.answer.set_exception(error)
            raise
        else:
            self._end(about, mine, before)
            mine.answer.set_result(answer)
            return answer
        finally:
            del mine  # or an error, its traceback and the round would hold each other

    def _end(self, about: Hashable, ended: _Round, before: _Round | None) -> None:
        if self._rounds[about] is ended:
            if before is not None and not before.answer.done():
                self._rounds[about] = before  # stopped while it waited for its turn
            else:
                del self._rounds[about]
