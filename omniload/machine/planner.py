"""The Planner machine: mixes, packs, costs, balances and places samples by their metadata alone.

It plans at most ``prefetch_steps`` ahead of the slowest rank, and several small steps at once. It tells the source
loaders what to read and what to release. Every step is durable in the journal before it is published.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from omniload.base.units import counted
from omniload.machine.messages import (
    AppendWorld,
    ChangeAsked,
    ConstructorReplaced,
    KeepEdits,
    LoaderReplaced,
    PlannerCommand,
    PlannerEvent,
    RanksLost,
    ReadAhead,
    Republish,
    ResizeAsked,
    SamplesReported,
    ServeWorld,
    Started,
    StepsTaken,
    StepTaken,
    TakeOver,
    TimesRead,
)
from omniload.machine.metadata.samples import asked_with_tags, tags_in
from omniload.machine.plans.ahead import PlanningAhead
from omniload.machine.plans.fences import (
    CutJournal,
    FencesLate,
    FenceTold,
    NewEdition,
    WithdrawalAsked,
    WithdrawalEnded,
    WithdrawalEvent,
)
from omniload.machine.plans.unread import ReadFailed
from omniload.machine.plans.windows import with_released
from omniload.machine.progress import PLANNED_ALL, Waits
from omniload.machine.queue import SampleQueue, commands_of_take_over
from omniload.machine.steps import RankSteps
from omniload.mix.edits.found import require_open, take_up
from omniload.mix.edits.next_edit import undone_by
from omniload.mix.pieces import PieceTable
from omniload.mix.possible import require_samples
from omniload.plan.records import PieceTags
from omniload.plan.world import require_follows

__all__ = ["Planner"]


@dataclass(slots=True, kw_only=True)
class Planner(PlanningAhead):
    """Plans ahead from the reports of loaders, constructors and ranks, and applies changes of the mix."""

    def handle(self, event: PlannerEvent) -> tuple[PlannerCommand, ...]:  # noqa: PLR0911 -- one for each event
        """Apply one event and return the commands to carry out, in order.

        Raises:
            ConfigError: A source gives no samples at all.
            OmniloadError: Ranks have reached a step that needs data which could not be read.
            IntegrityError: Ranks have reached a step in which a source has more bad records than its ``on_error``
                allows, or a rank holds a step that the journal has lost.
            StateError: The run resumed from a state that belongs to other samples.
        """
        match event:
            case Started():
                # A lost planner may have journaled these ranks, or taken plans back, without telling a constructor.
                serve = (ServeWorld(world=self.world, windows=()),) if self.world.generation else ()
                edition = NewEdition(edition=self._withdrawal.edition, windows=())
                told = (edition, *serve) if self.life else serve
                return (*told, *self._advance(range(len(self._queues))))
            case SamplesReported() | ReadFailed():
                return self._take_report(event)
            case StepTaken() | StepsTaken() | RanksLost():
                is_of_now = event.generation == self.world.generation
                further = is_of_now and self.ranks.hear(event, self.planned)
                return with_released(self._release(), self._advance(())) if further else ()
            case LoaderReplaced(sources=sources):
                return self.outstanding(sources)
            case ConstructorReplaced(number=number):
                self._keep_plans()  # the lost constructor may have given out any step that it was told to build
                to, end = self.released_to, self.state.step if self.has_ended else None
                windows = self._steps.windows
                return (Republish(number=number, released_to=to, windows=windows, end=end),)
            case WithdrawalAsked() | FenceTold() | FencesLate() | WithdrawalEnded():
                return self._withdraw(event)
            case ChangeAsked():
                return self._take_change(event)
            case ResizeAsked():
                return self._resize(event)
            case TimesRead(times=times):
                self._costs.hear(self.history, times)
                return () if self.has_ended else tuple(self._advance(()))
            case _:
                assert_never(event)

    @property
    def unread(self) -> tuple[str, ...]:
        """Names of sources whose next records cannot be read; the run ends before the first step that needs them."""
        return tuple(self.names[source] for source in self._unread.errors)

    def waits(self) -> Waits:
        """Say what holds up the next plan."""
        step = self.state.step
        if self.has_ended or step == self.num_steps:
            return Waits(text=f"{PLANNED_ALL} {step}, where the run ends")
        if self._room():
            starved = [] if self._starved is None else [self._starved.source]
            lacking = sorted(self._demand_now().short) or starved  # as far as the planner knows
            short = tuple(s for s in lacking if self._queues[s].is_asked)
            names = ", ".join(self.names[s] for s in short[:3])
            return Waits(
                text=f"waits for samples of {counted(len(short), 'source')} ({names})",
                sources=short,
            )
        return self.ranks.waits(step, self.world.tree.size_of("cp"), self.mix.steps_at_once)

    def filled(self) -> dict[int, float]:
        """Return the known fraction of the read-ahead target of each source that is below its target."""
        if self.has_ended:
            return {}
        sources = range(len(self._queues))
        below = self._demand_now().below(sources, self._queues, self._is_short)
        return {s: min(1.0, self._queues[s].tokens / max(1, least)) for s, least, _ in below}

    def outstanding(self, sources: Sequence[int]) -> tuple[TakeOver | ReadAhead, ...]:
        """Return the first commands to a loader that takes sources over.

        It has to hold the samples that are still needed, and to answer the reads that are under way.
        """
        floors_S = self._steps.state_before(self.released_to).widened(len(self._queues)).floors()
        take_over, asked = commands_of_take_over(self._queues, sources, floors_S, self.life)
        return (take_over, *(asked_with_tags(read, self._metadata.tags) for read in asked))

    def lost_in(self, step: int) -> NDArray[np.int64]:
        """Return the tokens of each source that a step cuts off or drops with overlong documents, until it is taken."""
        return self._steps.lost_in(step)

    def tags_of(self, pieces: PieceTable) -> PieceTags:
        """Return the tags that costs and strategies read, for pieces of a step that a rank may still ask for."""
        return self._metadata.tags_of(pieces)

    def _take_report(self, reported: SamplesReported | ReadFailed) -> tuple[PlannerCommand, ...]:
        source, queue = reported.source, self._queues[reported.source]
        if isinstance(reported, ReadFailed):
            is_news = not self.has_ended and self._unread.note(reported, queue)
            return tuple(self._advance((source,))) if is_news else ()
        if self.has_ended or (table := queue.news_of(reported.table, reported.without)) is None:
            return ()
        resumed, state = (each.widened(len(self._queues)) for each in (self._resumed, self.state))
        # The first report is the first chance to check the state that the run resumed from.
        if table.start <= queue.checked_to:
            require_samples(resumed, source, self.names[source], table)
        queue.report(table, state.cursors_S[source], reported.size_bytes)
        self._leads.note(source, reported.took_steps / self.mix.steps_at_once)
        self._metadata.add(source, table, tags_in(reported))
        return tuple(self._advance((source,)))

    def open_from(self, at: int | None) -> int:
        """Return the first step at which a change can take effect.

        Args:
            at: Step that the user asked for; ``None`` for the next possible one.
        """
        first = max(self._withdrawal.opens_at(self.planned), self.ranks.slowest)
        return first if at is None else max(first, min(at, self.planned))

    @property
    def is_settled(self) -> bool:
        """Whether all constructors have answered, so that a waiting change can be applied."""
        return self._withdrawal.is_settled

    @property
    def question(self) -> int:
        """Number of the last question to the constructors."""
        return self._withdrawal.turn

    def _withdraw(self, event: WithdrawalEvent) -> tuple[PlannerCommand, ...]:
        """Ask the constructors which planned steps no rank has, note their answers, or end the question.

        Such steps can be taken back, so that a change takes effect before steps that are already planned.
        """
        match event:
            case WithdrawalAsked(at=at, constructors=constructors):
                first = max(self._withdrawal.kept_to, self.ranks.slowest, at or 0)
                if first >= self.planned or not (self._may_go_on and self._withdrawal.is_settled):
                    return ()
                return (self._withdrawal.ask(constructors),)
            case WithdrawalEnded():
                return self._renew(self.planned) if self._withdrawal.is_fenced else ()
            case _:
                self._withdrawal.hear(event)
                return ()

    @property
    def _may_go_on(self) -> bool:
        """Whether planning can continue after plans are taken back.

        It cannot where the data has ended early: whether there is another step would then depend on the changed mix.
        """
        return not self.has_ended or self.state.step == self.num_steps

    def _take_change(self, asked: ChangeAsked) -> tuple[PlannerCommand, ...]:
        """Apply a change from a step that no rank was given yet; a refused change alters nothing."""
        first = self.open_from(asked.at)
        step = first if asked.at is None else asked.at
        undone_by(self.history, asked.change, step, at_rest=False)  # no later step would do
        ended = self.has_ended and first == self.planned
        require_open(step, planned=first, end=self.num_steps, ended=ended)
        state = self._steps.state_before(first)
        self.history, self.records_S = take_up(
            self.history, asked.change, step, asked.facts, state, self.records_S
        )
        cut, renewed = self._go_back(first) if first < self.planned else ((), ())
        if asked.facts is not None:
            # A source keeps its number for good, so an added source becomes the last one.
            self._queues.append(SampleQueue.at(0))
        self._demand = self._starved = self._bad.excess = None  # these belong to the old mix
        self._unread.forget()
        # The journal is cut first: otherwise a successor would find steps under an edit that did not draw them.
        kept = KeepEdits(history=self.history)
        return (*cut, kept, *renewed, *self._advance(range(len(self._queues))))

    def _go_back(self, step: int) -> tuple[tuple[CutJournal, ...], tuple[NewEdition, ...]]:
        """Return to the state before a planned step; return the commands to the journal and to the constructors."""
        self.state = self._steps.take_back(step, self._queues)
        if self.has_ended:
            self.has_ended = False
            for queue in self._queues:  # reports that came after the end were ignored, so ask again
                queue.asked_to = queue.table.stop
        return (CutJournal(step=step),), self._renew(step)

    def _renew(self, since: int) -> tuple[NewEdition, ...]:
        edition = self._withdrawal.renew(since)
        return (NewEdition(edition=edition, windows=self._steps.windows),)

    def _keep_plans(self) -> None:
        """Keep every step that is planned by now from being taken back."""
        self._withdrawal.keep_to(self.planned)
        self._withdrawal.give_up()

    def _resize(self, asked: ResizeAsked) -> tuple[PlannerCommand, ...]:
        """Place planned steps on the ranks of a new world, with the same samples in each step."""
        world = self.world.followed_by(dp=asked.dp, step=asked.step, generation=asked.generation)
        if world is self.world:
            return ()
        require_follows(self.world, world, self.mix, range(self._kept_from, self.planned + 1))
        self._keep_plans()  # the journal records the new ranks after the steps that are planned
        self.world, self._demand = world, None  # demand depends on the ranks of the next plan
        self.ranks = RankSteps.at(world.ranks(), world.step)
        self._steps.place_again(self.history, world, self.tags_of)
        serve = ServeWorld(world=world, windows=self._steps.windows)
        return (AppendWorld(world=world), serve, *with_released(self._release(), self._advance(())))
