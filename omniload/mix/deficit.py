"""Which source the next sample comes from: every source stays within one sample of its share.

The rule is worst-case fair weighted fair queueing. A source has *credit*, the tokens it is owed so far; drawing a
sample of ``n`` tokens pays every source its share of ``n`` and takes ``n`` from the one drawn. Among the sources that
are owed anything (credit of at least 0) the one whose next sample falls due first is drawn. A plain "largest deficit"
rule keeps a source from running ahead by more than a sample too, but among many lets it fall behind by several.

Credits and weights are integers, so credits always sum to zero exactly and the same
draw comes out on every machine.

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
"""Integer weights sum to this: a share is met to about one part in a billion."""

_TICK_BITS = 32
_LARGEST = 1 << 62
"""Numbers below this may be subtracted from each other in 64 bits."""
_FEW = 64
"""Samples, at hand or likely to be drawn, up to which they are served one by one."""
_LONG = 512
"""Samples at hand of one source from which on it is worth looking how many can be due."""


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
    """What was drawn of each source, in the unit of ``lengths``."""
    starved: int | None
    """Source whose next sample was due and not at hand; ``None`` when the budget was reached."""


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
    if missing < 0:  # only when tiny weights were lifted to 1
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

    Where a sequence of draws is cut is no matter: 100 tokens and 100 more are the samples of 200, at equal weights.

    Args:
        lengths: What each source has at hand: the length of its next samples, in order, ``[S]``;
            what weights count. With weights by samples, ones.
        weights_S: Integer weights from ``integer_weights``.
        credits_S: Credits left by the draw before; zeros at the start.
        budget: Tokens to draw; the last sample may exceed it.
        sizes: Tokens of the same samples where ``lengths`` counts something else.
        ended: Sources that are left out once what is at hand of them is drawn: there is no more. The
            others then share what is drawn in proportion to their weights.

    Returns:
        The draw; short of the budget where all sources have ended. With constant weights, and while none ends, every
        source's tokens stay within one sample (the longest of any source) of its share, above and below, after each.
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
"""Sources in order and samples of each, as lists or arrays, what was drawn of each, and the source that starved."""


def _serve(
    queues: list[list[int]],
    tokens: list[list[int]],
    weights_S: Sequence[int],
    credits_S: Sequence[int],
    budget: int,
    ended: Collection[int],
) -> _Served:
    """Run the queueing discipline in virtual time, from 0 at the start of this call.

    A source's next sample *starts* when its credit reaches 0 and *finishes* when the
    whole sample is owed; both move only when the source is drawn, which makes a draw
    ``O(log S)``: sources wait by start, and those that have started by finish.
    """
    counts = [0] * len(queues)
    served = [0] * len(queues)
    order: list[int] = []
    now = 0  # virtual time: what was served in all
    left = budget
    # Times are floors in units of 2**-32 token. Floors shift exactly with the origin of time, so
    # cutting a draw in two cannot change the order; quotients in floating point could.
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
            break  # all have ended
        # Where one sample finishes the source's next one starts.
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
        else:  # it has started already, as half of them have: spare it the way through the other heap
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
    """Serve as ``_serve`` does, with starts and finishes of all samples found beforehand.

    ``None`` where there is little to draw, so that it would take longer, or where a number does not fit 64 bits.
    """
    live = [s for s, weight in enumerate(weights_S) if weight > 0]
    known = sum(len(lengths[s]) for s in live)
    spent = sum(int((sizes or lengths)[s].sum()) for s in live) if known > _FEW else 0
    # Planners know several steps ahead, and small ones draw little of it.
    few = known <= _FEW or (known <= _LONG * len(live) and budget * known <= _FEW * spent)
    if few or budget <= 0 or max(map(abs, credits_S)) >= _LARGEST:
        return None
    until = budget
    if sizes is not None:  # what is served when the budget is reached is a guess at first
        units = sum(int(lengths[s].sum()) for s in live)
        until = 1 + budget * 5 * units // (4 * max(spent, 1))
    while until < _LARGEST // WEIGHT_ONE:
        if (ahead := _Ahead.of(lengths, sizes, live, (weights_S, credits_S), until)) is None:
            return None
        if (served := ahead.serve(live, len(lengths), budget, ended)) is not None:
            return served
        until *= 4  # edges were missing: the guess was too low
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ahead:
    """Where samples start and finish in virtual time, whenever they are drawn: one sort tells both orders.

    A source of ``n`` samples has ``n + 1`` *edges*: where its first one starts, where each one finishes and the next
    starts, and where the last one finishes and the source must have more.

    Shape suffixes: E edges, source after source; L sources that are drawn from.
    """

    until: int
    """Virtual time before which all edges are known."""
    is_all: bool
    """Whether there are no others."""
    firsts_L: NDArray[np.int64]
    counts_L: NDArray[np.int64]
    """Samples of each source."""
    lengths_E: NDArray[np.int64]
    """Length of the sample that finishes at each edge; 0 where none does."""
    sizes_E: NDArray[np.int64]
    """Tokens of it."""
    after_E: NDArray[np.int64]
    """What is served of the source once it is drawn."""
    starts_E: NDArray[np.int64]
    """Virtual time at each edge, in tokens that must be served before, rounded up."""
    rising_E: NDArray[np.intp]
    """Edges by virtual time; of ties the first source's, in its order."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[NDArray[np.integer]],
        sizes: Sequence[NDArray[np.integer]] | None,
        live: Sequence[int],
        due: tuple[Sequence[int], Sequence[int]],
        until: int,
    ) -> "_Ahead | None":
        """Find the edges before virtual time ``until``; ``due`` are weights and credits of all sources."""
        weights_S, credits_S = due
        heads = []
        for s in live:
            head = lengths[s]
            if len(head) > _LONG:  # planners know several steps ahead
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
        """Draw until the budget is reached; ``None`` where later edges may count."""
        falling_E = self.rising_E[::-1]
        num_edges, num_live = len(falling_E), len(live)
        keys_E = np.empty(num_edges, np.int64)  # the later a sample finishes the lower its key
        keys_E[falling_E] = np.arange(num_edges)
        lasts_L = self.firsts_L + self.counts_L
        next_E = np.append(keys_E[1:], 0)
        next_E[lasts_L] = -1 - np.arange(num_live)  # behind its last sample a source must have more
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
        # Where much is owed, all edges may lie before ``until`` and samples be left at it.
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
    """Return the columns end to end, a 0 before each."""
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
    """Draw samples, each named by its key: of those that have started the one with the highest.

    Args:
        starts: When samples start, rising.
        keys: Their keys; below 0, ``-1 - source``, where a source must have more.
        lengths: Length by key.
        lasts: Key of the last sample of each source; -1 where it has none.
        until: When to stop at the latest.
        ended: Sources that have no more.

    Returns:
        The keys drawn; the source that starved and the number of draws before it did, if one did.
    """
    started: list[int] = []
    drawn: list[int] = []
    waited_for: list[int] = []  # sources whose last sample is still to be drawn
    now, starved = 0, None
    for start, key in zip(starts, keys, strict=True):
        # Where none has started, the first that will is drawn.
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
