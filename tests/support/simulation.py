"""The machines without threads: messages wait in a bag, and a seed decides which is delivered next.

What real runs do to messages happens here more often: late, out of order, several times.
The only order that is kept is the one that every runtime keeps: the planner's journal
record comes before the plan it belongs to, and a rank takes its steps in order.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from omniload.base.errors import StateError
from omniload.base.ragged import Ragged, Ranges
from omniload.base.state import JsonObject
from omniload.batch.digest import batch_digest, combined
from omniload.batch.microbatch import Batch
from omniload.batch.rows import build_rows, stops_with_next
from omniload.machine.data_constructor import (
    BuildSteps,
    DataConstructor,
    FetchSlices,
    SlicesFetched,
)
from omniload.machine.messages import (
    AppendJournal,
    EndOfData,
    PlannerCommand,
    PublishPlans,
    ReadAhead,
    ReleaseSamples,
    ReleaseSteps,
    SamplesReported,
    Started,
    StepTaken,
)
from omniload.machine.planner import Planner
from omniload.machine.source_loader import SamplesRead, SourceLoader
from omniload.mix.config import MixConfig
from omniload.mix.samples import SampleTable
from omniload.mix.state import MixState
from omniload.plan.membership import Starved, membership_of
from omniload.plan.records import StepPlan
from tests.support.builders import a_planner, tokens_of

__all__ = ["Simulation", "known_ahead", "read_range", "reference_digests"]


def read_range(
    source: int, epoch: Sequence[Sequence[int]], start: int, stop: int
) -> tuple[SampleTable, Ragged]:
    """Read raw positions of a source in memory: ``epoch[i]`` are the sample lengths of record ``i``."""
    keys = [
        (position, sub, length)
        for position in range(start, stop)
        for sub, length in enumerate(epoch[position % len(epoch)])
    ]
    columns = np.asarray(keys, np.int64).reshape(-1, 3)
    table = SampleTable(
        start=start,
        stop=stop,
        positions_N=columns[:, 0].copy(),
        subs_N=columns[:, 1].astype(np.int32),
        lengths_N=columns[:, 2].astype(np.int32),
    )
    return table, Ragged.of([tokens_of(source, *key) for key in keys])


def known_ahead(
    state: MixState, epochs: Sequence[Sequence[Sequence[int]]], count: int
) -> list[SampleTable]:
    """Return ``count`` raw positions of metadata of every source, from its cursor on."""
    tables = []
    for source, (epoch, (position, sub, _)) in enumerate(zip(epochs, state.cursors_S, strict=True)):
        table, _ = read_range(source, epoch, position, position + count)
        fresh = (table.positions_N > position) | (table.subs_N >= sub)
        tables.append(
            SampleTable(
                start=table.start,
                stop=table.stop,
                positions_N=table.positions_N[fresh],
                subs_N=table.subs_N[fresh],
                lengths_N=table.lengths_N[fresh],
            )
        )
    return tables


def reference_digests(
    mix: MixConfig, epochs: Sequence[Sequence[Sequence[int]]], *, num_steps: int
) -> list[int]:
    """Return the digest of every step without any machine: everything is known, nothing is moved."""
    state, digests = MixState.start(len(mix.names)), []
    for _ in range(num_steps):
        count = 64
        while isinstance(
            membership := membership_of(mix, state, known_ahead(state, epochs, count)), Starved
        ):
            count *= 2
        pieces = membership.pieces
        rows = [
            tokens_of(source, position, sub, size)[start:stop]
            for (source, position, sub, start, _, size), stop in zip(
                pieces.rows(), stops_with_next(pieces).tolist(), strict=True
            )
        ]
        fetched = Ranges.of([Ragged.of(rows)])
        microbatch = build_rows(pieces, membership.row_offsets, fetched, length=mix.pack.length)
        digests.append(batch_digest(_whole(state.step, microbatch)))
        state = membership.after
    return digests


def _whole(step: int, microbatch: object) -> Batch:
    return Batch(
        step=step,
        microbatches=(microbatch,),  # type: ignore[arg-type]
        loss_tokens=0,
        imbalance=1.0,
        bound=1.0,
    )


@dataclass(slots=True, kw_only=True)
class Simulation:
    """A planner, its loaders, constructors and ranks, over sources in memory."""

    mix: MixConfig
    epochs: Sequence[Sequence[Sequence[int]]]
    """Sample lengths of every record of every source."""
    num_steps: int
    dp: int = 1
    num_loaders: int = 1
    num_constructors: int = 1
    seed: int = 0
    repeat_share: float = 0.0
    """Share of messages that come once more, later."""
    state: MixState | None = None
    batches: dict[tuple[int, int], Batch] = field(default_factory=dict, init=False)
    """What every rank took, by step and rank."""
    states: dict[int, JsonObject] = field(default_factory=dict, init=False)
    """State before each step, as rank 0 would have saved it."""
    journal: list[JsonObject] = field(default_factory=list, init=False)
    published: list[int] = field(default_factory=list, init=False)
    most_held: int = field(default=0, init=False)
    """Most tokens that the loaders held at once."""
    planner: Planner = field(init=False)
    _bag: list[Callable[[], None]] = field(default_factory=list, init=False)
    _random: random.Random = field(init=False)
    _loaders: list[SourceLoader] = field(init=False)
    _constructors: list[DataConstructor] = field(init=False)
    _next: dict[int, int] = field(init=False)
    _end: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.planner = a_planner(
            self.mix,
            dp=self.dp,
            epoch=[len(epoch) for epoch in self.epochs],
            state=self.state,
            num_steps=self.num_steps,
        )
        names = dict(enumerate(self.mix.names))
        self._loaders = [SourceLoader(names=names) for _ in range(self.num_loaders)]
        of = self.planner.tree.constructor_of
        count = min(self.num_constructors, self.dp)
        self._constructors = [
            DataConstructor(
                dp_ranks=[r for r in range(self.dp) if of(r, count) == i],
                names=self.mix.names,
                row_length=self.mix.pack.length,
            )
            for i in range(count)
        ]
        self._next = dict.fromkeys(range(self.dp), self.planner.state.step)

    def run(self) -> list[int]:
        """Deliver messages until all ranks have every step; return the digest of each step."""
        first = self.planner.state.step
        self._carry(self.planner.handle(Started()))
        while self._bag or self._ready():
            ready = self._ready()
            at = self._random.randrange(len(self._bag) + len(ready))
            if at < len(self._bag):
                self._deliver(at)
            else:
                self._take(ready[at - len(self._bag)])
            self.most_held = max(self.most_held, sum(x.held_tokens() for x in self._loaders))
        assert self._end is not None, "nothing is under way and the data has not ended: a deadlock"
        assert set(self._next.values()) == {self._end}, f"ranks stand at {self._next}"
        return [
            combined(batch_digest(self.batches[step, rank]) for rank in range(self.dp))
            for step in range(first, self._end)
        ]

    def _deliver(self, at: int) -> None:
        message = self._bag[at]
        self._bag[at] = self._bag[-1]
        self._bag.pop()
        if self._random.random() < self.repeat_share:
            self._bag.append(message)
        message()

    def _carry(self, commands: Sequence[PlannerCommand]) -> None:
        for command in commands:
            match command:
                case AppendJournal(record=record):
                    self.journal.append(record)
                case PublishPlans(plans=plans):
                    self._publish(plans)
                case ReadAhead():
                    self._send(self._read, command)
                case ReleaseSamples() | ReleaseSteps():
                    released = isinstance(command, ReleaseSamples)
                    for machine in self._loaders if released else self._constructors:
                        self._send(machine.handle, command)
                case EndOfData(step=step):
                    self._end = step

    def _publish(self, plans: Sequence[StepPlan]) -> None:
        journaled = [record["step"] for record in self.journal]
        for plan in plans:
            assert plan.step in journaled, "published before it was journaled"
            self.published.append(plan.step)
        for constructor in self._constructors:
            parts = [plan.part_of(constructor.dp_ranks) for plan in plans]
            self._send(self._build, constructor, parts)

    def _send(self, receiver: Callable[..., object], *message: object) -> None:
        self._bag.append(lambda: receiver(*message))

    def _loader_of(self, source: int) -> SourceLoader:
        return self._loaders[source % self.num_loaders]

    def _read(self, command: ReadAhead) -> None:
        (answer,) = self._loader_of(command.source).handle(command)
        if isinstance(answer, SamplesReported):
            self._report(answer)
        else:
            self._send(self._finish_read, command)

    def _finish_read(self, command: ReadAhead) -> None:
        source = command.source
        table, tokens = read_range(source, self.epochs[source], command.start, command.stop)
        read = SamplesRead(source=source, table=table, tokens=tokens, skipped=0)
        (report,) = self._loader_of(source).handle(read)
        self._report(report)

    def _report(self, report: SamplesReported) -> None:
        self._send(lambda: self._carry(self.planner.handle(report)))

    def _build(self, constructor: DataConstructor, plans: Sequence[StepPlan]) -> None:
        for command in constructor.handle(BuildSteps(plans=plans)):
            if isinstance(command, FetchSlices):
                self._send(self._fetch, constructor, command)

    def _fetch(self, constructor: DataConstructor, fetch: FetchSlices) -> None:
        try:
            slices = Ranges.of([self._loader_of(r.source).slices(r) for r in fetch.requests])
        except StateError:
            # Right for a repetition that comes when the step was served; else the test fails.
            assert all(constructor.has(s) or constructor.is_released(s) for s in fetch.steps)
            return
        self._send(constructor.handle, SlicesFetched(steps=fetch.steps, slices=slices))

    def _ready(self) -> list[int]:
        """Return the ranks whose next step is built."""
        return [
            rank
            for constructor in self._constructors
            for rank in constructor.dp_ranks
            if constructor.has(self._next[rank])
        ]

    def _take(self, rank: int) -> None:
        step = self._next[rank]
        constructor = next(c for c in self._constructors if rank in c.dp_ranks)
        if rank == 0:
            self.states[step] = self.planner.state_at(step)
        self.batches[step, rank] = constructor.batch_of(step, rank)
        self._next[rank] = step + 1
        taken = StepTaken(step=step, dp_rank=rank)
        self._send(lambda: self._carry(self.planner.handle(taken)))
