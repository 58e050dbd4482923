"""Packing where sources differ: some are cut and others are not, and some have rows to themselves.

::

    drawn    w w c b w c      c is never cut, w fills up, b lies alone
    rows     |c  c  w|w w w w|w w w w|b . . .|

Documents that stay whole are packed first, each into the fullest row of its kind that has room for it. Those that may
be cut fill what is left to the last token. A row is of one kind from its first document on, and rows are begun as they
are needed, so that what is drawn decides how many each kind has.

Shape suffixes:
    S  sources        P  pieces        A  parts of pieces
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.mix.config import MixConfig
from omniload.mix.pieces import PieceTable

__all__ = ["packed_by_source", "room_of", "sizes_of"]

_CARRIED = -1
_ALONE = -1
"""Kind of a piece that shares its row with none."""


def room_of(
    mix: MixConfig, sources_P: NDArray[np.integer], lengths_P: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the tokens of rows that pieces take: their own, or a whole row of one that lies alone.

    What a step draws is counted so: else documents that lie alone would be drawn faster than there are rows for them,
    and more would wait with every step.
    """
    packing = mix.own_packing
    if packing is None or not packing.alone_S.any():
        return lengths_P
    return np.where(packing.alone_S[sources_P], mix.pack.length, lengths_P)


def sizes_of(mix: MixConfig, lengths_S: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return what the pieces of each source take of what a step draws: tokens of rows, or rows without packing.

    The same list where that is their lengths.
    """
    if mix.pack.method == "none":
        return [np.ones(len(column), np.int64) for column in lengths_S]
    packing = mix.own_packing
    if packing is None or not packing.alone_S.any():
        return lengths_S
    return [
        np.full(len(column), mix.pack.length, np.int64) if alone else column
        for column, alone in zip(lengths_S, packing.alone_S.tolist(), strict=True)
    ]


def packed_by_source(
    pool: PieceTable, mix: MixConfig, *, num_first: int
) -> tuple[PieceTable, NDArray[np.int32]]:
    """Deal pieces to the rows of a step as each source wants it.

    Args:
        pool: Pieces of at most a row each, in order; those carried, the oldest first, before those drawn.
        mix: A mix whose sources differ.
        num_first: How many are carried. They stay whole and are placed before all others, in their order: the oldest
            always finds a row, so that none waits for ever.

    Returns:
        Parts of the pieces in order, and the row of each, or -1. Rows are begun in order, and none holds more than its
        tokens, or documents of two kinds. Where every row is begun, what may be cut leaves no room in shared rows
        unless all of it is placed.
    """
    packing = mix.own_packing
    assert packing is not None, "its sources are packed alike"
    sources_P, lengths_P = pool.sources_P, pool.lengths_P
    cut_P = packing.cut_S[sources_P]
    kinds_P = np.where(packing.own_S[sources_P], 1 + sources_P, 0)
    kinds_P[packing.alone_S[sources_P]] = _ALONE
    # Whole: what is carried, in its order, then the others by falling length, ties as they were drawn.
    falling = num_first + (-lengths_P[num_first:]).argsort(kind="stable")
    order = np.concatenate((np.arange(num_first), falling[~cut_P[falling]]))
    rows = _Rows(num=mix.rows_per_step, capacity=mix.pack.length)
    rows_P = np.full(len(pool), _CARRIED, np.int32)
    rows_P[order] = rows.whole(kinds_P[order].tolist(), lengths_P[order].tolist())
    is_cut_P = cut_P & (rows_P == _CARRIED)
    whole, cut = np.flatnonzero(~is_cut_P), np.flatnonzero(is_cut_P)
    number, starts, stops, row = rows.cut(kinds_P[cut].tolist(), lengths_P[cut].tolist())
    piece_A = np.concatenate((whole, cut[number]))
    by_piece = piece_A.argsort(kind="stable")
    found = pool.take(piece_A[by_piece])
    starts_A = np.concatenate((np.zeros(len(whole), np.int64), starts))[by_piece]
    stops_A = np.concatenate((lengths_P[whole], stops))[by_piece]
    rows_A = np.concatenate((rows_P[whole], row))[by_piece].astype(np.int32)
    return found.between(found.starts_P + starts_A, found.starts_P + stops_A), rows_A


@dataclass(slots=True, kw_only=True)
class _Rows:
    """The rows of a step, as far as they are begun."""

    num: int
    capacity: int
    begun: int = 0
    free: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    """Rows by kind and remaining room, each list a heap; there are far fewer sizes of room than rows."""

    def whole(self, kinds: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Place whole pieces, each into the fullest row of its kind that has room, else into a new one.

        Returns:
            The row of each document. Among rows with equal room the first is taken.
        """
        dealt = []
        rooms_of: dict[int, list[int]] = {kind: [] for kind in set(kinds)}  # rising
        self.free = {kind: {} for kind in rooms_of}
        for kind, length in zip(kinds, lengths, strict=True):
            rooms, rows_of = rooms_of[kind], self.free[kind]
            if (at := bisect_left(rooms, length)) < len(rooms):
                same = rows_of[room := rooms[at]]
                row = heappop(same)
                if not same:
                    del rooms[at], rows_of[room]
            else:
                room, row = self.capacity, self._begin()
            dealt.append(row)
            left = room - length
            if left and row != _CARRIED and kind != _ALONE:
                if left in rows_of:
                    heappush(rows_of[left], row)
                else:
                    rows_of[left] = [row]
                    insort(rooms, left)
        return dealt

    def cut(self, kinds: Sequence[int], lengths: Sequence[int]) -> NDArray[np.int64]:
        """Fill rows up in their order with pieces that are cut where rows end.

        Returns:
            Four columns of the parts in order: number of the piece, first token, first token no longer in it, row.
        """
        # The next row of each kind is the last of its list.
        spaces = {
            kind: sorted(((row, room) for room in rows_of for row in rows_of[room]), reverse=True)
            for kind, rows_of in self.free.items()
        }
        pieces, starts, stops, rows = list[int](), list[int](), list[int](), list[int]()
        for piece, (kind, length) in enumerate(zip(kinds, lengths, strict=True)):
            free, start = spaces.setdefault(kind, []), 0
            while start < length:
                if free:
                    row, room = free.pop()
                else:
                    row, room = self._begin(), self.capacity
                stop = length if row == _CARRIED else min(length, start + room)
                pieces.append(piece)
                starts.append(start)
                stops.append(stop)
                rows.append(row)
                if row != _CARRIED and stop - start < room:
                    free.append((row, room - (stop - start)))
                start = stop
        return np.array((pieces, starts, stops, rows), np.int64)

    def _begin(self) -> int:
        if self.begun == self.num:
            return _CARRIED
        self.begun += 1
        return self.begun - 1
