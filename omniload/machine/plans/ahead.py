"""Planning ahead of the ranks: a window of steps is drawn, placed and published once its samples are known.

``Planner`` handles the events: reports of samples, the progress of ranks, and changes of the mix.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from omniload.base.errors import ConfigError
from omniload.base.state import JsonObject
from omniload.machine.messages import (
    AppendJournal,
    EndOfData,
    KeepEdits,
    PlannerCommand,
    PublishPlans,
    ReadAhead,
    ReleaseSamples,
    ReleaseSteps,
)
from omniload.machine.metadata.samples import SampleMetadata, asked_with_tags
from omniload.machine.plans.fences import Withdrawal
from omniload.machine.plans.unread import BadRecords, Unread
from omniload.machine.plans.windows import PlannedSteps, WindowDraws
from omniload.machine.queue import (
    SampleQueue,
    draw_window,
    end_of,
    enter_step,
    queues_of,
    require_below_cap,
    require_usable,
)
from omniload.machine.scaling.coming import Demand, Foresight
from omniload.machine.scaling.leads import Leads
from omniload.machine.steps import RankSteps
from omniload.machine.strategy import CostFits, place
from omniload.mix.config import MixConfig
from omniload.mix.edits.edit import BeginStage, Edit, FitCost
from omniload.mix.edits.history import History
from omniload.mix.edits.stages import with_begun
from omniload.mix.state import MixState
from omniload.plan.membership import Exhausted, Membership, Starved
from omniload.plan.records import StepPlan
from omniload.plan.strategies import require_balance, tags_of_samples
from omniload.plan.window import steps_together
from omniload.plan.world import World

__all__ = ["PlanningAhead"]

_FEW_SOURCES = 128
"""With more sources than this, a first plan waits for many reads, so other reads are requested after them."""


@dataclass(slots=True, kw_only=True)
class PlanningAhead:
    """Publishes one plan per step, in order, once every source can supply it."""

    mix: MixConfig
    """The mix as written in its file; ``history`` knows the mix of each step."""
    world: World
    """The ranks."""
    records_S: Sequence[int]
    """Raw records of each source, including added ones."""
    state: MixState
    """State before the next step to plan."""
    fingerprint: dict[str, str]
    """Digests that a later resume compares with the mix of the file; edits carry their own."""
    edits: tuple[Edit, ...] = ()
    """The edits of the run so far."""
    known: Sequence[MixState] = ()
    """States after ``state`` that a lost planner had reached; ranks may be at their steps already."""
    life: int = 0
    """Number of planners that the plane lost before this one."""
    num_steps: int | None = None
    """First step that must not be planned; ``None`` where only the mix ends the run."""
    history: History = field(init=False)
    """The mix and its edits."""
    has_ended: bool = field(default=False, init=False)
    """Whether every step of the run is planned; later reports are then ignored."""
    _queues: list[SampleQueue] = field(init=False)
    _steps: PlannedSteps = field(init=False)
    ranks: RankSteps = field(init=False)
    """How far each rank is."""
    released_to: int = field(init=False)
    """Every rank has taken all steps before this one; states and samples of them are released."""
    _metadata: SampleMetadata = field(init=False)
    """Metadata of the samples that ranks may still ask for: loss masks, documents, images, and the tags in use."""
    _foresight: Foresight = field(default_factory=Foresight, init=False)
    _bad: BadRecords = field(init=False)
    _unread: Unread = field(default_factory=Unread, init=False)
    """Sources whose next records cannot be read; a step that needs more of one ends the run."""
    _costs: CostFits = field(init=False)
    _resumed: MixState = field(init=False)
    """The state that this planner began with."""
    _demand: Demand | None = field(default=None, init=False)
    _leads: Leads = field(default_factory=Leads, init=False)
    _withdrawal: Withdrawal = field(init=False)
    _starved: Starved | None = field(default=None, init=False)
    """The source that the last draw ran out of. It can happen because needs are estimates, and rough ones where weights
    count samples."""
    _starved_by: list[object] = field(default_factory=list, init=False)
    """Everything that the starved draw depended on, as it was then."""

    def __post_init__(self) -> None:
        require_balance(self.mix)
        self._metadata = SampleMetadata(tags=tags_of_samples(self.mix))
        self.history = History(self.mix, self.edits)
        self._queues = queues_of(self.state.widened(len(self.names)))
        self._bad = BadRecords(queues=self._queues)
        self._costs = CostFits(first=self.state.step)
        self._resumed = self.state
        self._steps = PlannedSteps.of((self.state, *self.known))
        step = max(self.state.step, self.world.step)
        self.ranks = RankSteps.at(self.world.ranks(), step, taken_over=self.life > 0)
        self.released_to = self.state.step
        # Fitted costs and beginning stages take effect after the planned steps, so no plan was taken back for them.
        changed = (
            edit.step
            for edit in self.edits
            if edit.step >= self.state.step and not isinstance(edit.change, FitCost | BeginStage)
        )
        self._withdrawal = Withdrawal.of(self.life, self.planned, changed)

    @property
    def planned(self) -> int:
        """First step that neither this planner nor a lost one before it has planned."""
        return self._steps.next_step

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all sources; a source's number is its place here."""
        return self.history.latest.names

    def state_at(self, step: int) -> JsonObject:
        """Return the state before ``step`` as plain JSON; a run that resumes from it continues with ``step``.

        Raises:
            StateError: The state is no longer held, or the step is not planned yet.
        """
        state = self._steps.state_before(step)
        return state.to_json(**self.history.state_fields_at(state.mix_revision, self.fingerprint))

    def _advance(self, changed: Iterable[int]) -> list[PlannerCommand]:
        """Plan as many steps as possible, and request the reads that the steps after them need.

        Args:
            changed: Sources whose known samples have changed since the last call.
        """
        demand, starved, commands = self._demand, self._starved, self._begin_step(changed)
        for s in (s for s in changed if s not in self._bad.over):
            require_usable(self.history, s, self._queues[s], self.records_S[s])
        self._demand_now().drop_known(changed, self._is_short)
        while not self.has_ended and ((room := self._room()) or self.state.step == self.num_steps):
            # Reaching the end needs no room: it must be noted so that later failures of reads are ignored.
            # ``>=`` because a run may resume from a state beyond ``num_steps``.
            is_last = self.num_steps is not None and self.state.step >= self.num_steps
            if self._demand_now().short and not is_last:
                break
            found = Exhausted() if is_last else self._window(room)
            if found is None:
                break
            if isinstance(found, Starved):
                commands += self._read_on(found)
                break
            if isinstance(found, Exhausted):
                self.has_ended = True
                commands.append(EndOfData(step=self.state.step))
                break
            self._starved = None
            commands += [*self._publish(found), *self._begin_step(())]
            changed = range(len(self._queues))
        if (excess := self._bad.excess) is not None and self.ranks.slowest >= self.state.step:
            raise excess  # not earlier, so that every run ends before the same step
        if not self.has_ended and excess is None:
            # A planner that takes over may find ranks ahead of it; it then plans more steps at once.
            changed = changed if self._demand_now() is demand else range(len(self._queues))
            if self._has_many_at_first:
                changed = self._read_at_first(changed, starved)
            commands += self._top_up(changed)
        return commands

    def _begin_step(self, changed: Iterable[int]) -> list[PlannerCommand]:
        """Move to the beginning of the next step: pass steps that edits skip, and enter a stage that is due."""
        before = self.state.mix_revision
        self.state, read_again = enter_step(self._queues, self.history, self.state)
        if self.state.mix_revision != before and self.history.leaves_out:
            # The queues change here for another reason than draws, so going back would not restore them.
            self._withdrawal.keep_to(self.state.step)
        for s in read_again:
            self._metadata.forget(s, self._queues[s].table.stop)
        self._bad.update(changed, self.history, self.state, self.records_S)
        begun = with_begun(self.history, self.state, self.records_S)
        self._demand = self._demand if begun is self.history else None
        begun, reads = self._costs.at(begun, self.state.step, planned=self.planned)
        if begun is self.history:
            return [*reads]
        self.history, self.state = begun, begun.entered(self.state)[1]
        return [KeepEdits(history=self.history), *reads]

    def _room(self) -> int:
        """Return how many steps may be planned now; 0 until a whole window of steps fits."""
        room = self.ranks.slowest + self.mix.steps_ahead - self.state.step
        return room if room >= self.mix.steps_at_once and self._bad.excess is None else 0

    def _window(self, room: int) -> list[Membership] | Starved | Exhausted | None:
        """Draw the steps of one window, at most ``room`` of them.

        Returns ``None`` where the first step is refused, such as by a source that refuses long documents. That ends the
        run.
        """
        if (starved := self._starved) is not None and all(
            map(operator.is_, self._starved_by, self._hangs_on(starved))
        ):
            return starved  # most reports are of other sources, and a new draw would look at every source in vain
        left = [] if self.num_steps is None else [self.num_steps - self.state.step]
        most = min(room, self.mix.steps_at_once, *left)
        tables = [queue.table for queue in self._queues]
        try:
            return steps_together(self.history, self.state, tables, self.records_S, most=most)
        except ConfigError as refused:
            self._bad.excess = refused
            return None

    def _hangs_on(self, starved: Starved) -> list[object]:
        """Return everything that a starved draw depended on: while it is unchanged, the draw starves again."""
        tables = [self._queues[s].table for s in starved.sources]
        return [self.history, self.state, *tables]

    def _read_on(self, starved: Starved) -> list[PlannerCommand]:
        """Request more of a source that a draw ran out of, or note why the run ends with it.

        The run ends if the source has too many bad records, cannot be read, or has reached its cap.
        """
        source, self._starved, self._starved_by = starved.source, starved, self._hangs_on(starved)
        self._bad.excess = self._bad.over.get(source) or self._unread.errors.get(source)
        if self._bad.excess is not None:
            return []
        demand, queue = self._demand_now(), self._queues[source]
        epoch = self.records_S[source]
        try:
            require_below_cap(self.history, self.names[source], queue, epoch, demand.step)
        except ConfigError as gone_through:
            self._bad.excess = gone_through
            return []
        return self._read(source, queue.tokens + demand.needs_S[source])

    def _publish(self, window: Sequence[Membership]) -> list[PlannerCommand]:
        """Place the steps of a window; all of them are journaled before any of them is published."""
        kept, plans = list[PlannerCommand](), list[StepPlan]()
        tables_S = [queue.table for queue in self._queues]
        for membership in window:
            mix, before = self.history.entered(self.state)
            after = membership.after
            bad, after = self._bad.pass_step(self.history, before, after, self.records_S)
            if self._bad.excess is not None:
                break
            facts = self._metadata.of(membership.pieces)
            plan = place(mix, self.world.tree, before, membership, facts)
            self.state = after
            plans.append(plan)
            kept.append(AppendJournal(before, plan, self.state, mix.names, bad))
            kept += self._steps.reach(self.state, self.history, self.fingerprint, self.world)
        if not plans:
            return []
        drawn = WindowDraws(step=plans[0].step, tables_S=tables_S, window=window[: len(plans)])
        draw_window(self._queues, drawn.window)
        published = self._steps.publish(plans, drawn)
        return [*kept, PublishPlans(plans=published, released_to=self.released_to)]

    def _demand_now(self) -> Demand:
        """Return the demand of the next plan on each source; computed once per plan, not per report."""
        step = self.state.step
        # If a rank is waiting, do not hold it up for more than one step needs.
        steps = 1 if step == self.ranks.slowest else self.mix.steps_at_once
        if self._demand is None or (self._demand.step, self._demand.steps) != (step, steps):
            self._demand = self._leads.demand(self.history, self.state, steps, self._queues)
            needs = enumerate(self._demand.needs_S)
            self._demand.short.update(s for s, n in needs if self._is_short(s, n))
        return self._demand

    def _top_up(self, sources: Iterable[int]) -> list[PlannerCommand]:
        """Request reads of every source with fewer known samples than the coming steps need."""
        below = self._demand_now().below(sources, self._queues, self._is_short)
        short = [(s, most - self._queues[s].tokens) for s, _, most in below]
        return [read for s, tokens in short for read in self._read(s, tokens)]

    def _is_short(self, source: int, tokens: int) -> bool:
        if source in self._unread:
            return False
        queue = self._queues[source]
        # A source with too many bad records needs no more reads, because no step gets past all of them.
        is_known = queue.tokens >= tokens or source in self._bad.over
        is_known = is_known and queue.table.stop >= queue.reach
        return not is_known and queue.table.stop < self._end_of(source)  # last, as it costs most

    def _end_of(self, source: int) -> float:
        return end_of(self.history, self.names[source], self.records_S[source])

    def _read(self, source: int, tokens: int) -> list[PlannerCommand]:
        queue = self._queues[source]
        if queue.is_asked:
            return []  # the answer is under way
        epoch, end = self.records_S[source], self._end_of(source)
        need = self._demand_now().needs_S[source] if self._has_many_at_first else None
        start, stop = queue.ask(tokens, epoch=epoch, end=end, need=need)
        read = ReadAhead(source=source, start=start, stop=stop, life=self.life)
        is_starved = self._starved is not None and source == self._starved.source
        is_lacked = is_starved or source in self._demand_now().short
        read = replace(read, without=queue.without_from(start), is_lacked=is_lacked)
        return [asked_with_tags(read, self._metadata.tags)]

    @property
    def _has_many_at_first(self) -> bool:
        """Whether the first plan of many sources is still due, so that only the reads it waits for are requested."""
        return self.planned == self._resumed.step and len(self._queues) > _FEW_SOURCES

    def _read_at_first(self, changed: Iterable[int], starved: Starved | None) -> Iterable[int]:
        """Return the changed sources that the first plan waits for, as only these are read for it.

        If no source is short and the draw still runs out of one for the first time, the estimated needs were too low,
        as they can be where weights count samples. Then all sources are read, because the draw would run out of one
        after the other.
        """
        if short := self._demand_now().short:
            return short.intersection(changed)
        return changed if starved is not None else range(len(self._queues))

    @property
    def _kept_from(self) -> int:
        """The first step that a rank may still ask for: an interrupted rank takes its last step again."""
        return self.ranks.slowest - self.mix.runtime.elastic

    def _release(self) -> list[PlannerCommand]:
        """Release whatever no rank can ask for again, one window of steps at a time."""
        step = self._kept_from
        if step < self.released_to + self.mix.steps_at_once:
            return []
        self.released_to = step
        self._steps.release(step)
        # Floors from the state before the step: pieces that were carried into the step have earlier positions.
        floors = dict(enumerate(self._steps.state_before(step).floors()))
        self._metadata.release(floors)
        ahead = self._foresight.at(self.history, self.state.step)
        return [ReleaseSteps(step=step), ReleaseSamples(floors=floors, life=self.life, ahead=ahead)]
