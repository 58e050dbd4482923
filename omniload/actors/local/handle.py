"""A rank's handle in the process of its plane."""

import time
from typing import TYPE_CHECKING

from typing_extensions import override

from omniload.actors.patience import wait_until
from omniload.actors.plane import RankHandle
from omniload.base.state import JsonObject
from omniload.batch.microbatch import Batch
from omniload.machine.progress import rank_name
from omniload.machine.waiting import Wait

if TYPE_CHECKING:
    from omniload.actors.local.plane import LocalPlane

__all__ = ["CONSTRUCTOR", "LocalHandle"]

CONSTRUCTOR = "constructor-0"
"""Name of the only data constructor."""


class LocalHandle(RankHandle):
    """A rank's way to the constructor and the planner of its own process."""

    def __init__(self, plane: "LocalPlane", dp_rank: int, cp_rank: int) -> None:
        self.first_step = plane.first_step
        self._plane, self._dp_rank, self._cp_rank = plane, dp_rank, cp_rank
        self._name = rank_name(dp_rank, cp_rank, plane.spec.tree.size_of("cp"))
        self._activity = plane.activity_of(self._name)
        self._activity.rest("has asked for no batch")
        self._told_next = plane.first_step
        """Step that is told of at the latest when it was taken."""

    @override
    def take(self, step: int, timeout_s: float | None = None) -> Batch | None:
        constructor = self._plane.constructor
        wait_for = Wait(
            who=self._name,
            what=f"the batch of step {step}",
            first=CONSTRUCTOR,
            limit_s=timeout_s or self._plane.spec.mix.runtime.batch_timeout,
        )
        began_s = time.monotonic()
        with self._activity.doing(f"waits for step {step}", (CONSTRUCTOR,)):
            wait_until(lambda s: constructor.wait(step, s), wait_for, self._plane.board)
            batch = constructor.take(step, self._dp_rank, self._cp_rank)
        self._activity.figures.count("wait_seconds_total", time.monotonic() - began_s)
        self._activity.figures.count("taken_steps_total")
        self._activity.rest(f"has step {step} and has not asked for the next")
        return batch

    @override
    def taken(self, step: int) -> None:
        # Steps are planned several at once: that they were taken is said as seldom.
        if step < self._told_next and self._plane.constructor.has(step + 1):
            return
        self._told_next = step + self._plane.spec.mix.steps_at_once
        self._plane.planner.taken(step, self._dp_rank, self._cp_rank)

    @override
    def state_at(self, step: int) -> JsonObject:
        return self._plane.planner.state_at(step)

    @override
    def close(self) -> None:
        self._plane.let_go(self._name)
