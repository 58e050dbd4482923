"""Layout of a plane: the number and names of its actors, the ranks that they serve, and their shared memory."""

from collections.abc import Sequence

from omniload.actors.plane import PlaneSpec
from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig

__all__ = [
    "PLANNER",
    "constructors_by_host",
    "dp_ranks_of_constructors",
    "home_roles",
    "ranks_with_threads",
    "require_threads",
    "store_bytes",
]

PLANNER = "planner"
_RANKS_PER_CONSTRUCTOR = 8
_CORES_PER_CONSTRUCTOR = 2
"""Cores of a single host per constructor; more constructors than cores, with their suppliers, only take memory."""
_BYTES_PER_TOKEN = 16
_STORE_FLOOR_BYTES = 256 << 20


def dp_ranks_of_constructors(spec: PlaneSpec, cores: int) -> dict[str, tuple[int, ...]]:
    """Return the data-parallel ranks of each data constructor, by name, if all are on a host with ``cores`` cores."""
    dp = spec.tree.size_of("dp")
    usual = min(-(-dp // _RANKS_PER_CONSTRUCTOR), max(1, cores // _CORES_PER_CONSTRUCTOR))
    num_constructors = min(dp, spec.mix.runtime.constructors or usual)
    return {
        f"constructor-{i}": tuple(spec.tree.dp_ranks_of(i, num_constructors))
        for i in range(num_constructors)
    }


def constructors_by_host(
    spec: PlaneSpec, host_of_R: Sequence[str]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return host and data-parallel ranks of each data constructor, by name; it is on the host of its ranks.

    Every host has at least one; further constructors of ``runtime.constructors`` go where most ranks
    are.

    Args:
        spec: The run.
        host_of_R: Host of each data-parallel rank.
    """
    dp = len(host_of_R)
    # Not by cores, because the cores of other hosts are unknown here.
    asked = spec.mix.runtime.constructors or -(-dp // _RANKS_PER_CONSTRUCTOR)
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for host in dict.fromkeys(host_of_R):
        ranks = [r for r in range(dp) if host_of_R[r] == host]
        count = min(len(ranks), max(1, round(asked * len(ranks) / dp)))
        for i in range(count):
            part = tuple(r for n, r in enumerate(ranks) if n * count // len(ranks) == i)
            found[f"constructor-{len(found)}"] = (host, part)
    return found


def home_roles(spec: PlaneSpec, constructors: Sequence[str]) -> tuple[str, ...]:
    """Return roles that can report the heartbeats of the opener's host: all roles that start there for good.

    Loaders with a place of their own would report the host where they are, and so would constructors that follow ranks.
    """
    runtime = spec.mix.runtime
    if runtime.place.loaders is None:
        return PLANNER, "loader-0"
    return PLANNER, *(() if runtime.elastic else constructors[:1])


def ranks_with_threads(spec: PlaneSpec, ranks: int) -> int:
    """Return for how many data-parallel ranks a constructor has threads if it is opened for ``ranks``.

    A waiting rank holds a thread. If ranks may join, there is room for as many as a constructor usually serves.
    """
    return max(ranks, _RANKS_PER_CONSTRUCTOR) if spec.mix.runtime.elastic else ranks


def require_threads(dp: int, num_constructors: int, ranks_each: int) -> None:
    """Refuse more ranks than constructors have threads for, because waiting ranks would block the building.

    Raises:
        ConfigError: There are too few constructors; names the number needed.
    """
    if -(-dp // num_constructors) > ranks_each:
        raise ConfigError(
            f"dp {dp} over {num_constructors} data constructors is more than the {ranks_each} ranks for which each "
            f"constructor has threads; open the plane with runtime.constructors {-(-dp // ranks_each)} or more"
        )


def store_bytes(mix: MixConfig) -> int:
    """Return the shared memory for the steps in flight, twice: once as slices, once as batches."""
    steps = mix.steps_ahead + 4
    return max(_STORE_FLOOR_BYTES, 2 * steps * mix.batch.tokens * _BYTES_PER_TOKEN)
