"""Batches that a rank asks its constructor for while it trains on those at hand.

What a rank was given it trains on, so a change of the mix holds behind that. A call costs half a millisecond, whatever
it brings: short steps are fetched many at once, and long ones as they are needed. Of a rank whose steps are long they
are lent: it has each confirmed before it is handed out, and drops those whose plans were taken back meanwhile.
"""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from omniload.actors.gate import Gate
from omniload.actors.ray.answers import call_in_thread, error_of, value_of, wait_for_ref
from omniload.actors.ray.environment import RayError
from omniload.actors.ray.errors.verdict import is_lost, may_live
from omniload.base.concurrency.threads import DaemonPool
from omniload.base.errors import UnavailableError
from omniload.batch.microbatch import Batch
from omniload.machine.plans.fetch_pace import FetchPace
from omniload.plan.world import WorldRank

__all__ = ["BatchesAhead"]


class _Due(NamedTuple):
    """What is asked for while the window at hand is used up."""

    step: int
    before: Batch | None
    """Let go of by the thread that asks."""
    left: int
    """Batches at hand as it is asked for."""


class _Window(NamedTuple):
    """An answer."""

    batches: tuple[Batch, ...]
    given: int
    """How many of them need not be confirmed."""
    edition: tuple[int, int]
    """Under which the others are lent."""


class _Asked(NamedTuple):
    """What is asked for."""

    step: int
    answer: "Future[_Window]"


class BatchesAhead:
    """The window at hand, and the one behind it: a thread asks for that one, and takes it in as it comes.

    A call to Ray takes a rank that has trained half a millisecond, and to give a window back to it a tenth of that.
    Neither is part of the wait for a step.
    """

    def __init__(
        self, gate: Gate, check: Callable[[], None], *, pace: FetchPace, limit_s: float
    ) -> None:
        """Ask at a pace, inside ``gate``; ``check`` raises where nobody will answer."""
        self._gate, self._check, self._pace, self._limit_s = gate, check, pace, limit_s
        self._on_lost: Callable[[Any], None] = lambda _: None
        self._constructor: Any = None
        self._rank = WorldRank(0, 0, 0)
        self._held = deque[Batch]()
        self._last: Batch | None = None
        """Of the window at hand, where it is one of several batches."""
        self._due: _Due | None = None
        self._asked: _Asked | None = None
        self._given, self._edition = 0, (0, 0)
        """Batches at hand that need not be confirmed, and the edition under which the others are lent."""
        self._turn = 0
        """Answers of earlier turns are waited for no more."""
        self._calls = DaemonPool(1, "omniload-asks")

    @property
    def is_empty(self) -> bool:
        """Whether no batch is at hand."""
        return not self._held

    def begins_at(self, step: int) -> bool:
        """Tell whether the batch of a step is the first at hand; where that, or what is asked for, is another, drop it.

        What was taken may not have reached the trainer, as where a peer could not be sent it. It is asked for once
        more, and what is behind it is not given in its place.
        """
        coming = step if self._asked is None else self._asked.step
        if step != (self._held[0].step if self._held else coming):
            self.drop()
        return bool(self._held)

    @property
    def is_lent(self) -> bool:
        """Whether the first batch at hand is to be confirmed before it is handed out."""
        return bool(self._held) and not self._given

    @property
    def coming(self) -> "Future[_Window] | None":
        """The batches behind those at hand, where they are asked for."""
        return None if self._asked is None else self._asked.answer

    def lead_to(
        self,
        constructor: Any,  # noqa: ANN401 -- Ray's handle has no static type
        rank: WorldRank,
        on_lost: Callable[[Any], None],
    ) -> None:
        """Ask another constructor, or as another rank; batches of before are built anew for those that are there.

        ``on_lost`` hears of one that is lost, also while the rank trains and waits for nothing.
        """
        self._constructor, self._rank = constructor, rank
        self._on_lost = on_lost
        self.drop()

    def confirm(self, step: int) -> Any:  # noqa: ANN401 -- Ray's references have no static type
        """Ask whether the first batch at hand, that of ``step``, still stands; return the answer to be."""
        return self._constructor.confirm.remote(step, self._edition)

    def drop(self) -> None:
        """Leave all that is at hand, and what is asked for: it is not what the rank is to train on."""
        self._held.clear()
        self._due = None
        self._turn += 1
        self.forget_asked()

    def next(self) -> Batch | None:
        """Give the first batch at hand; ``None`` where there is none."""
        self._pace.take(time.monotonic())
        self._given = max(0, self._given - 1)
        self._ask_if_due()
        return self._held.popleft() if self._held else None

    def peek(self) -> Batch | None:
        """Return the first batch at hand, and leave it there; what is behind it is asked for as if it were given."""
        self._ask_if_due()
        return self._held[0] if self._held else None

    def ask(self, step: int) -> "Future[_Window]":
        """Ask for the batches from ``step`` on, unless that is under way; return the answer to be."""
        if self._asked is None or self._asked.step != step:
            # The rank waits for the first of them.
            self._asked = self._ask(step, None, given=1)
        return self._asked.answer

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
        batches, self._given, self._edition = asked.result()
        self._held.extend(batches)
        before, self._last = self._last, None
        if self._held:
            # Of large steps, which come one at a time, one more would be much memory.
            self._last = self._held[-1] if len(self._held) > 1 else None
            # With the second batch: the first takes longer, of a window that is new, and to wake a thread would add a
            # fifth. With the only one, so that the next one comes while the trainer computes.
            left = max(1, len(self._held) - 1)
            self._due = _Due(step + len(self._held), before, left)
        return True

    def forget_asked(self) -> None:
        """Ask anew the next time."""
        self._asked = None

    def close(self, limit_s: float) -> bool:
        """Ask no more; return whether a call under way ended within the limit."""
        return self._calls.close(limit_s)

    def _ask_if_due(self) -> None:
        """Ask for what is behind the window at hand, once so much of it is used up."""
        if (due := self._due) is not None and len(self._held) == due.left:
            self._asked, self._due = self._ask(due.step, due.before, given=0), None

    def _ask(self, step: int, before: Batch | None, given: int) -> _Asked:
        """Ask for a window, of which a slow rank is given the first batches and lent the others."""
        most = self._pace.at_once
        given = given if self._pace.is_slow else most
        call = partial(
            self._answer, self._constructor, self._rank, self._turn, step, before, (most, given)
        )
        return _Asked(step, call_in_thread(call, self._calls))

    def _answer(
        self,
        constructor: Any,  # noqa: ANN401 -- as above
        rank: WorldRank,
        turn: int,
        step: int,
        before: Batch | None,
        wanted: tuple[int, int],
    ) -> _Window:
        """Have an answer, and then leave ``before``: Ray has its window back from this thread, not the trainer's."""
        most, given = wanted

        def check() -> None:
            self._check()
            # What is asked in a later turn waits behind this call.
            if turn != self._turn:
                raise UnavailableError(
                    "nobody waits for batches of the ranks of before, or behind a step that was taken back"
                )

        with self._gate.inside():
            if given < most:
                asked = constructor.lend_several.remote(step, most, *rank, given)
            else:
                asked = constructor.take_several.remote(step, most, *rank)
            # Not by Ray's own future: where this host's raylet has gone, that ends the process without a word.
            while not wait_for_ref(asked, self._limit_s, check):
                pass  # the rank that waits for it says so
            del before
            try:
                found = value_of(asked)
            except RayError as error:
                if is_lost(error) and not may_live(error):
                    self._on_lost(constructor)
                raise
        if given < most:
            return _Window(found[0], given, found[1])
        return _Window(found, len(found), (0, 0))
