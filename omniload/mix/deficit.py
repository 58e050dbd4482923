"""The choice of the source of each next sample; every source stays within one sample of its share.

The rule is worst-case fair weighted fair queueing. Each source has a *credit*, the tokens that it is owed so far.
Drawing a sample of ``n`` tokens pays every source its share of ``n`` and takes ``n`` from the source that was drawn.
Among the sources with a credit of at least 0, the source whose next sample falls due first is drawn. A plain "largest
deficit" rule also limits how far a source runs ahead to one sample, but may let it fall behind by several.

Credits and weights are integers. Therefore credits always sum to exactly zero, and every machine gives the same draw.

Source:
    Bennett and Zhang, "WF2Q: worst-case fair weighted fair queueing" (1996).

Shape suffixes:
    S  sources        N  samples drawn, in order
"""

import heapq
from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["WEIGHT_ONE", "Drawn", "draw", "integer_weights"]

WEIGHT_ONE = 1 << 30
"""Sum of the integer weights: a share is met to about one part in a billion."""

_TICK_BITS = 32
_LARGEST = 1 << 62
"""Numbers below this limit can be subtracted from each other in 64 bits."""
_FEW = 64
"""Largest number of samples, known or likely to be drawn, that are served one by one."""
_LONG = 512
"""Number of known samples of one source from which on it is worth computing how many can be due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The samples drawn by one call of ``draw``."""

    sources_N: NDArray[np.int32]
    """Source of each sample, in drawing order."""
    counts_S: NDArray[np.int64]
    """Samples taken from the head of each source."""
    credits_S: tuple[int, ...]
    """Credit of each source afterwards, in the unit of ``lengths`` times ``WEIGHT_ONE``."""
    served_S: tuple[int, ...]
    """Amount drawn of each source, in the unit of ``lengths``."""
    starved: int | None
    """Source whose next sample was due but not known; ``None`` if the budget was reached."""


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Scale weights to integers that sum to ``WEIGHT_ONE``, by largest remainder.

    A weight above 0 never becomes 0.

    Raises:
        ValueError: A weight is negative or not finite, or none is above 0.
    """
    for i, weight in enumerate(weights):
        if not 0 <= weight < float("inf"):
            raise ValueError(f"weights[{i}] is {weight}; a weight is finite and at least 0")
    largest = max(weights, default=0)
    if largest <= 0:
        raise ValueError(f"weights {list(weights)} sum to 0; give one source a weight above 0")
    scaled = [weight / largest for weight in weights]  # the sum of the weights may be infinite
    total = sum(scaled)
    exact = [value / total * WEIGHT_ONE for value in scaled]
    whole = [
        max(int(value), 1) if weight > 0 else 0
        for value, weight in zip(exact, weights, strict=True)
    ]
    by_remainder = sorted(
        (i for i, weight in enumerate(weights) if weight > 0),
        key=lambda i: (whole[i] - exact[i], i),
    )
    missing = WEIGHT_ONE - sum(whole)
    if missing < 0:  # only if tiny weights were raised to 1
        whole[max(range(len(whole)), key=whole.__getitem__)] += missing
    for i in by_remainder[: max(missing, 0)]:
        whole[i] += 1
    return tuple(whole)


def draw(
    lengths: Sequence[NDArray[np.integer]],
    weights_S: Sequence[int],
    credits_S: Sequence[int],
    *,
    budget: int,
    sizes: Sequence[NDArray[np.integer]] | None = None,
    ended: Collection[int] = (),
) -> Drawn:
    """Draw samples until they hold ``budget`` tokens.

    A sequence may be cut anywhere: at equal weights, drawing 100 tokens twice gives the samples of drawing 200.

    Args:
        lengths: The lengths of the known next samples of each source, in order, ``[S]``, in the unit that weights
            count; ones if weights count samples.
        weights_S: Integer weights from ``integer_weights``.
        credits_S: Credits after the previous draw; zeros at the start.
        budget: Tokens to draw; the last sample may exceed it.
        sizes: Tokens of the same samples, if ``lengths`` counts something else.
        ended: Sources that have no samples after the known ones. Once those are drawn, the other sources share the
            draws in proportion to their weights.

    Returns:
        The draw; it is short of the budget if all sources have ended. With constant weights, and while no source ends,
        the tokens of every source stay within one sample (the longest of any source) of its share, above and below,
        after each draw.
    """
    served = _serve_at_once(lengths, sizes, weights_S, credits_S, budget, ended)
    if served is None:
        units = [column.tolist() for column in lengths]
        tokens = units if sizes is None else [column.tolist() for column in sizes]
        served = _serve(units, tokens, weights_S, credits_S, budget, ended)
    order, counts, served_S, starved = served
    total = sum(served_S)
    return Drawn(
        sources_N=np.asarray(order, np.int32),
        counts_S=np.asarray(counts, np.int64),
        credits_S=tuple(
            credit + weight * total - WEIGHT_ONE * taken
            for credit, weight, taken in zip(credits_S, weights_S, served_S, strict=True)
        ),
        served_S=tuple(served_S),
        starved=starved,
    )


_Served: TypeAlias = tuple[Any, Any, list[int], int | None]
"""Sources in order and samples of each, as lists or arrays, the amount drawn of each, and the starved source."""


def _serve(
    queues: list[list[int]],
    tokens: list[list[int]],
    weights_S: Sequence[int],
    credits_S: Sequence[int],
    budget: int,
    ended: Collection[int],
) -> _Served:
    """Run the queueing discipline in virtual time, from 0 at the start of this call.

    The next sample of a source *starts* when its credit reaches 0 and *finishes* when the whole sample is owed. Both
    times change only when the source is drawn. Therefore a draw costs ``O(log S)``: waiting sources are sorted by
    start, and started sources by finish.
    """
    counts = [0] * len(queues)
    served = [0] * len(queues)
    order: list[int] = []
    now = 0  # virtual time: the total served so far
    left = budget
    # Times are floors in units of 2**-32 token. Floors shift exactly with the origin of time, so cutting a draw in two
    # cannot change the order. Floating-point quotients could change it.
    waiting = [
        ((-credits_S[s] << _TICK_BITS) // weights_S[s], s)
        for s in range(len(queues))
        if weights_S[s] > 0
    ]
    heapq.heapify(waiting)
    started: list[tuple[int, int]] = []

    while left > 0:
        ticks = now << _TICK_BITS
        while waiting and (waiting[0][0] <= ticks or not started):
            _, s = heapq.heappop(waiting)
            if counts[s] == len(queues[s]):
                if s in ended:
                    continue
                return order, counts, served, s
            finish = WEIGHT_ONE * (served[s] + queues[s][counts[s]]) - credits_S[s]
            heapq.heappush(started, ((finish << _TICK_BITS) // weights_S[s], s))
        if not started:
            break  # all sources have ended
        # The next sample of a source starts where its current sample finishes.
        start, s = heapq.heappop(started)
        count = counts[s]
        length = queues[s][count]
        left -= tokens[s][count]
        order.append(s)
        counts[s] = count + 1
        served[s] += length
        now += length
        count += 1
        if start > now << _TICK_BITS or count == len(queues[s]):
            heapq.heappush(waiting, (start, s))
        else:  # it has started already, as for half of them: skip the other heap
            finish = WEIGHT_ONE * (served[s] + queues[s][count]) - credits_S[s]
            heapq.heappush(started, ((finish << _TICK_BITS) // weights_S[s], s))
    return order, counts, served, None


def _serve_at_once(
    lengths: Sequence[NDArray[np.integer]],
    sizes: Sequence[NDArray[np.integer]] | None,
    weights_S: Sequence[int],
    credits_S: Sequence[int],
    budget: int,
    ended: Collection[int],
) -> _Served | None:
    """Serve like ``_serve``, but compute the starts and finishes of all samples in advance.

    Returns ``None`` if little is drawn, so that this takes longer, or if a number does not fit in 64 bits.
    """
    live = [s for s, weight in enumerate(weights_S) if weight > 0]
    known = sum(len(lengths[s]) for s in live)
    spent = sum(int((sizes or lengths)[s].sum()) for s in live) if known > _FEW else 0
    # Planners know the samples of several steps ahead, and small planners draw only a few of them.
    few = known <= _FEW or (known <= _LONG * len(live) and budget * known <= _FEW * spent)
    if few or budget <= 0 or max(map(abs, credits_S)) >= _LARGEST:
        return None
    until = budget
    if sizes is not None:  # the amount served when the budget is reached is first estimated
        units = sum(int(lengths[s].sum()) for s in live)
        until = 1 + budget * 5 * units // (4 * max(spent, 1))
    while until < _LARGEST // WEIGHT_ONE:
        if (ahead := _Ahead.of(lengths, sizes, live, weights_S, credits_S, until)) is None:
            return None
        if (served := ahead.serve(live, len(lengths), budget, ended)) is not None:
            return served
        until *= 4  # edges were missing, because the estimate was too low
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ahead:
    """Starts and finishes of samples in virtual time, computed before any draw; one sort gives both orders.

    A source of ``n`` samples has ``n + 1`` *edges*: its first sample starts at the first edge. At each further edge,
    one sample finishes and the next starts. At the last edge, the source needs more samples.

    Shape suffixes: E edges, source after source; L sources that are drawn from.
    """

    until: int
    """Virtual time before which all edges are known."""
    is_all: bool
    """Whether there are no later edges."""
    firsts_L: NDArray[np.int64]
    counts_L: NDArray[np.int64]
    """Samples of each source."""
    lengths_E: NDArray[np.int64]
    """Length of the sample that finishes at each edge; 0 if none does."""
    sizes_E: NDArray[np.int64]
    """Tokens of the same sample."""
    after_E: NDArray[np.int64]
    """Amount served of the source after that sample is drawn."""
    starts_E: NDArray[np.int64]
    """Virtual time at each edge: the tokens that must be served before it, rounded up."""
    rising_E: NDArray[np.intp]
    """Edges by virtual time; ties go to the earlier source, and within a source to the earlier edge."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[NDArray[np.integer]],
        sizes: Sequence[NDArray[np.integer]] | None,
        live: Sequence[int],
        weights_S: Sequence[int],
        credits_S: Sequence[int],
        until: int,
    ) -> "_Ahead | None":
        """Find the edges before virtual time ``until``."""
        heads = []
        for s in live:
            head = lengths[s]
            if len(head) > _LONG:  # planners know the samples of several steps ahead
                enough = (until * weights_S[s] + credits_S[s]) // WEIGHT_ONE + 1
                head = head[: int(np.cumsum(head, dtype=np.int64).searchsorted(enough)) + 1]
            heads.append(head)
        counts_L = np.array([len(head) for head in heads])
        firsts_L = np.cumsum(counts_L + 1) - counts_L - 1
        lengths_E = _edged(heads)
        total_E = np.cumsum(lengths_E)
        after_E = total_E - np.repeat(total_E[firsts_L], counts_L + 1)
        if after_E.max() >= _LARGEST // WEIGHT_ONE:
            return None
        weights_E = np.repeat(np.array([weights_S[s] for s in live]), counts_L + 1)
        credits_E = np.repeat(np.array([credits_S[s] for s in live]), counts_L + 1)
        whole_E, rest_E = np.divmod(after_E * WEIGHT_ONE - credits_E, weights_E)
        ticks_E = (rest_E << _TICK_BITS) // weights_E
        if whole_E.min() >= -(1 << 31) and whole_E.max() < 1 << 31:  # both fit one number
            rising_E = np.argsort((whole_E << _TICK_BITS) | ticks_E, kind="stable")
        else:
            rising_E = np.lexsort((ticks_E, whole_E))
        of_heads = list(zip(live, heads, strict=True))
        sizes_E = None if sizes is None else _edged([sizes[s][: len(h)] for s, h in of_heads])
        return cls(
            until=until,
            is_all=all(len(head) == len(lengths[s]) for s, head in of_heads),
            firsts_L=firsts_L,
            counts_L=counts_L,
            lengths_E=lengths_E,
            sizes_E=lengths_E if sizes_E is None else sizes_E,
            after_E=after_E,
            starts_E=whole_E + (ticks_E > 0),
            rising_E=rising_E,
        )

    def serve(
        self, live: Sequence[int], num_sources: int, budget: int, ended: Collection[int]
    ) -> _Served | None:
        """Draw until the budget is reached; return ``None`` if edges after ``until`` may matter."""
        falling_E = self.rising_E[::-1]
        num_edges, num_live = len(falling_E), len(live)
        keys_E = np.empty(num_edges, np.int64)  # the later a sample finishes, the lower its key
        keys_E[falling_E] = np.arange(num_edges)
        lasts_L = self.firsts_L + self.counts_L
        next_E = np.append(keys_E[1:], 0)
        next_E[lasts_L] = -1 - np.arange(num_live)  # after its last sample a source needs more
        starts_E = self.starts_E[self.rising_E]
        within = int(np.searchsorted(starts_E, self.until))
        drawn, starved, starved_at = _in_order(
            starts_E[:within].tolist(),
            next_E[self.rising_E[:within]].tolist(),
            self.lengths_E[falling_E].tolist(),
            np.where(self.counts_L > 0, keys_E[lasts_L], -1).tolist(),
            self.until,
            {at for at, s in enumerate(live) if s in ended},
        )
        edges_N = falling_E[drawn]
        count = int(np.searchsorted(np.cumsum(self.sizes_E[edges_N]), budget)) + 1
        # If much is owed, all edges may lie before ``until`` while samples remain at that time.
        has_ended = self.is_all and within == num_edges and len(drawn) == num_edges - num_live
        if starved is not None and starved_at < count:
            count, starved = starved_at, live[starved]
        elif count <= len(drawn) or has_ended:
            starved = None
        else:
            return None
        of_E = np.repeat(np.arange(num_live), self.counts_L + 1)
        places_N = of_E[edges_N[:count]]
        counts_L = np.bincount(places_N, minlength=num_live)
        counts_S, served_S = np.zeros((2, num_sources), np.int64)
        counts_S[live], served_S[live] = counts_L, self.after_E[self.firsts_L + counts_L]
        return np.array(live)[places_N], counts_S, served_S.tolist(), starved


