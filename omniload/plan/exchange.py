"""Exchanges of items between the heaviest bin and light ones, while they lower it.

Bins of few items are kept as lists, which are searched several times faster than arrays
of that size; bins of many as arrays. The exchanges are the same.

The lightest bins relieve the heaviest one most, and are tried first. Where a bin must hold as
many items as all others, though, they may have none that is lighter than its own: what relieves
it is then found among all items at once.

Shape suffixes:
    N  items        B  bins        H, L  items of the heavy bin, of the light one
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["TOLERANCE", "exchanged"]

TOLERANCE = 2e-5
"""Exchanges stop once the heaviest bin is within this part of the reachable bound."""

_TRIALS_PER_BIN = 16
_MOST_TRIALS = 8_192
"""Pairs of bins that may be tried, for every bin and in all: bounds the time where gains are tiny."""

_LIGHT_TRIED = 4
"""Light bins that are tried one by one at least, before all items are looked at."""
_PAIRS_A_TRIAL = 1_024
"""Pairs of items that are looked at together in the time of a trial."""

_FEW = 24
"""Items of a mean bin up to which lists are faster than arrays."""

_SMALLEST_GAIN = 1 - 1e-6
"""Part of half the gap that an exchange must come closer than: a gain lost in rounding would be tried for ever."""

_FIRST_SORTED = 32
"""Light bins that are sorted at first; even of thousands of bins, few are ever tried."""


def exchanged(
    costs: NDArray[np.float64],
    bins_N: NDArray[np.int64],
    num_bins: int,
    counts: tuple[int, int],
    bound: float,
    tolerance: float = TOLERANCE,
) -> NDArray[np.int64]:
    """Return the dealing after exchanges between the heaviest bin and light ones.

    Args:
        costs: Cost of each item.
        bins_N: Bin of each item.
        num_bins: Bins.
        counts: Least and most items in a bin; where the least is more than there are, items are given for others only.
        bound: Load that the heaviest bin cannot be below; close to it, no more is tried.
        tolerance: How close, as a part of the bound.
    """
    enough = bound * (1 + tolerance)
    loads_B = np.bincount(bins_N, weights=costs, minlength=num_bins).astype(np.float64, copy=False)
    # Looked at before anything is made: longest-first dealing of many items mostly comes close enough by itself.
    if loads_B.max() <= enough:
        return bins_N
    kind: type[_ListBins | _ArrayBins] = _ListBins if len(costs) <= _FEW * num_bins else _ArrayBins
    bins = kind.of(costs, bins_N, loads_B, counts)
    left = min(_TRIALS_PER_BIN * num_bins, _MOST_TRIALS)
    lightest = _Lightest.of(loads_B)
    while left > 0:
        heavy = int(loads_B.argmax())
        if loads_B[heavy] <= enough:
            break
        found, trials = _relief(bins, lightest, heavy, left)
        left -= trials
        if found is None:
            break  # no bin can relieve the heaviest one, or none was found in time
        light, give, take = found
        before = loads_B[heavy], loads_B[light]
        bins.exchange(heavy, light, give, take)
        lightest.move((heavy, light), before)
    return bins.of_N


def _relief(
    bins: "_ListBins | _ArrayBins", lightest: "_Lightest", heavy: int, left: int
) -> tuple[tuple[int, int, int] | None, int]:
    """Return a bin that relieves the heaviest one, what is given to it and what is taken back; and the trials it took.

    Args:
        bins: The bins.
        lightest: The same in the order in which they are tried.
        heavy: The heaviest.
        left: Trials that may be made.
    """
    together = 1 + len(bins.of_N) * len(bins.items[heavy]) // _PAIRS_A_TRIAL
    for tried, light in enumerate(lightest.others(heavy)):
        if tried == left:
            return None, left
        # Tried after single trials, because among thousands of bins some light one usually fits.
        if tried == max(_LIGHT_TRIED, together) and tried + together < left:
            return _best_of_all(bins, heavy), tried + together
        if (found := bins.best_exchange(heavy, light)) is not None:
            return (light, *found), tried + 1
    return None, left


def _best_of_all(bins: "_ListBins | _ArrayBins", heavy: int) -> tuple[int, int, int] | None:
    """Return the exchange of the heaviest bin with any other that leaves both lightest, of ties the first."""
    of_N, loads_B, load = bins.of_N, bins.loads_B, float(bins.loads_B[heavy])
    loads_N = loads_B[of_N]
    # A bin takes nothing of itself, and nothing back where counts allow it: an item of cost 0 of each bin with room.
    least, most = bins.counts
    has_room = len(bins.items[heavy]) > least
    room = (
        np.flatnonzero(np.bincount(of_N, minlength=len(loads_B)) < most) if has_room else of_N[:0]
    )
    others = np.concatenate((loads_N, loads_B[room]))
    costs = np.concatenate((bins.costs_N, np.zeros(len(room))))
    best: tuple[float, int, int] | None = None
    for give, cost in enumerate(bins.costs[heavy]):
        given = cost - costs
        reached = np.maximum(load - given, others + given)
        at = int(reached.argmin())
        if best is None or reached[at] < best[0]:
            best = float(reached[at]), give, at
    if best is None:
        return None
    reached_by_best, give, at = best
    light = int(of_N[at]) if at < len(of_N) else int(room[at - len(of_N)])
    half = (load - float(loads_B[light])) / 2
    # As for a single bin: a gain that rounding swallows would be tried for ever. The bin itself gains nothing.
    if reached_by_best - load + half >= half * _SMALLEST_GAIN:
        return None
    return light, give, bins.place_of(light, at) if at < len(of_N) else -1


@dataclass(slots=True)
class _ListBins:
    """Bins while they exchange items: members of each, sorted by cost."""

    items: list[list[int]]
    costs: list[list[float]]
    loads_B: NDArray[np.float64]
    counts: tuple[int, int]
    costs_N: NDArray[np.float64]
    """Cost of each item."""
    of_N: NDArray[np.int64]
    """Bin of each item."""

    @classmethod
    def of(
        cls,
        costs: NDArray[np.float64],
        bins_N: NDArray[np.int64],
        loads_B: NDArray[np.float64],
        counts: tuple[int, int],
    ) -> Self:
        """Return the bins of a dealing; ``loads_B`` is kept up to date from now on."""
        order = np.lexsort((costs, bins_N))
        ends = np.cumsum(np.bincount(bins_N, minlength=len(loads_B))).tolist()
        items, sorted_costs = order.tolist(), costs[order].tolist()
        cuts = list(zip([0, *ends], ends, strict=False))
        return cls(
            items=[items[a:b] for a, b in cuts],
            costs=[sorted_costs[a:b] for a, b in cuts],
            loads_B=loads_B,
            counts=counts,
            costs_N=costs,
            of_N=bins_N.copy(),
        )

    def best_exchange(self, heavy: int, light: int) -> tuple[int, int] | None:
        """Return what to give and what to take back, by place in the bin; -1 takes nothing.

        The best exchange shifts half of the difference of the loads. Only one that
        leaves both bins below the heavy one is returned.
        """
        half = float(self.loads_B[heavy] - self.loads_B[light]) / 2
        give_H, take_L = self.costs[heavy], self.costs[light]
        least, most = self.counts
        back_L = take_L
        shift = 0
        # Taking nothing back equals taking an item of cost 0, if counts allow it.
        if len(take_L) < most and len(give_H) > least:
            back_L, shift = [0.0, *take_L], -1
        elif not take_L:
            return None
        last = len(back_L) - 1
        smallest, found = half * _SMALLEST_GAIN, None
        for at, give in enumerate(give_H):
            place = bisect_left(back_L, give - half)
            # The item nearest to half of the gap is one of the two next to its place; no other needs a look.
            if place <= last:
                missed = abs(give - back_L[place] - half)
                if missed < smallest:
                    smallest, found = missed, (at, place + shift)
            if place:
                missed = abs(give - back_L[place - 1] - half)
                if missed < smallest:
                    smallest, found = missed, (at, place - 1 + shift)
        return found

    def exchange(self, heavy: int, light: int, give: int, take: int) -> None:
        given = self.items[heavy].pop(give), self.costs[heavy].pop(give)
        if take >= 0:
            self._insert(heavy, self.items[light].pop(take), self.costs[light].pop(take))
        self._insert(light, *given)
        for b in (heavy, light):
            # Summed anew: a sum of gains drifts, and with it what is taken for a gain.
            self.loads_B[b] = sum(self.costs[b])

    def _insert(self, b: int, item: int, cost: float) -> None:
        at = bisect_left(self.costs[b], cost)
        self.items[b].insert(at, item)
        self.costs[b].insert(at, cost)
        self.of_N[item] = b

    def place_of(self, b: int, item: int) -> int:
        """Return the place of an item in its bin."""
        return self.items[b].index(item)


@dataclass(slots=True)
class _ArrayBins:
    """The same as ``_ListBins``, but in arrays."""

    items: list[NDArray[np.int64]]
    costs: list[NDArray[np.float64]]
    loads_B: NDArray[np.float64]
    counts: tuple[int, int]
    costs_N: NDArray[np.float64]
    of_N: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        costs: NDArray[np.float64],
        bins_N: NDArray[np.int64],
        loads_B: NDArray[np.float64],
        counts: tuple[int, int],
    ) -> Self:
        order = np.lexsort((costs, bins_N))
        cuts = np.cumsum(np.bincount(bins_N, minlength=len(loads_B)))[:-1]
        return cls(
            items=np.split(order, cuts),
            costs=np.split(costs[order], cuts),
            loads_B=loads_B,
            counts=counts,
            costs_N=costs,
            of_N=bins_N.copy(),
        )

    def best_exchange(self, heavy: int, light: int) -> tuple[int, int] | None:
        gap = float(self.loads_B[heavy] - self.loads_B[light])
        give_H, take_L = self.costs[heavy], self.costs[light]
        least, most = self.counts
        if len(take_L) < most and len(give_H) > least:
            back_L = np.concatenate(([0.0], take_L))
            shift = -1
        elif len(take_L):
            back_L, shift = take_L, 0
        else:
            return None
        at = np.searchsorted(back_L, give_H - gap / 2)
        above = np.minimum(at, len(back_L) - 1)
        below = np.maximum(at - 1, 0)
        missed_above = np.abs(give_H - back_L[above] - gap / 2)
        missed_below = np.abs(give_H - back_L[below] - gap / 2)
        missed = np.minimum(missed_above, missed_below)
        best = int(missed.argmin())
        if missed[best] >= gap / 2 * _SMALLEST_GAIN:
            return None
        place = above[best] if missed_above[best] <= missed_below[best] else below[best]
        return best, int(place) + shift

    def exchange(self, heavy: int, light: int, give: int, take: int) -> None:
        # These are views, which is safe: an exchange replaces arrays and never changes one.
        given = self.items[heavy][give : give + 1]
        taken = self.items[light][take : take + 1] if take >= 0 else given[:0]
        given_cost = self.costs[heavy][give : give + 1]
        taken_cost = self.costs[light][take : take + 1] if take >= 0 else given_cost[:0]
        self._replace(heavy, give, taken, taken_cost)
        self._replace(light, take, given, given_cost)

    def _replace(
        self, b: int, place: int, item: NDArray[np.int64], cost: NDArray[np.float64]
    ) -> None:
        items, costs = self.items[b], self.costs[b]
        if place >= 0:
            items = np.concatenate((items[:place], items[place + 1 :]))
            costs = np.concatenate((costs[:place], costs[place + 1 :]))
        if len(item):
            at = int(costs.searchsorted(cost[0]))
            items = np.concatenate((items[:at], item, items[at:]))
            costs = np.concatenate((costs[:at], cost, costs[at:]))
        self.items[b], self.costs[b] = items, costs
        self.loads_B[b] = costs.sum()
        self.of_N[item] = b

    def place_of(self, b: int, item: int) -> int:
        """Return the place of an item in its bin."""
        return int(np.flatnonzero(self.items[b] == item)[0])


@dataclass(slots=True)
class _Lightest:
    """The lightest bins, sorted once: an exchange moves two bins, and of thousands few are ever tried."""

    loads_B: NDArray[np.float64]
    """Load of each bin, kept up to date by others."""
    limit: float
    """Load up to which bins are sorted."""
    sorted: list[tuple[float, int]]
    """Those bins by load, of ties the first."""

    @classmethod
    def of(cls, loads_B: NDArray[np.float64]) -> Self:
        """Return the first bins of a dealing."""
        lightest = cls(loads_B, 0.0, [])
        lightest.sort(_FIRST_SORTED)
        return lightest

    def sort(self, num: int) -> None:
        """Sort the ``num`` lightest bins, or all if there are fewer."""
        some = num < len(self.loads_B) // 4
        self.limit = float(np.partition(self.loads_B, num)[num]) if some else np.inf
        below = np.flatnonzero(self.loads_B <= self.limit)
        below = below[np.argsort(self.loads_B[below], kind="stable")]
        self.sorted = list(zip(self.loads_B[below].tolist(), below.tolist(), strict=True))

    def others(self, heavy: int) -> Iterator[int]:
        """Yield the other bins by load, of ties the first, as long as none is moved."""
        for at in range(len(self.loads_B)):
            if at == len(self.sorted):
                # Four times as many each time: all sorts before come to a part of the last one.
                self.sort(max(_FIRST_SORTED, 4 * at))
            if (light := self.sorted[at][1]) != heavy:
                yield light

    def move(self, bins: tuple[int, int], before: tuple[float, float]) -> None:
        """Note that the loads of two bins have changed."""
        for b, load in zip(bins, before, strict=True):
            if load <= self.limit:
                # Compare with the load at the time of sorting, because the bin has another load by now.
                del self.sorted[bisect_left(self.sorted, (load, b))]
            if (now := float(self.loads_B[b])) <= self.limit:
                insort(self.sorted, (now, b))
