"""The Planner machine: mix, pack membership, cost, balance, place; metadata only.

It plans at most ``prefetch_steps`` ahead of the slowest rank, several steps at once where
steps are small, tells the source loaders what to read and what to let go, and makes every
step durable in the journal before it is published.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import assert_never

import numpy as np

from omniload.base.errors import ConfigError, StateError
from omniload.base.state import JsonObject
from omniload.batch.rows import stops_with_next
from omniload.machine.loss_spans import LossSpans
from omniload.machine.messages import (
    AppendBase,
    AppendJournal,
    ConstructorReplaced,
    EndOfData,
    LoaderReplaced,
    PlannerCommand,
    PlannerEvent,
    PublishPlans,
    ReadAhead,
    ReleaseSamples,
    ReleaseSteps,
    Republish,
    SamplesReported,
    Started,
    StepTaken,
    TakeOver,
)
from omniload.machine.progress import Waits, rank_name
from omniload.machine.queue import Demand, SampleQueue
from omniload.machine.ranks import RankSteps
from omniload.machine.strategy import place
from omniload.mix.config import MixConfig
from omniload.mix.deficit import WEIGHT_ONE
from omniload.mix.possible import require_samples
from omniload.mix.schedule import weights_at
from omniload.mix.state import MixState
from omniload.plan.membership import Exhausted, Membership, Starved
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.records import StepPlan
from omniload.plan.strategies import require_strategy
from omniload.plan.window import window_of

__all__ = ["Planner"]

_PLANS_READ_AHEAD = 4
"""Plans' worth of samples known ahead of the next plan, for each source by its share; half as many let every
plan wait for a read."""
_BASE_EVERY = 1024
"""Steps between two bases in the journal, at least as many as may be planned ahead: a planner that takes over reads
from the last base but one at most."""
_SMALL_READ = 1024
"""Records that are read at once, however few there are: each epoch costs a read of its own, each request more."""
_NAMES_SHOWN = 3


@dataclass(slots=True, kw_only=True)
class Planner:
    """Publishes one plan per step, in order, once every source can supply it."""

    mix: MixConfig
    tree: ClientPlaceTree
    positions_per_epoch_S: Sequence[int]
    """Raw records of each source."""
    state: MixState
    """State before the next step to plan."""
    fingerprint: dict[str, str]
    """What a later resume must find unchanged."""
    known: Sequence[MixState] = ()
    """States behind ``state`` that a planner before this one, now lost, had come to: ranks may stand there."""
    num_steps: int | None = None
    """First step that is not planned; ``None`` for no end but the mix's own."""
    skipped_S: list[int] = field(init=False)
    """Records skipped by policy so far, by source, in this life of the planner."""
    overlong_S: list[int] = field(init=False)
    """Tokens cut off or dropped with overlong documents so far, by source, in this life."""
    _queues: list[SampleQueue] = field(init=False)
    _states: dict[int, MixState] = field(init=False)
    _ranks: RankSteps = field(init=False)
    released_to: int = field(init=False)
    """The step before which everything was let go: every rank has taken it."""
    _reach_S: list[int] = field(init=False)
    """End of the positions that carried pieces lie in: after a resume they are read again, drawn from or not."""
    _loss_spans: LossSpans = field(default_factory=LossSpans, init=False)
    """Of what is held, which tokens are trained on."""
    _resumed: MixState = field(init=False)
    """The state that this life began with."""
    _checked_to_S: list[int] = field(init=False)
    """Last position that ``_resumed`` says anything of."""
    _demand: Demand | None = field(default=None, init=False)
    _starved: int | None = field(default=None, init=False)
    """Source that the last draw ran out of: a need is a guess, most of all with weights by samples."""
    _ended: bool = field(default=False, init=False)
    _published: deque[tuple[StepPlan, ...]] = field(default_factory=deque, init=False)
    """Plans that a constructor may be asked to build once more: not every rank has taken their steps."""

    def __post_init__(self) -> None:
        require_strategy(self.mix.balance)
        num_sources = len(self.mix.names)
        self.skipped_S, self.overlong_S = [0] * num_sources, [0] * num_sources
        self._queues = [SampleQueue.at(floor) for floor in self.state.floors()]
        carried = self.state.carried
        self._reach_S = [
            int(carried.positions_P[carried.sources_P == s].max(initial=-1)) + 1
            for s in range(num_sources)
        ]
        self._resumed = self.state
        self._checked_to_S = [
            max(reach - 1, cursor[0])
            for reach, cursor in zip(self._reach_S, self.state.cursors_S, strict=True)
        ]
        self._states = {state.step: state for state in (self.state, *self.known)}
        ranks = product(range(self.tree.size_of("dp")), range(self.tree.size_of("cp")))
        self._ranks = RankSteps.at(ranks, self.state.step)
        self.released_to = self.state.step

    def handle(self, event: PlannerEvent) -> tuple[PlannerCommand, ...]:  # noqa: PLR0911 -- one for each event
        """Apply one event and return what must now be done, in order.

        Raises:
            ConfigError: A source gives no samples at all.
            StateError: The state that the run resumed from is of other samples.
        """
        match event:
            case Started():
                return tuple(self._advance(range(len(self._queues))))
            case SamplesReported(source=source, table=table, skipped=skipped):
                if table.start <= self._checked_to_S[source]:
                    require_samples(self._resumed, source, self.mix.names[source], table)
                if not self._queues[source].report(table, self.state.cursors_S[source]):
                    return ()
                self._loss_spans.add(source, table)
                self.skipped_S[source] += skipped
                return tuple(self._advance((source,)))
            case StepTaken(step=step, dp_rank=dp_rank, cp_rank=cp_rank):
                if not self._ranks.take((dp_rank, cp_rank), step):
                    return ()
                return (*self._release(), *self._advance(()))
            case LoaderReplaced(sources=sources):
                return self._read_again(sources)
            case ConstructorReplaced(number=number):
                return self._build_again(number)
            case _:
                assert_never(event)

    @property
    def slowest_step(self) -> int:
        """The step that the slowest rank wants next."""
        return self._ranks.slowest

    def _room(self) -> int:
        """Return how many steps may be planned now; 0 until there is room for as many as go together."""
        room = self.slowest_step + self.mix.steps_ahead - self.state.step
        return room if room >= self.mix.steps_at_once else 0

    def waits(self) -> Waits:
        """Say what holds up the next plan."""
        step = self.state.step
        if self._ended:
            return Waits(text=f"has planned every step before {step}, where the data ends")
        slowest = self.slowest_step
        if self._room():
            short = tuple(s for s in self._lacking() if self._is_asked(s))
            names = ", ".join(self.mix.names[s] for s in short[:_NAMES_SHOWN])
            return Waits(text=f"waits for samples of {len(short)} sources ({names})", sources=short)
        late = self._ranks.late()
        cp_size = self.tree.size_of("cp")
        return Waits(
            text=f"is {step - slowest} steps ahead of {len(late)} ranks that have not taken step {slowest}",
            ranks=tuple(rank_name(*rank, cp_size) for rank in late),
        )

    def _lacking(self) -> list[int]:
        """Return the sources without which the next step cannot be planned, as far as that is known."""
        short = self._demanded().short
        return [self._starved] if not short and self._starved is not None else sorted(short)

    def state_at(self, step: int) -> JsonObject:
        """Return the state before ``step`` as plain JSON: resuming from it, ``step`` comes next.

        Raises:
            StateError: The state is no longer held, or the step is not planned yet.
        """
        if step not in self._states:
            raise StateError(
                f"the state before step {step} is not held, only steps {min(self._states)} to {max(self._states)}; "
                "take the state at the trainer's own step"
            )
        return self._states[step].to_json(self.mix.names, self.fingerprint)

    def _advance(self, changed: Iterable[int]) -> list[PlannerCommand]:
        """Plan as many steps as may be planned, and ask for what the following ones need.

        Args:
            changed: Sources of which another amount is known than when this was called last.
        """
        commands: list[PlannerCommand] = []
        for s in changed:
            self._refuse_barren(s)
        self._recount(changed)
        while not self._ended and (room := self._room()):
            if self.num_steps is not None and self.state.step >= self.num_steps:
                self._ended = True
                commands.append(EndOfData(step=self.state.step))
                break
            demand = self._demanded()
            if demand.short:
                break
            found = self._window(room)
            if isinstance(found, Starved):
                source = found.source
                self._starved = source
                commands += self._read(source, self._queues[source].tokens + demand.needs_S[source])
                break
            if isinstance(found, Exhausted):
                self._ended = True
                commands.append(EndOfData(step=self.state.step))
                break
            self._starved = None
            commands += self._publish(found)
            changed = range(len(self._queues))
        if not self._ended:
            commands += self._top_up(changed)
        return commands

    def _window(self, room: int) -> list[Membership] | Starved | Exhausted:
        """Draw the steps that are planned together."""
        most = min(room, self.mix.steps_at_once)
        if self.num_steps is not None:
            most = min(most, self.num_steps - self.state.step)
        tables = [queue.table for queue in self._queues]
        return window_of(self.mix, self.state, tables, self.positions_per_epoch_S, most=most)

    def _steps_demanded(self) -> int:
        """Return how many steps the next plan is to have: one where a rank waits for it."""
        return 1 if self.state.step == self.slowest_step else self.mix.steps_at_once

    def _demanded(self) -> Demand:
        """Return what the next plan demands; found once a plan, for there may be a report of every source in it."""
        step, steps = self.state.step, self._steps_demanded()
        if self._demand is None or (self._demand.step, self._demand.steps) != (step, steps):
            needs = self._needs(steps)
            together = self.mix.steps_at_once
            ahead = step + _PLANS_READ_AHEAD * together
            soon = weights_at(self.mix.mix.stages, self.mix.names, ahead)
            tokens = self.mix.batch.tokens * together
            self._demand = Demand(
                step=step,
                steps=steps,
                needs_S=needs,
                targets_S=[
                    max(need, int(weight * tokens)) * _PLANS_READ_AHEAD
                    for need, weight in zip(needs, soon, strict=True)
                ],
                short={s for s, need in enumerate(needs) if self._is_short(s, need)},
            )
        return self._demand

    def _recount(self, changed: Iterable[int]) -> None:
        """See whether sources of which more is known are still short."""
        demand = self._demanded()
        for s in demand.short.intersection(changed):
            if not self._is_short(s, demand.needs_S[s]):
                demand.short.remove(s)

    def _needs(self, steps: int) -> list[int]:
        """Return the tokens of each source that the next steps are likely to draw; at least 1 where they draw any."""
        weights = weights_at(self.mix.mix.stages, self.mix.names, self.state.step)
        if self.mix.mix.level == "sample" or self.mix.pack.method == "none":
            return [1 if weight > 0 else 0 for weight in weights]
        rows = self.mix.rows_per_step * steps + self.mix.pack.rows_ahead
        budget = rows * self.mix.pack.length
        return [
            max(1, int(weight * budget + credit / WEIGHT_ONE)) if weight > 0 else 0
            for weight, credit in zip(weights, self.state.credits_S, strict=True)
        ]

    def _top_up(self, sources: Iterable[int]) -> list[PlannerCommand]:
        """Ask for more of every source of which less than the coming steps' share is known."""
        targets_S = self._demanded().targets_S
        commands: list[PlannerCommand] = []
        for s in sources:
            if self._is_short(s, targets_S[s]):
                commands += self._read(s, 2 * targets_S[s] - self._queues[s].tokens)
        return commands

    def _is_short(self, source: int, tokens: int) -> bool:
        queue = self._queues[source]
        if queue.table.stop >= self._end_of(source):
            return False
        return queue.tokens < tokens or queue.table.stop < self._reach_S[source]

    def _end_of(self, source: int) -> float:
        """Return the position from which on nothing of a source is ever drawn."""
        repeats = self.mix.mix.stop in ("never", "all_exhausted")
        return math.inf if repeats else self.positions_per_epoch_S[source]

    def _is_asked(self, source: int) -> bool:
        return self._queues[source].asked_to > self._queues[source].table.stop

    def _read(self, source: int, tokens: int) -> list[PlannerCommand]:
        queue = self._queues[source]
        if self._is_asked(source):
            return []  # the answer is under way
        start, stop = queue.next_range(tokens)
        stop = min(stop, start + max(4 * self.positions_per_epoch_S[source], _SMALL_READ))
        stop = int(min(max(stop, self._reach_S[source]), self._end_of(source)))
        queue.asked_to = stop
        return [ReadAhead(source=source, start=start, stop=stop)]

    def _read_again(self, sources: Sequence[int]) -> tuple[PlannerCommand, ...]:
        """Have another loader hold what the lost one held, and answer what it was asked."""
        floors_S = self._states[self.released_to].floors()
        ends = {s: self._queues[s].table.stop for s in sources}
        ranges = {s: (floors_S[s], max(floors_S[s], end)) for s, end in ends.items()}
        asked = [
            ReadAhead(source=s, start=ends[s], stop=self._queues[s].asked_to)
            for s in sources
            if self._is_asked(s)
        ]
        return (TakeOver(ranges=ranges), *asked)

    def _build_again(self, number: int) -> tuple[PlannerCommand, ...]:
        windows, end = tuple(self._published), self.state.step if self._ended else None
        to = self.released_to
        return (Republish(number=number, released_to=to, windows=windows, end=end),)

    def _refuse_barren(self, source: int) -> None:
        """Stop a run that would read a source round and round and never find a usable sample."""
        queue, epoch = self._queues[source], self.positions_per_epoch_S[source]
        # Of all that was ever seen: a queue that was just drawn empty says nothing.
        dropping = self.mix.pack.overlong == "drop"
        barren = queue.shortest is None or (dropping and queue.shortest > self.mix.pack.length)
        if queue.seen_positions >= epoch and barren:
            raise ConfigError(
                f"sources.{self.mix.names[source]}: none of its {epoch} records gives a sample that fits pack.length "
                f"{self.mix.pack.length}; remove the source, or change pack.overlong or its text key"
            )

    def _publish(self, window: Sequence[Membership]) -> list[PlannerCommand]:
        """Place the steps of a window; all of them are journaled before any is published."""
        commands: list[PlannerCommand] = []
        plans: list[StepPlan] = []
        for membership in window:
            before, plan = self.state, self._placed(membership)
            self.state = membership.after
            self._states[self.state.step] = self.state
            plans.append(plan)
            names = self.mix.names
            commands.append(AppendJournal(before=before, plan=plan, after=self.state, names=names))
            if self.state.step % _BASE_EVERY == 0:
                base = AppendBase(state=self.state, names=names, fingerprint=self.fingerprint)
                commands.append(base)
        finished_S = np.sum([membership.finished_S for membership in window], axis=0)
        for s in np.flatnonzero(finished_S).tolist():
            self._queues[s].draw(int(finished_S[s]))
        if self.mix.pack.overlong != "split":
            for membership in window:
                self.overlong_S = (membership.lost_S + self.overlong_S).tolist()
        self._published.append(tuple(plans))
        return [*commands, PublishPlans(plans=self._published[-1])]

    def _placed(self, membership: Membership) -> StepPlan:
        pieces = membership.pieces
        left_out = self._loss_spans.labels_left_out(pieces, stops_with_next(pieces))
        return place(self.mix, self.tree, self.state, membership, labels_left_out=left_out)

    def _release(self) -> list[PlannerCommand]:
        """Let go of what no rank can ask for again, of as many steps at once as are planned together."""
        step = self.slowest_step
        if step < self.released_to + self.mix.steps_at_once:
            return []
        self.released_to = step
        while self._published and self._published[0][-1].step < step:
            self._published.popleft()
        for old in [s for s in self._states if s < step]:
            del self._states[old]
        floors = dict(enumerate(self._states[step].floors()))
        self._loss_spans.release(floors)
        return [ReleaseSteps(step=step), ReleaseSamples(floors=floors)]
