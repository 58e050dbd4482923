"""What a simulation found, and the meter over its processes that finds it."""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import numpy as np

from omniload.base.errors import ConfigError
from omniload.simulation.clock import Host, Process
from omniload.simulation.job import Job
from omniload.simulation.loaders import SimulatedLoader, SimulatedReader, SimulatedShadow
from omniload.simulation.profile import Role
from omniload.simulation.ranks import Rank, Trainer
from omniload.simulation.roles import SimulatedConstructor, SimulatedPlanner
from omniload.simulation.wire import Wire

__all__ = [
    "Connections",
    "HostFigures",
    "Meter",
    "RoleFigures",
    "Simulated",
    "Waits",
    "knee_of",
    "limit_of",
]

_KNEE = 0.05
"""Share of the time that ranks may wait."""
_FULL = 0.9
"""Share of a core from which on a process is what others wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Waits of the last rank of each step, in seconds."""

    mean_s: float
    p50_s: float
    p99_s: float
    longest_s: float

    @classmethod
    def of(cls, waits_s: Sequence[float]) -> "Waits":
        """Return the figures of the waits of some steps; p99 is the highest where there are fewer than 100."""
        # A wait that was, not one between two: with few steps that would be nobody's.
        p50, p99 = np.quantile(waits_s, (0.5, 0.99), method="higher").tolist()
        return cls(
            mean_s=float(np.mean(waits_s)), p50_s=p50, p99_s=p99, longest_s=float(max(waits_s))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleFigures:
    """The processes of one role."""

    role: Role
    count: int
    cores: float
    """Cores that they keep busy, all together."""
    busiest: float
    """Share of a core of the busiest one."""
    messages_step: float
    """Messages of a step that they send or take, all together."""
    message_bytes_step: float
    """Their bytes."""
    batches_step: float
    """Batches of single ranks in them."""
    memory_bytes: int
    """Most memory of one of them at a step's begin."""
    connections: int
    """Most processes that one of them speaks to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFigures:
    """Memory and cores of the data plane on hosts, without what ranks train with."""

    first_memory_bytes: int
    """On the first host, which has planner and loaders."""
    other_memory_bytes: int
    """The most on any other; 0 where there is none."""
    first_cores: float
    other_cores: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Connections:
    """Pairs of processes that spoke to each other."""

    total: int
    without: int
    """What it would be if every rank opened every source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What a data plane would do."""

    runtime: str
    ranks: int
    hosts: int
    sources: int
    loaders: int
    readers: int
    """Further readers of sources at the end, beside the loaders."""
    constructors: int
    seed: int
    steps: int
    """Steps that are counted; those before, in which buffers fill, are not."""
    step_s: float
    """What training on a step takes, as it was asked for."""
    tokens_per_step: float
    """Without padding."""
    seconds: float
    """Virtual time of the steps."""
    tokens_per_s: float
    waits: Waits
    planner_step_s: float
    """Processor seconds that the planner spends on a step, messages included."""
    planner_share: float
    """Share of a core that it keeps busy."""
    cpu_step_s: float
    """Processor seconds of all processes for a step."""
    roles: tuple[RoleFigures, ...]
    memory: HostFigures
    connections: Connections

    @property
    def stalled_share(self) -> float:
        """Share of the time that ranks wait."""
        return self.waits.mean_s * self.steps / self.seconds


class _Holds(Protocol):
    """A role that holds something in a process."""

    @property
    def process(self) -> Process: ...

    @property
    def held_bytes(self) -> int: ...


@dataclass(slots=True, kw_only=True)
class Meter:
    """What the processes of a simulated plane do in the steps that count, and the most that each holds."""

    job: Job
    runtime: str
    hosts: Sequence[Host]
    wire: Wire
    planner: SimulatedPlanner
    loaders: Sequence[SimulatedLoader]
    constructors: Sequence[SimulatedConstructor]
    ranks: Sequence[Rank]
    _before: dict[int, Process] = field(default_factory=dict, init=False)
    """Copies of processes as they were when the steps began that count, by the ``id`` of each."""
    _peaks: dict[int, int] = field(default_factory=dict, init=False)
    """Bytes, the same."""
    _planned_before: int = field(default=0, init=False)
    _spent_before_s: float = field(default=0.0, init=False)

    def begin(self) -> None:
        """Count from now on."""
        self._before = {id(process): copy(process) for process in self._processes()}
        self._planned_before = self.planner.steps
        self._spent_before_s = self.planner.spent_s

    def weigh(self) -> None:
        """Note what every process takes of memory now, where it is more than before."""
        held: dict[int, int] = {}
        for each in self._holders():
            held[id(each.process)] = held.get(id(each.process), 0) + each.held_bytes
        # A rank's process is its trainer's, whose memory is not the data plane's.
        costs = self.wire.costs
        own = {"node": costs.node_bytes, "rank": 0}
        for process in self._processes():
            size = held.get(id(process), 0) + own.get(process.role, costs.process_bytes)
            self._peaks[id(process)] = max(self._peaks.get(id(process), 0), size)

    def found(self, trainer: Trainer) -> Simulated:
        """Return what the last ``job.steps`` steps of a job came to.

        Raises:
            ConfigError: They are too few for time to pass in them.
        """
        job, steps = self.job, self.job.steps
        # From the begin of the last step that does not count: ranks wait for the first one that does from there on.
        seconds = trainer.begins_s[-1] - trainer.begins_s[-steps - 1]
        if not seconds:
            raise ConfigError(
                f"--steps is {steps}, and no time passes in so few, as {job.spec.mix.steps_at_once} come at once: "
                "simulate more of them"
            )
        # What was planned, not `batch.tokens`: rows that are not packed full hold fewer.
        counted = range(trainer.num_steps - steps, trainer.num_steps)
        tokens = sum(self.planner.tokens[k] for k in counted) / steps
        planned = max(1, self.planner.steps - self._planned_before)
        spent_s = self.planner.spent_s - self._spent_before_s
        busy_s = sum(self._busy_s(process) for process in self._processes())
        return Simulated(
            runtime=self.runtime,
            ranks=len(self.ranks),
            hosts=job.hosts,
            sources=len(job.originals),
            loaders=len(self.loaders),
            readers=sum(1 for _ in self._readers()),
            constructors=len(self.constructors),
            seed=job.seed,
            steps=steps,
            step_s=job.step_s,
            tokens_per_step=tokens,
            seconds=seconds,
            tokens_per_s=tokens * steps / seconds,
            waits=Waits.of(trainer.waits_s[-steps:]),
            planner_step_s=spent_s / planned,
            planner_share=spent_s / seconds,
            cpu_step_s=busy_s / steps,
            roles=tuple(self._role(role, seconds) for role in self._roles()),
            memory=self._memory(seconds),
            connections=Connections(
                total=len(self.wire.connections), without=len(self.ranks) * len(job.originals)
            ),
        )

    def _processes(self) -> Iterator[Process]:
        return (process for host in self.hosts for process in host.processes)

    def _readers(self) -> Iterator[SimulatedReader]:
        return (each for loader in self.loaders for its in loader.readers.values() for each in its)

    def _shadows(self) -> Iterator[SimulatedShadow]:
        return (each for loader in self.loaders for each in loader.shadows)

    def _holders(self) -> Iterator[_Holds]:
        readers, shadows = self._readers(), self._shadows()
        planner = (self.planner,)
        return chain(self.loaders, shadows, readers, self.constructors, self.ranks, planner)

    def _busy_s(self, process: Process) -> float:
        return process.busy_s - self._before_of(process).busy_s

    def _before_of(self, process: Process) -> Process:
        """Return a process as it was; one that was started since, to read a source, had done nothing."""
        return self._before.get(id(process)) or Process(process.host, process.role, process.width)

    def _roles(self) -> list[Role]:
        return list(dict.fromkeys(process.role for process in self._processes()))

    def _role(self, role: Role, seconds: float) -> RoleFigures:
        its = [process for process in self._processes() if process.role == role]
        busy = [self._busy_s(process) / seconds for process in its]
        before, steps = [self._before_of(each) for each in its], self.job.steps
        since = list(zip(its, before, strict=True))
        connections = self.wire.connections_by()
        return RoleFigures(
            role=role,
            count=len(its),
            cores=sum(busy),
            busiest=max(busy),
            messages_step=sum(now.messages - then.messages for now, then in since) / steps,
            message_bytes_step=sum(n.message_bytes - then.message_bytes for n, then in since)
            / steps,
            batches_step=sum(now.batches - then.batches for now, then in since) / steps,
            memory_bytes=max(self._peaks.get(id(process), 0) for process in its),
            connections=max(connections.get(id(process), 0) for process in its),
        )

    def _memory(self, seconds: float) -> HostFigures:
        def of(host: Host) -> tuple[int, float]:
            return (
                sum(self._peaks[id(each)] for each in host.processes),
                sum(map(self._busy_s, host.processes)) / seconds,
            )

        first, *others = map(of, self.hosts)
        return HostFigures(
            first_memory_bytes=first[0],
            first_cores=first[1],
            other_memory_bytes=max((size for size, _ in others), default=0),
            other_cores=max((cores for _, cores in others), default=0.0),
        )


def knee_of(sizes: Sequence[Simulated]) -> int | None:
    """Return the fewest ranks from which on they wait a twentieth of the time; ``None`` where they never do.

    Args:
        sizes: The same job with more and more ranks.
    """
    knee = None
    # From the largest down: a size in the middle that waits by chance, before one that does not, is no knee.
    for found in reversed(sizes):
        if found.stalled_share < _KNEE:
            break
        knee = found.ranks
    return knee


def limit_of(found: Simulated) -> str:
    """Say what a job waits for, if for anything."""
    # Ranks that do not train wait all the time: then the limit is what is asked for.
    if found.step_s and found.stalled_share < _KNEE:
        return f"data is no limit: ranks wait {found.stalled_share:.1%} of the time"
    busiest = max(found.roles, key=lambda role: role.busiest)
    waits = f"ranks wait {found.stalled_share:.0%} of the time"
    if busiest.busiest >= _FULL:
        return f"{waits}; the limit is a {busiest.role}, busy {busiest.busiest:.0%} of a core"
    return (
        f"{waits}; no process is busy all the time: cores of the first host "
        f"({found.memory.first_cores:.2f} in use), its network, or the time that messages take"
    )
