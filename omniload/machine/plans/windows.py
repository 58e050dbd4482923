"""Planned steps and their draws, window by window, kept until every rank has them or they are taken back.

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
)
from omniload.machine.queue import SampleQueue
from omniload.machine.strategy import place_again
from omniload.mix.edits.history import History
from omniload.mix.samples import SampleTable
from omniload.mix.state import MixState
from omniload.plan.membership import Membership
from omniload.plan.records import StepPlan, TagsOf
from omniload.plan.world import World

__all__ = ["PlannedSteps", "WindowDraws", "with_released"]

_BASE_EVERY = 1024
"""Steps between two whole states in the journal. At least as many as may be planned ahead, because a planner that takes
over reads from the second to last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowDraws:
    """The draws of the steps of one window."""

    step: int
    """The first step of the window."""
    tables_S: Sequence[SampleTable]
    """Known samples of each source before the window was drawn."""
    window: Sequence[Membership]
    """Membership of each step."""

    @property
    def last(self) -> int:
        """The last step of the window."""
        return self.step + len(self.window) - 1

    def before(self, step: int) -> "WindowDraws":
        """Return the draws of the steps before ``step``."""
        return WindowDraws(
            step=self.step, tables_S=self.tables_S, window=self.window[: step - self.step]
        )

    def from_step(self, step: int) -> list[SampleTable]:
        """Return for each source what the steps from ``step`` on drew, and all bad records known before the window."""
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
    """Plans, by published window, with the state before each step and the state after the last one."""

    _states: dict[int, MixState]
    _plans: deque[tuple[StepPlan, ...]] = field(default_factory=deque, init=False)
    _drawn: deque[WindowDraws] = field(default_factory=deque, init=False)

    @classmethod
    def of(cls, states: Iterable[MixState]) -> Self:
        """Begin with known states; none of their steps is planned here."""
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
        """Note the state after a planned step; return the whole state for the journal where it is due, mostly not."""
        self._states[state.step] = state
        if state.step % _BASE_EVERY:
            return ()
        beside = history.state_fields_at(state.mix_revision, fingerprint)
        base = AppendBase(state=state, **beside)
        # Together with the ranks, because a planner that takes over reads from this base on.
        return (base, AppendWorld(world=world)) if world.generation else (base,)

    def publish(self, plans: Sequence[StepPlan], drawn: WindowDraws) -> tuple[StepPlan, ...]:
        """Keep the plans of a window and its draws; return the plans."""
        self._plans.append(tuple(plans))
        self._drawn.append(drawn)
        return self._plans[-1]

    def state_before(self, step: int) -> MixState:
        """Return the state before a step.

        Raises:
            StateError: The state is no longer held, or the step is not planned yet.
        """
        if step not in self._states:
            raise StateError(
                f"the state before step {step} is not held, only steps {min(self._states)} to {self.next_step}; "
                "take the state at the trainer's own step"
            )
        return self._states[step]

    def release(self, step: int) -> None:
        """Release windows that lie entirely before ``step``, and the states before it except the last one."""
        while self._plans and self._plans[0][-1].step < step:
            self._plans.popleft()
        while self._drawn and self._drawn[0].last < step:
            self._drawn.popleft()
        # The last one stays for a rank that is interrupted while it takes a step, and takes it back.
        for old in [s for s in self._states if s < step - 1]:
            del self._states[old]

    def place_again(self, history: History, world: World, tags_of: TagsOf) -> None:
        """Place steps on the ranks of a new world; release earlier plans, whose steps all ranks have taken."""
        cut = [[plan for plan in plans if plan.step >= world.step] for plans in self._plans]
        self._plans = deque(
            # Each with the mix of its own step, because a later step may have another cost.
            tuple(
                place_again(
                    history.of_revision(plan.mix_revision), world.tree, plan, tags_of(plan.pieces)
                )
                for plan in plans
            )
            for plans in cut
            if plans
        )

    def lost_in(self, step: int) -> NDArray[np.int64]:
        """Return the tokens of each source that a planned step loses with overlong documents."""
        drawn = next(each for each in self._drawn if each.step <= step <= each.last)
        return drawn.window[step - drawn.step].lost_S

    def take_back(self, step: int, queues: Sequence[SampleQueue]) -> MixState:
        """Take back all steps from ``step`` on, and return their draws to the queues; return the state before ``step``.

        A window keeps its steps before ``step``, because each step is drawn and placed by itself.
        """
        state = self.state_before(step)
        _give_back(queues, [each for each in self._drawn if each.last >= step], state)
        cut = [tuple(plan for plan in plans if plan.step < step) for plans in self._plans]
        self._plans = deque(plans for plans in cut if plans)
        self._drawn = deque(each.before(step) for each in self._drawn if each.step < step)
        for later in [s for s in self._states if s > step]:
            del self._states[later]
        return state


def with_released(
    released: Sequence[PlannerCommand], commands: Sequence[PlannerCommand]
) -> tuple[PlannerCommand, ...]:
    """Return ``commands`` together with the commands that release steps and samples.

    If there are plans among the commands, they tell data constructors how far steps are released, and ``ReleaseSteps``
    is not needed. Loaders are told after the constructors: a constructor that lacks samples waits to hear that their
    step was released.

    Args:
        released: ``ReleaseSteps`` and ``ReleaseSamples``, or nothing.
        commands: Other commands that follow from the same event.
    """
    kinds = [type(command) for command in commands]
    if PublishPlans not in kinds:
        return (*released, *commands)
    behind = kinds.index(PublishPlans) + 1
    samples = (command for command in released if not isinstance(command, ReleaseSteps))
    return (*commands[:behind], *samples, *commands[behind:])


def _give_back(
    queues: Sequence[SampleQueue], drawn: Sequence[WindowDraws], state: MixState
) -> None:
    """Restore queues to how they were before the step of ``state``, followed by the samples reported since.

    Args:
        queues: Of all sources, including those that were added since.
        drawn: The windows after that step, and the one that contains it, in order.
        state: The state before the step.
    """
    parts: list[list[SampleTable]] = [[] for _ in queues]
    for each in drawn:
        for s, table in enumerate(each.from_step(state.step)):
            if len(table) or len(table.bad_N):
                parts[s].append(table)
    cursors_S = state.widened(len(queues)).cursors_S
    for queue, tables, (position, _, _) in zip(queues, parts, cursors_S, strict=True):
        if tables:
            _put_before(queue, tables, position)


def _put_before(queue: SampleQueue, drawn: Sequence[SampleTable], position: int) -> None:
    """Put drawn samples back at the front of a queue, in order, with the bad records from a position on."""
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
