"""The job to simulate: mix, ranks and hosts, and the values that follow from them as when a job is opened."""

from dataclasses import dataclass

from omniload.actors.plane import PlaneSpec
from omniload.actors.ray.layout import constructors_by_host, dp_ranks_of_constructors
from omniload.base.errors import ConfigError
from omniload.machine.loader_groups import LoaderShare, SourceCost, costs_of, partition
from omniload.machine.planner import Planner
from omniload.machine.scaling.coming import PLANS_READ_AHEAD
from omniload.mix.config import MixConfig
from omniload.mix.state import MixState
from omniload.plan.world import World
from omniload.simulation.profile import Profile, SourceCosts
from omniload.source.kept_profile import KeptProfile

__all__ = [
    "Job",
    "a_planner_of",
    "constructors_of",
    "hosts_of",
    "reads_of",
    "shares_of",
    "steps_that_count",
    "warm_up_of",
]

_LEAST_STEPS, _WINDOWS = 48, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job to simulate."""

    spec: PlaneSpec
    """Mix and ranks."""
    originals: tuple[str, ...]
    """Name of the measured source that stands for each source."""
    hosts: int = 1
    cores: float = 1.0
    """Cores of a host that the data plane gets."""
    network_bytes_per_s: float = 1.25e9
    """Network speed of a host; 10 Gbit/s by default."""
    step_s: float = 0.0
    """Seconds of training on a step."""
    steps: int = 48
    """Number of counted steps."""
    seed: int = 0

    def costs(self, profile: Profile) -> list[SourceCosts]:
        """Return the measured costs of each source.

        Raises:
            ConfigError: A source is not in the profile.
        """
        if missing := sorted(set(self.originals) - profile.sources.keys()):
            raise ConfigError(
                f"the profile has no source {missing[0]!r}, only {sorted(profile.sources)[:8]}; measure this mix again"
            )
        return [profile.sources[name] for name in self.originals]


def warm_up_of(mix: MixConfig) -> int:
    """Return how many steps do not count: while batches come from buffers that filled at once, a job seems too fast.

    These are the steps that are built ahead, and those whose samples loaders read ahead of plans.
    """
    return mix.steps_ahead + (1 + PLANS_READ_AHEAD) * mix.steps_at_once


def steps_that_count(mix: MixConfig) -> int:
    """Return the default number of counted steps: several windows, because the steps of a window arrive together."""
    return max(_LEAST_STEPS, _WINDOWS * mix.steps_at_once)


def hosts_of(ranks: int, hosts: int) -> list[str]:
    """Return the host of each rank; neighbours share a host.

    Raises:
        ConfigError: There are more hosts than ranks.
    """
    if hosts > ranks:
        raise ConfigError(
            f"--hosts is {hosts}, more than --ranks {ranks}; give every host a rank at least"
        )
    # All numbers have one width, so that the order of names is the order of ranks.
    return [f"host-{rank * hosts // ranks:05}" for rank in range(ranks)]


def constructors_of(job: Job) -> list[tuple[str, tuple[int, ...]]]:
    """Return the host and the data-parallel ranks of each data constructor, as when a job of this size is opened."""
    hosts = hosts_of(job.spec.tree.size_of("dp"), job.hosts)
    if job.hosts > 1:
        return list(constructors_by_host(job.spec, hosts).values())
    # Divided by the cores of the simulated host, not of this host.
    found = dp_ranks_of_constructors(job.spec, max(1, round(job.cores)))
    return [(hosts[0], ranks) for ranks in found.values()]


def reads_of(job: Job, profile: Profile) -> list[SourceCost]:
    """Return the costs of each source for its loader, and its number of readers, as when a job is opened."""
    spec, costs = job.spec, job.costs(profile)
    kept = {
        name: KeptProfile(
            # A kept profile allows at most a second per token, but this profile may be from a slower machine.
            preprocess_s_per_token=min(1.0, _token_s(source)),
            block_bytes=source.block_bytes,
        )
        for name, source in zip(spec.mix.names, costs, strict=True)
    }
    return costs_of(spec.mix, kept, cores=max(1, int(job.cores)))


def shares_of(job: Job, profile: Profile) -> tuple[LoaderShare, ...]:
    """Return the loaders, as when a job of this size is opened."""
    runtime = job.spec.mix.runtime
    return partition(
        reads_of(job, profile), num_loaders=runtime.loaders, max_loaders=runtime.scaling.most
    )


def _token_s(costs: SourceCosts) -> float:
    tokens = sum(costs.lengths) / len(costs.counts) * costs.block_positions
    return costs.token_s + costs.block_s / max(1.0, tokens)


def a_planner_of(job: Job, profile: Profile) -> Planner:
    """Return the planner of a job that begins at step 0."""
    spec = job.spec
    return Planner(
        mix=spec.mix,
        world=World(tree=spec.tree),
        records_S=[costs.positions_per_epoch for costs in job.costs(profile)],
        state=MixState.start(len(spec.mix.names)),
        # Nothing is resumed from it, so its fingerprint is not compared.
        fingerprint={},
    )
