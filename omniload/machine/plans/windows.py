"""Planned steps, by windows: their plans, and what they drew, until every rank has them or they are taken back.

Shape suffixes:
    S  sources
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import StateError
from omniload.machine.messages import (
    AppendBase,
    AppendWorld,
    PlannerCommand,
    PublishPlans,
    ReleaseSteps,
    base_due,
)
from omniload.machine.queue import SampleQueue
from omniload.machine.strategy import place_again
from omniload.mix.edits.history import History
from omniload.mix.samples import SampleTable
from omniload.mix.state import MixState
from omniload.plan.membership import Membership
from omniload.plan.records import StepPlan, TagsOf
from omniload.plan.world import World

__all__ = ["Drawn", "PlannedSteps", "with_released"]


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


@dataclass(slots=True, kw_only=True)
class PlannedSteps:
    """Plans by the windows they were published in, the state before each step, and the state after the last."""

    _states: dict[int, MixState]
    _plans: deque[tuple[StepPlan, ...]] = field(default_factory=deque, init=False)
    _drawn: deque[Drawn] = field(default_factory=deque, init=False)

    @classmethod
    def of(cls, states: Iterable[MixState]) -> Self:
        """Begin with states that are known; none of their steps is planned here."""
        return cls(_states={state.step: state for state in states})

    @property
    def next_step(self) -> int:
        """First step that neither this planner nor one before it has planned."""
        return max(self._states)

    @property
    def windows(self) -> tuple[tuple[StepPlan, ...], ...]:
        """The plans, in order."""
        return tuple(self._plans)

    def reach(
        self, state: MixState, history: History, fingerprint: Mapping[str, str], world: World
    ) -> tuple[AppendBase | AppendWorld, ...]:
        """Note the state after a step that was planned; return what the journal is due behind its record."""
        self._states[state.step] = state
        return base_due(history, state, fingerprint, world)

    def publish(self, plans: Sequence[StepPlan], drawn: Drawn) -> tuple[StepPlan, ...]:
        """Keep the plans of a window, and what they drew; return the plans."""
        self._plans.append(tuple(plans))
        self._drawn.append(drawn)
        return self._plans[-1]

    def state_before(self, step: int) -> MixState:
        """Return the state before a step.

        Raises:
            StateError: It is no longer held, or the step is not planned yet.
        """
        if step not in self._states:
            raise StateError(
                f"the state before step {step} is not held, only steps {min(self._states)} to {self.next_step}; "
                "take the state at the trainer's own step"
            )
        return self._states[step]

    def release(self, step: int) -> None:
        """Let go of windows that lie before ``step`` as a whole, and of states."""
        while self._plans and self._plans[0][-1].step < step:
            self._plans.popleft()
        while self._drawn and self._drawn[0].last < step:
            self._drawn.popleft()
        # But the last before it: a rank that is interrupted as it takes a step takes that back.
        for old in [s for s in self._states if s < step - 1]:
            del self._states[old]

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
        self, step: int, queues: Sequence[SampleQueue], overlong_S: list[int]
    ) -> MixState:
        """Have steps from one on never been planned, and queues hold what they drew; return the state before it.

        A window of several steps keeps those before that step: each is drawn and placed by itself.
        """
        state = self.state_before(step)
        _give_back(queues, [each for each in self._drawn if each.last >= step], state, overlong_S)
        cut = [tuple(plan for plan in plans if plan.step < step) for plans in self._plans]
        self._plans = deque(plans for plans in cut if plans)
        self._drawn = deque(each.before(step) for each in self._drawn if each.step < step)
        for later in [s for s in self._states if s > step]:
            del self._states[later]
        return state


def with_released(
    released: Sequence[PlannerCommand], commands: Sequence[PlannerCommand]
) -> tuple[PlannerCommand, ...]:
    """Return commands with those that release something: data constructors hear of it with plans, where there are any.

    Loaders hear of it behind them: a constructor that lacks samples waits to hear that their step was released.

    Args:
        released: ``ReleaseSteps`` and what loaders release, or nothing.
        commands: What follows from the same event; plans say how far steps are released.
    """
    kinds = [type(command) for command in commands]
    if PublishPlans not in kinds:
        return (*released, *commands)
    behind = kinds.index(PublishPlans) + 1
    samples = (command for command in released if not isinstance(command, ReleaseSteps))
    return (*commands[:behind], *samples, *commands[behind:])


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
