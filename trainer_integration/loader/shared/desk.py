"""Decides which worker makes which batch, and which ranks get it: the logic of a group's server. No I/O.

A batch is identified by its *key*: the number of the epoch in its loader, and the indices. Each rank gets the batches
that it asks for. Ranks that ask for the same key within a few batches of each other get one batch, made once; for a
rank that comes later, the batch is made again.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from trainer_integration.loader.shared.frames import Frame, Kind

__all__ = [
    "Asked",
    "Command",
    "Desk",
    "Dropped",
    "Ended",
    "Event",
    "Give",
    "Joined",
    "Left",
    "Made",
    "Order",
    "Release",
    "Replace",
]

_ORDERS = 2
"""Orders that a worker has at once: the batch that it makes, and the next."""
_LEARNT = 64
"""Batches after which ranks that never asked for the same batch count as taking different ones."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A rank has joined."""

    rank: int


@dataclass(frozen=True, slots=True)
class Left:
    """A rank has left, with all its requests."""

    rank: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A rank wants a batch."""

    rank: int
    task: int
    key: bytes


@dataclass(frozen=True, slots=True)
class Dropped:
    """A rank does not want a batch any more."""

    rank: int
    task: int


@dataclass(frozen=True, slots=True)
class Made:
    """A worker has made a batch, or failed."""

    worker: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker has ended by itself."""

    worker: int
    why: str


Event = Joined | Left | Asked | Dropped | Made | Ended


