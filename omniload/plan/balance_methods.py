"""Dealing items to bins so that the heaviest bin is as light as can be.

``greedy_swap`` is longest-first dealing followed by exchanges between the heaviest bin
and light ones. It reaches the lower bound to a few parts in a hundred thousand where
equal-count differencing stays tens of percent above it (long-tailed lengths), so it
is the default; Karmarkar-Karp stays as a candidate for thin tails.

Source:
    Graham, "Bounds on multiprocessing timing anomalies" (1969); Karmarkar and Karp,
    "The differencing method of set partitioning" (1982).

Shape suffixes:
    N  items        B  bins
"""

import heapq
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from omniload.plan.exchange import TOLERANCE, exchanged

__all__ = [
    "TOLERANCE",
    "BalanceMethod",
    "Balanced",
    "balance",
    "imbalance_of",
    "loads_in_order",
    "reachable_bound",
]

BalanceMethod: TypeAlias = Literal["greedy_swap", "karmarkar_karp", "none"]
"""``none`` deals contiguous runs in order."""

_MANY_BINS = 256
"""Bins from which on items are dealt in rounds."""
_LONG_ROUND = 64
"""Items that must be dealt at once: sorting the bins costs more than dealing fewer one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """Which bin every item goes to."""

    bins_N: NDArray[np.int32]
    """Bin of each item."""
    loads_B: NDArray[np.float64]
    """Cost of each bin."""
    bound: float
    """No dealing has a heaviest bin below this."""

    @property
    def imbalance(self) -> float:
        """Heaviest bin over the mean; 1 when there is nothing to carry."""
        return imbalance_of(self.loads_B)

    @property
    def least_imbalance(self) -> float:
        """The reachable bound over the mean: what ``imbalance`` cannot fall below."""
        mean = float(self.loads_B.sum()) / len(self.loads_B)
        return self.bound / mean if mean > 0 else 1.0


def imbalance_of(loads: NDArray[np.float64]) -> float:
    """Return the heaviest load over the mean; 1 when there is nothing to carry."""
    mean = float(loads.sum()) / loads.size
    return float(loads.max()) / mean if mean > 0 else 1.0


def balance(
    costs_N: NDArray[Any],
    num_bins: int,
    *,
    method: BalanceMethod = "greedy_swap",
    max_count: int | None = None,
    min_count: int = 0,
    tolerance: float = TOLERANCE,
) -> Balanced:
    """Deal items to bins evenly.

    Args:
        costs_N: Cost of each item; finite and at least 0.
        num_bins: Bins.
        method: Algorithm. ``greedy_swap`` takes ``O(N log N)`` and a bounded number of
            exchanges; ``karmarkar_karp`` ``O(N B log B)`` time and some ``9 N B`` bytes.
        max_count: Most items in a bin; any number when not given.
        min_count: Least items in a bin.
        tolerance: Part of the reachable bound up to which exchanges go on; the heaviest bin may be that much over it.

    Returns:
        The dealing: every item in one bin, every bin within its counts. The same
        arguments give the same dealing; ties go to the earlier item and bin.
        ``greedy_swap`` is never heavier than longest-first dealing, and so within
        ``4/3 - 1/(3B)`` of the optimum when counts are free. ``karmarkar_karp`` deals
        with free counts; where that breaks a limit, the lightest items of the bin move
        to the lightest bins with room, and exchanges follow.

    Raises:
        ValueError: A cost is negative or not finite, the method is unknown, or the
            items do not fit the bins' counts.
    """
    costs = _checked(costs_N, num_bins, max_count, min_count)
    if method not in get_args(BalanceMethod):
        raise ValueError(f"method is {method!r}; choose one of {list(get_args(BalanceMethod))}")
    most = len(costs) if max_count is None else max_count
    bound = _bound(costs, num_bins, most, min_count)
    if num_bins == 1:
        bins_N = np.zeros(len(costs), np.int64)
    elif method == "none":
        bins_N = _in_order(len(costs), num_bins)
    elif method == "greedy_swap":
        bins_N = _longest_first(costs, num_bins, most, min_count)
        bins_N = exchanged(costs, bins_N, num_bins, (min_count, most), bound, tolerance)
    else:
        bins_N = _differenced(costs, num_bins)
        counts_B = np.bincount(bins_N, minlength=num_bins)
        if len(costs) and (counts_B.max() > most or counts_B.min() < min_count):
            bins_N = _repaired(costs, bins_N, num_bins, most, min_count)
            bins_N = exchanged(costs, bins_N, num_bins, (min_count, most), bound, tolerance)
    return Balanced(
        bins_N=bins_N.astype(np.int32), loads_B=_loads(costs, bins_N, num_bins), bound=bound
    )


def loads_in_order(costs_N: NDArray[np.float64], num_bins: int) -> NDArray[np.float64]:
    """Return the cost of each bin where items are dealt by ``none``: what balance is measured against."""
    return _loads(costs_N, _in_order(len(costs_N), num_bins), num_bins)


def reachable_bound(
    costs_N: NDArray[Any], num_bins: int, max_count: int | None = None, min_count: int = 0
) -> float:
    """Return a load that the heaviest bin cannot be below, whatever the dealing.

    It is the largest of: the mean; for every ``q``, the ``q + 1`` smallest among the
    ``q * B + 1`` largest items, as so many of these meet in some bin; and, for every
    ``k`` up to ``B``, what the ``k`` largest items cost with as many of the smallest as
    the counts force upon their bins: on average where each lies in a bin of its own,
    else the two smallest of them in one.

    Raises:
        ValueError: As for ``balance``.
    """
    costs = _checked(costs_N, num_bins, max_count, min_count)
    return _bound(costs, num_bins, len(costs) if max_count is None else max_count, min_count)


def _checked(
    costs_N: NDArray[Any], num_bins: int, max_count: int | None, min_count: int
) -> NDArray[np.float64]:
    costs = np.asarray(costs_N, np.float64)
    if num_bins < 1:
        raise ValueError(f"num_bins is {num_bins}; give at least one bin")
    if costs.ndim != 1:
        raise ValueError(f"costs_N has shape {costs.shape}; give one cost for each item")
    # Negated, because nan is neither at least 0 nor below it.
    wrong = ~(costs >= 0) | ~np.isfinite(costs)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(f"costs_N[{at}] is {costs[at]}; a cost is finite and at least 0")
    if max_count is not None and max_count * num_bins < len(costs):
        raise ValueError(
            f"max_count {max_count} times {num_bins} bins holds {max_count * num_bins} of {len(costs)} items; "
            f"raise max_count to {-(-len(costs) // num_bins)} or add bins"
        )
    if min_count < 0 or min_count * num_bins > len(costs):
        raise ValueError(
            f"min_count {min_count} times {num_bins} bins does not fit {len(costs)} items; "
            f"choose one from 0 to {len(costs) // num_bins}"
        )
    return costs


def _bound(costs: NDArray[np.float64], num_bins: int, most: int, least: int) -> float:
    if len(costs) == 0:
        return 0.0
    falling = np.sort(costs)[::-1]
    before = np.concatenate(([0.0], np.cumsum(falling)))
    q = np.arange((len(costs) - 1) // num_bins + 1)
    meeting = float(np.max(before[q * num_bins + 1] - before[q * num_bins - q]))
    apart = _apart(falling, before, num_bins, most, least)
    return max(float(before[-1]) / num_bins, meeting, apart)


def _apart(
    falling: NDArray[np.float64],
    before: NDArray[np.float64],
    num_bins: int,
    most: int,
    least: int,
) -> float:
    """Return the bound of the largest items with what counts force upon them: each in its own bin, or two in one."""
    num = len(falling)
    # No bin can be left with fewer than this.
    forced = max(least, num - (num_bins - 1) * most, 1)
    k = np.arange(1, min(num_bins, num) + 1)
    light = np.minimum(k * (forced - 1), num - k)
    apart = (before[k] + before[-1] - before[num - light]) / k
    two_less = before[-1] - before[num - max(forced - 2, 0)]
    if forced > 1:
        # One of these bins has the costliest of the lightest items, together with a largest one and the forced items.
        apart = np.maximum(apart, falling[k - 1] + falling[num - light] + two_less)
    meeting = np.full(len(k), np.inf)
    meeting[1:] = falling[: len(k) - 1] + falling[1 : len(k)] + two_less
    return float(np.minimum(apart, meeting).max())


def _in_order(num: int, num_bins: int) -> NDArray[np.int64]:
    return np.arange(num) * num_bins // max(num, 1)


def _loads(
    costs: NDArray[np.float64], bins_N: NDArray[np.int64], num_bins: int
) -> NDArray[np.float64]:
    return np.bincount(bins_N, weights=costs, minlength=num_bins).astype(np.float64, copy=False)


def _longest_first(
    costs: NDArray[np.float64], num_bins: int, most: int, least: int
) -> NDArray[np.int64]:
    """Deal items from the largest on, each to the lightest bin with room."""
    # Stable, as all sorts here: ties decide a plan, and a plan is the same on every machine.
    order = np.argsort(-costs, kind="stable")
    bins_N = np.empty(len(costs), np.int64)
    if num_bins < _MANY_BINS:
        loads, counts = [0.0] * num_bins, [0] * num_bins
        bins_N[order] = _one_by_one(costs[order].tolist(), loads, counts, most, least)
        return bins_N
    # The same dealing as one by one, ties included: plans must not change at a number of bins.
    rounds = _Rounds(falling=costs[order], most=most, least=least, num_bins=num_bins)
    rounds.deal()
    bins_N[order] = np.concatenate((*rounds.dealt, rounds.rest()))
    return bins_N


def _one_by_one(
    falling: list[float], loads: list[float], counts: list[int], limit: int, least: int
) -> list[int]:
    """Deal items to bins of such loads and counts; return the bin of each."""
    reserved = sum(least - min(count, least) for count in counts)  # items that bins still need
    # Pairs, so that with equal loads the bin of the lower number comes first on every machine.
    lightest = [(load, b) for b, load in enumerate(loads) if counts[b] < limit]
    heapq.heapify(lightest)
    dealt: list[int] = []
    for i, cost in enumerate(falling):
        # The remaining items are needed by bins with too few, so only these get items from here on.
        if reserved == len(falling) - i and limit != least:
            limit = least
            lightest = [entry for entry in lightest if counts[entry[1]] < least]
            heapq.heapify(lightest)
        load, b = lightest[0]
        dealt.append(b)
        counts[b] += 1
        if counts[b] <= least:
            reserved -= 1
        if counts[b] < limit:
            heapq.heapreplace(lightest, (load + cost, b))
        else:
            heapq.heappop(lightest)
    return dealt


class _Rounds:
    """Items dealt from the largest on, several at once while no bin that was dealt one gets the next.

    Of thousands of bins most get one before any gets another, so that a sort of the bins serves a whole round.
    """

    def __init__(
        self, *, falling: NDArray[np.float64], most: int, least: int, num_bins: int
    ) -> None:
        self._falling, self._least = falling, least
        self._limit = most
        self._reserved = least * num_bins  # items that bins below ``least`` still need
        self._loads_B = np.zeros(num_bins)
        self._counts_B = np.zeros(num_bins, np.int64)
        self._at = 0
        self.dealt: list[NDArray[np.int64]] = []
        """Bins of the items so far."""

    def deal(self) -> None:
        """Deal round by round, for as long as rounds are long."""
        while (bins := self._round()) is not None and len(bins):
            if len(bins) < _LONG_ROUND:
                return
            self._reserved -= int(np.count_nonzero(self._counts_B[bins] < self._least))
            self._loads_B[bins] += self._falling[self._at : self._at + len(bins)]
            self._counts_B[bins] += 1
            self._at += len(bins)
            self.dealt.append(bins)

    def _round(self) -> NDArray[np.int64] | None:
        """Return the bins of the next items, each once; ``None`` where only single items show what limits them."""
        left = len(self._falling) - self._at
        open_B = np.flatnonzero(self._counts_B < self._limit)
        bins = open_B[np.argsort(self._loads_B[open_B], kind="stable")][:left]
        loads, counts = self._loads_B[bins], self._counts_B[bins]
        after = loads + self._falling[self._at : self._at + len(bins)]
        # A round ends before a bin that is no lighter than one it has dealt to, because the latter may be due first.
        again = np.where(counts + 1 < self._limit, after, np.inf)
        ahead = np.flatnonzero(np.minimum.accumulate(again)[:-1] <= loads[1:])
        bins = bins[: int(ahead[0]) + 1] if len(ahead) else bins
        if self._limit != self._least and self._reserved >= left - len(bins):
            return None
        return bins

    def rest(self) -> list[int]:
        """Deal the rest one by one; return the bins of it."""
        falling, loads = self._falling[self._at :].tolist(), self._loads_B.tolist()
        return _one_by_one(falling, loads, self._counts_B.tolist(), self._limit, self._least)


def _differenced(costs: NDArray[np.float64], num_bins: int) -> NDArray[np.int64]:
    """Deal by multi-way largest differencing, with free counts.

    Every item starts as a dealing of its own. The two dealings whose loads differ most
    are joined, the heaviest bin of one with the lightest of the other, until one is
    left; walking the joins backwards tells every item its bin.
    """
    num = len(costs)
    loads_of: dict[int, NDArray[np.float64]] = {}
    for i in range(num):
        loads_of[i] = np.zeros(num_bins)
        loads_of[i][0] = costs[i]
    widest = [(-cost if num_bins > 1 else 0.0, i) for i, cost in enumerate(costs.tolist())]
    heapq.heapify(widest)
    joins: list[tuple[int, int, NDArray[np.integer[Any]]]] = []
    # The order of bins is kept of each join, and these orders are most of the memory.
    small = np.uint16 if num_bins <= 1 << 16 else np.int32
    while len(widest) > 1:
        _, a = heapq.heappop(widest)
        _, b = widest[0]
        joined = loads_of.pop(a) + loads_of.pop(b)[::-1]
        order = np.argsort(-joined, kind="stable")
        joined = joined[order]
        new = num + len(joins)
        loads_of[new] = joined
        joins.append((a, b, order.astype(small)))
        heapq.heapreplace(widest, (float(joined[-1] - joined[0]), new))
    # Going backwards, each dealing is freed as its parts replace it; all of them together would be N * B numbers.
    bins_of = {widest[0][1]: np.arange(num_bins)} if widest else {}
    for new in range(num + len(joins) - 1, num - 1, -1):
        a, b, places = joins.pop()
        bins_B = np.empty(num_bins, np.int64)
        bins_B[places] = bins_of.pop(new)
        bins_of[a], bins_of[b] = bins_B, bins_B[::-1]
    return np.array([bins_of[i][0] for i in range(num)], np.int64)


def _repaired(
    costs: NDArray[np.float64], bins_N: NDArray[np.int64], num_bins: int, most: int, least: int
) -> NDArray[np.int64]:
    """Move light items from bins with too many to the lightest bins that want them."""
    out_N = bins_N.copy()
    loads_B = _loads(costs, out_N, num_bins)
    counts_B = np.bincount(out_N, minlength=num_bins)
    while counts_B.max() > most or counts_B.min() < least:
        if counts_B.max() > most:
            giver = int(counts_B.argmax())
            # Bins that have too few come first: filling others would only put off what these are owed.
            room_B = counts_B < (least if counts_B.min() < least else most)
            taker = int(np.where(room_B, loads_B, np.inf).argmin())
        else:
            taker = int(counts_B.argmin())
            giver = int(np.where(counts_B > least, loads_B, -np.inf).argmax())
        members = np.flatnonzero(out_N == giver)
        # The lightest: what counts force to move shall change the loads least.
        item = int(members[costs[members].argmin()])
        out_N[item] = taker
        for b, sign in ((giver, -1), (taker, 1)):
            counts_B[b] += sign
            loads_B[b] += sign * costs[item]
    return out_N
