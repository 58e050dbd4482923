"""A rank's handle in the process of its plane."""

import time
from typing import TYPE_CHECKING

from typing_extensions import override

from omniload.actors.address import check_rank
from omniload.actors.patience import wait_until
from omniload.actors.plane import RankHandle
from omniload.base.state import JsonObject
from omniload.batch.microbatch import Batch
from omniload.machine.messages import ResizeAsked
from omniload.machine.progress import rank_name
from omniload.machine.steps import of_next
from omniload.machine.waiting import Wait
from omniload.plan.world import World

if TYPE_CHECKING:
    from omniload.actors.local.plane import LocalPlane, RankKey

__all__ = ["CONSTRUCTOR", "LocalHandle"]

CONSTRUCTOR = "constructor-0"
"""Name of the only data constructor."""


class LocalHandle(RankHandle):
    """A rank's way to the constructor and the planner of its own process."""

    def __init__(
        self, plane: "LocalPlane", dp_rank: int, cp_rank: int, asked: ResizeAsked | None
    ) -> None:
        """Take a rank of the plane, which has checked that there is one; of the ranks that ``asked`` says."""
        self._plane, self._cp_rank = plane, cp_rank
        world = plane.resized(asked)
        if (
            asked is not None
            and asked.generation is None
            and plane.was_held(world, dp_rank, cp_rank)
        ):
            # In the place of one that is gone: of the ranks that come next.
            world = plane.resized(of_next(asked, world.generation))
        first_step = plane.first_step if asked is None else asked.step
        self._be(world, dp_rank, plane.claim_rank(world, dp_rank, cp_rank), first_step)

    def _be(self, world: World, dp_rank: int, key: "RankKey", first_step: int) -> None:
        """Be a rank that was claimed."""
        self._world, self._key, self.first_step = world, key, first_step
        self._dp_rank = dp_rank
        self._name = rank_name(dp_rank, self._cp_rank, world.tree.size_of("cp"))
        self._activity = self._plane.activity_of(self._name)
        self._activity.rest("has asked for no batch")
        self._told_next = first_step
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
            generation = self._world.generation
            wait_until(lambda s: constructor.wait(step, s, generation), wait_for, self._plane.board)
            batch = constructor.take(step, self._dp_rank, self._cp_rank, generation=generation)
        self._activity.figures.count("wait_seconds_total", time.monotonic() - began_s)
        self._activity.figures.count("taken_steps_total")
        self._activity.rest(f"has step {step} and has not asked for the next")
        return batch

    @override
    def is_ready(self, step: int) -> bool:
        return self._plane.constructor.has(step)

    @override
    def taken(self, step: int) -> None:
        # Steps are planned several at once: that they were taken is said as seldom.
        if step < self._told_next and self._plane.constructor.has(step + 1):
            return
        self._told_next = step + self._plane.spec.mix.steps_at_once
        self._plane.planner.taken(step, self._dp_rank, self._cp_rank, self._world.generation)

    @override
    def state_at(self, step: int) -> JsonObject:
        return self._plane.planner.state_at(step)

    @override
    def resize(self, asked: ResizeAsked, dp_rank: int) -> None:
        asked = of_next(asked, self._world.generation)
        check_rank({"dp": asked.dp, "cp": self._world.tree.size_of("cp")}, dp_rank, self._cp_rank)
        world = self._plane.resized(asked)
        # Whatever can be refused comes before anything changes here.
        key, before = self._plane.claim_rank(world, dp_rank, self._cp_rank), self._key
        self._plane.let_go(before)
        self._be(world, dp_rank, key, asked.step)

    @override
    def close(self) -> None:
        self._plane.let_go(self._key)
