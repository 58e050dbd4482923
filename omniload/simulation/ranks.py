"""Ranks under a virtual clock: they take their batches like a rank's handle, and train in step."""

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
    """Takes the batches of one rank."""

    process: Process
    wire: Wire
    rank: int
    window: int
    """Steps that are planned together; the rank asks for at most as many at once."""
    constructor: SimulatedConstructor
    planner: SimulatedPlanner
    held_bytes: int = field(default=0, init=False)
    """Bytes of batches that are on their way to the rank, or wait for it."""
    place: int = field(default=0, init=False)
    """Place of the step that it took last among the steps that arrived together."""
    _waiting: tuple[int, Then] | None = field(default=None, init=False)
    _beside: deque[Then] = field(default_factory=deque, init=False)
    """Work of other threads of the rank, which start when the taking thread has its batch."""

    @abstractmethod
    def take(self, step: int, have: Then) -> None:
        """Take a step, and then call ``have``."""

    def let_go(self) -> None:
        """Start the threads that wait for the taking thread, which has its batch and leaves the core to them."""
        while self._beside:
            self._beside.popleft()()

    @abstractmethod
    def look(self) -> None:
        """Check whether the awaited step is built."""

    def _tell_taken(self, step: int) -> None:
        """Report that this rank has a step, to the planner or to the role that passes it on."""
        told, wire = self._told_by(), self.wire
        hear = partial(told.hear, StepTaken(step=step, dp_rank=self.rank))
        telling_s = wire.end_s(self.process)
        self.process.work(telling_s, lambda: wire.carry(self.process, told.process, hear))

    @abstractmethod
    def _told_by(self) -> SimulatedConstructor | SimulatedPlanner:
        """Return the role to which this rank reports its steps."""


class _Asked(NamedTuple):
    """Request of a rank."""

    step: int
    most: int
    """Number of wanted steps, from that step on."""
    given: int
    """Number of them that are given; later ones are lent."""


class _Window(NamedTuple):
    """Answer to a request."""

    sizes: list[int]
    """Bytes of each batch."""
    given: int


@dataclass(slots=True)
class RayRank(Rank):
    """A rank outside the constructor's process: asks for several steps, and for the next ones before it runs out."""

    _pace: FetchPace = field(init=False)
    _held: deque[int] = field(default_factory=deque, init=False)
    """Bytes of the batches in memory."""
    _given: int = field(default=0, init=False)
    """Number of them that need no confirmation."""
    _came: _Window | None = field(default=None, init=False)
    """Answer that has arrived after them."""
    _asked: int | None = field(default=None, init=False)
    _behind: int = field(default=0, init=False)
    """The step after those in memory."""
    _unanswered: _Asked | None = field(default=None, init=False)
    """Request that the constructor answers once its first step is built."""

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
        # Otherwise the request is on its way; asked again, the constructor would answer twice.
        elif self._asked is None:
            self._ask(step, given=1)

    def _ask(self, step: int, given: int) -> None:
        """Ask for several steps; a slow rank is given the first batches and lent the others."""
        self._asked, most = step, self._pace.at_once
        asked = _Asked(step, most, given if self._pace.is_slow else most)
        # The taking thread does not wait for this, because another thread asks.
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
        # All built steps are sent along, so that a late rank gets several steps in one message.
        sizes = constructor.sizes_from(asked.step, asked.most, self.rank)
        self.held_bytes += sum(sizes)
        # Both of the constructor's ends at once: the request was received while nothing was built, and is counted here.
        its, wire = constructor.process, self.wire
        seconds = wire.end_s(its) + wire.end_s(its, sum(sizes), len(sizes))
        arrive = partial(self._arrive, _Window(sizes, asked.given))
        constructor.process.work(
            seconds, lambda: self.wire.carry(constructor.process, self.process, arrive, sum(sizes))
        )

    def _arrive(self, window: _Window) -> None:
        # Another thread receives the answer as it arrives, while the rank trains or waits for it.
        seconds = self.wire.end_s(self.process, sum(window.sizes), len(window.sizes))
        self.process.work(seconds, partial(self._have_come, window))

    def _have_come(self, window: _Window) -> None:
        self._came = window
        if self._waiting is not None:
            self._open()

    def _open(self) -> None:
        """Move the answer's batches into memory, and take the first of them."""
        assert self._came is not None
        assert self._waiting is not None
        (step, have), (sizes, self._given) = self._waiting, self._came
        self._came = self._waiting = None
        self._held.extend(sizes)
        self._asked, self._behind, self.place = None, step + len(sizes), 0
        self._take_at_hand(step, have)

    def _take_at_hand(self, step: int, have: Then) -> None:
        """Hand out the first batch in memory; if it is lent, only after the constructor confirms it."""
        if self._given:
            self._hand_out(step, have)
            return
        its, wire, constructor = self.process, self.wire, self.constructor.process
        # Costs as much as reporting a step, because an answer without a batch is part of its message. Half is for
        # asking, half for hearing.
        half_s = wire.end_s(its) / 2

        def hear() -> None:
            its.work(half_s, partial(self._hand_out, step, have))

        def answer() -> None:
            answered = partial(wire.carry, constructor, its, hear)
            constructor.work(wire.end_s(constructor), answered)

        # The mix of a simulated job never changes, so every lent batch is confirmed.
        its.work(half_s, partial(wire.carry, its, constructor, answer))

    def _hand_out(self, step: int, have: Then) -> None:
        self._pace.take(self.process.host.clock.now_s)
        self._given = max(0, self._given - 1)
        self.held_bytes -= self._held.popleft()
        # With the second of the batches that arrived together, or with the only one.
        if self.place == 1 or (self.place == 0 and not self._held):
            self._beside.append(partial(self._ask, self._behind, given=0))
        # Each lent step is reported by itself, given steps with the last of them.
        if not (self._held and self._given):
            self._beside.append(partial(self._tell_taken, step))
        have()