@dataclass(frozen=True, slots=True)
class Order:
    """Have a worker make a batch."""

    worker: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class Give:
    """Send a rank its batch."""

    rank: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class Release:
    """Free these blocks once no rank holds them."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replace:
    """Start another worker in place of one that has ended."""

    worker: int


Command = Order | Give | Release | Replace


@dataclass(slots=True)
class _Job:
    key: bytes
    waiting: list[tuple[int, int]]
    """Rank and task of each request that waits for the batch."""
    takers: set[int]
    """Ranks that have asked for the batch."""
    worker: int | None = None
    made: Frame | None = None


@dataclass(slots=True)
class Desk:
    """Orders batches from workers, for each rank in turn, and hands them out."""

    workers: int
    ahead: int
    """Batches that a rank asks for ahead of the one that it takes."""
    ranks: int
    """Expected ranks; batches of the first rank are kept for the others."""
    _jobs: OrderedDict[int, _Job] = field(default_factory=OrderedDict)
    _of_key: dict[bytes, list[int]] = field(default_factory=dict)
    _queues: OrderedDict[int, deque[int]] = field(default_factory=OrderedDict)
    """Jobs that no worker has, by the rank that asked first."""
    _orders: list[list[int]] = field(default_factory=list)
    _kept: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Finished jobs that are kept for ranks that may still ask."""
    _next: int = 0
    _joined: int = 0
    _alone: int = 0
    _most_takers: int = 1
    made: int = 0
    """Number of batches that workers have made, for tests."""

    def __post_init__(self) -> None:
        """Begin with idle workers."""
        self._orders = [[] for _ in range(self.workers)]

    def handle(self, event: Event) -> list[Command]:
        """Handle an event and return the commands, in order."""
        match event:
            case Joined(rank):
                self._queues[rank] = deque()
                self._joined += 1
                return []
            case Left(rank):
                return self._left(rank)
            case Asked(rank, task, key):
                return self._asked(rank, task, key)
            case Dropped(rank, task):
                self._forget([(rank, task)])
                return []
            case Made(worker, frame):
                return self._made(worker, frame)
            case Ended(worker, why):
                return self._ended(worker, why)
            case _:
                assert_never(event)

    def _asked(self, rank: int, task: int, key: bytes) -> list[Command]:
        for number in self._of_key.get(key, ()):
            job = self._jobs[number]
            if rank not in job.takers:
                job.takers.add(rank)
                self._most_takers = max(self._most_takers, len(job.takers))
                if job.made is None:
                    job.waiting.append((rank, task))
                    return []
                return [_given(rank, task, job.made), *self._trim()]
        # Before all ranks have joined, a batch that only one has asked for says nothing about the others.
        if self._joined >= self.ranks:
            self._alone += 1
        number, self._next = self._next, self._next + 1
        self._jobs[number] = _Job(key, [(rank, task)], {rank})
        self._of_key.setdefault(key, []).append(number)
        self._queues[rank].append(number)
        return self._ordered()

    def _ordered(self) -> list[Command]:
        """Give idle workers the next jobs, for each rank in turn."""
        commands: list[Command] = []
        while any(self._queues.values()):
            # The worker with the fewest orders, because strict turns would make a fast worker wait for a slow one.
            worker = min(range(self.workers), key=lambda n: len(self._orders[n]))
            if len(self._orders[worker]) >= _ORDERS:
                break
            rank = next(rank for rank, queue in self._queues.items() if queue)
            number = self._queues[rank].popleft()
            # In turn, so that a rank that asks far ahead does not keep another rank from its next batch.
            self._queues.move_to_end(rank)
            job = self._jobs[number]
            job.worker = worker
            self._orders[worker].append(number)
            commands.append(Order(worker, Frame(Kind.ASK, number, job.key)))
        return commands

    def _made(self, worker: int, frame: Frame) -> list[Command]:
        self.made += 1
        self._orders[worker].remove(frame.number)
        job = self._jobs[frame.number]
        job.made, job.worker = frame, None
        gives: list[Command] = [_given(rank, task, frame) for rank, task in job.waiting]
        job.waiting.clear()
        # Kept even if all ranks that asked have it, because slower ranks may still ask for it.
        self._kept[frame.number] = None
        return [*gives, *self._trim(), *self._ordered()]

    def _trim(self) -> list[Command]:
        """Release batches that no rank will ask for: those that all their takers have, and old ones."""
        apart = self._most_takers == 1 and self._alone >= _LEARNT
        # Ranks that take the same batches differ by at most the number they ask for ahead.
        room = 0 if apart else (self.ahead + _ORDERS) * max(self.ranks, len(self._queues))
        done = [n for n in self._kept if self._is_taken(self._jobs[n])]
        old = [n for n in self._kept if n not in done]
        done += old[: max(0, len(old) - room)]
        return [Release(self._removed(number)) for number in done]

    def _is_taken(self, job: _Job) -> bool:
        takers = len(job.takers & self._queues.keys())
        all_in = self._joined >= self.ranks
        # All ranks, or as many as ever took the same batch, because several groups of ranks may each share their own.
        return all_in and (takers >= len(self._queues) or 1 < self._most_takers <= takers)

    def _removed(self, number: int) -> tuple[int, ...]:
        job = self._jobs.pop(number)
        self._kept.pop(number, None)
        numbers = self._of_key[job.key]
        numbers.remove(number)
        if not numbers:
            del self._of_key[job.key]
        return () if job.made is None else job.made.slots

    def _forget(self, wanted: Iterable[tuple[int, int]]) -> None:
        """Remove requests; a job that no worker has begun is removed with its last request."""
        gone = set(wanted)
        for number, job in list(self._jobs.items()):
            if gone.isdisjoint(job.waiting):
                continue
            job.waiting = [each for each in job.waiting if each not in gone]
            # A batch that a worker is making is finished anyway: nothing stops it, and another rank may ask for it.
            if not job.waiting and job.worker is None:
                for queue in self._queues.values():
                    if number in queue:
                        queue.remove(number)
                self._removed(number)

    def _left(self, rank: int) -> list[Command]:
        own = {(r, task) for job in self._jobs.values() for r, task in job.waiting if r == rank}
        self._forget(own)
        # Jobs that other ranks wait for stay, even if this rank asked first.
        for number in self._queues.pop(rank):
            self._queues[self._jobs[number].waiting[0][0]].append(number)
        return [*self._trim(), *self._ordered()]

    def _ended(self, worker: int, why: str) -> list[Command]:
        """Tell the ranks that wait for the worker's present batch; give its next batch to another worker."""
        orders, self._orders[worker] = self._orders[worker], []
        commands: list[Command] = []
        # A worker makes its orders one after another, so it ended at the first.
        for number in orders[:1]:
            lost = Frame(Kind.LOST, number, why.encode())
            commands += [_given(rank, task, lost) for rank, task in self._jobs[number].waiting]
            self._removed(number)
        for number in orders[1:]:
            job = self._jobs[number]
            job.worker = None
            if job.waiting:
                # At the front, because it was ordered before all jobs that still wait there.
                self._queues[job.waiting[0][0]].appendleft(number)
            else:
                self._removed(number)
        return [*commands, Replace(worker), *self._ordered()]


def _given(rank: int, task: int, made: Frame) -> Give:
    return Give(rank, Frame(made.kind, task, made.body, made.slots))
