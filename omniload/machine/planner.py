"""The Planner machine: mix, pack membership, cost, balance, place; metadata only.

It plans step after step, at most ``prefetch_steps`` ahead of the slowest rank, tells the
source loaders what to read and what to let go, and makes every step durable in the
journal before it is published.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import assert_never

from omniload.base.errors import ConfigError, StateError
from omniload.base.state import JsonObject
from omniload.machine.messages import (
    AppendJournal,
    EndOfData,
    PlannerCommand,
    PlannerEvent,
    PublishPlan,
    ReadAhead,
    ReleaseSamples,
    ReleaseSteps,
    SamplesReported,
    Started,
    StepTaken,
)
from omniload.machine.progress import rank_name
from omniload.machine.queue import SampleQueue
from omniload.machine.strategy import place
from omniload.mix.config import MixConfig
from omniload.mix.deficit import WEIGHT_ONE
from omniload.mix.possible import require_samples
from omniload.mix.schedule import weights_at
from omniload.mix.state import MixState
from omniload.plan.membership import Exhausted, Membership, Starved, membership_of
from omniload.plan.place_tree import ClientPlaceTree

__all__ = ["Planner", "Waits"]

_STEPS_READ_AHEAD = 4
"""Steps' worth of samples known ahead of the next plan, for each source by its share; half as many let every
plan wait for a read."""


_SMALL_READ = 1024
"""Records that are read at once, however few there are: each epoch costs a read of its own, each request more."""


_NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """What holds up the next plan: ranks that are behind, or sources of which too little is known."""

    text: str
    """As words that follow the planner's name."""
    ranks: tuple[str, ...] = ()
    """Names of the ranks."""
    sources: tuple[int, ...] = ()
    """Sources that were asked for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Demand:
    """Tokens of each source that must be known before a step can be planned, and below which more are asked for."""

    step: int
    """The step."""
    needs_S: list[int]
    """What the step is likely to draw; at least 1 where it draws any."""
    targets_S: list[int]
    """What the coming steps are likely to draw."""
    short: set[int]
    """Sources of which less than the need is known."""


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
    num_steps: int | None = None
    """First step that is not planned; ``None`` for no end but the mix's own."""
    skipped_S: list[int] = field(init=False)
    """Records skipped by policy so far, by source, in this life of the planner."""
    overlong_S: list[int] = field(init=False)
    """Tokens cut off or dropped with overlong documents so far, by source, in this life."""
    _queues: list[SampleQueue] = field(init=False)
    _states: dict[int, MixState] = field(init=False)
    _wanted: dict[tuple[int, int], int] = field(init=False)
    """Next step of every rank, by its place along dp and cp."""
    _reach_S: list[int] = field(init=False)
    """End of the positions that carried pieces lie in: after a resume they are read again, drawn from or not."""
    _resumed: MixState = field(init=False)
    """The state that this life began with."""
    _checked_to_S: list[int] = field(init=False)
    """Last position that ``_resumed`` says anything of."""
    _demand: _Demand | None = field(default=None, init=False)
    _starved: int | None = field(default=None, init=False)
    """Source that the last draw ran out of: a need is a guess, most of all with weights by samples."""
    _ended: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        num_sources = len(self.mix.names)
        self.skipped_S, self.overlong_S = [0] * num_sources, [0] * num_sources
        self._queues = [SampleQueue.at(self.state.floor_of(s)) for s in range(num_sources)]
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
        self._states = {self.state.step: self.state}
        ranks = product(range(self.tree.size_of("dp")), range(self.tree.size_of("cp")))
        self._wanted = dict.fromkeys(ranks, self.state.step)

    def handle(self, event: PlannerEvent) -> tuple[PlannerCommand, ...]:
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
                self.skipped_S[source] += skipped
                return tuple(self._advance((source,)))
            case StepTaken(step=step, dp_rank=dp_rank, cp_rank=cp_rank):
                before, rank = self.slowest_step, (dp_rank, cp_rank)
                self._wanted[rank] = max(self._wanted[rank], step + 1)
                if self.slowest_step == before:
                    return ()
                return (*self._release(), *self._advance(()))
            case _:
                assert_never(event)

    @property
    def slowest_step(self) -> int:
        """The step that the slowest rank wants next."""
        return min(self._wanted.values())

    def waits(self) -> Waits:
        """Say what holds up the next plan."""
        step = self.state.step
        if self._ended:
            return Waits(text=f"has planned every step before {step}, where the data ends")
        slowest = self.slowest_step
        if step < slowest + self.mix.runtime.prefetch_steps:
            short = tuple(s for s in self._lacking() if self._is_asked(s))
            names = ", ".join(self.mix.names[s] for s in short[:_NAMES_SHOWN])
            return Waits(text=f"waits for samples of {len(short)} sources ({names})", sources=short)
        late = [rank for rank, wanted in self._wanted.items() if wanted == slowest]
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
        while (
            not self._ended
            and self.state.step < self.slowest_step + self.mix.runtime.prefetch_steps
        ):
            if self.num_steps is not None and self.state.step >= self.num_steps:
                self._ended = True
                commands.append(EndOfData(step=self.state.step))
                break
            demand = self._demanded()
            if demand.short:
                break
            tables = [queue.table for queue in self._queues]
            membership = membership_of(self.mix, self.state, tables, self.positions_per_epoch_S)
            if isinstance(membership, Starved):
                source = membership.source
                self._starved = source
                commands += self._read(source, self._queues[source].tokens + demand.needs_S[source])
                break
            if isinstance(membership, Exhausted):
                self._ended = True
                commands.append(EndOfData(step=self.state.step))
                break
            self._starved = None
            commands += self._publish(membership)
            changed = range(len(self._queues))
        if not self._ended:
            commands += self._top_up(changed)
        return commands

    def _demanded(self) -> _Demand:
        """Return what the next step demands; found once a step, for there may be a report of every source in it."""
        if self._demand is None or self._demand.step != self.state.step:
            needs = self._needs()
            ahead = self.state.step + _STEPS_READ_AHEAD
            soon = weights_at(self.mix.mix.stages, self.mix.names, ahead)
            self._demand = _Demand(
                step=self.state.step,
                needs_S=needs,
                targets_S=[
                    max(need, int(weight * self.mix.batch.tokens)) * _STEPS_READ_AHEAD
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

    def _needs(self) -> list[int]:
        """Return the tokens of each source that the next step is likely to draw; at least 1 where it draws any."""
        weights = weights_at(self.mix.mix.stages, self.mix.names, self.state.step)
        if self.mix.mix.level == "sample" or self.mix.pack.method == "none":
            return [1 if weight > 0 else 0 for weight in weights]
        budget = (self.mix.rows_per_step + self.mix.pack.rows_ahead) * self.mix.pack.length
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

    def _publish(self, membership: Membership) -> list[PlannerCommand]:
        plan = place(self.mix, self.tree, self.state, membership)
        for s, count in enumerate(membership.finished_S.tolist()):
            self._queues[s].draw(count)
            self.overlong_S[s] += int(membership.lost_S[s])
        before, self.state = self.state, membership.after
        self._states[self.state.step] = self.state
        journaled = AppendJournal(before=before, plan=plan, after=self.state, names=self.mix.names)
        return [journaled, PublishPlan(plan=plan)]

    def _release(self) -> list[PlannerCommand]:
        """Let go of what no rank can ask for again."""
        step = self.slowest_step
        for old in [s for s in self._states if s < step]:
            del self._states[old]
        state = self._states[step]
        return [
            ReleaseSteps(step=step),
            ReleaseSamples(floors={s: state.floor_of(s) for s in range(len(self.mix.names))}),
        ]