@dataclass(slots=True)
class LocalRank(Rank):
    """A rank in the process of its plane: its batches are available as soon as they are built."""

    _told_next: int = field(default=0, init=False)
    """First step that must be reported when it is taken; reports are as rare as plans."""

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
            # As a message, because waking a waiting thread takes time.
            self.wire.carry(self.process, self.process, self._hand_out)

    def _hand_out(self) -> None:
        if self._waiting is None or not self.constructor.machine.has(self._waiting[0]):
            return  # woken twice: the rank may already wait for a step that is not built
        step, have = self._waiting
        self._waiting = None
        # Reported are a window's first step, and a step after which nothing is built: there the planner may wait.
        is_known = step < self._told_next and self.constructor.machine.has(step + 1)
        if not is_known:
            self._told_next = step + self.window
            self._tell_taken(step)
        self.process.work(self.wire.end_s(self.process), have)


@dataclass(slots=True)
class _Asleep:
    """Ranks of a host that have trained; they wake one after another when a core is free.

    A collective releases the ranks one by one, and each then has only a short task, which runs without interruption.
    """

    ranks: deque[Rank]
    cores: int
    """Cores on which no rank is taking its batch."""


@dataclass(slots=True)
class Trainer:
    """All ranks: a step begins once each rank has its batch, and takes ``step_s``."""

    clock: Clock
    ranks: Sequence[Rank]
    num_steps: int
    step_s: float
    on_step: Callable[[int], None]
    """Called when a step begins."""
    step: int = 0
    waits_s: list[float] = field(default_factory=list, init=False)
    """Wait of the last rank, for each step."""
    begins_s: list[float] = field(default_factory=list, init=False)
    """Time at which each step began."""
    _missing: int = field(default=0, init=False)
    _longest_s: float = field(default=0.0, init=False)
    """Longest wait of a rank so far for the step that all take."""
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
        # A rank that only takes batches finds everything for that in its caches.
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
        # A rank's wait counts from its own begin, as in a run.
        self._longest_s = max(self._longest_s, self.clock.now_s - woken_s)
        self._missing -= 1
        if self._missing:
            return
        self.waits_s.append(self._longest_s)
        self.begins_s.append(self.clock.now_s)
        self.on_step(self.step)
        self.step += 1
        if not self.is_done:
            # A collective of the ranks ends a step: no rank begins the next step before all have trained.
            self.clock.after(self.step_s, self.begin)
