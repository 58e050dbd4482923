"""Ranks under a virtual clock: they take their batches as a rank's handle does, and train in step."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import NamedTuple

from typing_extensions import override

from omniload.machine.messages import StepTaken
from omniload.machine.plans.fetch_pace import FetchPace
from omniload.simulation.clock import Clock, Process, Then
from omniload.simulation.roles import SimulatedConstructor, SimulatedPlanner
from omniload.simulation.wire import Wire

__all__ = ["LocalRank", "Rank", "RayRank", "Trainer"]


@dataclass(slots=True)
class Rank(ABC):
    """What takes the batches of one rank."""

    process: Process
    wire: Wire
    rank: int
    window: int
    """Steps that are planned at once: it asks for no more of them at once."""
    constructor: SimulatedConstructor
    planner: SimulatedPlanner
    held_bytes: int = field(default=0, init=False)
    """Of batches that are on their way to it, or wait for it."""
    place: int = field(default=0, init=False)
    """Of the step that it took last, among those that came together."""
    _waiting: tuple[int, Then] | None = field(default=None, init=False)
    _beside: deque[Then] = field(default_factory=deque, init=False)
    """What threads beside the one that takes are woken for."""

    @abstractmethod
    def take(self, step: int, have: Then) -> None:
        """Take a step, and then call ``have``."""

    def let_go(self) -> None:
        """Have threads go on that wait for the one that takes: it has its batch, and leaves the core to them."""
        while self._beside:
            self._beside.popleft()()

    @abstractmethod
    def look(self) -> None:
        """See whether what it waits for is built by now."""

    def _tell_taken(self, step: int) -> None:
        """Tell that this rank has a step: the planner, or what passes it on."""
        told, wire = self._told_by(), self.wire
        hear = partial(told.hear, StepTaken(step=step, dp_rank=self.rank))
        telling_s = wire.end_s(self.process)
        self.process.work(telling_s, lambda: wire.carry(self.process, told.process, hear))

    @abstractmethod
    def _told_by(self) -> SimulatedConstructor | SimulatedPlanner:
        """Return what is told which steps this rank has."""


class _Asked(NamedTuple):
    """What a rank asks for."""

    step: int
    most: int
    """Steps from that one on."""
    given: int
    """How many of them are given; those behind are lent."""


class _Window(NamedTuple):
    """An answer."""

    sizes: list[int]
    """Bytes of each batch."""
    given: int


@dataclass(slots=True)
class RayRank(Rank):
    """A rank beside a constructor's process: asks for the steps of a while, and for those behind while it has some."""

    _pace: FetchPace = field(init=False)
    _held: deque[int] = field(default_factory=deque, init=False)
    """Bytes of the batches at hand."""
    _given: int = field(default=0, init=False)
    """How many of them need not be confirmed."""
    _came: _Window | None = field(default=None, init=False)
    """What has come behind them."""
    _asked: int | None = field(default=None, init=False)
    _behind: int = field(default=0, init=False)
    """The step behind those at hand."""
    _unanswered: _Asked | None = field(default=None, init=False)
    """What the constructor is to answer once its first step is built."""

    def __post_init__(self) -> None:
        self._pace = FetchPace(self.window)

    @override
    def _told_by(self) -> SimulatedConstructor:
        return self.constructor

    @override
    def take(self, step: int, have: Then) -> None:
        if self._held:
            self.place += 1
            self._take_at_hand(step, have)
            return
        self._waiting = step, have
        if self._came is not None:
            self._open()
        # Else its question is on its way: asked again, the constructor would answer twice.
        elif self._asked is None:
            self._ask(step, given=1)

    def _ask(self, step: int, given: int) -> None:
        """Ask for the steps of a while, of which a slow rank is given the first batches and lent the others."""
        self._asked, most = step, self._pace.at_once
        asked = _Asked(step, most, given if self._pace.is_slow else most)
        # Nobody waits for that: a thread beside the one that takes asks.
        self.process.work(
            self.wire.end_s(self.process),
            lambda: self.wire.carry(
                self.process, self.constructor.process, partial(self._be_asked, asked)
            ),
        )

    def _be_asked(self, asked: _Asked) -> None:
        self._unanswered = asked
        self.look()

    @override
    def look(self) -> None:
        asked, constructor = self._unanswered, self.constructor
        if asked is None or not constructor.machine.has(asked.step):
            return
        self._unanswered = None
        # What is built of them goes along: a rank that is late has several steps in one message.
        sizes = constructor.sizes_from(asked.step, asked.most, self.rank)
        self.held_bytes += sum(sizes)
        # Both ends of the constructor at once: what was asked was taken while nothing was built, and is counted here.
        its, wire = constructor.process, self.wire
        seconds = wire.end_s(its) + wire.end_s(its, sum(sizes), len(sizes))
        arrive = partial(self._arrive, _Window(sizes, asked.given))
        constructor.process.work(
            seconds, lambda: self.wire.carry(constructor.process, self.process, arrive, sum(sizes))
        )

    def _arrive(self, window: _Window) -> None:
        # A thread beside takes it in as it comes, while the rank trains or waits for it.
        seconds = self.wire.end_s(self.process, sum(window.sizes), len(window.sizes))
        self.process.work(seconds, partial(self._have_come, window))

    def _have_come(self, window: _Window) -> None:
        self._came = window
        if self._waiting is not None:
            self._open()

    def _open(self) -> None:
        """Have what came at hand, and take the first step of it."""
        assert self._came is not None
        assert self._waiting is not None
        (step, have), (sizes, self._given) = self._waiting, self._came
        self._came = self._waiting = None
        self._held.extend(sizes)
        self._asked, self._behind, self.place = None, step + len(sizes), 0
        self._take_at_hand(step, have)

    def _take_at_hand(self, step: int, have: Then) -> None:
        """Hand the first batch at hand out; one that is lent once the constructor has said that it stands."""
        if self._given:
            self._hand_out(step, have)
            return
        its, wire, constructor = self.process, self.wire, self.constructor.process
        # As of a step that is told: an answer without a batch is part of its message. Half of it asks, half hears.
        half_s = wire.end_s(its) / 2

        def hear() -> None:
            its.work(half_s, partial(self._hand_out, step, have))

        def answer() -> None:
            answered = partial(wire.carry, constructor, its, hear)
            constructor.work(wire.end_s(constructor), answered)

        # Nobody changes the mix of a job that is simulated: each of them stands.
        its.work(half_s, partial(wire.carry, its, constructor, answer))

    def _hand_out(self, step: int, have: Then) -> None:
        self._pace.take(self.process.host.clock.now_s)
        self._given = max(0, self._given - 1)
        self.held_bytes -= self._held.popleft()
        # With the second of those that came together, or with the only one.
        if self.place == 1 or (self.place == 0 and not self._held):
            self._beside.append(partial(self._ask, self._behind, given=0))
        if not (self._held and self._given):  # said of each that is lent, else with the last
            self._beside.append(partial(self._tell_taken, step))
        have()


