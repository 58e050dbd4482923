"""Which piece goes into which row. Lengths in, row numbers out; no tokens are touched.

Shape suffixes:
    P  pieces        R  rows
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from operator import neg

import numpy as np
from numpy.typing import NDArray

from omniload.mix.config import MixConfig
from omniload.mix.pieces import PieceTable
from omniload.plan.rows.by_source import packed_by_source

__all__ = ["CARRIED", "best_fit", "fill_in_order", "packed"]

CARRIED = -1
"""Row number of a piece that found no room."""
_ALIKE = 8
"""Pieces of one size from which on they are dealt together."""


def best_fit(
    lengths_P: Sequence[int] | NDArray[np.integer], *, num_first: int, num_rows: int, capacity: int
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
    lengths = np.asarray(lengths_P, np.int64)
    order = _order_of(lengths, num_first)
    sizes = lengths[order].tolist()
    ends = [*sizes[: num_first + 1], *sizes[-1:]]  # behind the carried ones sizes fall
    if ends and not 1 <= min(ends) <= max(ends) <= capacity:
        raise ValueError(
            f"pieces have {min(ends)} to {max(ends)} tokens, a row holds 1 to {capacity}; "
            "cut or drop longer documents before packing"
        )
    sizes += [0] * _ALIKE  # ends the loop, which looks ahead
    # Rows by the room they have left: far fewer rooms than rows where a step has many.
    rooms = [capacity] if num_rows else []
    rows_of = {capacity: list(range(1 - num_rows, 1))}  # as -row and rising: the first is the last
    dealt: list[int] = []  # as -row too
    while size := sizes[len(dealt)]:
        if sizes[len(dealt) + _ALIKE - 1] == size and len(dealt) >= num_first:
            count = bisect_right(sizes, -size, lo=len(dealt), key=neg) - len(dealt)
            dealt += _dealt_alike(rooms, rows_of, size, count)
            continue
        if (at := bisect_left(rooms, size)) == len(rooms):
            dealt.append(-CARRIED)
            continue
        same = rows_of[room := rooms[at]]
        dealt.append(row := same.pop())
        if not same:
            del rooms[at], rows_of[room]
        if left := room - size:
            if left in rows_of:
                insort(rows_of[left], row)
            else:
                rows_of[left] = [row]
                insort(rooms, left)
    rows_P = np.empty(len(lengths), np.int32)
    rows_P[order] = dealt
    return np.negative(rows_P, out=rows_P)


def _order_of(lengths: NDArray[np.int64], num_first: int) -> NDArray[np.intp]:
    falling = (-lengths[num_first:]).argsort(kind="stable")
    if not num_first:
        return falling
    return np.concatenate((np.arange(num_first), num_first + falling))


def _dealt_alike(
    rooms: list[int], rows_of: dict[int, list[int]], size: int, count: int
) -> list[int]:
    """Return the rows, as ``-row``, of ``count`` pieces of one size that come one after the other.

    A row that took one has the least room of all that fit another, and so takes as many as fit it.
    """
    dealt: list[int] = []
    while count:
        at = bisect_left(rooms, size)
        if at == len(rooms):
            return dealt + [-CARRIED] * count
        room = rooms[at]
        same, fit = rows_of[room], room // size
        rows = same[-min(len(same), -(-count // fit)) :]
        del same[-len(rows) :]
        if not same:
            del rooms[at], rows_of[room]
        taken = [0] * (fit * len(rows))
        for at in range(fit):
            taken[at::fit] = reversed(rows)
        dealt += taken[:count]
        count -= len(taken)
        if count < 0:  # the last row takes fewer
            _add(rooms, rows_of, room - (fit + count) * size, rows[:1])
            count, rows = 0, rows[1:]
        _add(rooms, rows_of, room - fit * size, rows)
    return dealt


def _add(rooms: list[int], rows_of: dict[int, list[int]], room: int, rows: list[int]) -> None:
    if not room or not rows:
        return
    if room in rows_of:
        rows_of[room] += rows
        # Among rows with equal room the first is taken, and these were not added in the order of their numbers.
        rows_of[room].sort()
    else:
        rows_of[room] = rows
        insort(rooms, room)


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
    # Each once: where a piece ends at the end of a row there is no empty part.
    bounds = np.unique(np.concatenate(([0], ends, cuts[cuts < total])))
    starts, stops = bounds[:-1], bounds[1:]
    piece = np.searchsorted(ends, starts, side="right")
    begins = ends - lengths_P
    rows = starts // capacity
    rows[rows >= num_rows] = CARRIED
    return piece, starts - begins[piece], stops - begins[piece], rows


def packed(
    mix: MixConfig, carried: PieceTable, fresh: PieceTable, *, is_last: bool
) -> tuple[PieceTable, NDArray[np.int64], PieceTable]:
    """Return the pieces grouped by row, the rows' boundaries, and what is carried on, oldest first.

    Where nothing is drawn after them, rows that stay empty are left out.
    """
    pool = PieceTable.concatenated([carried, fresh])
    num_rows, capacity = mix.rows_per_step, mix.pack.length
    if mix.own_packing is not None:
        pool, rows_P = packed_by_source(pool, mix, num_first=len(carried))
    elif mix.pack.method == "best_fit":
        rows_P = best_fit(
            pool.lengths_P, num_first=len(carried), num_rows=num_rows, capacity=capacity
        )
    elif mix.pack.method == "none":
        # A step draws as many pieces as it has rows: nothing is carried, and each has its own.
        rows_P = np.arange(len(pool), dtype=np.int32)
    else:
        piece, starts, stops, rows = fill_in_order(
            pool.lengths_P, num_rows=num_rows, capacity=capacity
        )
        cut = pool.take(piece)
        pool = cut.between(cut.starts_P + starts, cut.starts_P + stops)
        rows_P = rows.astype(np.int32)
    if is_last:
        # Every method begins a row only once those before it are begun: none of these is empty.
        num_rows = int(rows_P.max()) + 1
    # Stable: pieces of a row keep the order in which they were drawn, and so do those carried, the oldest first.
    order = rows_P.argsort(kind="stable")
    num_carried = int((rows_P == CARRIED).sum())
    row_offsets = np.searchsorted(rows_P[order[num_carried:]], np.arange(num_rows + 1)).astype(
        np.int64
    )
    return pool.take(order[num_carried:]), row_offsets, pool.take(order[:num_carried])
