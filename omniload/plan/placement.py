"""Where the samples or rows of a step go: a bucket, and a microbatch of it.

Dealing is in two levels: first over the buckets (their sums decide how long a step
takes), then inside every bucket over its microbatches. What is dealt never depends
on the mesh; only where it goes does.

Shape suffixes:
    N  samples or rows      B  buckets      M  microbatches of a bucket
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.plan.balance import Balanced, BalanceMethod, balance
from omniload.plan.place_tree import BucketAxis, ClientPlaceTree, MeshAxis

__all__ = ["Distribution", "Placement", "imbalance_of", "num_microbatches_of", "place"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """What members are dealt to."""

    axis: BucketAxis = "dp"
    """Axis of the mesh that the buckets lie along."""
    group_size: int = 1
    """Neighbouring consumers that share a bucket."""
    microbatches: int = 1
    """Microbatches of a bucket."""
    max_count: int | None = None
    """Most members of one microbatch; any number when not given."""

    def __post_init__(self) -> None:
        for name in ("group_size", "microbatches", "max_count"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it is at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where every member goes, and how even that is."""

    members_N: NDArray[np.int64]
    """Number of each member among the samples or rows that were loaded, in the order of the step."""
    buckets_N: NDArray[np.int32]
    """Bucket of each member: its dp rank when dealt along dp without groups."""
    microbatches_N: NDArray[np.int32]
    """Microbatch of each member within its bucket."""
    loads_BM: NDArray[np.float64]
    """Cost of each microbatch of each bucket."""
    imbalance: float
    """Heaviest bucket over the mean."""
    bound: float
    """What ``imbalance`` cannot fall below for these members."""
    imbalance_before: float
    """Heaviest bucket over the mean when members are dealt in order."""
    imbalance_of_module: Mapping[str, float] = field(
        default_factory=lambda: MappingProxyType[str, float]({})
    )
    """Heaviest bucket over the mean by the cost of one module alone."""
    tree: ClientPlaceTree
    """The mesh."""
    distribution: Distribution
    """What members were dealt to."""
    broadcast: tuple[MeshAxis, ...] = ()
    """Axes along which one rank fetches and the trainer broadcasts."""

    @property
    def num_microbatches(self) -> int:
        """Microbatches of every bucket."""
        return self.distribution.microbatches

    @property
    def microbatch_imbalance(self) -> float:
        """Heaviest microbatch of all over their mean: what a pipeline waits for."""
        return imbalance_of(self.loads_BM)

    @property
    def bucket_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that consume each bucket."""
        return self.tree.buckets(self.distribution.axis, self.distribution.group_size)

    @property
    def fetching_ranks(self) -> tuple[int, ...]:
        """Ranks that fetch; the others are served by broadcast."""
        return self.tree.fetching_ranks(self.broadcast)

    def members_of(self, bucket: int, microbatch: int) -> NDArray[np.int64]:
        """Return the members of one microbatch of one bucket, in the order of the step."""
        chosen = np.flatnonzero((self.buckets_N == bucket) & (self.microbatches_N == microbatch))
        return self.members_N[chosen]

    def describe(self) -> str:
        """Return the figures of the placement as text."""
        deal = self.distribution
        held = (
            f"{len(self.members_N):,} members in {len(self.loads_BM):,} buckets along {deal.axis}"
        )
        known = f"in order {self.imbalance_before:.4f}, at best {self.bound:.4f}"
        lines = [
            f"{held}, {deal.microbatches} microbatches each",
            f"heaviest bucket over the mean: {self.imbalance:.4f} ({known})",
            f"heaviest microbatch over the mean: {self.microbatch_imbalance:.4f}",
            *(f"by {name} alone: {value:.4f}" for name, value in self.imbalance_of_module.items()),
            f"fetching: {len(self.fetching_ranks):,} of {self.tree.world_size:,} ranks",
        ]
        return "\n".join(lines)


def imbalance_of(loads: NDArray[np.float64]) -> float:
    """Return the heaviest load over the mean; 1 when there is nothing to carry."""
    mean = float(loads.mean())
    return float(loads.max()) / mean if mean > 0 else 1.0


def num_microbatches_of(num_rows: int, dp: int, rows_per_microbatch: int) -> int:
    """Return the microbatches that every dp rank needs for the rows of a step, at least 1.

    Raises:
        ValueError: An argument is below its least value.
    """
    for name, value, least in (
        ("num_rows", num_rows, 0),
        ("dp", dp, 1),
        ("rows_per_microbatch", rows_per_microbatch, 1),
    ):
        if value < least:
            raise ValueError(f"{name} is {value}; it is at least {least}")
    return max(1, -(-num_rows // (dp * rows_per_microbatch)))


def place(
    costs_N: NDArray[Any],
    num_buckets: int,
    distribution: Distribution,
    *,
    method: BalanceMethod = "greedy_swap",
) -> tuple[Balanced, NDArray[np.int32]]:
    """Deal members to buckets, then the members of each bucket to its microbatches.

    Args:
        costs_N: Cost of each member.
        num_buckets: Buckets.
        distribution: Microbatches of a bucket, and the most members of one.
        method: Balancing algorithm, at both levels.

    Returns:
        The dealing over buckets, and the microbatch of each member. No microbatch is
        over ``max_count``, and none is empty when there are members enough for all.

    Raises:
        ValueError: The members do not fit, or a cost is not finite and at least 0.
    """
    num, deal = distribution.microbatches, distribution
    cap = None if deal.max_count is None else deal.max_count * num
    if cap is not None and cap * num_buckets < len(costs_N):
        needed = num_microbatches_of(len(costs_N), num_buckets, deal.max_count or 1)
        raise ValueError(
            f"{num_buckets} buckets of {num} microbatches of {deal.max_count} members hold "
            f"{cap * num_buckets} of {len(costs_N)}; use {needed} microbatches"
        )
    # An empty microbatch would leave its ranks out of step with the others.
    least = min(num, len(costs_N) // num_buckets) if num_buckets > 0 else 0
    over_buckets = balance(costs_N, num_buckets, method=method, max_count=cap, min_count=least)
    microbatches_N = np.zeros(len(costs_N), np.int32)
    if num == 1:
        return over_buckets, microbatches_N
    order = np.argsort(over_buckets.bins_N, kind="stable")
    counts_B = np.bincount(over_buckets.bins_N, minlength=num_buckets)
    for members in np.split(order, np.cumsum(counts_B)[:-1]):
        inside = balance(
            costs_N[members],
            num,
            method=method,
            max_count=deal.max_count,
            min_count=min(1, len(members) // num),
        )
        microbatches_N[members] = inside.bins_N
    return over_buckets, microbatches_N
