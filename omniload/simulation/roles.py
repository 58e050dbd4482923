"""Planner and constructors under a virtual clock: shells that carry events and commands, and count their cost.

Each does what the shell of the same role does in a run (``omniload.actors``): which thread handles what, which role is
asked for what, and in how many messages.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from omniload.machine.data_constructor import DataConstructor
from omniload.machine.messages import (
    EndOfData,
    PlannerEvent,
    PublishPlans,
    ReadAhead,
    ReleaseSamples,
    ReleaseSteps,
    SamplesReported,
    SliceRequest,
    Started,
    StepsTaken,
    StepTaken,
)
from omniload.machine.planner import Planner
from omniload.machine.plans.building import BuildSteps, FetchSlices, SlicesFetched
from omniload.machine.scaling.leads import ReadPace
from omniload.mix.columns import ColumnRanges, SampleColumns
from omniload.plan.records import StepPlan
from omniload.simulation.clock import Lane, Process, Then
from omniload.simulation.hollow import size_of_batch
from omniload.simulation.loaders import SimulatedLoader, size_of_request, size_of_table
from omniload.simulation.profile import BuildCosts, PlannerCosts
from omniload.simulation.wire import Wire

__all__ = ["SimulatedConstructor", "SimulatedPlanner"]

_PIECE_BYTES, _ROW_BYTES = 28, 16  # columns of a PieceTable; offset, rank and microbatch
_TOLD_TOGETHER_S = 0.1
"""As in a constructor's shell: reports of ranks wait this long for each other."""


class _HearTold(Protocol):
    """Receives the reports of ranks."""

    def __call__(self, number: int, told: StepsTaken) -> None:
        """Receive the reports, and their total number so far."""
        ...


class _Waiting(Protocol):
    """A rank that may wait for a batch."""

    def look(self) -> None:
        """Check whether the batch is built."""
        ...


def _size_of_plan(plan: StepPlan) -> int:
    """Return the bytes of a plan, or of a part of a plan."""
    return _PIECE_BYTES * len(plan.pieces) + _ROW_BYTES * plan.num_rows


