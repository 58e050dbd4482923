"""Placement of the samples or rows of a step: a bucket, and one of its microbatches.

Dealing is in two levels: over the buckets, as their sums decide how long a step takes, and over
the microbatches, which the stages of a pipeline, and collectives inside a layer, wait for. Even buckets
do not make microbatches even, but microbatches that are even make buckets nearly so: where they
hold several members each they are dealt first, then grouped, and a few members change places
until buckets are as even as they can be. What is dealt never depends on the mesh; only where it
goes does.

Shape suffixes:
    N  samples or rows      B  buckets      M  microbatches of a bucket
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.plan.balance_methods import (
    Balanced,
    BalanceMethod,
    balance,
    imbalance_of,
    reachable_bound,
)
from omniload.plan.exchange import TOLERANCE, exchanged
from omniload.plan.place_tree import BucketAxis, ClientPlaceTree, MeshAxis

__all__ = [
    "Distribution",
    "Placement",
    "loads_of",
    "microbatch_bound_of",
    "num_microbatches_of",
    "place",
    "require_dealing",
]

_CLOSE = 3e-3
"""Part of their bound that microbatches are dealt to: what a step waits for is the sum of several."""
_UNEVEN = 2e-3
"""Part of their bound by which buckets of such microbatches may be heavier before they are dealt by themselves too."""
_FAR = 5e-3
"""Part of that limit by which a microbatch may be heavier for the sake of buckets that are even enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """The buckets and microbatches that members are dealt to."""

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
            if value is None:
                continue
            if not isinstance(value, (int, np.integer)) or value < 1:
                raise ValueError(f"{name} is {value!r}; it is a whole number, and at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The place of every member, and the resulting balance."""

    members_N: NDArray[np.int64]
    """Index of each member among the loaded samples or rows, in the order of the step."""
    buckets_N: NDArray[np.int32]
    """Bucket of each member: its dp rank, if dealt along dp without groups."""
    microbatches_N: NDArray[np.int32]
    """Microbatch of each member within its bucket."""
    loads_BM: NDArray[np.float64]
    """Cost of each microbatch of each bucket."""
    imbalance: float
    """Heaviest bucket over the mean."""
    bound: float
    """Lower bound of ``imbalance`` for these members."""
    imbalance_before: float
    """Imbalance if members were dealt in order: heaviest bucket over the mean."""
    microbatch_bound: float = 1.0
    """Lower bound of ``microbatch_imbalance`` for these members."""
    imbalance_of_module: Mapping[str, float] = field(
        default_factory=lambda: MappingProxyType[str, float]({})
    )
    """Heaviest bucket over the mean, by the cost of one module alone."""
    tree: ClientPlaceTree
    """The mesh."""
    distribution: Distribution
    """The buckets and microbatches that members were dealt to."""
    broadcast: tuple[MeshAxis, ...] = ()
    """Axes along which one rank fetches and the trainer broadcasts."""
    encoders_I: NDArray[np.int32] | None = None
    """Rank of the tree that encodes each image of the step; ``None`` if each rank encodes those of its own rows."""

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of every bucket."""
        return self.distribution.microbatches

    @property
    def microbatch_imbalance(self) -> float:
        """Heaviest microbatch of all over their mean; a pipeline waits for the heaviest."""
        return imbalance_of(self.loads_BM)

    @property
    def fetching_ranks(self) -> tuple[int, ...]:
        """Ranks that fetch; the others get their data by broadcast."""
        return self.tree.fetching_ranks(self.broadcast)

    def members_of(self, bucket: int, microbatch: int) -> NDArray[np.int64]:
        """Return the members of one microbatch of one bucket, in the order of the step.

        Raises:
            ValueError: There is no such bucket or microbatch.
        """
        for what, number, count in zip(
            ("bucket", "microbatch"), (bucket, microbatch), self.loads_BM.shape, strict=True
        ):
            if not 0 <= number < count:
                raise ValueError(f"{what} is {number}; there are {count}, numbered from 0")
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
            f"heaviest microbatch over the mean: {self.microbatch_imbalance:.4f} (at best {self.microbatch_bound:.4f})",
            *(f"by {name} alone: {value:.4f}" for name, value in self.imbalance_of_module.items()),
            f"fetching: {len(self.fetching_ranks):,} of {self.tree.world_size:,} ranks",
        ]
        return "\n".join(lines)


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
    """Deal members to buckets and microbatches.

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
    found = None
    if method == "greedy_swap" and num > 1 and len(costs_N) > num_buckets * num:
        found = _microbatches_first(costs_N, num_buckets, deal, least, cap)
        if found[0].loads_B.max() <= found[0].bound * (1 + _UNEVEN):
            return found
    over_buckets = balance(costs_N, num_buckets, method=method, max_count=cap, min_count=least)
    if found is not None and found[0].loads_B.max() <= over_buckets.loads_B.max():
        return found
    microbatches_N = np.zeros(len(costs_N), np.int32)
    if num == 1 or not len(costs_N):
        return over_buckets, microbatches_N
    counts_B = np.bincount(over_buckets.bins_N, minlength=num_buckets)
    if method == "greedy_swap" and counts_B.max() <= num and _is_one_each(costs_N, counts_B, deal):
        return over_buckets, _by_falling_cost(costs_N, over_buckets.bins_N, counts_B)
    # One sort by bucket; a pass over all members for each bucket takes seconds with thousands of buckets.
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


def _microbatches_first(
    costs_N: NDArray[Any], num_buckets: int, deal: Distribution, least: int, cap: int | None
) -> tuple[Balanced, NDArray[np.int32]]:
    """Deal more members than there are microbatches to these, group them to buckets, and even those out.

    Args:
        costs_N: Cost of each member.
        num_buckets: Buckets.
        deal: What members are dealt to.
        least: Least members of a bucket.
        cap: Most members of a bucket; ``None`` for any number.
    """
    num, costs = deal.microbatches, np.asarray(costs_N, np.float64)
    flat = balance(
        costs, num_buckets * num, max_count=deal.max_count, min_count=1, tolerance=_CLOSE
    )
    grouped = balance(flat.loads_B, num_buckets, max_count=num, min_count=num)
    # Number each microbatch within its bucket.
    order = np.argsort(grouped.bins_N, kind="stable")
    numbers = np.empty(len(order), np.int32)
    numbers[order] = np.tile(np.arange(num), num_buckets)
    before_N, microbatches_N = grouped.bins_N[flat.bins_N].astype(np.int64), numbers[flat.bins_N]
    bound = reachable_bound(costs, num_buckets, cap, least)
    # One for one: no bucket has as many as would let it give one without another in its place.
    buckets_N = exchanged(costs, before_N, num_buckets, (len(costs), 0), bound)
    _fill_places(costs, before_N, buckets_N, microbatches_N)
    loads_BM = loads_of(costs, buckets_N, microbatches_N, (num_buckets, num))
    limit = max(flat.bound * (1 + _CLOSE), float(flat.loads_B.max())) * (1 + TOLERANCE)
    for bucket in np.flatnonzero(loads_BM.max(axis=1) > limit):
        members = np.flatnonzero(buckets_N == bucket)
        inside = balance(costs[members], num, max_count=deal.max_count, min_count=1)
        microbatches_N[members] = inside.bins_N
    loads_BM = loads_of(costs, buckets_N, microbatches_N, (num_buckets, num))
    if loads_BM.max() > limit * (1 + _FAR) and grouped.loads_B.max() <= bound * (1 + _UNEVEN):
        # With few members every exchange is a large change, and the buckets were even enough before.
        buckets_N, microbatches_N = before_N, numbers[flat.bins_N]
        loads_BM = flat.loads_B[order].reshape(num_buckets, num)
    dealt = Balanced(bins_N=buckets_N.astype(np.int32), loads_B=loads_BM.sum(axis=1), bound=bound)
    return dealt, microbatches_N


def loads_of(
    costs_N: NDArray[np.float64],
    buckets_N: NDArray[np.integer[Any]],
    microbatches_N: NDArray[np.int32],
    shape: tuple[int, int],
) -> NDArray[np.float64]:
    """Return the cost of each microbatch of each bucket, ``[B, M]``."""
    # In 64 bits: a user's numbers of buckets and microbatches may multiply to more than 32 hold.
    flat_N = buckets_N * np.int64(shape[1]) + microbatches_N
    loads = np.bincount(flat_N, costs_N, shape[0] * shape[1])
    return loads.astype(np.float64, copy=False).reshape(shape)


def _fill_places(
    costs_N: NDArray[np.float64],
    before_N: NDArray[np.int64],
    now_N: NDArray[np.int64],
    microbatches_N: NDArray[np.int32],
) -> None:
    """Give members that came to a bucket the microbatches of those that left it, in the order of their costs.

    As many came to each bucket as left it. ``microbatches_N`` has the microbatch of each member before, and then now.
    """
    moved = np.flatnonzero(before_N != now_N)
    left = moved[np.lexsort((costs_N[moved], before_N[moved]))]
    came = moved[np.lexsort((costs_N[moved], now_N[moved]))]
    microbatches_N[came] = microbatches_N[left]


def microbatch_bound_of(
    costs_N: NDArray[Any], num_buckets: int, distribution: Distribution
) -> float:
    """Return what the heaviest microbatch over the mean of all cannot fall below, however members are dealt.

    Raises:
        ValueError: As for ``place``.
    """
    num = num_buckets * distribution.microbatches
    total = float(np.sum(costs_N))
    if not total:
        return 1.0
    if len(costs_N) <= num:  # the heaviest alone
        return max(1.0, float(np.max(costs_N)) * num / total)
    return reachable_bound(costs_N, num, distribution.max_count, 1) * num / total


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
