"""The Planner machine: mix, pack membership, cost, balance, place; metadata only.

It plans at most ``prefetch_steps`` ahead of the slowest rank, several steps at once where steps are small, tells the
source loaders what to read and what to let go, and makes every step durable in the journal before it is published.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

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
from omniload.machine.metadata.tags import asked_with_tags, tags_in
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
    """Plans ahead, by what it hears of loaders, constructors, ranks, and of whoever changes the mix."""

    def handle(self, event: PlannerEvent) -> tuple[PlannerCommand, ...]:  # noqa: PLR0911 -- one for each event
        """Apply one event and return what must now be done, in order.

        Raises:
            ConfigError: A source gives no samples at all.
            OmniloadError: Ranks want a step that needs what could not be read.
            IntegrityError: Ranks want a step in which a source has more bad records than its ``on_error`` allows, or
                have one that the journal has lost.
            StateError: The state that the run resumed from is of other samples.
        """
        match event:
            case Started():
                # A lost planner may have journaled these ranks without telling a constructor, or taken plans back.
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
                self._keep_plans()  # the one before it may have given out whatever it was told to build
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
        """Names of sources that cannot be read on: the run ends before the first step that needs more of one."""
        return tuple(self.names[source] for source in self._unread.errors)

    def waits(self) -> Waits:
        """Say what holds up the next plan."""
        step = self.state.step
        if self.has_ended or step == self.num_steps:
            return Waits(text=f"{PLANNED_ALL} {step}, where the run ends")
        if self._room():
            starved = [] if self._starved is None else [self._starved.source]
            lacking = sorted(self._demand_now().short) or starved  # as far as that is known
            short = tuple(s for s in lacking if self._queues[s].is_asked)
            names = ", ".join(self.names[s] for s in short[:3])
            return Waits(
                text=f"waits for samples of {counted(len(short), 'source')} ({names})",
                sources=short,
            )
        return self.ranks.waits(step, self.world.tree.size_of("cp"), self.mix.steps_at_once)

    def filled(self) -> dict[int, float]:
        """Return which part of its target is known of each source, where that is not all: a read of it is due."""
        if self.has_ended:
            return {}
        sources = range(len(self._queues))
        below = self._demand_now().below(sources, self._queues, self._is_short)
        return {s: min(1.0, self._queues[s].tokens / max(1, least)) for s, least, _ in below}

    def outstanding(self, sources: Sequence[int]) -> tuple[TakeOver | ReadAhead, ...]:
        """Return the first commands to a loader that takes sources over: hold what is needed, answer what is asked."""
        floors_S = self._steps.state_before(self.released_to).widened(len(self._queues)).floors()
        take_over, asked = commands_of_take_over(self._queues, sources, floors_S, self.life)
        return (take_over, *(asked_with_tags(read, self._metadata.tags) for read in asked))

    def tags_of(self, pieces: PieceTable) -> PieceTags:
        """Return the tags that costs and strategies read, of pieces of a step that some rank may ask for."""
        return self._metadata.tags_of(pieces)

    def _take_report(self, reported: SamplesReported | ReadFailed) -> tuple[PlannerCommand, ...]:
        source, queue = reported.source, self._queues[reported.source]
        if isinstance(reported, ReadFailed):
            is_news = not self.has_ended and self._unread.note(reported, queue)
            return tuple(self._advance((source,))) if is_news else ()
        if self.has_ended or (table := queue.news_of(reported.table, reported.without)) is None:
            return ()
        resumed, state = (each.widened(len(self._queues)) for each in (self._resumed, self.state))
        # Only now is there anything to hold the state against that the run was resumed from.
        if table.start <= queue.checked_to:
            require_samples(resumed, source, self.names[source], table)
        queue.report(table, state.cursors_S[source], reported.size_bytes)
        self._leads.note(source, reported.took_steps / self.mix.steps_at_once)
        self._metadata.add(source, table, tags_in(reported))
        return tuple(self._advance((source,)))

    def open_from(self, at: int | None) -> int:
        """Return the first step that a change may hold from, where it is asked for from step ``at`` on, or the next."""
        first = max(self._withdrawal.opens_at(self.planned), self.ranks.slowest)
        return first if at is None else max(first, min(at, self.planned))

    @property
    def is_settled(self) -> bool:
        """Whether a change that waits for the answers of constructors may be taken up."""
        return self._withdrawal.is_settled

    @property
    def question(self) -> int:
        """Number of what constructors were asked last."""
        return self._withdrawal.turn

    def _withdraw(self, event: WithdrawalEvent) -> tuple[PlannerCommand, ...]:
        """Ask which steps no rank has, where a change may hold from one that is planned; hear it; and let go of it."""
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
        """Whether steps may be planned once some are taken back: where the data ends, another mix may decide."""
        return not self.has_ended or self.state.step == self.num_steps

    def _take_change(self, asked: ChangeAsked) -> tuple[PlannerCommand, ...]:
        """Apply a change from the first step on that no rank was given, or later; refused, it leaves all as it was."""
        first = self.open_from(asked.at)
        step = first if asked.at is None else asked.at
        undone_by(self.history, asked.change, step, at_rest=False)  # no later step would do
        ended = self.has_ended and first == self.planned
        require_open(step, planned=first, end=self.num_steps, ended=ended)
        reached = self._steps.state_before(first), self.positions_per_epoch_S
        self.history, self.positions_per_epoch_S = take_up(
            self.history, asked.change, step, asked.facts, reached
        )
        cut, renewed = self._go_back(first) if first < self.planned else ((), ())
        if asked.facts is not None:
            # Numbers of sources never move: one that is added is the last.
            self._queues.append(SampleQueue.at(0))
            self.overlong_S.append(0)
        self._demand = self._starved = self._bad.excess = None  # found under the mix of before
        self._unread.forget()
        # Cut first: else a planner that takes over would find steps under an edit that they were not drawn under.
        kept = KeepEdits(history=self.history)
        return (*cut, kept, *renewed, *self._advance(range(len(self._queues))))

    def _go_back(self, step: int) -> tuple[tuple[CutJournal, ...], tuple[NewEdition, ...]]:
        """Be before a step that is planned; return what the journal is told of it, and what constructors are."""
        self.state = self._steps.take_back(step, self._queues, self.overlong_S)
        if self.has_ended:
            self.has_ended = False
            for queue in self._queues:  # a report that came meanwhile was not heard
                queue.asked_to = queue.table.stop
        return (CutJournal(step=step),), self._renew(step)

    def _renew(self, since: int) -> tuple[NewEdition, ...]:
        edition = self._withdrawal.renew(since)
        return (NewEdition(edition=edition, windows=self._steps.windows),)

    def _keep_plans(self) -> None:
        """Take back nothing that is planned by now."""
        self._withdrawal.keep_to(self.planned)
        self._withdrawal.give_up()

    def _resize(self, asked: ResizeAsked) -> tuple[PlannerCommand, ...]:
        """Place planned steps on other ranks, with the same samples in each; every rank of the new world asks."""
        world = self.world.followed_by(dp=asked.dp, step=asked.step, generation=asked.generation)
        if world is self.world:
            return ()
        require_follows(self.world, world, self.mix, range(self._kept_from, self.planned + 1))
        self._keep_plans()  # the journal notes the ranks behind what is planned
        self.world, self._demand = world, None  # whom the next plan is for has changed
        self.ranks = RankSteps.at(world.ranks(), world.step)
        self._steps.place_again(self.history, world, self.tags_of)
        serve = ServeWorld(world=world, windows=self._steps.windows)
        return (AppendWorld(world=world), serve, *with_released(self._release(), self._advance(())))