def _edged(columns: Sequence[NDArray[np.integer]]) -> NDArray[np.int64]:
    """Return the columns end to end, with a 0 before each."""
    zero = np.zeros(1, np.int64)
    return np.concatenate([part for column in columns for part in (zero, column)])


def _in_order(
    starts: list[int],
    keys: list[int],
    lengths: list[int],
    lasts: list[int],
    until: int,
    ended: Collection[int],
) -> tuple[list[int], int | None, int]:
    """Draw samples, each identified by its key; among the started samples, the highest key comes first.

    Args:
        starts: Start times of the samples, rising.
        keys: Keys of the samples; ``-1 - source``, below 0, where a source needs more samples.
        lengths: Length by key.
        lasts: Key of the last sample of each source; -1 if the source has none.
        until: Latest time at which to stop.
        ended: Sources that have no further samples.

    Returns:
        The keys drawn, the source that starved, if any, and the number of draws before that.
    """
    started: list[int] = []
    drawn: list[int] = []
    waited_for: list[int] = []  # sources whose last sample is still to be drawn
    now, starved = 0, None
    for start, key in zip(starts, keys, strict=True):
        # If no sample has started, the first one that starts is drawn.
        while now < start and started:
            sample = started.pop()
            drawn.append(sample)
            now += lengths[sample]
        if key >= 0:
            insort(started, key)
        elif -1 - key in ended:
            continue
        elif lasts[-1 - key] in started:
            waited_for.append(-1 - key)
        else:
            starved = -1 - key
            break
    else:
        while now < until and started:
            sample = started.pop()
            drawn.append(sample)
            now += lengths[sample]
    due = {lasts[source]: source for source in reversed(waited_for)}
    for count, sample in enumerate(drawn if due else (), start=1):
        if sample in due:
            return drawn, due[sample], count
    return drawn, starved, len(drawn)
