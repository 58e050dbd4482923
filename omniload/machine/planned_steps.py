"""Steps that are planned, and that some rank may still ask for: their plans, and the states between them."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

from omniload.base.errors import StateError
from omniload.machine.strategy import place_again
from omniload.mix.config import MixConfig
from omniload.mix.state import MixState
from omniload.plan.records import StepPlan
from omniload.plan.world import World

__all__ = ["PlannedSteps"]


@dataclass(slots=True, kw_only=True)
class PlannedSteps:
    """Plans by the windows they were published in, and the state before each step and behind the last."""

    _states: dict[int, MixState]
    _windows: deque[tuple[StepPlan, ...]] = field(default_factory=deque)

    @classmethod
    def of(cls, states: Iterable[MixState]) -> Self:
        """Begin with states that are known; none of their steps is planned here."""
        return cls(_states={state.step: state for state in states})

    @property
    def next_step(self) -> int:
        """First step that is not planned, also by a planner before this one."""
        return max(self._states)

    @property
    def windows(self) -> tuple[tuple[StepPlan, ...], ...]:
        """The plans, in order."""
        return tuple(self._windows)

    def reach(self, state: MixState) -> None:
        """Note the state behind a step that was planned."""
        self._states[state.step] = state

    def publish(self, plans: Sequence[StepPlan]) -> tuple[StepPlan, ...]:
        """Keep the plans of a window; return them."""
        self._windows.append(tuple(plans))
        return self._windows[-1]

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
        """Let go of states before ``step``, and of windows that lie before it as a whole."""
        while self._windows and self._windows[0][-1].step < step:
            self._windows.popleft()
        for old in [s for s in self._states if s < step]:
            del self._states[old]

    def place_again(self, mix: MixConfig, world: World) -> None:
        """Place the steps of a world on its ranks; plans before it are let go: ranks have their steps behind them."""
        cut = [[plan for plan in plans if plan.step >= world.step] for plans in self._windows]
        self._windows = deque(
            tuple(place_again(mix, world.tree, plan) for plan in plans) for plans in cut if plans
        )