@dataclass(slots=True)
class SimulatedConstructor:
    """A data constructor: asks loaders for the samples of plans, builds, and answers its ranks."""

    process: Process
    wire: Wire
    machine: DataConstructor
    builds: BuildCosts
    calls: Lane
    """Threads that take windows of plans."""
    builder: Lane
    """Lays out the rows of one window after another."""
    loader_of: Mapping[int, SimulatedLoader]
    """Loader of each source."""
    in_one_process: bool
    """Whether the loader is in the same process, where nothing is copied and the building thread fetches."""
    ranks: Sequence[_Waiting] = ()
    """Ranks that may wait for what it builds."""
    held_bytes: int = field(default=0, init=False)
    """Bytes of built batches."""
    _sizes: dict[tuple[int, int], int] = field(default_factory=dict, init=False)
    _asked: "tuple[int, _HearTold] | None" = field(default=None, init=False)
    """Number of reports that the planner had heard when it asked for more, and the receiver of the answer."""

    def build(self, plans: Sequence[StepPlan]) -> None:
        """Build the steps of a window."""
        self.calls.call(lambda: self._begin_build(plans))

    def _begin_build(self, plans: Sequence[StepPlan]) -> tuple[float, Then]:
        seconds = self.wire.end_s(self.process, sum(map(_size_of_plan, plans)))
        # Decided when a thread begins with it, not at its arrival, because windows may have been built meanwhile.
        commands = self.machine.handle(BuildSteps(plans=plans))
        fetches = [command for command in commands if isinstance(command, FetchSlices)]
        if not fetches:
            return seconds, lambda: None  # no step of the window was new
        (fetch,) = fetches
        if self.in_one_process:
            # In one process, a single loader has all sources.
            loader = self.loader_of[fetch.requests[0].source]
            found = loader.columns(fetch.requests)
            seconds += loader.slices_s(fetch.requests, found)
            seconds += self._rows_s(found)
            return seconds, lambda: self._fetched(fetch, dict(enumerate(found)))
        of = self._by_loader(fetch)
        seconds += sum(self.wire.end_s(self.process) for _ in of)
        return seconds, lambda: self._ask(fetch, of)

    def _by_loader(self, fetch: FetchSlices) -> dict[int, list[int]]:
        """Return the places of the requests of each loader, by its ``id``."""
        of: dict[int, list[int]] = {}
        for place, request in enumerate(fetch.requests):
            of.setdefault(id(self.loader_of[request.source]), []).append(place)
        return of

    def _ask(self, fetch: FetchSlices, of: Mapping[int, list[int]]) -> None:
        """Ask each loader for its part; once all have answered, the window is built."""
        found: dict[int, SampleColumns] = {}
        missing = set(of)
        received_s = [0.0]

        def answered(loader: int, columns: list[SampleColumns], size_bytes: int) -> None:
            found.update(zip(of[loader], columns, strict=True))
            missing.remove(loader)
            # Answers are received one by one as they arrive; only the last answer starts the layout of the window.
            received_s[0] += self.wire.end_s(self.process, size_bytes)
            if not missing:
                self.process.work(received_s[0], lay_out)

        def lay_out() -> None:
            seconds = self._rows_s(found.values())
            self.builder.call(lambda: (seconds, lambda: self._fetched(fetch, found)))

        for number, places in of.items():
            requests = [fetch.requests[place] for place in places]
            loader = self.loader_of[requests[0].source]
            ask = partial(self._ask_one, loader, requests, partial(answered, number))
            size_bytes = sum(map(size_of_request, requests))
            self.wire.carry(self.process, loader.process, ask, size_bytes)

    def _ask_one(
        self,
        loader: SimulatedLoader,
        requests: Sequence[SliceRequest],
        answered: Callable[[list[SampleColumns], int], None],
    ) -> None:
        def answer(columns: list[SampleColumns], size_bytes: int) -> None:
            then = partial(answered, columns, size_bytes)
            self.wire.carry(loader.process, self.process, then, size_bytes)

        loader.slices(requests, answer)

    def _rows_s(self, found: Iterable[SampleColumns]) -> float:
        tokens = sum(int(each.tokens.offsets[-1]) for each in found)
        return self.builds.rows_s + tokens * self.builds.rows_token_s

    def _fetched(self, fetch: FetchSlices, found: Mapping[int, SampleColumns]) -> None:
        slices = ColumnRanges.of([found[place] for place in range(len(fetch.requests))])
        self.machine.handle(
            SlicesFetched(steps=fetch.steps, slices=slices, generation=fetch.generation)
        )
        for step in fetch.steps:
            for rank in self.machine.dp_ranks:
                size = size_of_batch(self.machine.batch_of(step, rank))
                self._sizes[step, rank] = size
                self.held_bytes += size
        # Ranks are woken, not answered, because they know which of them waits, and for which step.
        for waiting in self.ranks:
            waiting.look()

    def hear(self, taken: StepTaken) -> None:
        """Receive a rank's report that it has a step."""
        self.process.work(self.wire.end_s(self.process), partial(self._note, taken))

    def _note(self, taken: StepTaken) -> None:
        self.machine.told.hear(taken)
        self._answer()
        answer_all = partial(self._answer, self.machine.told.number)
        self.process.host.clock.after(_TOLD_TOGETHER_S, answer_all)

    def ask_told(self, heard: int, hear: _HearTold) -> None:
        """Receive the planner's question for reports beyond those it has heard."""
        self._asked = heard, hear
        self._answer()

    def _answer(self, at_once: int = 0) -> None:
        """Answer the planner if an answer is due, or if it has not heard ``at_once`` reports."""
        if self._asked is None:
            return
        (heard, hear), told = self._asked, self.machine.told
        if not told.is_due(heard) and at_once <= heard:
            return
        self._asked = None
        # Both ends on this side: the question was received while there was no report, and is counted here.
        seconds = self.wire.end_s(self.process) + self.wire.end_s(self.process)
        answer = partial(hear, told.number, told.taken())
        self.process.work(seconds, answer)

    def sizes_from(self, step: int, most: int, rank: int) -> list[int]:
        """Return the bytes of a rank's batches of a built step, and of the built steps after it."""
        steps = [step]
        while len(steps) < most and self.machine.has(steps[-1] + 1):
            steps.append(steps[-1] + 1)
        return [self._sizes[each, rank] for each in steps]

    def release(self, command: ReleaseSteps) -> None:
        """Release the batches that every rank has."""
        self.machine.handle(command)
        for key in [key for key in self._sizes if key[0] < command.step]:
            self.held_bytes -= self._sizes.pop(key)


