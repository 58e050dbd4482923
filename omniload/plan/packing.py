"""Which piece goes into which row. Lengths in, row numbers out; no tokens are touched.

Shape suffixes:
    P  pieces
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

__all__ = ["CARRIED", "best_fit", "fill_in_order"]

CARRIED = -1
"""Row number of a piece that found no room."""


def best_fit(
    lengths_P: Sequence[int], *, num_first: int, num_rows: int, capacity: int
) -> NDArray[np.int32]:
    """Pack whole pieces into rows: each goes to the fullest row that still has room for it.

    The first ``num_first`` pieces (carried over, oldest first) are placed before all
    others, so the oldest always finds room and none waits for ever. The rest follow by
    falling length, ties in the order given.

    Args:
        lengths_P: Tokens of each piece, 1 to ``capacity``.
        num_first: Pieces at the head of the list that are placed first, in their order.
        num_rows: Rows to fill.
        capacity: Tokens in a row.

    Returns:
        Row of each piece, or ``CARRIED``. No row holds more than ``capacity``.

    Raises:
        ValueError: A piece is longer than a row or empty.

    Source:
        Best fit decreasing; Johnson et al., "Worst-case performance bounds for simple
        one-dimensional packing algorithms" (1974).
    """
    lengths = list(lengths_P)
    if lengths and not 1 <= min(lengths) <= max(lengths) <= capacity:
        raise ValueError(
            f"pieces have {min(lengths)} to {max(lengths)} tokens, a row holds 1 to {capacity}; "
            "cut or drop longer documents before packing"
        )
    falling = num_first + np.argsort(-np.asarray(lengths[num_first:], np.int64), kind="stable")
    rows = [CARRIED] * len(lengths)
    # Rows by the room they have left: far fewer rooms than rows where a step has many.
    rooms = [capacity] if num_rows else []
    rows_of = {capacity: list(range(num_rows))}  # heaps: of rows with equal room the first
    for p in [*range(num_first), *falling.tolist()]:
        size = lengths[p]
        at = bisect_left(rooms, size)
        if at == len(rooms):
            continue
        room = rooms[at]
        same = rows_of[room]
        row = rows[p] = heappop(same)
        if not same:
            del rooms[at], rows_of[room]
        if left := room - size:
            if left in rows_of:
                heappush(rows_of[left], row)
            else:
                rows_of[left] = [row]
                insort(rooms, left)
    return np.asarray(rows, np.int32)


def fill_in_order(
    lengths_P: NDArray[np.integer], *, num_rows: int, capacity: int
) -> tuple[NDArray[np.int64], ...]:
    """Lay pieces end to end and cut at every row boundary: no token of a row is wasted.

    Args:
        lengths_P: Tokens of each piece, in order.
        num_rows: Rows to fill.
        capacity: Tokens in a row.

    Returns:
        Four columns of the parts after cutting, in order: number of the piece, first
        token of the part within it, first token no longer in it, row; parts past the
        last row have row ``CARRIED``.
    """
    ends = np.cumsum(lengths_P, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.arange(1, num_rows + 1, dtype=np.int64) * capacity
    bounds = np.unique(np.concatenate(([0], ends, cuts[cuts < total])))
    starts, stops = bounds[:-1], bounds[1:]
    piece = np.searchsorted(ends, starts, side="right")
    begins = ends - lengths_P
    rows = starts // capacity
    rows[rows >= num_rows] = CARRIED
    return piece, starts - begins[piece], stops - begins[piece], rows
