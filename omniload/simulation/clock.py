"""Virtual time: what is to happen, in order, and processes that share the cores of their hosts.

Cores are shared as Linux shares them, evenly among all that want to run; the threads of one process get
``width`` cores at most, as they share an interpreter lock.
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
"""What is left of a job by rounding."""
_LEAST_LEFT = 0.05
"""Share of a host's cores that the timers of its processes leave to jobs at least."""


class Clock:
    """Calls what was asked for at its time; what is due together comes in the order it was asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Then]] = []
        self._numbers = count()

    def after(self, delay_s: float, then: Then) -> None:
        """Call ``then`` so much later."""
        # The number decides between equal times: functions have no order, and a heap would compare them.
        heapq.heappush(self._due, (self.now_s + delay_s, next(self._numbers), then))

    def step(self) -> bool:
        """Go on to what is due next; return whether there was anything."""
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
    """Kind of role."""
    width: float
    """Cores that its threads get at once."""
    timers: float = 0.0
    """Cores that its timers keep busy, whatever else it does."""
    messages: int = field(default=0, init=False)
    """Messages that it has sent or taken."""
    message_bytes: int = field(default=0, init=False)
    """Their bytes."""
    batches: int = field(default=0, init=False)
    """Batches in them."""
    busy_s: float = field(default=0.0, init=False)
    """Processor seconds that it has had."""
    done_s: float = field(default=0.0, init=False)
    """Processor seconds that a job which was always there has had."""
    jobs: list[tuple[float, int, Then]] = field(default_factory=list, init=False)
    """What runs: at which ``done_s`` each ends."""

    def work(self, seconds: float, then: Then) -> None:
        """Use so much of a processor beside whatever else runs, and then call ``then``."""
        self.host.begin(self, seconds, then)


class Host:
    """Cores that the processes of a host share, and its way to other hosts."""

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
        """Part of its cores that nothing has wanted, on average over late steps: who runs finds caches and cores as
        others left them."""
        self._had_s = 0.0
        self._looked_s = 0.0, 0.0
        self._looks = 0

    def process(self, role: Role, width: float = 1.0, *, timers: float = 0.0) -> Process:
        """Start a process, whose timers keep so many cores busy."""
        # Until now others had the cores that its timers take.
        self.settle()
        # Timers of hundreds of ranks, simulated on a few cores, would take more than those.
        timers = min(timers, self._left - self.cores * _LEAST_LEFT)
        made = Process(self, role, width, timers)
        # Timers run whatever else there is: jobs share what they leave.
        self._left -= timers
        self.processes.append(made)
        self._look_ahead()
        return made

    def transfer_s(self, size_bytes: int) -> float:
        """Have bytes go through the network of this host, behind those before them; return how long that takes."""
        self._sent_at_s = max(self._sent_at_s, self.clock.now_s) + size_bytes / self._network
        return self._sent_at_s - self.clock.now_s

    def begin(self, process: Process, seconds: float, then: Then) -> None:
        """Run a job of a process."""
        self.settle()
        # Only those that have work are gone through at each event, of thousands.
        if not process.jobs:
            self._running.append(process)
        heapq.heappush(process.jobs, (process.done_s + seconds, next(self._numbers), then))
        self._look_ahead()

    def look(self, steps: int) -> None:
        """Have the step that ends now count in ``rest``, as one of so many late ones."""
        self.settle()
        began_s, had_s = self._looked_s
        self._looked_s = self._at_s, self._had_s
        if not (passed_s := self._at_s - began_s):
            return
        self._looks = min(self._looks + 1, steps)
        idle = 1.0 - (self._had_s - had_s) / (passed_s * self.cores)
        self.rest += (max(0.0, idle) - self.rest) / self._looks

    def _wanted(self) -> float:
        """Return how many cores processes want, beside their timers."""
        return sum(min(len(process.jobs), process.width) for process in self._running)

    def _share(self, wanted: float) -> float:
        """Return the part of what processes want that they get."""
        return min(1.0, self._left / wanted) if wanted else 1.0

    def settle(self) -> None:
        """Count what processes have had until now."""
        passed_s = self.clock.now_s - self._at_s
        self._at_s = self.clock.now_s
        # Most calls are of one moment, in which hundreds of ranks begin: they are not gone through each time.
        wanted = self._wanted() if passed_s else 0.0
        share = self._share(wanted)
        self._had_s += passed_s * (min(wanted, self._left) + self.cores - self._left)
        for process in self._running if passed_s else ():
            had_s = passed_s * share * min(len(process.jobs), process.width)
            process.busy_s += had_s
            # Its jobs share alike: in this measure it is known as one begins when it ends, whatever comes and goes.
            process.done_s += had_s / len(process.jobs)
        for process in self.processes if passed_s else ():
            process.busy_s += passed_s * process.timers

    def _look_ahead(self) -> None:
        """Wake up when the next job ends; what was said before holds no more."""
        # A wake-up cannot be taken out of the clock again: by its number an older one does nothing.
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
        # Collected first: a job that begins in the middle would change the shares that the others are judged by.
        ended: list[Then] = []
        for process in self._running:
            while process.jobs and self._is_over(process.jobs[0][0] - process.done_s):
                ended.append(heapq.heappop(process.jobs)[2])
        self._running = [process for process in self._running if process.jobs]
        self._look_ahead()
        # Last of all: what follows may begin jobs here, which look ahead anew.
        for then in ended:
            then()

    def _is_over(self, left_s: float) -> bool:
        """Tell whether so little of a job is left that time, as far on as it is, would stand still for it."""
        now_s = self.clock.now_s
        return left_s <= _NOTHING_S or now_s + left_s == now_s


class Lane:
    """Threads of a process that take calls in the order they came."""

    def __init__(self, process: Process, threads: int) -> None:
        self.process, self._free = process, threads
        self._waiting: deque[Callable[[], tuple[float, Then]]] = deque()

    def call(self, begin: Callable[[], tuple[float, Then]]) -> None:
        """Carry out a call once a thread is free: ``begin`` says what it takes, and what follows."""
        self._waiting.append(begin)
        self._go_on()

    def keep(self) -> None:
        """Hold on to the thread of the call that has just been carried out: it waits for something else."""
        self._free -= 1

    def let_go(self) -> None:
        """Let a thread that was kept take other calls."""
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