def _each(calls: Sequence[Then]) -> None:
    for call in calls:
        call()


@dataclass(slots=True)
class SimulatedPlanner:
    """The planner: one thread takes events, and carries out an event's commands before the next event."""

    process: Process
    wire: Wire
    machine: Planner
    costs: PlannerCosts
    thread: Lane
    loader_of: Mapping[int, SimulatedLoader]
    constructors: Sequence[SimulatedConstructor]
    tokens: dict[int, int] = field(default_factory=dict, init=False)
    """Tokens of each planned step, without padding."""
    spent_s: float = field(default=0.0, init=False)
    """Processor seconds of the thread."""
    ends_at: int | None = field(default=None, init=False)
    """Step before which the data ends, once that is known."""
    _plans: dict[int, int] = field(default_factory=dict, init=False)
    """Bytes of the plans that some rank may need."""
    _tables: dict[int, deque[tuple[int, int]]] = field(default_factory=dict, init=False)
    """End and bytes of each source's reports that may still be needed."""
    _unasked: dict[int, int] = field(default_factory=dict, init=False)
    """Number of reports heard from the ranks of each constructor, by its place, while it is not asked for more."""
    _times: ReadPace = field(default_factory=ReadPace, init=False)
    """Durations of reads, measured as in a run."""

    @property
    def steps(self) -> int:
        """Number of steps planned so far."""
        return len(self.tokens)

    @property
    def held_bytes(self) -> int:
        """Bytes of its knowledge of samples, and of its plans."""
        tables = sum(size for queue in self._tables.values() for _, size in queue)
        return tables + sum(self._plans.values())

    def hear(self, event: PlannerEvent) -> None:
        """Handle an event after the earlier ones."""
        self.thread.call(lambda: self._begin(event))

    def _listen(self, sends: list[Then]) -> float:
        """Ask each constructor without an open question for its ranks' reports; return the time that takes."""
        return sum(
            self._send(sends, self.constructors[place].process, self._question(place))
            for place in list(self._unasked)
        )

    def _listen_again(self, event: PlannerEvent, slowest: int, sends: list[Then]) -> float:
        """Ask again after an event if a plan waits for the answers; return the time that takes."""
        ranks = self.machine.ranks
        is_behind = isinstance(event, StepsTaken) and not ranks.are_ahead(event)
        return self._listen(sends) if is_behind or ranks.slowest != slowest else 0.0

    def _question(self, place: int) -> Then:
        """Return the question to a constructor, which is open from now on."""
        constructor, heard = self.constructors[place], self._unasked.pop(place)

        def hear(number: int, told: StepsTaken) -> None:
            # It passes through the constructor's thread, which answers.
            then = partial(self._hear_told, place, number, told)
            self.wire.carry(constructor.process, self.process, then)

        return partial(constructor.ask_told, heard, hear)

    def _hear_told(self, place: int, number: int, told: StepsTaken) -> None:
        self.thread.call(lambda: self._begin(told, (place, number)))

    def _taking_s(self, event: PlannerEvent, sends: list[Then]) -> float:
        """Return the time it takes to receive an event."""
        match event:
            case Started():
                # Ranks of the same process report to the planner directly.
                self._unasked = {
                    place: 0
                    for place, each in enumerate(self.constructors)
                    if not each.in_one_process
                }
                return self._listen(sends) + self.costs.report_s
            case StepTaken():
                return self.wire.end_s(self.process) + self.costs.taken_s
            case StepsTaken(steps=steps):
                return self.wire.end_s(self.process) + len(steps) * self.costs.taken_s
            case SamplesReported(source=source, table=table):
                size_bytes = size_of_table(table)
                self._tables.setdefault(source, deque()).append((table.stop, size_bytes))
                return self.wire.end_s(self.process, size_bytes) + self.costs.report_s
            case _:
                return self.wire.end_s(self.process) + self.costs.report_s

    def _begin(self, event: PlannerEvent, of: tuple[int, int] | None = None) -> tuple[float, Then]:
        """Begin an event, or the answer ``of`` a constructor with the number of its reports heard so far."""
        # Sent when the time of the whole event has passed, because the planner's one thread carries commands out first.
        sends, slowest = list[Then](), self.machine.ranks.slowest
        self._unasked |= {} if of is None else dict([of])
        seconds = self._taking_s(event, sends)
        for command in self.machine.handle(event):
            match command:
                case PublishPlans(plans=plans, released_to=step):
                    self._release(step)
                    seconds += len(plans) * self.costs.step_s
                    seconds += self._publish(plans, step, sends)
                case ReadAhead(source=source):
                    loader = self.loader_of[source]
                    report = partial(self._report, loader, self._now_s)
                    read = partial(loader.read, command, report)
                    seconds += self._send(sends, loader.process, read)
                case ReleaseSamples(floors=floors, ahead=ahead):
                    self._forget(floors)
                    if ahead is not None:
                        self._times.reach(ahead.step, self._now_s)
                    # Once per loader, however many sources it has, because the message names them all.
                    for loader in {id(each): each for each in self.loader_of.values()}.values():
                        forget: Callable[[], object] = partial(loader.release, command)
                        seconds += self._send(sends, loader.process, forget)
                case ReleaseSteps(step=step):
                    self._release(step)
                    for constructor in self.constructors:
                        let_go = partial(constructor.release, command)
                        seconds += self._send(sends, constructor.process, let_go)
                case EndOfData(step=step):
                    self.ends_at = step
                case _:
                    pass  # the journal is part of the cost of a step
        seconds += self._listen_again(event, slowest, sends)
        self.spent_s += seconds
        return seconds, partial(_each, sends)

    def _publish(self, plans: Sequence[StepPlan], released_to: int, sends: list[Then]) -> float:
        """Send every constructor its part and its released steps, and ask for its ranks' reports; return the time."""
        self.tokens |= {plan.step: sum(plan.tokens_S) for plan in plans}
        self._plans |= {plan.step: _size_of_plan(plan) for plan in plans}
        seconds = 0.0
        ranks_of = [constructor.machine.dp_ranks for constructor in self.constructors]
        parts_of = zip(*(plan.parts_of(ranks_of) for plan in plans), strict=True)
        release = ReleaseSteps(step=released_to)
        for place, parts in enumerate(parts_of):
            constructor = self.constructors[place]
            seconds += len(parts) * self.costs.part_s
            size_bytes = sum(map(_size_of_plan, parts))
            let_go, build = partial(constructor.release, release), partial(constructor.build, parts)
            calls: list[Then] = [let_go, build]
            if place in self._unasked:
                calls.append(self._question(place))
            seconds += self._send(sends, constructor.process, partial(_each, calls), size_bytes)
        return seconds

    def _send(
        self, sends: list[Then], to: Process, then: Callable[[], object], size_bytes: int = 0
    ) -> float:
        sends.append(partial(self.wire.carry, self.process, to, then, size_bytes))  # type: ignore[arg-type]
        return self.wire.end_s(self.process, size_bytes)

    def _report(self, loader: SimulatedLoader, asked_s: float, report: SamplesReported) -> None:
        hear, size_bytes = partial(self._hear_report, asked_s, report), size_of_table(report.table)
        self.wire.carry(loader.process, self.process, hear, size_bytes)

    def _hear_report(self, asked_s: float, report: SamplesReported) -> None:
        took_steps = self._times.steps_of(report.source, asked_s, self._now_s)
        self.hear(replace(report, took_steps=took_steps))

    @property
    def _now_s(self) -> float:
        return self.process.host.clock.now_s

    def _release(self, step: int) -> None:
        for each in [each for each in self._plans if each < step]:
            del self._plans[each]

    def _forget(self, floors: Mapping[int, int]) -> None:
        for source, floor in floors.items():
            queue = self._tables.get(source)
            while queue and queue[0][0] <= floor:
                queue.popleft()
