"""The machines without threads: messages wait in a bag, and a seed decides which is delivered next.

Faults of messages happen here more often than in real runs: messages are late, out of order, or repeated. If the
ranks change, they train in step: no rank receives a step before all have the previous one. Only the order that every
runtime keeps is kept here. The planner's journal record comes before the plan it belongs to, and a rank takes its
steps in order.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from omniload.base.errors import ConfigError, StateError
from omniload.base.state import JsonObject
from omniload.batch.digest import batch_digest, combined
from omniload.batch.microbatch import Batch
from omniload.batch.rows import RowBuilder, build_rows
from omniload.machine.data_constructor import DataConstructor
from omniload.machine.held.blocks import SampleRange
from omniload.machine.messages import (
    AppendJournal,
    AppendWorld,
    ChangeAsked,
    ConstructorReplaced,
    EndOfData,
    HandedOver,
    KeepEdits,
    LoaderReplaced,
    PlannerCommand,
    PlannerEvent,
    PublishPlans,
    ReadAhead,
    ReadTimes,
    ReleaseSamples,
    ReleaseSteps,
    Republish,
    ResizeAsked,
    SamplesReported,
    ServeWorld,
    SliceRequest,
    Started,
    StepsTaken,
    StepTaken,
    TakeOver,
    TimesRead,
)
from omniload.machine.planner import Planner
from omniload.machine.plans.building import BuildSteps, FetchSlices, SlicesFetched, SlicesMissing
from omniload.machine.plans.fences import (
    AskFences,
    CutJournal,
    FencesLate,
    FenceTold,
    NewEdition,
    WithdrawalAsked,
    WithdrawalEnded,
)
from omniload.machine.roster.members import (
    EndMember,
    EndPlane,
    HandOver,
    Member,
    MemberEnded,
    MemberReady,
    MembersSeen,
    PlaceFound,
    RosterCommand,
    StartMember,
)
from omniload.machine.roster.roster import Roster
from omniload.machine.source_loader import Read, SamplesRead, SourceLoader
from omniload.mix.columns import ColumnRanges, SampleColumns
from omniload.mix.config import MixConfig
from omniload.mix.edits.edit import AddSource, Change, Edit
from omniload.mix.edits.history import History
from omniload.mix.journal.times import MeasuredTimes
from omniload.mix.state import MixState
from omniload.plan.records import StepPlan
from omniload.plan.world import RanksServed, World
from tests.support.plane.builders import a_planner, some_facts
from tests.support.plane.messages import Message, MessageBag, Moment, Way, below
from tests.support.plane.reference import read_range

__all__ = ["Simulation"]


_MOST_LOOKS = 400
"""Looks for a source to move in one run; each is one message in the bag."""
_MOST_MESSAGES = 50_000
"""Most messages of one run: a hundred times the count of the longest runs here."""
_MOST_MISSED = 1_000
"""Most times in a run that a loader may lack a requested sample: forty times the most in any of a thousand runs."""
_LOOKS_EVERY = 8
"""Messages between two looks at the loaders' samples."""
_WAITS = 0.8
"""Share of these looks that move no source."""
_GIVEN_UP = 0.3
"""Share of moves that time out before they start, if any do."""
_LONGEST_START = 10
"""Most messages until a member that starts in a better place may stand by."""
_LONGEST_FENCE = 100
"""Most messages for which a planner waits for the fences of constructors."""
_MOST_LENDINGS = 12
"""Times that a rank asks for a step ahead before it waits for it."""
_NO_PLACE = 0.4
"""Share of better places that are not free."""


