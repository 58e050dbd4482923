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
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
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
    """Return what the units of each source take of what a step draws: tokens of rows, or rows without packing.

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
    order = [*range(num_first), *falling[~cut_P[falling]].tolist()]
    rows = _Rows(num=mix.rows_per_step, capacity=mix.pack.length)
    kinds, lengths = kinds_P.tolist(), lengths_P.tolist()
    row_of = {p: rows.whole(kinds[p], lengths[p]) for p in order}
    rows.fill()
    parts: list[tuple[int, int, int, int]] = []
    for p, may_cut in enumerate(cut_P.tolist()):
        row = row_of.get(p, _CARRIED)
        if row != _CARRIED or not may_cut:
            parts.append((p, 0, lengths[p], row))
        else:
            parts += [(p, *part) for part in rows.cut(kinds[p], lengths[p])]
    piece_A, starts_A, stops_A, rows_A = np.array(parts, np.int64).reshape(-1, 4).T
    found = pool.take(piece_A)
    return found.between(found.starts_P + starts_A, found.starts_P + stops_A), rows_A.astype(
        np.int32
    )


@dataclass(slots=True, kw_only=True)
class _Rows:
    """The rows of a step, as far as they are begun."""

    num: int
    capacity: int
    begun: int = 0
    rooms: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Of each kind its rows with room, as ``(room, row)``, rising."""
    spaces: dict[int, deque[tuple[int, int]]] = field(default_factory=dict)
    """The same as ``(row, room)``, by row, while they are filled up."""

    def whole(self, kind: int, length: int) -> int:
        """Place a whole piece into the fullest row of its kind that has room, else into a new one; return the row."""
        rooms = self.rooms.setdefault(kind, [])
        if (at := bisect_left(rooms, (length, -1))) < len(rooms):
            room, row = rooms.pop(at)
        else:
            room, row = self.capacity, self._begin()
        if row != _CARRIED and kind != _ALONE and room > length:
            insort(rooms, (room - length, row))
        return row

    def fill(self) -> None:
        """Have the rows filled up in their order from here on."""
        self.spaces = {
            kind: deque(sorted((row, room) for room, row in rooms))
            for kind, rooms in self.rooms.items()
        }

    def cut(self, kind: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Yield the parts of a piece that is cut where rows end, as ``(start, stop, row)``."""
        spaces, start = self.spaces.setdefault(kind, deque()), 0
        while start < length:
            if not spaces and (row := self._begin()) != _CARRIED:
                spaces.append((row, self.capacity))
            if not spaces:
                yield start, length, _CARRIED
                return
            row, room = spaces.popleft()
            stop = min(length, start + room)
            yield start, stop, row
            if stop - start < room:
                spaces.appendleft((row, room - (stop - start)))
            start = stop

    def _begin(self) -> int:
        if self.begun == self.num:
            return _CARRIED
        self.begun += 1
        return self.begun - 1
