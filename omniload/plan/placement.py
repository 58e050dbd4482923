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

from omniload.plan.balance_methods import Balanced, BalanceMethod, balance, reachable_bound
from omniload.plan.place_tree import BucketAxis, ClientPlaceTree, MeshAxis

__all__ = [
    "Distribution",
    "Placement",
    "imbalance_of",
    "num_microbatches_of",
    "place",
    "require_dealing",
]


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
    encoders_I: NDArray[np.int32] | None = None
    """Rank of the tree that encodes each image of the step; ``None`` where each rank encodes those of its rows."""

    @property
    def num_microbatches(self) -> int:
        """Microbatches of every bucket."""
        return self.distribution.microbatches

    @property
    def microbatch_imbalance(self) -> float:
        """Heaviest microbatch of all over their mean: what a pipeline waits for."""
        return imbalance_of(self.loads_BM)

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
    mean = float(loads.sum()) / loads.size
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
    # One number for all ranks: a rank with a microbatch less would miss a collective of the others, and hang them.
    return max(1, -(-num_rows // (dp * rows_per_microbatch)))


def place(
    costs_N: NDArray[Any],
    num_buckets: int,
    distribution: Distribution,
    *,
    method: BalanceMethod = "greedy_swap",
    dealing: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None,
) -> tuple[Balanced, NDArray[np.int32]]:
    """Deal members to buckets, then the members of each bucket to its microbatches.

    Args:
        costs_N: Cost of each member.
        num_buckets: Buckets.
        distribution: Microbatches of a bucket, and the most members of one.
        method: Balancing algorithm, at both levels.
        dealing: Bucket and microbatch of each member, where they are dealt by hand.

    Returns:
        The dealing over buckets, and the microbatch of each member. No microbatch is
        over ``max_count``, and none is empty when there are members enough for all.

    Raises:
        ValueError: The members do not fit, or a cost is not finite and at least 0.
    """
    num, deal = distribution.microbatches, distribution
    least, cap = _counts_of(len(costs_N), num_buckets, deal)
    if dealing is not None:
        bound = reachable_bound(costs_N, num_buckets, cap, least)
        return _by_hand(costs_N, num_buckets, deal, dealing, bound), dealing[1]
    over_buckets = balance(costs_N, num_buckets, method=method, max_count=cap, min_count=least)
    microbatches_N = np.zeros(len(costs_N), np.int32)
    if num == 1 or not len(costs_N):
        return over_buckets, microbatches_N
    counts_B = np.bincount(over_buckets.bins_N, minlength=num_buckets)
    if method == "greedy_swap" and counts_B.max() <= num and _is_one_each(costs_N, counts_B, deal):
        return over_buckets, _by_falling_cost(costs_N, over_buckets.bins_N, counts_B)
    # By bucket in one sort: a look through all members for each bucket takes seconds at thousands of them.
    order = np.argsort(over_buckets.bins_N, kind="stable")
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


def _is_one_each(costs_N: NDArray[Any], counts_B: NDArray[np.int64], deal: Distribution) -> bool:
    """Return whether buckets with a microbatch for each member put two members in none.

    Longest-first dealing puts members that cost nothing together, unless counts forbid it.
    """
    full = deal.max_count == 1 or counts_B.min() == deal.microbatches
    return bool(full or costs_N.min(initial=1.0) > 0)


def _by_falling_cost(
    costs_N: NDArray[Any], buckets_N: NDArray[np.int32], counts_B: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Return the place of each member in its bucket by falling cost, of ties the first: a microbatch for each.

    This is what balancing each bucket by itself comes to, for thousands of buckets in one sort.
    """
    # In floating point first: less than 0 is nothing to an unsigned number.
    order = np.lexsort((-np.asarray(costs_N, np.float64), buckets_N))
    places_N = np.empty(len(order), np.int32)
    places_N[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts_B) - counts_B, counts_B)
    return places_N


def require_dealing(
    buckets_N: NDArray[Any], microbatches_N: NDArray[Any], num: int, deal: Distribution
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return a dealing by hand in the planner's type, once it is seen to give ``num`` members a place.

    Raises:
        ValueError: A column has not one whole number for each member, from 0, or names a microbatch
            that there is not.
    """
    for name, column_N in (("buckets_N", buckets_N), ("microbatches_N", microbatches_N)):
        if column_N.shape != (num,) or not np.issubdtype(column_N.dtype, np.integer):
            raise ValueError(
                f"{name} has shape {column_N.shape} and type {column_N.dtype} for {num} members; "
                "give a whole number for each"
            )
        if column_N.min(initial=0) < 0:
            at = int(column_N.argmin())
            raise ValueError(f"{name}[{at}] is {column_N[at]}; numbers start at 0")
    if (most := int(microbatches_N.max(initial=0))) >= deal.microbatches:
        raise ValueError(
            f"microbatches_N holds {most}; a bucket has {deal.microbatches}, numbered from 0"
        )
    return buckets_N.astype(np.int32), microbatches_N.astype(np.int32)


def _by_hand(
    costs_N: NDArray[Any],
    num_buckets: int,
    deal: Distribution,
    dealing: tuple[NDArray[np.int32], NDArray[np.int32]],
    bound: float,
) -> Balanced:
    """Return a dealing that was made elsewhere, once it is seen to fit."""
    buckets_N, microbatches_N = dealing
    if (most := int(buckets_N.max(initial=0))) >= num_buckets:
        raise ValueError(f"a member is dealt to bucket {most} of {num_buckets}, numbered from 0")
    # In 64 bits: a user's numbers of buckets and microbatches may multiply to more than 32 hold.
    flat_N = buckets_N * np.int64(deal.microbatches) + microbatches_N
    counts = np.bincount(flat_N, minlength=num_buckets * deal.microbatches)
    if deal.max_count is not None and counts.max() > deal.max_count:
        bucket, microbatch = divmod(int(counts.argmax()), deal.microbatches)
        raise ValueError(
            f"microbatch {microbatch} of bucket {bucket} is dealt {counts.max()} members; "
            f"the most is {deal.max_count}"
        )
    loads_B = np.bincount(buckets_N, costs_N, num_buckets).astype(np.float64, copy=False)
    return Balanced(bins_N=buckets_N, loads_B=loads_B, bound=bound)


def _counts_of(num: int, num_buckets: int, deal: Distribution) -> tuple[int, int | None]:
    """Return the least and the most members of a bucket.

    Raises:
        ValueError: The members do not fit.
    """
    cap = None if deal.max_count is None else deal.max_count * deal.microbatches
    if cap is not None and cap * num_buckets < num:
        needed = num_microbatches_of(num, num_buckets, deal.max_count or 1)
        raise ValueError(
            f"{num_buckets} buckets of {deal.microbatches} microbatches of {deal.max_count} members hold "
            f"{cap * num_buckets} of {num}; use {needed} microbatches"
        )
    # An empty microbatch would leave its ranks out of step with the others.
    return (min(deal.microbatches, num // num_buckets) if num_buckets > 0 else 0), cap
