"""Virtual time: future events in order, and processes that share the cores of their hosts.

Cores are shared as Linux shares them: evenly among all processes that want to run. The threads of one process get at
most ``width`` cores, because they share an interpreter lock.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

from omniload.simulation.profile import Role

__all__ = ["Clock", "Host", "Lane", "Process", "Then"]

Then: TypeAlias = Callable[[], None]
_NOTHING_S = 1e-12
"""Remainder of a job that is only a rounding error."""
_LEAST_LEFT = 0.05
"""Least share of a host's cores that the timers of its processes leave to jobs."""


class Clock:
    """Makes calls at their times; calls that are due at the same time run in the order in which they were requested."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Then]] = []
        self._numbers = count()

    def after(self, delay_s: float, then: Then) -> None:
        """Call ``then`` after a delay."""
        # The number orders calls of equal times, because functions have no order and the heap would compare them.
        heapq.heappush(self._due, (self.now_s + delay_s, next(self._numbers), then))

    def step(self) -> bool:
        """Advance to the next call that is due; return whether there was one."""
        if not self._due:
            return False
        self.now_s, _, then = heapq.heappop(self._due)
        then()
        return True


@dataclass(slots=True)
class Process:
    """A process on a host."""

    host: "Host"
    role: Role
    """Kind of the process's role."""
    width: float
    """Most cores that its threads get at the same time."""
    timers: float = 0.0
    """Cores that its timers keep busy, independent of its jobs."""
    messages: int = field(default=0, init=False)
    """Messages that it has sent or received."""
    message_bytes: int = field(default=0, init=False)
    """Bytes in those messages."""
    batches: int = field(default=0, init=False)
    """Batches in those messages."""
    busy_s: float = field(default=0.0, init=False)
    """Processor seconds that it has used."""
    done_s: float = field(default=0.0, init=False)
    """Processor seconds that a job present from the start would have received."""
    jobs: list[tuple[float, int, Then]] = field(default_factory=list, init=False)
    """Running jobs, each with the ``done_s`` at which it ends."""

    def work(self, seconds: float, then: Then) -> None:
        """Use ``seconds`` of a processor in parallel with the running jobs, and then call ``then``."""
        self.host.begin(self, seconds, then)


