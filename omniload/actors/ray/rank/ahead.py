"""Prefetching of batches: a rank requests the next ones from its constructor while it trains on those it has.

A rank trains on every batch that it was given, so a change of the mix takes effect after those. But a call costs half a
millisecond, however many batches it brings. So short steps are fetched many at a time, and long ones when needed. To a
rank with long steps, batches are only lent: it has each one confirmed before handing it out, and drops those whose
plans were taken back meanwhile.
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
    """The next request, which is sent while the present window is being used up."""

    step: int
    before: Batch | None
    """A batch of the previous window, which the requesting thread releases."""
    left: int
    """Number of remaining batches at which the request is sent."""


class _Window(NamedTuple):
    """The answer to a request."""

    batches: tuple[Batch, ...]
    given: int
    """Number of batches that need no confirmation."""
    edition: tuple[int, int]
    """Edition under which the others are lent."""


class _Asked(NamedTuple):
    """A request under way."""

    step: int
    answer: "Future[_Window]"


class BatchesAhead:
    """The present window of batches, and the next one, which a thread requests and receives.

    For a rank that has just trained, a call to Ray takes half a millisecond, and returning a window to Ray a tenth of
    that. The thread keeps both out of the wait for a step.
    """

    def __init__(
        self, gate: Gate, check: Callable[[], None], *, pace: FetchPace, limit_s: float
    ) -> None:
        """Request batches at ``pace``, inside ``gate``; ``check`` raises once no answer can come."""
        self._gate, self._check, self._pace, self._limit_s = gate, check, pace, limit_s
        self._on_lost: Callable[[Any], None] = lambda _: None
        self._constructor: Any = None
        self._rank = WorldRank(0)
        self._held = deque[Batch]()
        self._last: Batch | None = None
        """Last batch of the present window, if that has several."""
        self._due: _Due | None = None
        self._asked: _Asked | None = None
        self._given, self._edition = 0, (0, 0)
        """Number of present batches that need no confirmation, and the edition under which the others are lent."""
        self._turn = 0
        """Nobody waits for answers of earlier turns."""
        self._calls = DaemonPool(1, "omniload-asks")

    @property
    def is_empty(self) -> bool:
        """Whether there is no batch to hand out without waiting."""
        return not self._held

    def begins_at(self, step: int) -> bool:
        """Return whether the first batch is that of ``step``; if it is another one, drop all batches and the request.

        A batch that was taken may not have reached the trainer, for example because it could not be sent to a peer. The
        rank then asks for it again, and must not get a later one instead.
        """
        coming = step if self._asked is None else self._asked.step
        if step != (self._held[0].step if self._held else coming):
            self.drop()
        return bool(self._held)

    @property
    def is_lent(self) -> bool:
        """Whether the first batch must be confirmed before it is handed out."""
        return bool(self._held) and not self._given

    @property
    def coming(self) -> "Future[_Window] | None":
        """The batches after the present ones, if they are requested."""
        return None if self._asked is None else self._asked.answer

    def lead_to(
        self,
        constructor: Any,  # noqa: ANN401 -- Ray's handle has no static type
        rank: WorldRank,
        on_lost: Callable[[Any], None],
    ) -> None:
        """Use another constructor, or become another rank; earlier batches are dropped, as they are built anew.

        ``on_lost`` is called with a lost constructor, also while the rank trains and waits for nothing.
        """
        self._constructor, self._rank = constructor, rank
        self._on_lost = on_lost
        self.drop()

    def confirm(self, step: int) -> Any:  # noqa: ANN401 -- Ray's references have no static type
        """Ask whether the first batch, that of ``step``, is still valid; return the future answer."""
        return self._constructor.confirm.remote(step, self._edition)

    def drop(self) -> None:
        """Drop all batches and the request, because the rank must not train on them."""
        self._held.clear()
        self._due = None
        self._turn += 1
        self.forget_asked()

    def next(self) -> Batch | None:
        """Remove and return the first batch; ``None`` if there is none."""
        self._pace.take(time.monotonic())
        self._given = max(0, self._given - 1)
        self._ask_if_due()
        return self._held.popleft() if self._held else None

    def peek(self) -> Batch | None:
        """Return the first batch without removing it; the next request is sent as if it were removed."""
        self._ask_if_due()
        return self._held[0] if self._held else None

    def ask(self, step: int) -> "Future[_Window]":
        """Request the batches from ``step`` on, unless such a request is under way; return the future answer."""
        if self._asked is None or self._asked.step != step:
            # The rank waits for the first of them.
            self._asked = self._ask(step, None, given=1)
        return self._asked.answer

    def take_in(self) -> bool:
        """Receive the requested batches, if they have come, and schedule the next request.

        At the end of the data, the answer has no batches.

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
            # Large steps come one at a time, and keeping one more of them would take much memory.
            self._last = self._held[-1] if len(self._held) > 1 else None
            # The request goes out with the second batch: taking the first one of a new window is slower anyway, and
            # waking a thread would add a fifth. A window with one batch sends it with that one, so that the next one
            # comes while the trainer computes.
            left = max(1, len(self._held) - 1)
            self._due = _Due(step + len(self._held), before, left)
        return True

    def forget_asked(self) -> None:
        """Forget the request, so that the next call sends a new one."""
        self._asked = None

    def close(self, limit_s: float) -> bool:
        """Send no more requests; return whether a call under way ended within the limit."""
        return self._calls.close(limit_s)

    def _ask_if_due(self) -> None:
        """Send the next request once enough of the present window is used up."""
        if (due := self._due) is not None and len(self._held) == due.left:
            self._asked, self._due = self._ask(due.step, due.before, given=0), None

    def _ask(self, step: int, before: Batch | None, given: int) -> _Asked:
        """Request a window; a rank with slow steps is given its first batches and lent the others."""
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
        """Wait for the answer, then release ``before``, so that this thread returns its window to Ray."""
        most, given = wanted

        def check() -> None:
            self._check()
            # Requests of a later turn wait for the end of this call.
            if turn != self._turn:
                raise UnavailableError(
                    "nobody waits for batches of the ranks of before, or behind a step that was taken back"
                )

        with self._gate.inside():
            if given < most:
                asked = constructor.lend_several.remote(step, most, rank, given)
            else:
                asked = constructor.take_several.remote(step, most, rank)
            # Not by Ray's own future, which ends the process silently if this host's raylet has gone.
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