@dataclass(frozen=True, slots=True, eq=False)
class _Loan:
    """A batch that a rank holds before it comes for its step."""

    step: int
    batch: Batch
    edition: tuple[int, int]
    """Number of the edition of its plans."""
    number: int
    """Number of the constructor that lent it."""
    constructor: DataConstructor


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
    """Share of messages that are delivered once more, later."""
    lost_share: float = 0.0
    """Share of messages that are lost on their way, and sent again."""
    slow_share: float = 0.0
    """Share of messages that many others overtake."""
    short_reads: float = 0.0
    """Share of reads that are answered with their first records."""
    cuts: int = 0
    """Times that a role, or a rank, is cut off for a while."""
    kills: int = 0
    """Source loaders that are killed during the run, in any state; at most five."""
    constructor_kills: int = 0
    """Data constructors that are killed during the run."""
    planner_kills: int = 0
    """Times that the planner is killed during the run; another one starts a while later, from the journal."""
    shadows: int = 0
    """Loaders that stand by for each loader."""
    places: int = 0
    """Times that a better place is found for some member; at most two."""
    constructor_moves: int = 0
    """Times that a better place is found for a data constructor, because its ranks are there."""
    moves: int = 0
    """Times that a source is moved to another loader during the run."""
    impatient: bool = False
    """Whether moves time out.

    Some time out before they start, which changes nothing. Others time out when only some roles have been notified,
    and the source then moves on.
    """
    state: MixState | None = None
    edits: tuple[Edit, ...] = ()
    """Edits of the run so far."""
    changes: Sequence[tuple[Change, int | None]] = ()
    """Changes that are requested during the run, one after another, each at some moment.

    Sources that they add come last in ``epochs``, in the order of these changes.
    """
    resizes: Sequence[tuple[int, bool]] = ()
    """Changes of the ranks, one after another, each at some moment: their number, and whether old ones stop at once.

    If they do, a step that only some of them have is taken again. Otherwise they first reach a step boundary.
    """
    times: Callable[[int], MeasuredTimes] | None = None
    """The times that ranks report of the steps from one step on; ``None`` if they report nothing."""
    rows: RowBuilder = build_rows
    """The function that lays out rows."""
    lends: bool = False
    """Whether ranks are lent the step after their present one, as ranks through Ray are when their steps are long."""
    redone: int = field(default=0, init=False)
    """Steps that some rank had and that are taken again."""
    worlds: list[World] = field(default_factory=list, init=False)
    """Ranks recorded in the journal, in order."""
    history: History = field(init=False)
    """The history that was kept last."""
    refused: int = field(default=0, init=False)
    """Changes that were refused."""
    batches: dict[tuple[int, int], Batch] = field(default_factory=dict, init=False)
    """The batch that every rank took, by step and rank."""
    states: dict[int, JsonObject] = field(default_factory=dict, init=False)
    """State before each step, as rank 0 would have saved it."""
    journal: list[JsonObject] = field(default_factory=list, init=False)
    published: list[int] = field(default_factory=list, init=False)
    most_held: int = field(default=0, init=False)
    """Most bytes of samples that the loaders held at once."""
    planner: Planner = field(init=False)
    seen: Counter[str] = field(default_factory=Counter, init=False)
    """Events by number of times. A history without any event proves nothing."""
    longest_wait: int = field(default=0, init=False)
    """Most messages between two batches that ranks took."""
    trace: list[Moment] | None = field(default=None, init=False)
    """All events, in order; ``None`` if no test looks at them."""
    _missed: int = field(default=0, init=False)
    """Times that a loader lacked a requested sample."""
    _took_at: int = field(default=0, init=False)
    _bag: MessageBag = field(init=False)
    _random: random.Random = field(init=False)
    _in_step: bool = field(init=False)
    _names: dict[int, str] = field(init=False)
    _lives: list[list[SourceLoader | None]] = field(init=False)
    """Every life of each loader; ``None`` once it was killed."""
    _role: list[int] = field(init=False)
    """The loader that should serve each source."""
    _linked: list[Way] = field(init=False)
    """The member of each source that the planner uses; messages to it stay addressed to that life."""
    _serving: list[Way] = field(init=False)
    """The member of each source that constructors use; when it ends, its outstanding requests are known."""
    _turn: int = field(default=0, init=False)
    """Number of the last hand-over."""
    _moved_at: list[int] = field(init=False)
    """Number of the first hand-over after the last move of each source."""
    _roster: Roster = field(init=False)
    _looked_s: float = field(default=0.0, init=False)
    """Time of the last look of the roster."""
    _constructors: list[DataConstructor] = field(init=False)
    _told: list[DataConstructor] = field(init=False)
    """The constructors that the planner speaks to."""
    _first_served: list[RanksServed] = field(init=False)
    """The ranks of each when the plane was opened."""
    _served: list[RanksServed] = field(init=False)
    """The ranks of each as the planner's shell knows them."""
    _asks: dict[tuple[int, int], tuple[DataConstructor, Planner, int]] = field(
        default_factory=dict, init=False
    )
    """Open questions to constructors, by number and the planner's life: constructor, planner, and words it heard."""
    _questions: dict[tuple[int, int], DataConstructor] = field(default_factory=dict, init=False)
    """The constructors that a planner has asked and not heard from since, with the same keys."""
    _heard: dict[tuple[int, int], tuple[DataConstructor, int]] = field(
        default_factory=dict, init=False
    )
    """The number of words that a planner has heard, and the constructor that sent them, with the same keys."""
    _last_told: dict[int, tuple[int, int]] = field(default_factory=dict, init=False)
    """The constructor to which each rank reported its last step, and that step."""
    _generation: int = field(default=0, init=False)
    """Generation of the present ranks."""
    _halt: int | None = field(default=None, init=False)
    """Step boundary at which the old ranks stop before a change of the ranks."""
    _dp_at: dict[int, int] = field(default_factory=dict, init=False)
    """The number of ranks that trained on each step."""
    _next: dict[int, int] = field(init=False)
    _loans: dict[int, _Loan] = field(default_factory=dict, init=False)
    """The loans of the next step, by rank."""
    _confirming: set[int] = field(default_factory=set, init=False)
    """Ranks that have asked whether their loan is valid, and have no answer yet."""
    _end: int | None = field(default=None, init=False)
    planners_killed: int = field(default=0, init=False)
    _planner_is_there: bool = field(default=True, init=False)
    _states: list[MixState] = field(init=False)
    """The states that the journal passes through."""
    constructors_killed: int = field(default=0, init=False)
    _absent: set[int] = field(default_factory=set, init=False)
    """Constructors that were lost while one was starting in a better place, until that one is there."""
    _building: set[Member] = field(init=False)
    """Constructors that were started and not ended."""
    killed: int = field(default=0, init=False)
    """Loaders that were killed while they held a role."""
    _tried: set[Member] = field(default_factory=set, init=False)
    """Members that are started in better places."""
    _places: random.Random = field(init=False)
    """Random numbers for better places alone, so that a history without better places stays the same."""
    _lengths: random.Random = field(init=False)
    """Random numbers for short reads alone, for the same reason."""
    moved: int = field(default=0, init=False)
    """Sources that were moved."""
    given_up: int = field(default=0, init=False)
    """Moves that timed out before they were taken up."""
    moved_on: int = field(default=0, init=False)
    """Moves of a source that began before all roles were notified of the previous one."""
    _looks: int = field(default=0, init=False)
    """Times that a source was searched for a move."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._places = random.Random(f"places {self.seed}")
        self._lengths = random.Random(f"lengths {self.seed}")
        self._bag = MessageBag(
            chance=self._random,
            repeat_share=self.repeat_share,
            lost_share=self.lost_share,
            slow_share=self.slow_share,
            cuts=self.cuts,
        )
        self._in_step = bool(self.resizes)
        self.history = History(self.mix, self.edits)
        names = dict(enumerate([*self.history.latest.names, *self._added()]))
        self.planner = a_planner(
            self.mix,
            dp=self.dp,
            epoch=[len(epoch) for epoch in self.epochs[: len(self.history.latest.names)]],
            edits=self.edits,
            state=self.state,
            num_steps=self.num_steps,
        )
        self._names = names
        self._states = [self.planner.state]
        self._lives = [[SourceLoader(names=names)] for _ in range(self.num_loaders)]
        self._role = [source % self.num_loaders for source in range(len(names))]
        self._moved_at = [0] * len(names)
        self._linked = [Way(0, number, 0) for number in self._role]
        self._serving = list(self._linked)
        roles = {f"loader-{i}": self.shadows for i in range(self.num_loaders)}
        builders = [f"constructor-{i}" for i in range(min(self.num_constructors, self.dp))]
        self._roster = Roster(roles=roles | dict.fromkeys(builders, 0))
        self._building = {Member(role) for role in builders}
        self._replace(self._roster.begin())
        self._look()
        assert not self.resizes or self.mix.runtime.elastic
        for deed, times in self._deeds():
            for _ in range(times):
                self._plan_deed(deed)
        count = min(self.num_constructors, self.dp)
        self._first_served = [self.planner.world.served_by(i, count) for i in range(count)]
        self._served = list(self._first_served)
        self._constructors = [
            DataConstructor(
                dp_ranks=served.dp_ranks,
                names=tuple(names.values()),
                row_length=self.mix.pack.length,
                rows=self.rows,
            )
            for served in self._served
        ]
        self._told = list(self._constructors)
        self._listen()
        self._next = dict.fromkeys(range(self.dp), self.planner.state.step)

    def _deeds(self) -> list[tuple[Callable[[], None], int]]:
        """Return the actions on the plane during the run, and how often each happens."""
        return [
            (self._kill, self.kills),
            (self._kill_constructor, self.constructor_kills),
            (self._kill_planner, self.planner_kills),
            (self._cut_off, self.cuts),
            (self._move, int(self.moves > 0)),
            (self._change, int(bool(self.changes))),
            (self._resize, int(bool(self.resizes))),
            (self._find_place, self.places),
            (self._move_constructor, self.constructor_moves),
        ]

    def _plan_deed(self, deed: Callable[[], None]) -> None:
        """Schedule an action at some moment."""
        self._bag.add(Message(deed))

    def _do_what_is_due(self) -> bool:
        """Perform the actions that are due, and return whether there were any; here each action is a message."""
        return False

    def _began(self) -> None:
        """Let the planner start."""
        self._carry(self.planner.handle(Started()))

    def run(self) -> list[int]:
        """Deliver messages until all ranks have every step; return the digest of each step."""
        first = self.planner.state.step
        self._began()
        ready, bag, under_way = self._ready(), self._bag, self._bag.under_way
        while ready or under_way:
            delivered, waiting, has_changed = bag.delivered, len(under_way), True
            assert delivered < _MOST_MESSAGES, f"no end: {waiting} messages are under way"
            at = below(self._random, waiting + len(ready))
            if at < waiting:
                has_changed = self._deliver(at)
            elif bag.is_cut_off(f"rank {(rank := ready[at - waiting])}") or self._computes(rank):
                bag.delivered += 1
                has_changed = False
            else:
                self.longest_wait = max(self.longest_wait, delivered - self._took_at)
                self._took_at = delivered
                self._take(rank)
            if delivered % _LOOKS_EVERY == 0:
                self._look_at_buffers()
            if self._do_what_is_due() or has_changed:
                ready = self._ready()
        assert self._end is not None, "nothing is under way and the data has not ended: a deadlock"
        assert set(self._next.values()) == {self._end}, f"ranks stand at {self._next}"
        return [
            combined(batch_digest(self.batches[step, rank]) for rank in range(self._dp_at[step]))
            for step in range(first, self._end)
        ]

    def _computes(self, rank: int) -> bool:
        """Return whether a rank still computes and has not asked for its next step; here each rank asks at once."""
        del rank
        return False

    def ended_at(self) -> tuple[int, JsonObject]:
        """Return the step before which the data ended, and the state before it."""
        assert self._end is not None, "it has ended"
        return self._end, self._saved_at(self._end)

    def _look_at_buffers(self) -> None:
        alive = [loader for lives in self._lives for loader in lives if loader is not None]
        self.most_held = max(self.most_held, sum(loader.held_bytes for loader in alive))

    def _added(self) -> list[str]:
        changes = [change for change, _ in self.changes]
        return [change.name for change in changes if isinstance(change, AddSource)]

    def _change(self) -> None:
        """Request the next change, now or a few messages later, at random."""
        if not self.changes:
            return  # a repetition
        waits = self._random.random() < 0.7 and (self._bag or self._ready())
        if waits or not self._planner_is_there:
            self._bag.add(Message(self._change))
            return
        change, at = self.changes[0]
        facts = None
        if isinstance(change, AddSource):
            facts = some_facts([len(self.epochs[len(self.planner.names)])])[0]
        asked = ChangeAsked(change=change, at=at, facts=facts)
        planner = self.planner
        self._carry(planner.handle(WithdrawalAsked(at=at, constructors=len(self._told))))
        self._take_up(planner, asked)

    def _take_up(self, planner: Planner, asked: ChangeAsked) -> None:
        """Apply a change once the planner that was asked knows which steps no rank has; its shell waits."""
        if planner is not self.planner or not self._planner_is_there:
            self._saw("a change is lost with its planner and asked for again", "planner")
            self._bag.add(Message(self._change))
            return
        if not planner.is_settled:
            self._send(self._take_up, planner, asked, waits=True)
            return
        before, planned = len(self.history.edits), planner.planned
        first = planner.open_from(asked.at)
        if first < planned:
            self._saw("plans are taken back for a change", "planner")
        is_refused = False
        try:
            self._carry(planner.handle(asked))
        except ConfigError:
            is_refused = True
            self.refused += 1
        if len(self.history.edits) > before or is_refused:
            self.changes = self.changes[1:]
        else:
            self._saw("a change is lost with its planner and asked for again", "planner")
        if planner is self.planner and self._planner_is_there:
            self._carry(planner.handle(WithdrawalEnded()))
        if self.changes:
            self._bag.add(Message(self._change))

    def _ask_fences(self, command: AskFences) -> None:
        """Ask every constructor, and give up on those that have not answered after a while."""
        for number, constructor in enumerate(self._told):
            asked = number, constructor, self.planner, command.edition
            self._send(self._fence, *asked, to=f"constructor-{number}")
        left = self._random.randrange(_LONGEST_FENCE)
        self._send(self._be_late, self.planner, command.edition[1], left, waits=True)

    def _fence(
        self, number: int, constructor: DataConstructor, planner: Planner, edition: tuple[int, int]
    ) -> None:
        if not self._is_there(number, constructor):
            return  # it was killed
        ahead = range(constructor.giving.given_to, constructor.giving.given_to + 64)
        is_built = any(map(constructor.has, ahead))
        step = constructor.giving.fence(edition)
        if is_built and not any(map(constructor.has, ahead)):
            self._saw("a step that is built is withheld", f"constructor-{number}")
        told = FenceTold(number=number, turn=edition[1], step=step)
        self._send(self._hear, planner, told, to="planner")

    def _be_late(self, planner: Planner, turn: int, left: int) -> None:
        if left:
            self._send(self._be_late, planner, turn, left - 1, waits=True)
        else:
            if planner is self.planner and not planner.is_settled:
                self._saw("constructors say too late what they have given", "planner")
            self._hear(planner, FencesLate(turn=turn))

    def _deliver(self, at: int) -> bool:
        """Deliver a message unless it is delayed or lost; return whether a rank may now have another step."""
        if (message := self._bag.take(at)) is None:
            return False
        if self.trace is not None and message.to:
            self._note(message.to, message.name, message.content)
        message.receiver(*message.content)
        # Messages to loaders and the planner reach ranks only through constructors. The keeper may end a constructor.
        return not message.to or message.to.startswith(("constructor", "keeper", "rank"))

    def served_and_kept(self) -> list[int]:
        """Return the steps that a constructor still holds although it was notified that every rank has them."""
        return [
            step
            for constructor in self._constructors
            for step in range(self.num_steps)
            if constructor.has(step) and constructor.is_released(step)
        ]

    @property
    def delivered(self) -> int:
        """Messages that were delivered."""
        return self._bag.delivered

    def _note(self, role: str, what: str, content: Sequence[object] = ()) -> None:
        """Note an event for a test that looks at the trace later."""
        if self.trace is not None:
            self.trace.append(Moment(self._bag.delivered, role, what, tuple(content)))

    def _saw(self, what: str, role: str = "") -> None:
        """Count an event."""
        self.seen[what] += 1
        self._note(role, what)

    def _cut_off(self) -> None:
        """Cut a role or a rank off for a while."""
        roles = [f"loader-{i}" for i in range(self.num_loaders)]
        roles += [f"constructor-{i}" for i in range(len(self._constructors))]
        roles += ["planner", *(f"rank {rank}" for rank in self._next)]
        if (role := self._bag.cut_off(roles)) is not None:
            self._saw("a role is cut off", role)

    def _carry(self, commands: Sequence[PlannerCommand]) -> None:  # noqa: C901, PLR0912 -- one branch for each command
        for command in commands:
            match command:
                case AppendJournal():
                    self._append(command)
                case KeepEdits(history=history):
                    self.history = history
                case CutJournal(step=step):
                    at = step - self._states[0].step
                    del self.journal[at:], self._states[at + 1 :]
                case NewEdition(edition=edition, windows=windows):
                    self._served[:] = [replace(each, edition=edition) for each in self._served]
                    self._tell_constructors(((), *windows))
                case AskFences():
                    self._ask_fences(command)
                case AppendWorld(world=world):
                    self.worlds.append(world)
                case ServeWorld():
                    self._serve(command)
                case PublishPlans():
                    self._publish(command)
                case ReadAhead() | TakeOver() | ReleaseSamples():
                    self._tell_loaders(command)
                case Republish():
                    self._republish(command)
                case ReleaseSteps():
                    for number, machine in enumerate(self._told):
                        self._send(machine.handle, command, to=f"constructor-{number}")
                case ReadTimes(first=first) if self.times is not None:
                    self._tell_planner(TimesRead(times=self.times(first)))
                case EndOfData(step=step):
                    self._end = step

    def _append(self, command: AppendJournal) -> None:
        record, at = command.record, command.plan.step - self._states[0].step
        assert record["revision"] <= len(self.history.edits), "before it was kept"
        if at < len(self.journal):
            assert record == self.journal[at], "a step that is planned again is another one"
        else:
            self.journal.append(record)
            self._states.append(command.after)

    def _tell_loaders(self, command: ReadAhead | TakeOver | ReleaseSamples) -> None:
        """Send to the life that the planner uses now, which may be dead when the message arrives."""
        match command:
            case ReadAhead(source=source):
                way = self._linked[source]
                self._send(self._read, way, command, to=f"loader-{way.number}")
            case TakeOver(ranges=ranges):
                for source in ranges:
                    without = {s: out for s, out in command.without.items() if s == source}
                    part = TakeOver(ranges={source: ranges[source]}, without=without)
                    way = self._linked[source]
                    self._send(self._take_over, way, part, to=f"loader-{way.number}")
            case ReleaseSamples():
                for way in set(self._linked):
                    self._send(self._release_samples, way, command, to=f"loader-{way.number}")

    def _publish(self, command: PublishPlans) -> None:
        plans = command.plans
        journaled = [record["step"] for record in self.journal]
        for plan in plans:
            assert plan.step in journaled, "published before it was journaled"
            if plan.step not in self.published:
                self.published.append(plan.step)
        self._tell_constructors((plans,), command.released_to)

    def _tell_constructors(
        self, windows: Sequence[Sequence[StepPlan]], released_to: int = 0
    ) -> None:
        ranks_of = [served.dp_ranks for served in self._served]
        parts = [[plan.parts_of(ranks_of) for plan in plans] for plans in windows]
        for number in range(len(self._told)):
            for window in parts:
                self._tell_constructor(number, [of_plan[number] for of_plan in window], released_to)

    def _tell_constructor(self, number: int, parts: Sequence[StepPlan], released_to: int) -> None:
        order = BuildSteps(plans=parts, served=self._served[number], released_to=released_to)
        to = f"constructor-{number}"
        # A constructor without an open question gets its question together with its build order.
        asks = self._question(number)
        self._send(self._build, number, self._told[number], order, asks, to=to)

    def _serve(self, command: ServeWorld) -> None:
        count = len(self._told)
        edition = self._served[0].edition
        self._served[:] = [
            replace(command.world.served_by(number, count), edition=edition)
            for number in range(count)
        ]
        self._tell_constructors(((), *command.windows))

    def _resize(self) -> None:
        """Change the ranks, now or a few messages later, at random; then at a step boundary, or at once."""
        if not self.resizes:
            return  # a repetition
        at = set(self._next.values())
        dp, at_once = self.resizes[0]
        waits = self._halt is None and self._random.random() < 0.7
        if not waits and not at_once:
            self._halt = max(at) if self._halt is None else self._halt
        if (waits or (not at_once and at != {self._halt})) and (self._bag or self._ready()):
            self._bag.add(Message(self._resize))
            return
        self.resizes, self._halt, step = self.resizes[1:], None, min(at)
        self.redone += len(at) > 1
        for key in [key for key in self.batches if key[0] >= step]:
            del self.batches[key]
        self._generation += 1
        self._last_told.clear()
        self._loans.clear()
        self._confirming.clear()
        self._next = dict.fromkeys(range(dp), step)
        asked = ResizeAsked(dp=dp, step=step, generation=self._generation)
        for _ in range(dp):
            self._send(self._ask, asked, to="planner")
        if self.resizes:
            self._bag.add(Message(self._resize))

    def _ask(self, asked: ResizeAsked) -> None:
        """Let a rank report which ranks it counts, until a planner is there to handle it."""
        if not self._planner_is_there:
            self._put_off(self._ask, asked, to="planner")
            return
        if asked.generation < self._generation:
            # The report of a rank that had left the world by the time it was handled.
            with suppress(StateError):
                self._carry(self.planner.handle(asked))
            return
        self._carry(self.planner.handle(asked))

    def _send(
        self, receiver: Callable[..., object], *message: object, to: str = "", waits: bool = False
    ) -> None:
        self._bag.add(Message(receiver, message, to, waits))

    def _put_off(self, receiver: Callable[..., object], *message: object, to: str = "") -> None:
        self._send(receiver, *message, to=to, waits=True)

    def _kill(self) -> None:
        """Kill a loader that holds its role; its open requests and its samples are lost."""
        number = self._random.randrange(self.num_loaders)
        holder = self._roster.holder_of(f"loader-{number}")
        if holder is not None and self.killed < self.kills:
            self._lives[number] = [None] * len(self._lives[number])
            self.killed += 1
            self._replace(self._roster.handle(MemberEnded(holder, "killed")))

    def _kill_constructor(self) -> None:
        """Kill a constructor; another takes its place at once, or the one that is starting in a better place.

        The planner is notified later.
        """
        if self.constructors_killed < self.constructor_kills:
            self.constructors_killed += 1
            number = self._random.randrange(len(self._constructors))
            self._absent.add(number)
            self._constructors[number] = self._a_constructor(number)
            self._tell_past(number)
            if (holder := self._roster.holder_of(f"constructor-{number}")) is not None:
                self._replace(self._roster.handle(MemberEnded(holder, "killed")))

    def _a_constructor(self, number: int) -> DataConstructor:
        """Return a constructor that has received no message."""
        return replace(self._constructors[number], dp_ranks=self._first_served[number].dp_ranks)

    def _build_from_now_on(self, number: int) -> None:
        """Let another constructor take a role; the planner is notified later."""
        self._absent.discard(number)
        new = self._constructors[number] = self._a_constructor(number)
        self._tell_past(number)
        for rank, (told, step) in self._last_told.items():
            if told == number:  # the ranks that were led to it also report to it
                self._tell_taken(number, step, rank)
        self._send(self._link_constructor, number, new, to="planner")
        if self.constructor_moves:
            self._send(self._look)

    def _move_constructor(self) -> None:
        """Find a better place for a constructor: its next life starts there and later replaces the present one."""
        number = self._places.randrange(len(self._constructors))
        if (holder := self._roster.holder_of(f"constructor-{number}")) is not None:
            self._try(self._roster.handle(PlaceFound(holder, may_hold=True)))

    def _kill_planner(self) -> None:
        """Kill the planner. All events and questions that were not written down are lost."""
        if self._planner_is_there and self.planners_killed < self.planner_kills:
            self.planners_killed += 1
            self._planner_is_there = False
            self._send(self._recover_planner)

    def _recover_planner(self) -> None:
        """Start another planner, from the last steps of the journal."""
        ahead = self._states[-self.mix.steps_held - 1 :]
        self._begin_planner(ahead, **({"world": self.worlds[-1]} if self.worlds else {}))

    def _begin_planner(self, ahead: Sequence[MixState], **world: World) -> None:
        """Start another planner, which knows the states that the previous one had reached."""
        self._served = list(self._first_served)
        self.planner = a_planner(
            self.mix,
            dp=self.dp,
            epoch=[len(epoch) for epoch in self.epochs[: len(self.history.latest.names)]],
            edits=self.history.edits,
            state=ahead[0],
            known=ahead[1:],
            life=self.planner.life + 1,
            num_steps=self.num_steps,
            **world,
        )
        self._planner_is_there = True
        self._told = list(self._constructors)
        self._listen()
        self._carry(self.planner.handle(Started()))
        self._turn += 1
        for source, number in enumerate(self._role):
            way = Way(self._turn, number, len(self._lives[number]) - 1)
            is_heard = self._serving[source].turn >= self._moved_at[source]
            if self._serving[source][1:] != way[1:] or not is_heard:
                self._send(self._link, way, (source,), to="planner")
        for rank, step in self._next.items():
            if step > self._states[0].step:
                self._tell_planner(self._taken(step - 1, rank))

    def _taken(self, step: int, rank: int) -> StepTaken:
        return StepTaken(step=step, dp_rank=rank, generation=self._generation)

    def _tell_taken(self, number: int, step: int, rank: int) -> None:
        """Let a rank report the steps that it took to its constructor."""
        constructor, taken = self._constructors[number], self._taken(step, rank)
        self._send(self._hear_taken, number, constructor, taken, to=f"constructor-{number}")

    def _hear_taken(self, number: int, constructor: DataConstructor, taken: StepTaken) -> None:
        if not self._is_there(number, constructor) or not constructor.told.hear(taken):
            # The rank's call has failed, or the constructor answers that it does not serve this rank.
            self._saw("a rank tells a constructor that does not pass it on")
            self._tell_planner(taken)
        else:
            self._answer_told(number)

    def _is_there(self, number: int, constructor: DataConstructor) -> bool:
        return self._constructors[number] is constructor and number not in self._absent

    def _tell_past(self, number: int) -> None:
        """Let ranks of a lost constructor send the planner the reports that the constructor may not have passed on."""
        for rank, (told, step) in self._last_told.items():
            if told == number:
                self._saw(
                    "a rank tells the planner past a constructor that is lost", f"rank {rank}"
                )
                self._tell_planner(self._taken(step, rank))

    def _listen(self, numbers: Iterable[int] | None = None) -> None:
        """Let constructors forward rank reports to the present planner; constructors already asked continue."""
        for number in range(len(self._told)) if numbers is None else numbers:
            if (asks := self._question(number)) is not None:
                self._ask_told(number, *asks)

    def _question(self, number: int) -> tuple[DataConstructor, Planner, int] | None:
        """Return the question to a constructor and note that it was asked, or ``None`` if it is already open."""
        constructor, key = self._told[number], (number, self.planner.life)
        if self._questions.get(key) is constructor:
            return None
        self._questions[key] = constructor
        of, heard = self._heard.get(key, (constructor, 0))
        return constructor, self.planner, heard if of is constructor else 0

    def _ask_told(
        self, number: int, constructor: DataConstructor, planner: Planner, heard: int
    ) -> None:
        """Ask for words after the last one heard; a constructor is asked before it has any."""
        self._asks[number, planner.life] = constructor, planner, heard
        self._answer_told(number)

    def _answer_told(self, number: int) -> None:
        """Answer every planner that asks; later reports of ranks are joined in the next answer."""
        for key, (constructor, planner, heard) in list(self._asks.items()):
            told = constructor.told
            if key[0] == number and told.number > heard and self._is_there(number, constructor):
                del self._asks[key]
                answer = number, constructor, planner, told.number, told.taken()
                self._send(self._hear_told, *answer, to="planner")

    def _hear_told(
        self,
        number: int,
        constructor: DataConstructor,
        planner: Planner,
        heard: int,
        told: StepsTaken,
    ) -> None:
        key = number, planner.life
        if self._told[number] is constructor:
            self._heard[key] = constructor, heard
        if self._questions.get(key) is constructor:
            del self._questions[key]
        if len(told.steps) > 1:
            self._saw("what several ranks took is heard in one message", "planner")
        self._hear(planner, told)
        if not (self._planner_is_there and planner is self.planner):
            return
        is_of_now = told.generation == planner.world.generation
        if is_of_now and planner.ranks.are_ahead(told):
            self._saw("ranks that are ahead are heard of again as others catch up", "planner")
        else:
            self._listen((number,))

    def _tell_planner(self, event: PlannerEvent) -> None:
        """Send an event to the present planner; if it is dead, the event is lost."""
        planner = self.planner
        self._send(self._hear, planner, event, to="planner")

    def _hear(self, planner: Planner, event: PlannerEvent) -> None:
        if self._planner_is_there and planner is self.planner:
            slowest = planner.ranks.slowest
            self._carry(planner.handle(event))
            if planner.ranks.slowest != slowest:
                self._listen()

    def _link_constructor(self, number: int, new: DataConstructor) -> None:
        if self._constructors[number] is new:  # otherwise it was killed meanwhile
            self._told[number] = new
            self._hear(self.planner, ConstructorReplaced(number=number))

    def _republish(self, command: Republish) -> None:
        dp_ranks = self._served[command.number].dp_ranks
        for window in ((), *command.windows):
            parts = [plan.part_of(dp_ranks) for plan in window]
            self._tell_constructor(command.number, parts, command.released_to)

    def _replace(self, commands: Sequence[RosterCommand]) -> None:
        for command in commands:
            match command:
                case StartMember(member=member) if member.role.startswith("constructor-"):
                    self._building.add(member)
                    if member in self._tried:
                        self._send(self._member_is_ready, member, to="keeper")
                    else:
                        self._replace(self._roster.handle(MemberReady(member)))
                case StartMember(member=member):
                    self._send(self._member_is_ready, member, to="keeper")
                case HandOver(member=member) if member.role.startswith("constructor-"):
                    self._build_from_now_on(int(member.role.removeprefix("constructor-")))
                case HandOver(member=member):
                    number = int(member.role.removeprefix("loader-"))
                    self._lives[number].append(SourceLoader(names=self._names))
                    self._hand_over(number, [s for s, at in enumerate(self._role) if at == number])
                    self._send(self._look)
                case EndMember(member=member):
                    assert member not in self._roster.members(), (
                        "it is ended, and may be handed a role"
                    )
                    self._building.discard(member)
                case EndPlane(why=why):
                    raise AssertionError(why)

    def _look(self) -> None:
        """Let the roster look a second later, so that an earlier successor has settled."""
        self._looked_s += 1.0
        seen = MembersSeen(now_s=self._looked_s, beats={})
        self._replace(self._roster.handle(seen))

    def _find_place(self) -> None:
        """Find a better place for a member, which may be the holder, or one that is starting."""
        number = self._places.randrange(self.num_loaders)
        members = [m for m in self._roster.members() if m.role == f"loader-{number}"]
        self._try(self._roster.handle(PlaceFound(self._places.choice(members))))

    def _try(self, commands: Sequence[RosterCommand]) -> None:
        for command in commands:
            assert isinstance(command, StartMember), "until it stands by nobody else is touched"
            self._tried.add(command.member)
            # Long enough that others are lost meanwhile, because a process on another host takes seconds to start.
            self._put_off(self._start_later, command, self._places.randrange(_LONGEST_START))

    def _start_later(self, command: StartMember, left: int) -> None:
        if left:
            self._put_off(self._start_later, command, left - 1)
        else:
            self._replace((command,))

    def _member_is_ready(self, member: Member) -> None:
        """Let a member report that it stands by, or that it cannot run in its place."""
        is_tried = member in self._tried
        self._tried.discard(member)
        if is_tried and self._places.random() < _NO_PLACE:
            self._saw("a better place turns out to be none", member.role)
            self._replace(self._roster.handle(MemberEnded(member, "no data there")))
            return
        is_built = member.role.startswith("constructor-")
        if is_tried and is_built and self._roster.holder_of(member.role) is None:
            self._saw("a constructor is lost while another one is started in a better place")
        commands = self._roster.handle(MemberReady(member))
        if is_tried and is_built and len(commands) > 1:
            number = int(member.role.removeprefix("constructor-"))
            if self._constructors[number].num_steps:
                self._saw("a constructor moves to a better place with a step built", member.role)
        elif is_tried and any(isinstance(command, EndMember) for command in commands):
            self._saw("a shadow is replaced by one in a better place", member.role)
        elif is_tried and commands == ():
            self._saw("somebody is lost while a better place is tried", member.role)
        self._replace(commands)

    def missing(self) -> list[str]:
        """Return the roles that lack members, and surplus constructors."""
        there = Counter(member.role for member in self._roster.members())
        wanted = 1 + self.shadows
        roles = [f"loader-{number}" for number in range(self.num_loaders)]
        missing = [role for role in roles if there[role] != wanted or not self._roster.is_whole()]
        builders = {m for m in self._roster.members() if m.role.startswith("constructor-")}
        return missing + [member.name for member in self._building ^ builders]

    def _hand_over(self, number: int, sources: Sequence[int]) -> None:
        """Let the planner hand sources over to the last life of a loader, and later notify their other readers."""
        self._turn += 1
        way = Way(self._turn, number, len(self._lives[number]) - 1)
        self._send(self._link, way, tuple(sources), to="planner")

    def _move(self) -> None:
        """Move a source to another loader while any role may be lost; the old loader drops it at some moment."""
        if self.moved < self.moves and self._looks < _MOST_LOOKS:
            self._looks += 1
            self._bag.add(Message(self._move))  # until enough sources are moved
        if self._random.random() < _WAITS:
            return
        source = self._random.randrange(len(self.planner.names))
        number, before = self._random.randrange(self.num_loaders), self._role[source]
        is_through = self._serving[source].number == before
        if number == before or self.moved >= self.moves or not (is_through or self.impatient):
            return
        for loader in self._lives[before]:
            if loader is not None:
                loader.handle(HandedOver(sources=(source,)))
        if self.impatient and self._random.random() < _GIVEN_UP:
            self.given_up += 1
            self._leave(source, number)
            return
        self.moved += 1
        self.moved_on += not is_through
        self._role[source], self._moved_at[source] = number, self._turn + 1
        self._leave(source, before)
        if self._roster.holder_of(f"loader-{number}") is not None:
            self._hand_over(number, [source])

    def _leave(self, source: int, number: int) -> None:
        """Let a loader drop a source that now belongs to another, at some moment."""
        for life, loader in enumerate(self._lives[number]):
            if loader is not None:
                self._send(self._drop, source, Way(0, number, life), to=f"loader-{number}")

    def _drop(self, source: int, way: Way) -> None:
        """Drop a source once constructors know of its last move, unless it has come back."""
        loader = self._lives[way.number][way.life]
        if self._role[source] == way.number or loader is None:
            return
        if self._serving[source].turn < self._moved_at[source]:
            self._put_off(self._drop, source, way)
        else:
            loader.forget(source)

    def _link(self, way: Way, sources: Sequence[int]) -> None:
        """Let the planner use a new life; the message about an older life may come later."""
        later = [source for source in sources if way.turn >= self._linked[source].turn]
        for source in later:
            self._linked[source] = way
        known = tuple(source for source in later if source < len(self.planner.names))
        for source in set(later).difference(known):  # it has no outstanding requests
            self._know_way(source, way)
        if known:
            self._hear(self.planner, LoaderReplaced(sources=known))

    def _take_over(self, way: Way, command: TakeOver) -> None:
        loader = self._lives[way.number][way.life]
        if loader is None:
            return
        for source in command.ranges:
            self._send(self._know_way, source, way, self._random.choice((0, 0, 20)))
        for read in loader.handle(command):
            again = ReadAhead(
                source=read.source, start=read.start, stop=read.stop, without=read.without
            )
            self._send(self._read, way, again, to=f"loader-{way.number}")

    def _know_way(self, source: int, way: Way, later: int = 0) -> None:
        """Let constructors use a way, unless they know a later one; now or some messages later."""
        if later:
            self._put_off(self._know_way, source, way, later - 1)
            return
        self._serving[source] = max(self._serving[source], way)

    def _release_samples(self, way: Way, command: ReleaseSamples) -> None:
        loader = self._lives[way.number][way.life]
        if loader is not None:
            loader.handle(command)

    def _read(self, way: Way, command: ReadAhead) -> None:
        loader = self._lives[way.number][way.life]
        if loader is None:  # it died during the call; the next loader gets the outstanding requests
            return
        (answer,) = loader.handle(command)
        if isinstance(answer, SamplesReported):
            self._report(answer)
        else:
            self._send(self._finish_read, way, command, to=f"loader-{way.number}")

    def _finish_read(self, way: Way, command: ReadAhead) -> None:
        loader = self._lives[way.number][way.life]
        if self._lengths.random() < self.short_reads:
            command = replace(
                command, stop=self._lengths.randrange(command.start, command.stop) + 1
            )
            self._saw("a read is answered with its first records", f"loader-{way.number}")
        if loader is not None:
            self._report(self._read_now(loader, command))

    def _read_now(self, loader: SourceLoader, asked: ReadAhead | Read) -> SamplesReported:
        source, without = asked.source, asked.without
        table, columns = read_range(source, self.epochs[source], asked.start, asked.stop, without)
        (report,) = loader.handle(
            SamplesRead(
                source=source,
                block=SampleRange(table, columns.tokens, columns.others, frozenset(without)),
            )
        )
        assert isinstance(report, SamplesReported)
        return report

    def _report(self, report: SamplesReported) -> None:
        self._tell_planner(report)

    def _build(
        self,
        number: int,
        constructor: DataConstructor,
        order: BuildSteps,
        asks: tuple[DataConstructor, Planner, int] | None,
    ) -> None:
        # The call to a lost constructor fails, and the next one is asked again.
        if asks is not None and self._is_there(number, constructor):
            self._ask_told(number, *asks)
        for command in constructor.handle(order):
            if isinstance(command, FetchSlices):
                self._send(self._fetch, number, constructor, command, to=f"constructor-{number}")

    def _fetch(self, number: int, constructor: DataConstructor, fetch: FetchSlices) -> None:
        if self._constructors[number] is not constructor or number in self._absent:
            return  # it was killed
        ways = [self._serving[request.source] for request in fetch.requests]
        loaders = [self._lives[way.number][way.life] for way in ways]
        if None in loaders:  # a constructor waits for the next holder
            self._saw("samples are asked of a loader that is dead", f"constructor-{number}")
            self._put_off(self._fetch, number, constructor, fetch)
            return
        try:
            slices = ColumnRanges.of(self._slices(loaders, fetch.requests))
        except StateError:
            self._miss(number, constructor, fetch, ways)
            return
        fetched = SlicesFetched(
            steps=fetch.steps,
            slices=slices,
            generation=fetch.generation,
            edition=fetch.edition,
        )
        self._send(constructor.handle, fetched, to=f"constructor-{number}")

    def _slices(
        self, loaders: Sequence[SourceLoader | None], requests: Sequence[SliceRequest]
    ) -> list[SampleColumns]:
        """Ask each loader once, as a constructor does; return the answers by request."""
        places_of: dict[int, list[int]] = {}
        for place, loader in enumerate(loaders):
            places_of.setdefault(id(loader), []).append(place)
        found: dict[int, SampleColumns] = {}
        for places in places_of.values():
            loader, asked = loaders[places[0]], [requests[place] for place in places]
            assert loader is not None
            for read in loader.unread(asked):
                self._read_now(loader, read)
            found |= zip(places, loader.slices_of(asked), strict=True)
        return [found[place] for place in range(len(requests))]

    def _miss(
        self, number: int, constructor: DataConstructor, fetch: FetchSlices, ways: Sequence[Way]
    ) -> None:
        """Let a constructor wait until it learns why a loader lacks a requested sample."""
        self._missed += 1
        assert self._missed < _MOST_MISSED, "a constructor waits for what nobody holds"
        missing = SlicesMissing(
            steps=fetch.steps, generation=fetch.generation, edition=fetch.edition
        )
        commands = constructor.handle(missing)
        if any(way.life < len(self._lives[way.number]) - 1 for way in ways):
            self._saw("a loader that is believed dead is asked for what it does not hold")
        for command in commands:
            if isinstance(command, FetchSlices):
                self._saw("a constructor asks for fewer steps than its ranks have meanwhile")
                self._send(self._fetch, number, constructor, command, to=f"constructor-{number}")
        if not commands:
            self._put_off(self._fetch, number, constructor, fetch)

    def _ready(self) -> list[int]:
        """Return the ranks whose next step is built or already lent."""
        wanted, halt = self._next, self._halt
        first = min(wanted.values()) if self._in_step else None
        return [
            rank
            for constructor in self._constructors
            if constructor.generation == self._generation
            for rank in constructor.dp_ranks
            if (step := wanted[rank]) != halt
            and (first is None or step == first)
            and rank not in self._confirming
            and (rank in self._loans or constructor.has(step))
        ]

    def _take(self, rank: int) -> None:
        """Let a rank ask for its next step: it takes the step, or asks whether its loan is still valid."""
        if (loan := self._loans.get(rank)) is not None:
            self._confirming.add(rank)
            self._send(self._confirm, rank, loan, to=f"constructor-{loan.number}")
            return
        number, constructor = self._constructor_of(rank)
        step = self._next[rank]
        self._have(rank, step, number, constructor.batch_of(step, rank))

    def _constructor_of(self, rank: int) -> tuple[int, DataConstructor]:
        return next(
            (n, c)
            for n, c in enumerate(self._constructors)
            if c.generation == self._generation and rank in c.dp_ranks
        )

    def _have(self, rank: int, step: int, number: int, batch: Batch) -> None:
        """Let a rank train on a step."""
        self._note(f"rank {rank}", f"takes step {step}")
        if rank == 0:
            self.states[step] = self._saved_at(step)
        self.batches[step, rank] = batch
        self._next[rank], self._dp_at[step] = step + 1, len(self._next)
        self._last_told[rank] = number, step
        self._tell_taken(number, step, rank)
        if self.lends:
            asked = rank, self._generation, step + 1, _MOST_LENDINGS
            self._send(self._lend, *asked, to=f"constructor-{number}")

    def _lend(self, rank: int, generation: int, step: int, left: int) -> None:
        """Lend a rank its next step while it computes, or a few messages later if the step is not built."""
        wants = generation == self._generation and self._next.get(rank) == step
        if not wants or rank in self._loans:
            return  # it did not wait for it, or this message is a repetition
        number, constructor = next(
            ((n, c) for n, c in enumerate(self._constructors) if rank in c.dp_ranks), (0, None)
        )
        if constructor is None or number in self._absent or constructor.generation != generation:
            return
        if constructor.has(step):
            batch = constructor.batch_of(step, rank, lends=True)
            edition = constructor.giving.edition.number
            self._loans[rank] = _Loan(step, batch, edition, number, constructor)
        elif left:
            self._put_off(self._lend, rank, generation, step, left - 1, to=f"constructor-{number}")

    def _confirm(self, rank: int, loan: _Loan) -> None:
        """Let a constructor answer whether its loan of a step is valid; if it is lost, the rank learns that."""
        if not self._is_there(loan.number, loan.constructor):
            if self._loans.get(rank) is loan:
                self._saw("a constructor is lost that has lent a step", f"rank {rank}")
            self._hear_confirmed(rank, loan, stands=False)
            return
        stands = loan.constructor.giving.confirm(loan.step, loan.edition)
        told = partial(self._hear_confirmed, stands=stands)
        self._send(told, rank, loan, to=f"rank {rank}")

    def _hear_confirmed(self, rank: int, loan: _Loan, *, stands: bool) -> None:
        if self._loans.get(rank) is not loan:
            return  # a repetition, or a message to a rank of an earlier world
        del self._loans[rank]
        self._confirming.discard(rank)
        if stands:
            self._saw("a step that was lent stands", f"rank {rank}")
            self._have(rank, loan.step, loan.number, loan.batch)
        else:
            self._saw("a step that was lent is asked for anew", f"rank {rank}")

    def _saved_at(self, step: int) -> JsonObject:
        """Return the state as rank 0 would save it; without a planner it waits for the next one."""
        if self._planner_is_there:
            return self.planner.state_at(step)
        state = self._states[step - self._states[0].step]
        kept = self.history.state_fields_at(state.mix_revision, self.planner.fingerprint)
        return state.to_json(**kept)
