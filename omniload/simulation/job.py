"""The job that is simulated: mix, ranks, hosts, and what follows from them as it does when a job is opened."""

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
    """The job that is simulated."""

    spec: PlaneSpec
    """Mix and ranks."""
    originals: tuple[str, ...]
    """Of each source, the one that was measured for it."""
    hosts: int = 1
    cores: float = 1.0
    """Of a host, those that the data plane gets."""
    network_bytes_per_s: float = 1.25e9
    """Of a host: 10 Gbit/s."""
    step_s: float = 0.0
    """What training on a step takes."""
    steps: int = 48
    """Steps that count."""
    seed: int = 0

    def costs(self, profile: Profile) -> list[SourceCosts]:
        """Return what was measured of each source.

        Raises:
            ConfigError: A source is not in the profile.
        """
        if missing := sorted(set(self.originals) - profile.sources.keys()):
            raise ConfigError(
                f"the profile has no source {missing[0]!r}, only {sorted(profile.sources)[:8]}; measure this mix again"
            )
        return [profile.sources[name] for name in self.originals]


def warm_up_of(mix: MixConfig) -> int:
    """Return how many steps do not count: a job is not as fast as it seems while batches come from what filled at once.

    Those are steps that are built ahead, and samples that loaders read ahead of plans.
    """
    return mix.steps_ahead + (1 + PLANS_READ_AHEAD) * mix.steps_at_once


def steps_that_count(mix: MixConfig) -> int:
    """Return how many steps count where nobody says: several windows, as the steps of one come in one moment."""
    return max(_LEAST_STEPS, _WINDOWS * mix.steps_at_once)


def hosts_of(ranks: int, hosts: int) -> list[str]:
    """Return the host of each rank: neighbours share one.

    Raises:
        ConfigError: There are more hosts than ranks.
    """
    if hosts > ranks:
        raise ConfigError(
            f"--hosts is {hosts}, more than --ranks {ranks}; give every host a rank at least"
        )
    # Of one width: in the order of names they are in that of ranks.
    return [f"host-{rank * hosts // ranks:05}" for rank in range(ranks)]


def constructors_of(job: Job) -> list[tuple[str, tuple[int, ...]]]:
    """Return host and data-parallel ranks of each data constructor, as a job of this size is opened with them."""
    hosts = hosts_of(job.spec.tree.size_of("dp"), job.hosts)
    if job.hosts > 1:
        return list(constructors_by_host(job.spec, hosts).values())
    # Shared out by cores, of the host that is simulated, not of this one.
    found = dp_ranks_of_constructors(job.spec, max(1, round(job.cores)))
    return [(hosts[0], ranks) for ranks in found.values()]


def reads_of(job: Job, profile: Profile) -> list[SourceCost]:
    """Return what each source costs its loader, and how many read it, as a job of this size is opened with them."""
    spec, costs = job.spec, job.costs(profile)
    kept = {
        name: KeptProfile(
            # A kept profile takes no more than a second a token; a profile here may be of a slower machine.
            preprocess_s_per_token=min(1.0, _token_s(source)),
            block_bytes=source.block_bytes,
        )
        for name, source in zip(spec.mix.names, costs, strict=True)
    }
    return costs_of(spec.mix, kept, cores=max(1, int(job.cores)))


def shares_of(job: Job, profile: Profile) -> tuple[LoaderShare, ...]:
    """Return the loaders as a job of this size is opened with them."""
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
        positions_per_epoch_S=[costs.positions_per_epoch for costs in job.costs(profile)],
        state=MixState.start(len(spec.mix.names)),
        # Nothing is resumed from it, so that nothing is compared.
        fingerprint={},
    )
