"""What a simulation found."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omniload.simulation.profile import Role

__all__ = [
    "Connections",
    "HostFigures",
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
    """Further readers of sources, beside the loaders."""
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
