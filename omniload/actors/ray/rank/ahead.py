"""Batches that a rank asks its constructor for while it trains on those at hand."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from omniload.actors.gate import Gate
from omniload.actors.ray.answers import (
    call_in_thread,
    error_of,
    is_lost,
    value_of,
    wait_for_ref,
)
from omniload.actors.ray.environment import RayError
from omniload.base.concurrency.threads import DaemonPool
from omniload.base.errors import UnavailableError
from omniload.batch.microbatch import Batch
from omniload.plan.world import WorldRank

__all__ = ["BatchesAhead"]


class _Due(NamedTuple):
    """What is asked for while the window at hand is used up."""

    step: int
    before: Batch | None
    """Let go of by the thread that asks."""
    left: int
    """Batches at hand as it is asked for."""


class BatchesAhead:
    """The window at hand, and the one behind it: a thread asks for that one, and takes it in as it comes.

    A call to Ray takes a rank that has trained half a millisecond, and to give a window back to it a tenth of that.
    Neither is part of the wait for a step.
    """

    def __init__(self, gate: Gate, check: Callable[[], None], *, most: int, limit_s: float) -> None:
        """Ask for up to ``most`` batches at once, inside ``gate``; ``check`` raises where nobody will answer."""
        self._gate, self._check, self._most, self._limit_s = gate, check, most, limit_s
        self._on_lost: Callable[[Any], None] = lambda _: None
        self._constructor: Any = None
        self._rank = WorldRank(0, 0, 0)
        self._held = deque[Batch]()
        self._last: Batch | None = None
        """Of the window at hand, where it is one of several batches."""
        self._due: _Due | None = None
        self._asked: tuple[int, Future[tuple[Batch, ...]]] | None = None
        self._calls = DaemonPool(1, "omniload-asks")

    @property
    def is_empty(self) -> bool:
        """Whether no batch is at hand."""
        return not self._held

    @property
    def coming(self) -> "Future[tuple[Batch, ...]] | None":
        """The batches behind those at hand, where they are asked for."""
        return None if self._asked is None else self._asked[1]

    def lead_to(
        self,
        constructor: Any,  # noqa: ANN401 -- Ray's handle has no static type
        rank: WorldRank,
        on_lost: Callable[[Any], None],
    ) -> None:
        """Ask another constructor, or as another rank; batches of before are built anew for those that are there.

        ``on_lost`` hears of one that is lost, also while the rank trains and waits for nothing.
        """
        self._constructor, self._rank, self._due = constructor, rank, None
        self._on_lost = on_lost
        self._held.clear()
        self.forget_asked()

    def next(self) -> Batch | None:
        """Give the first batch at hand; ``None`` where there is none."""
        if self._due is not None and len(self._held) == self._due.left:
            self._ask_behind(self._due)
        return self._held.popleft() if self._held else None

    def ask(self, step: int) -> "Future[tuple[Batch, ...]]":
        """Ask for the batches from ``step`` on, unless that is under way; return the answer to be."""
        if self._asked is None or self._asked[0] != step:
            self._asked = step, self._ask(step, None)
        return self._asked[1]

    def take_in(self) -> bool:
        """Have the batches that were asked for at hand, none at the end of the data; those behind are asked for soon.

        Returns:
            Whether they had come; an error is left to the rank, which waits for them.
        """
        if self._asked is None:
            return False
        step, asked = self._asked
        if not asked.done() or error_of(asked) is not None:
            return False
        self.forget_asked()
        self._held.extend(asked.result())
        before, self._last = self._last, None
        if self._held:
            # Of large steps, which come one at a time, one more would be much memory.
            self._last = self._held[-1] if len(self._held) > 1 else None
            # With the second batch: the first takes longer, of a window that is new, and to wake a thread would add a
            # fifth. Of one batch now, so that the next one comes while the trainer computes.
            due = _Due(step + len(self._held), before, left=len(self._held) - 1)
            if due.left:
                self._due = due
            else:
                self._ask_behind(due)
        return True

    def forget_asked(self) -> None:
        """Ask anew the next time."""
        self._asked = None

    def close(self, limit_s: float) -> bool:
        """Ask no more; return whether a call under way ended within the limit."""
        return self._calls.close(limit_s)

    def _ask_behind(self, due: _Due) -> None:
        self._asked, self._due = (due.step, self._ask(due.step, due.before)), None

    def _ask(self, step: int, before: Batch | None) -> "Future[tuple[Batch, ...]]":
        call = partial(self._answer, self._constructor, self._rank, step, before)
        return call_in_thread(call, self._calls)

    def _answer(self, constructor: Any, rank: WorldRank, step: int, before: Batch | None) -> Any:  # noqa: ANN401 -- as above
        """Have an answer, and then leave ``before``: Ray has its window back from this thread, not the trainer's."""

        def check() -> None:
            self._check()
            # What is asked as another rank waits behind this call.
            if rank != self._rank:
                raise UnavailableError("nobody waits for batches of the ranks of before")

        with self._gate.inside():
            asked = constructor.take_several.remote(step, self._most, *rank)
            # Not by Ray's own future: where this host's raylet has gone, that ends the process without a word.
            while not wait_for_ref(asked, self._limit_s, check):
                pass  # the rank that waits for it says so
            del before
            try:
                return value_of(asked)
            except RayError as error:
                if is_lost(error):
                    self._on_lost(constructor)
                raise