class Host:
    """Cores that the processes of a host share, and its network to other hosts."""

    def __init__(self, clock: Clock, *, cores: float, network_bytes_per_s: float) -> None:
        self.clock, self.cores, self._network = clock, cores, network_bytes_per_s
        self._left = cores
        self.processes: list[Process] = []
        self._running: list[Process] = []
        self._numbers = count()
        self._at_s = 0.0
        self._turn = 0
        self._sent_at_s = 0.0
        self.rest = 0.0
        """Share of the host's cores that stayed idle, averaged over recent steps. A process that runs after idle time
        finds caches and cores in another state."""
        self._had_s = 0.0
        self._looked_s = 0.0, 0.0
        self._looks = 0

    def process(self, role: Role, width: float = 1.0, *, timers: float = 0.0) -> Process:
        """Start a process whose timers keep ``timers`` cores busy."""
        # Until now, other processes had the cores that its timers take.
        self.settle()
        # The timers of hundreds of ranks, simulated on a few cores, would otherwise take more than the cores.
        timers = min(timers, self._left - self.cores * _LEAST_LEFT)
        made = Process(self, role, width, timers)
        # Timers run independently of everything else, and jobs share what they leave.
        self._left -= timers
        self.processes.append(made)
        self._look_ahead()
        return made

    def transfer_s(self, size_bytes: int) -> float:
        """Send bytes through the network of this host, behind earlier bytes; return how long that takes."""
        self._sent_at_s = max(self._sent_at_s, self.clock.now_s) + size_bytes / self._network
        return self._sent_at_s - self.clock.now_s

    def begin(self, process: Process, seconds: float, then: Then) -> None:
        """Run a job of a process."""
        self.settle()
        # Of thousands of processes, only those with work are visited at each event.
        if not process.jobs:
            self._running.append(process)
        heapq.heappush(process.jobs, (process.done_s + seconds, next(self._numbers), then))
        self._look_ahead()

    def look(self, steps: int) -> None:
        """Include the step that ends now in ``rest``, an average over the last ``steps`` steps."""
        self.settle()
        began_s, had_s = self._looked_s
        self._looked_s = self._at_s, self._had_s
        if not (passed_s := self._at_s - began_s):
            return
        self._looks = min(self._looks + 1, steps)
        idle = 1.0 - (self._had_s - had_s) / (passed_s * self.cores)
        self.rest += (max(0.0, idle) - self.rest) / self._looks

    def _wanted(self) -> float:
        """Return how many cores processes want, apart from their timers."""
        return sum(min(len(process.jobs), process.width) for process in self._running)

    def _share(self, wanted: float) -> float:
        """Return the share of the wanted cores that processes get."""
        return min(1.0, self._left / wanted) if wanted else 1.0

    def settle(self) -> None:
        """Add up the processor time that processes have used until now."""
        passed_s = self.clock.now_s - self._at_s
        self._at_s = self.clock.now_s
        # Most calls happen at one moment, when hundreds of ranks begin; processes are not visited each time.
        wanted = self._wanted() if passed_s else 0.0
        share = self._share(wanted)
        self._had_s += passed_s * (min(wanted, self._left) + self.cores - self._left)
        for process in self._running if passed_s else ():
            had_s = passed_s * share * min(len(process.jobs), process.width)
            process.busy_s += had_s
            # Jobs of a process share evenly, so in this measure the end of a job is fixed at its begin.
            process.done_s += had_s / len(process.jobs)
        for process in self.processes if passed_s else ():
            process.busy_s += passed_s * process.timers

    def _look_ahead(self) -> None:
        """Schedule a wake-up at the end of the next job; the wake-up scheduled before is void."""
        # A wake-up cannot be removed from the clock, so its number marks an older one as void.
        self._turn += 1
        if not self._running:
            return
        share, turn = self._share(self._wanted()), self._turn
        soonest_s = min(
            (process.jobs[0][0] - process.done_s)
            * len(process.jobs)
            / (share * min(len(process.jobs), process.width))
            for process in self._running
        )
        self.clock.after(max(soonest_s, 0.0), lambda: self._end(turn))

    def _end(self, turn: int) -> None:
        if turn != self._turn:
            return
        self.settle()
        # Collected first, because a job that begins in between would change the shares by which the others are judged.
        ended: list[Then] = []
        for process in self._running:
            while process.jobs and self._is_over(process.jobs[0][0] - process.done_s):
                ended.append(heapq.heappop(process.jobs)[2])
        self._running = [process for process in self._running if process.jobs]
        self._look_ahead()
        # Called last, because the calls may begin jobs here, which schedule a new wake-up.
        for then in ended:
            then()

    def _is_over(self, left_s: float) -> bool:
        """Return whether the rest of a job is so small that adding it to the present time would not change the time."""
        now_s = self.clock.now_s
        return left_s <= _NOTHING_S or now_s + left_s == now_s


class Lane:
    """Threads of a process that handle calls in the order of their arrival."""

    def __init__(self, process: Process, threads: int) -> None:
        self.process, self._free = process, threads
        self._waiting: deque[Callable[[], tuple[float, Then]]] = deque()

    def call(self, begin: Callable[[], tuple[float, Then]]) -> None:
        """Carry out a call once a thread is free: ``begin`` returns the time it takes and what follows."""
        self._waiting.append(begin)
        self._go_on()

    def keep(self) -> None:
        """Keep a thread busy: the call that has just been carried out waits for something else."""
        self._free -= 1

    def let_go(self) -> None:
        """Let a kept thread take other calls."""
        self._free += 1
        self._go_on()

    def _go_on(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            seconds, then = self._waiting.popleft()()
            self.process.work(seconds, lambda then=then: self._ended(then))  # type: ignore[misc]

    def _ended(self, then: Then) -> None:
        self._free += 1
        then()
        self._go_on()
