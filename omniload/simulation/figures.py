"""Results of a simulation, and the meter over its processes that measures them."""

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
"""Share of the time from which on ranks count as waiting."""
_FULL = 0.9
"""Share of a core from which on a process is a bottleneck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Waits of the last rank of each step, in seconds."""

    mean_s: float
    p50_s: float
    p99_s: float
    longest_s: float

    @classmethod
    def of(cls, waits_s: Sequence[float]) -> "Waits":
        """Return the statistics of the waits of some steps; p99 is the highest wait if there are fewer than 100."""
        # Each figure is a wait that occurred; with few steps, a value between two would be no rank's.
        p50, p99 = np.quantile(waits_s, (0.5, 0.99), method="higher").tolist()
        return cls(
            mean_s=float(np.mean(waits_s)), p50_s=p50, p99_s=p99, longest_s=float(max(waits_s))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleFigures:
    """Figures of the processes of one role."""

    role: Role
    count: int
    cores: float
    """Cores that they keep busy in total."""
    busiest: float
    """Share of a core that the busiest process uses."""
    messages_step: float
    """Messages per step that they send or receive in total."""
    message_bytes_step: float
    """Bytes of those messages."""
    batches_step: float
    """Batches of single ranks in those messages."""
    memory_bytes: int
    """Most memory of one process at the begin of a step."""
    connections: int
    """Most processes that one process communicates with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFigures:
    """Memory and cores of the data plane on hosts, without those of training."""

    first_memory_bytes: int
    """Memory on the first host, which has planner and loaders."""
    other_memory_bytes: int
    """Most memory on any other host; 0 without other hosts."""
    first_cores: float
    other_cores: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Connections:
    """Number of pairs of processes that communicated."""

    total: int
    without: int
    """Number of connections if every rank opened every source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Predicted behaviour of a data plane."""

    runtime: str
    ranks: int
    hosts: int
    sources: int
    loaders: int
    readers: int
    """Further readers of sources at the end, in addition to the loaders."""
    constructors: int
    seed: int
    steps: int
    """Number of counted steps; earlier steps, in which buffers fill, do not count."""
    step_s: float
    """Seconds of training on a step, as given."""
    tokens_per_step: float
    """Tokens of a step, without padding."""
    seconds: float
    """Virtual time of the steps."""
    tokens_per_s: float
    waits: Waits
    planner_step_s: float
    """Processor seconds that the planner spends on a step, including messages."""
    planner_share: float
    """Share of a core that the planner keeps busy."""
    cpu_step_s: float
    """Processor seconds of all processes per step."""
    roles: tuple[RoleFigures, ...]
    memory: HostFigures
    connections: Connections

    @property
    def stalled_share(self) -> float:
        """Share of the time that ranks wait."""
        return self.waits.mean_s * self.steps / self.seconds


class _Holds(Protocol):
    """A role that holds memory in a process."""

    @property
    def process(self) -> Process: ...

    @property
    def held_bytes(self) -> int: ...


@dataclass(slots=True, kw_only=True)
class Meter:
    """Measures what the processes of a simulated plane do in the counted steps, and the most memory that each holds."""

    job: Job
    runtime: str
    hosts: Sequence[Host]
    wire: Wire
    planner: SimulatedPlanner
    loaders: Sequence[SimulatedLoader]
    constructors: Sequence[SimulatedConstructor]
    ranks: Sequence[Rank]
    _before: dict[int, Process] = field(default_factory=dict, init=False)
    """Copies of processes at the begin of the counted steps, by the ``id`` of each process."""
    _peaks: dict[int, int] = field(default_factory=dict, init=False)
    """Peak bytes, by the same ``id``."""
    _planned_before: int = field(default=0, init=False)
    _spent_before_s: float = field(default=0.0, init=False)

    def begin(self) -> None:
        """Start counting."""
        self._before = {id(process): copy(process) for process in self._processes()}
        self._planned_before = self.planner.steps
        self._spent_before_s = self.planner.spent_s

    def weigh(self) -> None:
        """Note the present memory of every process that exceeds its earlier peak."""
        held: dict[int, int] = {}
        for each in self._holders():
            held[id(each.process)] = held.get(id(each.process), 0) + each.held_bytes
        # A rank's process belongs to its trainer, whose memory is not the data plane's.
        costs = self.wire.costs
        own = {"node": costs.node_bytes, "rank": 0}
        for process in self._processes():
            size = held.get(id(process), 0) + own.get(process.role, costs.process_bytes)
            self._peaks[id(process)] = max(self._peaks.get(id(process), 0), size)

    def found(self, trainer: Trainer) -> Simulated:
        """Return the figures of the last ``job.steps`` steps of a job.

        Raises:
            ConfigError: The steps are so few that no time passes in them.
        """
        job, steps = self.job, self.job.steps
        # From the begin of the last uncounted step, because ranks wait for the first counted step from there on.
        seconds = trainer.begins_s[-1] - trainer.begins_s[-steps - 1]
        if not seconds:
            raise ConfigError(
                f"--steps is {steps}, and no time passes in so few, as {job.spec.mix.steps_at_once} come at once: "
                "simulate more of them"
            )
        # Planned tokens, not `batch.tokens`, because rows that are not packed full have fewer.
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
        """Return a process as it was at the start of counting; a reader that was started later had done nothing."""
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
    """Return the fewest ranks from which on they wait a twentieth of the time; ``None`` if they never do.

    Args:
        sizes: The same job with more and more ranks.
    """
    knee = None
    # From the largest down, because a middle size that waits by chance, before a larger one that does not, is no knee.
    for found in reversed(sizes):
        if found.stalled_share < _KNEE:
            break
        knee = found.ranks
    return knee


def limit_of(found: Simulated) -> str:
    """Return what limits a job, if anything does."""
    # Ranks that do not train wait all the time, so the limit is then what was asked for.
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
