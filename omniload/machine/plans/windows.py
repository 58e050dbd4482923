"""Windows of steps that are planned: their plans, and what they drew, until every rank has them or they are taken back.

Shape suffixes:
    S  sources
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from omniload.machine.queue import SampleQueue
from omniload.machine.strategy import place_again
from omniload.mix.edits.history import History
from omniload.mix.samples import SampleTable
from omniload.mix.state import MixState
from omniload.plan.membership import Membership
from omniload.plan.records import StepPlan, TagsOf
from omniload.plan.world import World

__all__ = ["Drawn", "Windows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What the steps of one window drew."""

    step: int
    """The first of them."""
    tables_S: Sequence[SampleTable]
    """What was known of each source before it."""
    window: Sequence[Membership]
    """Its steps."""

    @property
    def last(self) -> int:
        """Its last step."""
        return self.step + len(self.window) - 1

    def before(self, step: int) -> "Drawn":
        """Return what its steps before one drew."""
        return Drawn(step=self.step, tables_S=self.tables_S, window=self.window[: step - self.step])

    def from_step(self, step: int) -> list[SampleTable]:
        """Return what its steps from one on drew of each source, with every bad record that was known before it."""
        at = max(0, step - self.step)
        kept_S = _summed([each.finished_S for each in self.window[:at]], len(self.tables_S))
        drawn_S = _summed([each.finished_S for each in self.window], len(self.tables_S))
        return [
            table.of_samples(slice(kept, drawn))
            for table, kept, drawn in zip(
                self.tables_S, kept_S.tolist(), drawn_S.tolist(), strict=True
            )
        ]


@dataclass(slots=True)
class Windows:
    """Plans by the windows that they were published in, in order."""

    _plans: deque[tuple[StepPlan, ...]] = field(default_factory=deque)
    _drawn: deque[Drawn] = field(default_factory=deque)

    def add(self, plans: Sequence[StepPlan], drawn: Drawn) -> tuple[StepPlan, ...]:
        """Keep the plans of a window, and what they drew; return the plans."""
        self._plans.append(tuple(plans))
        self._drawn.append(drawn)
        return self._plans[-1]

    def all(self) -> tuple[tuple[StepPlan, ...], ...]:
        """Return the plans."""
        return tuple(self._plans)

    def release(self, step: int) -> None:
        """Let go of windows that lie before a step as a whole."""
        while self._plans and self._plans[0][-1].step < step:
            self._plans.popleft()
        while self._drawn and self._drawn[0].last < step:
            self._drawn.popleft()

    def place_again(self, history: History, world: World, tags_of: TagsOf) -> None:
        """Place the steps of a world on its ranks; plans before it are let go: ranks have their steps behind them."""
        cut = [[plan for plan in plans if plan.step >= world.step] for plans in self._plans]
        self._plans = deque(
            # Each by the mix of its step: a later one may have another cost.
            tuple(
                place_again(
                    history.of_revision(plan.mix_revision), world.tree, plan, tags_of(plan.pieces)
                )
                for plan in plans
            )
            for plans in cut
            if plans
        )

    def take_back(
        self, state: MixState, queues: Sequence[SampleQueue], overlong_S: list[int]
    ) -> None:
        """Let go of the plans from the step of ``state`` on; queues have what they drew again.

        A window of several steps keeps those before that step: each is drawn and placed by itself.
        """
        step = state.step
        _give_back(queues, [each for each in self._drawn if each.last >= step], state, overlong_S)
        cut = [tuple(plan for plan in plans if plan.step < step) for plans in self._plans]
        self._plans = deque(plans for plans in cut if plans)
        self._drawn = deque(each.before(step) for each in self._drawn if each.step < step)


def _give_back(
    queues: Sequence[SampleQueue], drawn: Sequence[Drawn], state: MixState, overlong_S: list[int]
) -> None:
    """Have queues be what they were before the step of ``state``, with what was reported since behind it.

    Args:
        queues: Of all sources, also those that were added since.
        drawn: The windows that lie behind that step, or hold it, in order.
        state: The state before the step.
        overlong_S: Tokens that overlong documents lost; those of the steps from there on are taken off.
    """
    parts: list[list[SampleTable]] = [[] for _ in queues]
    for each in drawn:
        for s, table in enumerate(each.from_step(state.step)):
            if len(table) or len(table.bad_N):
                parts[s].append(table)
        at = max(0, state.step - each.step)
        lost_S = _summed([step.lost_S for step in each.window[at:]], len(queues))
        for s in lost_S.nonzero()[0].tolist():
            overlong_S[s] -= int(lost_S[s])
    cursors_S = state.widened(len(queues)).cursors_S
    for queue, tables, (position, _, _) in zip(queues, parts, cursors_S, strict=True):
        if tables:
            _put_before(queue, tables, position)


def _put_before(queue: SampleQueue, drawn: Sequence[SampleTable], position: int) -> None:
    """Have a queue hold samples that were drawn, in order, and the bad records that were passed from a position on."""
    tables = [*drawn, queue.table]
    bad = {
        int(p): table.place_of(p) for table in tables for p in table.bad_N.tolist() if p >= position
    }
    places = tuple(bad[p] for p in sorted(bad))
    queue.tokens += sum(int(table.lengths_N.sum()) for table in drawn)
    queue.table = SampleTable(
        start=tables[0].start,
        stop=queue.table.stop,
        positions_N=np.concatenate([table.positions_N for table in tables]),
        subs_N=np.concatenate([table.subs_N for table in tables]),
        lengths_N=np.concatenate([table.lengths_N for table in tables]),
        bad_N=np.array(sorted(bad), np.int64),
        reason=queue.table.reason or tables[0].reason,
        places=places if any(places) else (),
    )


def _summed(counts: Sequence[NDArray[np.int64]], num_sources: int) -> NDArray[np.int64]:
    total_S = np.zeros(num_sources, np.int64)
    for count_S in counts:
        total_S[: len(count_S)] += count_S
    return total_S
