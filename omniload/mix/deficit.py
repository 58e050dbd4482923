"""Which source the next sample comes from: every source stays within one sample of its share.

The rule is worst-case fair weighted fair queueing. A source has *credit*, the tokens
it is owed so far; drawing a sample of ``n`` tokens pays every source its share of
``n`` and takes ``n`` from the one drawn. Among the sources that are owed anything
(credit of at least 0) the one whose next sample falls due first is drawn. A plain
"largest deficit" rule keeps a source from running ahead by more than a sample too,
but lets it fall behind by several when there are many sources.

Credits and weights are integers, so credits always sum to zero exactly and the same
draw comes out on every machine.

Source:
    Bennett and Zhang, "WF2Q: worst-case fair weighted fair queueing" (1996).

Shape suffixes:
    S  sources        N  samples drawn, in order
"""

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["WEIGHT_ONE", "Drawn", "draw", "integer_weights"]

WEIGHT_ONE = 1 << 30
"""Integer weights sum to this: a share is met to about one part in a billion."""

_TICK_BITS = 32


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

    The order does not depend on where a sequence of draws is cut: drawing 100 and then
    100 more tokens gives the samples of drawing 200, as long as the weights stay.

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
        The draw; short of the budget where all sources have ended. With constant weights, and
        while none ends, every source's tokens stay within one sample (the longest of any source)
        of its share, above and below, after every sample.
    """
    units = [column.tolist() for column in lengths]
    tokens = units if sizes is None else [column.tolist() for column in sizes]
    order, counts, served, starved = _serve(units, tokens, weights_S, credits_S, budget, ended)
    total = sum(served)
    return Drawn(
        sources_N=np.asarray(order, np.int32),
        counts_S=np.asarray(counts, np.int64),
        credits_S=tuple(
            credit + weight * total - WEIGHT_ONE * taken
            for credit, weight, taken in zip(credits_S, weights_S, served, strict=True)
        ),
        served_S=tuple(served),
        starved=starved,
    )


def _serve(
    queues: list[list[int]],
    tokens: list[list[int]],
    weights_S: Sequence[int],
    credits_S: Sequence[int],
    budget: int,
    ended: Collection[int],
) -> tuple[list[int], list[int], list[int], int | None]:
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