@dataclass(slots=True)
class LocalRank(Rank):
    """A rank in the process of its plane: its batches are there once they are built."""

    _told_next: int = field(default=0, init=False)
    """Step that is told of at the latest when it was taken: as seldom as steps are planned."""

    @override
    def _told_by(self) -> SimulatedPlanner:
        return self.planner

    @override
    def take(self, step: int, have: Then) -> None:
        self._waiting = step, have
        if self.constructor.machine.has(step):
            self._hand_out()

    @override
    def look(self) -> None:
        if self._waiting is not None and self.constructor.machine.has(self._waiting[0]):
            # By a message: a thread that waits is woken, which takes its time.
            self.wire.carry(self.process, self.process, self._hand_out)

    def _hand_out(self) -> None:
        if self._waiting is None or not self.constructor.machine.has(self._waiting[0]):
            return  # woken twice: by now it may wait for a step that is not built
        step, have = self._waiting
        self._waiting = None
        # Told of a window's first step, and of one behind which nothing is built: there the planner may be waited for.
        is_known = step < self._told_next and self.constructor.machine.has(step + 1)
        if not is_known:
            self._told_next = step + self.window
            self._tell_taken(step)
        self.process.work(self.wire.end_s(self.process), have)


@dataclass(slots=True)
class _Asleep:
    """Ranks of a host that have trained: they wake one after the other, where a core is left for them.

    A collective lets go of them one by one, and what a rank has to do then is short: it is run through.
    """

    ranks: deque[Rank]
    cores: int
    """On which none of them takes its batch."""


@dataclass(slots=True)
class Trainer:
    """All ranks: a step begins once each has its batch, and takes ``step_s``."""

    clock: Clock
    ranks: Sequence[Rank]
    num_steps: int
    step_s: float
    on_step: Callable[[int], None]
    """Called when a step begins."""
    step: int = 0
    waits_s: list[float] = field(default_factory=list, init=False)
    """Of each step, what the last rank waited."""
    begins_s: list[float] = field(default_factory=list, init=False)
    """When each step began."""
    _missing: int = field(default=0, init=False)
    _longest_s: float = field(default=0.0, init=False)
    """What a rank has waited for the step that all take, at most so far."""
    _by_host: Sequence[Sequence[Rank]] = field(init=False)

    def __post_init__(self) -> None:
        by_host: dict[int, list[Rank]] = {}
        for rank in self.ranks:
            by_host.setdefault(id(rank.process.host), []).append(rank)
        self._by_host = list(by_host.values())

    @property
    def is_done(self) -> bool:
        """Whether every step has begun."""
        return len(self.begins_s) == self.num_steps

    def begin(self) -> None:
        """Have every rank take the next step."""
        self._missing, self._longest_s = len(self.ranks), 0.0
        for ranks in self._by_host:
            self._wake(_Asleep(deque(ranks), ceil(ranks[0].process.host.cores)))

    def _wake(self, of_host: "_Asleep") -> None:
        while of_host.ranks and of_host.cores > 0:
            rank = of_host.ranks.popleft()
            rank.take(self.step, partial(self._took, rank, self.clock.now_s, of_host))

    def _took(self, rank: Rank, woken_s: float, of_host: "_Asleep") -> None:
        # A rank that only takes batches has all that it needs for that in its caches.
        if take_s := rank.wire.take_s(rank.place):
            of_host.cores -= 1
            rank.process.work(take_s, partial(self._has_taken, rank, woken_s, of_host))
        else:
            rank.let_go()
            self._have(woken_s)

    def _has_taken(self, rank: Rank, woken_s: float, of_host: "_Asleep") -> None:
        of_host.cores += 1
        rank.let_go()
        self._have(woken_s)
        self._wake(of_host)

    def _have(self, woken_s: float) -> None:
        # What a rank waits counts from its own begin, as in a run.
        self._longest_s = max(self._longest_s, self.clock.now_s - woken_s)
        self._missing -= 1
        if self._missing:
            return
        self.waits_s.append(self._longest_s)
        self.begins_s.append(self.clock.now_s)
        self.on_step(self.step)
        self.step += 1
        if not self.is_done:
            # A collective of the ranks ends a step: none begins the next before all have trained.
            self.clock.after(self.step_s, self.begin)
