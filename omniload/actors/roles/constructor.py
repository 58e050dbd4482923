"""Shell of the Data Constructor: fetches what a plan names, builds, and serves its ranks.

Where a source loader does not hold what it asked for, it waits to hear why.
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
from omniload.plan.world import RanksServed

__all__ = ["ConstructorShell"]

_TOLD_WITHIN_S = 20.0
"""Longest wait to hear why a loader lacks samples: another loader takes over in less, on a busy machine too."""
_TURN_S = 0.2
"""Whether other loaders serve is looked for so often."""
_TOLD_TOGETHER_S = 0.1
"""What a rank tells waits so long for the others: no step is planned by it, but a planner names ranks that it lacks."""
_ASKED_AGAIN_S = 30.0
"""A planner that asks what ranks tell is answered by then: one that is lost holds a thread no longer."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """Steps that could not be built."""

    served: RanksServed
    """The ranks that they were to be built for, and the edition of their plans."""
    last: int
    """The last of them."""
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
        """Build with what ``fetch`` gets from the source loaders that ``loaders`` names."""
        self._machine, self._fetch = machine, fetch
        self._activity, self._loaders = activity, loaders
        self._rest()
        lock = threading.RLock()
        self._changed, self._told = threading.Condition(lock), threading.Condition(lock)
        self._error: OmniloadError | None = None
        self._failed: _Failure | None = None
        """What the planner hears each time that it asks, as an answer may be lost, until other ranks or plans come."""
        self._end: int | None = None

    def build(
        self, plans: Sequence[StepPlan], served: RanksServed | None = None, released_to: int = 0
    ) -> int:
        """Build the parts of consecutive plans that concern this constructor; return how many.

        Steps before ``released_to`` are let go. Where ``served`` are other ranks than before, so is all for those.
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
                    # Released as every rank has the step, or lacked by a loader that was replaced: told of later.
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
        """Wait for the reason why a loader lacks samples; return what is to be done now, nothing where none came.

        One reason: all ranks have taken the step meanwhile, which this constructor builds again in the place of a
        lost one. Another: the loader was replaced though it lives, and another loader serves its sources. The call
        that tells of either may come after the loader's answer.

        Args:
            asked: What was asked for.
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
        # Without the lock, for milliseconds: ranks take meanwhile what is built.
        fetched = self._machine.lay_out(fetched)
        with self._changed:
            self._changed.notify_all()  # ranks that wait look once the lock is free
            return self._machine.handle(fetched)

    def wait(self, step: int, timeout_s: float, generation: int = 0) -> bool:
        """Wait for a step, its end or a failure; return whether one came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._settled(step, generation), timeout_s)

    def take(
        self,
        step: int,
        dp_rank: int,
        cp_rank: int = 0,
        timeout_s: float | None = None,
        generation: int = 0,
        *,
        lends: bool = False,
    ) -> Batch | None:
        """Wait for a step and return one rank's batch; ``None`` when the data ends before it.

        What it ``lends`` is given once it is confirmed.

        Raises:
            StateError: There are other ranks by now.
            TimeoutError: ``timeout_s`` passed first.
            OmniloadError: The data plane has failed; the cause as it was raised.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._settled(step, generation), timeout_s):
                raise TimeoutError(f"step {step} was not built within {timeout_s} s")
            if generation < self._machine.generation:
                raise StateError(
                    f"dp rank {dp_rank} asks for step {step} as one of generation {generation}, and the ranks "
                    f"are of generation {self._machine.generation} by now: call resize, or close the loader of a rank "
                    "that left"
                )
            # Before the failure is raised: a step that is built is served, and so is the end, whatever failed later.
            if (built := self.built(step, dp_rank, cp_rank, generation, lends=lends)) is not None:
                return built
            if self._end is not None and step >= self._end:
                return None
            if self._error is not None:
                raise self._error
            return self._machine.batch_of(step, dp_rank, cp_rank)

    def built(
        self, step: int, dp_rank: int, cp_rank: int, generation: int, *, lends: bool = False
    ) -> Batch | None:
        """Give out or lend a batch, as ``take`` does; ``None`` where it is not there, without a wait."""
        with self._changed:
            held = self.has(step, generation)
            return self._machine.batch_of(step, dp_rank, cp_rank, lends=lends) if held else None

    def take_several(
        self, step: int, most: int, dp_rank: int, cp_rank: int = 0, generation: int = 0
    ) -> tuple[Batch, ...]:
        """Wait for a step and return one rank's batches of it and those behind it that are built.

        Args:
            step: The first step.
            most: Steps wanted.
            dp_rank: The rank.
            cp_rank: Its place among its cp peers.
            generation: Of the ranks that it is one of.

        Returns:
            One batch at least; none when the data ends before the step.

        Raises:
            OmniloadError: As for ``take``.
        """
        return self.lend_several(step, most, dp_rank, cp_rank, generation, given=most)[0]

    def lend_several(  # noqa: PLR0913, PLR0917 -- as ``take_several``, what is given, and how long it waits
        self,
        step: int,
        most: int,
        dp_rank: int,
        cp_rank: int = 0,
        generation: int = 0,
        given: int = 0,
        timeout_s: float | None = None,
    ) -> tuple[tuple[Batch, ...], tuple[int, int]]:
        """As ``take_several``, but that the first ``given`` batches are given and those behind them lent.

        Returns:
            The batches, and the number of the edition of their plans, which ``confirm`` is asked with.

        Raises:
            TimeoutError: ``timeout_s`` passed first.
            OmniloadError: As for ``take``.
        """
        batches = list[Batch]()
        with self._changed:
            rank = dp_rank, cp_rank
            first = self.take(step, *rank, timeout_s, generation, lends=given < 1)
            if first is not None:
                batches.append(first)
                # Not let go of since the first was taken: all of them are of one edition.
                while len(batches) < most and self._machine.has(step + len(batches)):
                    lends = len(batches) >= given
                    batches.append(self._machine.batch_of(step + len(batches), *rank, lends=lends))
            return tuple(batches), self._machine.giving.edition.number

    def confirm(self, step: int, edition: tuple[int, int]) -> bool:
        """Give a rank a step that it was lent under an edition, where it still stands; see ``Giving.confirm``."""
        with self._changed:
            return self._machine.giving.confirm(step, edition)

    def taken(self, step: int, dp_rank: int, cp_rank: int = 0, generation: int = 0) -> bool:
        """Note for the planner that a rank's trainer has the batch of ``step``; see ``RanksTold.hear``."""
        taken = StepTaken(step=step, dp_rank=dp_rank, cp_rank=cp_rank, generation=generation)
        with self._told:
            self._told.notify_all()
            return self._machine.told.hear(taken)

    def told(
        self, heard: int, served: tuple[int, tuple[int, int]] = (0, (0, 0))
    ) -> tuple[int, StepsTaken]:
        """Wait for more words of ranks than ``heard``; return how many there are by now, and what they tell.

        All ranks tell of a step at about the same time, and are one answer. One that is late holds the others' words up
        for a tenth of a second. The same question may be put again, as where its answer was lost.

        Args:
            heard: Words that were heard.
            served: Number of the ranks and plans that the planner has come to, as of ``RanksServed``: a failure is told
                once this constructor has heard of them too, as they may end it.

        Raises:
            BaseException: Why a step cannot be built, as it was raised; to every question, until other ranks or plans
                come in the place of its own.
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
        """Give out no step more until an edition of the plans of this number has come; see ``Giving.fence``."""
        with self._changed:
            return self._machine.giving.fence(edition)

    def told_beside(self, building: "Future[int]", order: BuildOrder) -> tuple[int, StepsTaken]:
        """As ``told``, while steps are built in another thread: the planner hears what ranks tell meanwhile.

        Args:
            building: Where it ends in an error, ``told`` raises that.
            order: What is built, and how many words were heard.
        """
        building.add_done_callback(partial(self._note_built, order))
        return self.told(order.heard or 0, order.served.number)

    def _note_built(self, order: BuildOrder, building: "Future[int]") -> None:
        if not building.cancelled() and (error := building.exception()) is not None:
            last = max((plan.step for plan in order.plans), default=0)
            failed = _Failure(order.served, last, error)
            with self._told:
                # The first one that stands: others follow from it, and those of what is gone come late.
                if self._stands(failed) and self._failed is None:
                    self._failed = failed
                    self._told.notify_all()

    def _stands(self, failed: _Failure) -> bool:
        """Tell whether there are neither other ranks by now, nor other plans of the steps."""
        is_of_now = failed.served.generation >= self._machine.generation
        return is_of_now and self._machine.giving.edition.keeps(failed.served.edition, failed.last)

    def _fails(self, served: tuple[int, tuple[int, int]]) -> bool:
        """Tell whether a planner that has come to some ranks and plans is to hear of a failure."""
        machine = self._machine
        has_heard = machine.generation >= served[0] and machine.giving.edition.number >= served[1]
        return has_heard and self._failed is not None and self._stands(self._failed)

    def know(self, mix: MixConfig) -> None:
        """Know the names, tags and patches of all sources, also of one that an edit adds."""
        with self._changed:
            self._machine.names, self._machine.tags = mix.names, tags_of(mix.sources)
            self._machine.values_per_patch = values_per_patch_of(mix.sources)

    def has(self, step: int, generation: int = 0) -> bool:
        """Return whether a step is built for the ranks of a generation: ``take`` then waits for nothing."""
        with self._changed:
            return generation == self._machine.generation and self._machine.has(step)

    def release(self, command: ReleaseSteps) -> None:
        """Let go of steps that every rank has taken."""
        with self._changed:
            self._machine.handle(command)
            self._changed.notify_all()
        self._note_queued()

    def _note_queued(self) -> None:
        with self._changed:
            self._activity.figures.note(queued_steps=self._machine.num_steps)

    def end(self, step: int) -> None:
        """Note that there is no step ``step`` nor any after it, and wake ranks that wait for one."""
        with self._changed:
            self._end = step
            self._changed.notify_all()

    def fail(self, error: OmniloadError) -> None:
        """Wake every rank that waits, with the reason why its batch will not come."""
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
