"""Shell of the Data Constructor: fetches what a plan names, builds, and serves its ranks.

If a source loader lacks requested samples, the shell waits to hear why.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from omniload.actors.heartbeat_board import Activity
from omniload.actors.roles.build_order import BuildOrder
from omniload.base.errors import OmniloadError, StateError
from omniload.batch.microbatch import Batch
from omniload.machine.data_constructor import DataConstructor
from omniload.machine.messages import ReleaseSteps, SliceRequest, StepsTaken, StepTaken
from omniload.machine.plans.building import (
    BuildSteps,
    Commands,
    FetchSlices,
    SlicesFetched,
    SlicesMissing,
)
from omniload.mix.columns import ColumnRanges
from omniload.mix.config import MixConfig
from omniload.mix.sources import tags_of, values_per_patch_of
from omniload.plan.records import StepPlan
from omniload.plan.world import RanksServed, WorldRank

__all__ = ["ConstructorShell"]

_TOLD_WITHIN_S = 20.0
"""Longest wait to hear why a loader lacks samples; a take-over is faster, even on a busy machine."""
_TURN_S = 0.2
"""Interval of checking whether other loaders serve by now."""
_TOLD_TOGETHER_S = 0.1
"""Time that a rank's report waits for the others, so that one message has all of them."""
_ASKED_AGAIN_S = 30.0
"""Longest time until a planner's question for reports is answered, so that a lost planner does not block a thread."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """Steps that could not be built."""

    served: RanksServed
    """The ranks that they were built for, and the edition of their plans."""
    last: int
    """The last of these steps."""
    error: BaseException


class ConstructorShell:
    """Builds in the thread that calls ``build``; ``take`` waits in any other."""

    def __init__(
        self,
        machine: DataConstructor,
        fetch: Callable[[Sequence[SliceRequest]], ColumnRanges],
        activity: Activity,
        loaders: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """Build from the samples that ``fetch`` gets from the source loaders that ``loaders`` names."""
        self._machine, self._fetch = machine, fetch
        self._activity, self._loaders = activity, loaders
        self._rest()
        lock = threading.RLock()
        self._changed, self._told = threading.Condition(lock), threading.Condition(lock)
        self._error: OmniloadError | None = None
        self._failed: _Failure | None = None
        """Answer to every question of the planner until other ranks or plans come, because an answer may be lost."""
        self._end: int | None = None

    def build(
        self, plans: Sequence[StepPlan], served: RanksServed | None = None, released_to: int = 0
    ) -> int:
        """Build this constructor's parts of consecutive plans; return the number of steps.

        Steps before ``released_to`` are released. If ``served`` names other ranks, so are all steps for the old ones.
        """
        asked = BuildSteps(plans=plans, served=served, released_to=released_to)
        with self._changed:
            commands = self._machine.handle(asked)
            self._changed.notify_all()
            if self._failed is not None:
                self._failed = self._failed if self._stands(self._failed) else None
                self._told.notify_all()
        self._note_queued()
        while commands:
            (command,) = commands
            if not isinstance(command, FetchSlices):
                break
            named, loaders = _named(command.steps), tuple(self._loaders())
            try:
                with self._activity.doing(f"fetches {named}", loaders):
                    slices = self._fetch(command.requests)
            except StateError:
                with self._activity.doing("waits to hear why a loader lacks samples", loaders):
                    # Every rank has the step, or the loader was replaced; the reason comes later.
                    commands = self._hear_why(command, loaders)
                if not commands:
                    raise
                continue
            with self._activity.doing(f"builds {named}"):
                commands = self._built(command, slices)
            self._activity.figures.count("built_steps_total", len(command.steps))
            self._note_queued()
            self._rest()
        return len(plans)

    def _rest(self) -> None:
        self._activity.rest("has built every step that was planned", ("planner",))

    def _hear_why(self, asked: FetchSlices, loaders: tuple[str, ...]) -> Commands:
        """Wait for the reason why a loader lacks samples; return the commands that follow, none if no reason came.

        All ranks may have taken the step meanwhile, if this constructor has replaced a lost one and builds it again. Or
        the loader was replaced although it lives, and another loader serves its sources. The call that reports either
        may come after the loader's answer.

        Args:
            asked: The request.
            loaders: The loaders that were asked.
        """
        missing = SlicesMissing(
            steps=asked.steps, generation=asked.generation, edition=asked.edition
        )
        until_s = time.monotonic() + _TOLD_WITHIN_S
        while True:
            with self._changed:
                if commands := self._machine.handle(missing):
                    return commands
                if tuple(self._loaders()) != loaders:
                    return (asked,)
                if time.monotonic() >= until_s:
                    return ()
                self._changed.wait(_TURN_S)

    def _built(self, of: FetchSlices, slices: ColumnRanges) -> Commands:
        fetched = SlicesFetched(
            steps=of.steps, slices=slices, generation=of.generation, edition=of.edition
        )
        # Without the lock, so that ranks can take built steps during these milliseconds.
        fetched = self._machine.lay_out(fetched)
        with self._changed:
            self._changed.notify_all()  # waiting ranks look again once the lock is free
            return self._machine.handle(fetched)

    def wait(self, step: int, timeout_s: float, generation: int = 0) -> bool:
        """Wait for a step, the end of the data, or a failure; return whether one of them came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._settled(step, generation), timeout_s)

    def take(
        self,
        step: int,
        rank: WorldRank,
        timeout_s: float | None = None,
        *,
        lends: bool = False,
    ) -> Batch | None:
        """Wait for a step and return one rank's batch; ``None`` when the data ends before it.

        A batch that it ``lends`` is given once the rank confirms it.

        Raises:
            StateError: There are other ranks by now.
            TimeoutError: ``timeout_s`` passed first.
            OmniloadError: The data plane has failed; this is the original error.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._settled(step, rank.generation), timeout_s):
                raise TimeoutError(f"step {step} was not built within {timeout_s} s")
            if rank.generation < self._machine.generation:
                raise StateError(
                    f"dp rank {rank.dp} asks for step {step} with generation {rank.generation}, but the ranks are now "
                    f"of generation {self._machine.generation}: call resize, or close the loader of a rank that left"
                )
            # Before the failure is raised: a built step, and the end of the data, are served in any case.
            if (built := self.take_built(step, rank, lends=lends)) is not None:
                return built
            if self._end is not None and step >= self._end:
                return None
            if self._error is not None:
                raise self._error
            return self._machine.batch_of(step, rank.dp, rank.cp)

    def take_built(self, step: int, rank: WorldRank, *, lends: bool = False) -> Batch | None:
        """Give out or lend a batch as ``take`` does, but without a wait; ``None`` if it is not there."""
        with self._changed:
            held = self.has(step, rank.generation)
            return self._machine.batch_of(step, rank.dp, rank.cp, lends=lends) if held else None

    def take_several(self, step: int, most: int, rank: WorldRank) -> tuple[Batch, ...]:
        """Wait for a step and return one rank's batches of it and of later steps that are built.

        Args:
            step: The first step.
            most: Steps wanted.
            rank: The rank.

        Returns:
            One batch at least; none when the data ends before the step.

        Raises:
            OmniloadError: As for ``take``.
        """
        return self.lend_several(step, most, rank, given=most)[0]

    def lend_several(
        self,
        step: int,
        most: int,
        rank: WorldRank,
        given: int = 0,
        timeout_s: float | None = None,
    ) -> tuple[tuple[Batch, ...], tuple[int, int]]:
        """As ``take_several``, but only the first ``given`` batches are given, and the others are lent.

        Returns:
            The batches, and the number of the edition of their plans, for ``confirm``.

        Raises:
            TimeoutError: ``timeout_s`` passed first.
            OmniloadError: As for ``take``.
        """
        batches = list[Batch]()
        with self._changed:
            first = self.take(step, rank, timeout_s, lends=given < 1)
            if first is not None:
                batches.append(first)
                # The lock was held since the first batch was taken, so all of them belong to one edition.
                while len(batches) < most and self._machine.has(later := step + len(batches)):
                    lends = len(batches) >= given
                    batches.append(self._machine.batch_of(later, rank.dp, rank.cp, lends=lends))
            return tuple(batches), self._machine.giving.edition.number

    def confirm(self, step: int, edition: tuple[int, int]) -> bool:
        """Give a rank a step that it was lent under an edition, if it is still valid; see ``Giving.confirm``."""
        with self._changed:
            return self._machine.giving.confirm(step, edition)

    def taken(self, step: int, rank: WorldRank) -> bool:
        """Note for the planner that a rank's trainer has the batch of ``step``; see ``RanksTold.hear``."""
        with self._told:
            self._told.notify_all()
            return self._machine.told.hear(StepTaken.by(rank, step))

    def told(
        self, heard: int, served: tuple[int, tuple[int, int]] = (0, (0, 0))
    ) -> tuple[int, StepsTaken]:
        """Wait for more reports of ranks than ``heard``; return their present number and their content.

        All ranks report a step at about the same time, so one answer has all of them; a late rank delays it by a tenth
        of a second. The question may be repeated, for example if its answer was lost.

        Args:
            heard: Number of reports that the planner has heard.
            served: Number of the planner's present ranks and plans, as of ``RanksServed``. A failure is reported once
                this constructor has heard of them too, because they may end the failure.

        Raises:
            BaseException: The original error because of which a step cannot be built. It answers every question, until
                other ranks or plans replace those of the step.
        """
        with self._told:
            self._told.wait_for(
                lambda: self._fails(served) or self._machine.told.number > heard, _ASKED_AGAIN_S
            )
            self._told.wait_for(
                lambda: self._fails(served) or self._machine.told.is_due(heard), _TOLD_TOGETHER_S
            )
            if self._failed is not None and self._fails(served):
                raise self._failed.error
            return self._machine.told.number, self._machine.told.taken()

    def fence(self, edition: tuple[int, int]) -> int:
        """Withhold steps until the edition of this number has come; see ``Giving.fence``."""
        with self._changed:
            return self._machine.giving.fence(edition)

    def told_beside(self, building: "Future[int]", order: BuildOrder) -> tuple[int, StepsTaken]:
        """As ``told``, while another thread builds steps, so that the planner hears the ranks meanwhile.

        Args:
            building: The build; if it fails, ``told`` raises its error.
            order: The order being built, with the number of reports that were heard.
        """
        building.add_done_callback(partial(self._note_built, order))
        return self.told(order.heard or 0, order.served.number)

    def _note_built(self, order: BuildOrder, building: "Future[int]") -> None:
        if not building.cancelled() and (error := building.exception()) is not None:
            last = max((plan.step for plan in order.plans), default=0)
            failed = _Failure(order.served, last, error)
            with self._told:
                # Only the first relevant failure: others follow from it, or concern old plans and come late.
                if self._stands(failed) and self._failed is None:
                    self._failed = failed
                    self._told.notify_all()

    def _stands(self, failed: _Failure) -> bool:
        """Return whether a failure is still relevant: neither the ranks nor the plans of its steps have changed."""
        is_of_now = failed.served.generation >= self._machine.generation
        return is_of_now and self._machine.giving.edition.keeps(failed.served.edition, failed.last)

    def _fails(self, served: tuple[int, tuple[int, int]]) -> bool:
        """Return whether a planner with these ranks and plans should hear of the failure."""
        machine = self._machine
        has_heard = machine.generation >= served[0] and machine.giving.edition.number >= served[1]
        return has_heard and self._failed is not None and self._stands(self._failed)

    def know(self, mix: MixConfig) -> None:
        """Learn the names, tags and patches of all sources, including one that an edit adds."""
        with self._changed:
            self._machine.names, self._machine.tags = mix.names, tags_of(mix.sources)
            self._machine.values_per_patch = values_per_patch_of(mix.sources)

    def has(self, step: int, generation: int = 0) -> bool:
        """Return whether a step is built for the ranks of a generation, so that ``take`` would not wait."""
        with self._changed:
            return generation == self._machine.generation and self._machine.has(step)

    def release(self, command: ReleaseSteps) -> None:
        """Release steps that every rank has taken."""
        with self._changed:
            self._machine.handle(command)
            self._changed.notify_all()
        self._note_queued()

    def _note_queued(self) -> None:
        with self._changed:
            self._activity.figures.note(queued_steps=self._machine.num_steps)

    def end(self, step: int) -> None:
        """Note that the data ends before ``step``, and wake waiting ranks."""
        with self._changed:
            self._end = step
            self._changed.notify_all()

    def fail(self, error: OmniloadError) -> None:
        """Wake every waiting rank with the error because of which its batch will not come."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _settled(self, step: int, generation: int = 0) -> bool:
        if generation != self._machine.generation:
            return generation < self._machine.generation or self._error is not None
        over = self._error is not None or (self._end is not None and step >= self._end)
        return over or self._machine.has(step) or self._machine.is_released(step)  # late asks fail


def _named(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
