"""Moves whole columns of sequences: between Arrow and ``Ragged``, end to end, by index.

Text is a ``Ragged`` of UTF-8 bytes, token ids one of int32; both move the same way.

Shape suffixes:
    N  sequences        V  values of all sequences together
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from omniload.base.ragged import Ragged, Rows, numbers_of, run_of

__all__ = [
    "PLAIN_TEXTS",
    "Layer",
    "Pieces",
    "as_binary",
    "drained",
    "held_together",
    "is_utf8",
    "lengths_bytes",
    "lying",
    "take",
    "text_array",
    "text_bytes",
]

PLAIN_TEXTS: dict[pa.DataType, type[np.signedinteger[Any]]] = {
    pa.string(): np.int32,
    pa.large_string(): np.int64,
}
"""Types of texts whose offsets are read as they lie, and the type of those."""
_VIEW_BYTES = 16
_MOST_PIECES = 16
"""Units of a block that stay where they are; every read that is not in their order shows all of them."""
_PIECE_BYTES = 1 << 31
"""What a view reaches less than."""
_WITHIN_CHARACTER, _CHARACTER_BYTES = -64, 4
"""Bytes of a character of several, but its first, are below this as signed ones; and how many it has at most."""
_WINDOW_BYTES = 3 << 16
"""Bytes that are copied and looked at together: what a core has in its nearest caches."""
_LEAST_ROOM = 1 << 16
_SLACK = 4
"""Part of texts that room beyond them may be."""
_END_BYTES = 8


def as_binary(column: Ragged) -> pa.LargeBinaryArray:
    """Show a column to Arrow as binary strings of ``itemsize`` bytes a value; at most offsets are copied."""
    # Large: with offsets of 32 bits a block would end at 2 GiB.
    itemsize = column.values_V.itemsize
    ends = np.ascontiguousarray(column.offsets if itemsize == 1 else column.offsets * itemsize)
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(column), [None, pa.py_buffer(ends), pa.py_buffer(column.values_V)]
    )


def take(
    binary: pa.LargeBinaryArray,
    rows: Rows,
    dtype: np.dtype[Any],
    *,
    lent: bool = False,
) -> Ragged:
    """Return the sequences ``rows``, copied end to end.

    Arrow copies each with one memcpy and lets go of the interpreter lock: sequences of
    650 tokens move at 2.2 G tokens/s, against 0.8 for one numpy slice a sequence and 0.3
    for Arrow's ``take`` of lists; of 30 tokens at 0.7 against 0.05 and 0.1 (one core).
    Sequences that lie end to end already are copied at once.

    Args:
        binary: The column, from ``as_binary``.
        rows: Sequences wanted, in the order wanted.
        dtype: Type of the values.
        lent: Whether sequences that lie end to end may be shown where they are: that keeps the whole column.
    """
    if (run := run_of(rows)) is not None:
        shown = _shown(binary.slice(run.start, len(run)), np.int64, dtype)
        return shown if lent else Ragged(values_V=shown.values_V.copy(), offsets=shown.offsets)
    # pa.array(rows) would import pandas where it is installed: 40 MB in every loader.
    numbers = pa.py_buffer(numbers_of(rows))
    indices = pa.Int64Array.from_buffers(pa.int64(), len(rows), [None, numbers])
    return _shown(binary.take(indices), np.int64, dtype)


class Pieces:
    """Columns of one type that stay where they are, found by the number of a sequence in all of them.

    Sequences in another order than their own are found by views: 16 bytes each, which hold the length and the place,
    or up to twelve bytes themselves. Those of sequences of 50 bytes are copied in half of the time of ``take``, of
    2,000 in three quarters, and what is shown where it lies is not copied at all.

    Takes by one thread while others ask for lengths and values.
    """

    def __init__(self, columns: Sequence[Ragged]) -> None:
        """Show columns, at least one, each of less than 2 GiB."""
        self.values = [pa.py_buffer(np.ascontiguousarray(each.values_V)) for each in columns]
        """The values of each column."""
        self._dtype = columns[0].values_V.dtype
        self._begins = list(accumulate(map(len, columns), initial=0))
        self._columns: list[pa.LargeBinaryArray] | None = [as_binary(each) for each in columns]
        """Until sequences are asked for in another order."""
        self._views_N: NDArray[np.complex128] | None = None
        self._viewed_in: list[pa.Buffer] = []

    def __len__(self) -> int:
        return self._begins[-1]

    @property
    def size_bytes(self) -> int:
        """What it takes of memory at most."""
        return sum(int(values.size) for values in self.values) + _VIEW_BYTES * len(self)

    @property
    def lengths_bytes_N(self) -> NDArray[np.int64]:
        """Bytes of each sequence."""
        columns = self._columns
        if columns is not None:
            return np.concatenate([lengths_bytes(each) for each in columns])
        assert self._views_N is not None, "there are views before columns are let go of"
        return self._views_N.view(np.int32)[::4].astype(np.int64)

    def take(self, rows: Rows, *, lent: bool = False) -> Ragged:
        """Return the sequences ``rows``; see ``take``, the function."""
        if self._columns is not None and (run := run_of(rows)) is not None:
            parts = [self._column(part) for part in self._parts_of(run)]
            if len(parts) > 1:
                return drained(parts, self._dtype)
            shown = parts[0]
            return shown if lent else Ragged(values_V=shown.values_V.copy(), offsets=shown.offsets)
        return _shown(
            self._viewed(rows, pa.binary_view()).cast(pa.large_binary()), np.int64, self._dtype
        )

    def texts(self, rows: Rows) -> pa.Array:
        """Show the sequences ``rows`` as texts where they lie: that keeps all columns."""
        if self._columns is not None and (run := run_of(rows)) is not None:
            parts = self._parts_of(run)
            if len(parts) > 1:
                return text_array(drained([self._column(part) for part in parts], self._dtype))
            return parts[0].view(pa.large_string())
        return self._viewed(rows, pa.string_view())

    def _parts_of(self, rows: range) -> list[pa.LargeBinaryArray]:
        """Show sequences as they lie, an array for each column that they lie in."""
        assert self._columns is not None, "looked at before"
        found, first = [], rows.start
        while first < rows.stop:
            at = bisect_right(self._begins, first) - 1
            until = min(rows.stop, self._begins[at + 1])
            found.append(self._columns[at].slice(first - self._begins[at], until - first))
            first = until
        return found

    def _column(self, part: pa.LargeBinaryArray) -> Ragged:
        return _shown(part, np.int64, self._dtype)

    def _viewed(self, rows: Rows, kind: pa.DataType) -> pa.Array:
        if self._views_N is None:
            assert self._columns is not None, "no view was made"
            views = pa.concat_arrays([each.cast(pa.binary_view()) for each in self._columns])
            _, each, *self._viewed_in = views.buffers()
            self._views_N = np.frombuffer(each, np.complex128, len(views))
            # Lengths are in the views: whoever asks for them finds those first.
            self._columns = None
        taken_N = self._views_N[numbers_of(rows)]
        return pa.Array.from_buffers(
            kind, len(taken_N), [None, pa.py_buffer(taken_N), *self._viewed_in]
        )


def lengths_bytes(binary: pa.LargeBinaryArray) -> NDArray[np.int64]:
    """Return the bytes of each sequence of a column from ``as_binary``."""
    ends = np.frombuffer(binary.buffers()[1], np.int64, len(binary) + 1)
    return ends[1:] - ends[:-1]


def held_together(parts: list[Ragged], *, own: bool) -> Pieces | pa.LargeBinaryArray:
    """Return columns of units as one, where they lie if they may stay there; else end to end, and the list is emptied.

    Args:
        parts: The columns, at least one.
        own: Whether each lies in memory of its own, without room beyond it.
    """
    dtype = parts[0].values_V.dtype
    if not own or len(parts) > _MOST_PIECES:
        parts = [drained(parts, dtype)]
    if max(part.values_V.nbytes for part in parts) >= _PIECE_BYTES:
        return as_binary(drained(parts, dtype))
    return Pieces(parts)


def drained(columns: list[Ragged], dtype: np.dtype[Any]) -> Ragged:
    """Lay columns end to end and empty the list on the way; a single column is not copied.

    Each column is let go of once it is copied, so that pages are touched about once more
    than the result needs. Leaving columns where they are would save that moment but hold
    on to the slack of Arrow's builders, half as much again, for as long as the block lives.
    """
    if len(columns) == 1:
        return columns.pop()
    offsets = np.zeros(sum(map(len, columns)) + 1, np.int64)
    size = sum(len(column.values_V) for column in columns)
    values = _room(size * dtype.itemsize).view(dtype)
    row = at = 0
    # Taken from the end, where that moves no other, and each goes as soon as it is copied.
    columns.reverse()
    while columns:
        column = columns.pop()
        values[at : at + len(column.values_V)] = column.values_V
        offsets[row + 1 : row + 1 + len(column)] = column.offsets[1:] + at
        row, at = row + len(column), at + len(column.values_V)
    return Ragged(values_V=values, offsets=offsets)


class Layer:
    """Lays columns end to end as they are made, one at a time: each is copied in the cache, and let go of.

    All of them kept until the end would be new pages, and are copied once more; so is what a reader holds of a whole
    row group, which it has moved about as it grew.
    """

    def __init__(self, likely_bytes: int, dtype: np.dtype[Any], likely_count: int = 0) -> None:
        """Begin with room for so many bytes, and sequences; more are moved, as seldom as twice the room each time."""
        self._values_V = _room(
            max(likely_bytes, _LEAST_ROOM) // dtype.itemsize * dtype.itemsize
        ).view(dtype)
        self._ends = _room(_END_BYTES * (likely_count + 1)).view(np.int64)
        self._ends[0] = 0
        self._at = self._count = 0

    def lay(self, column: Ragged) -> None:
        """Copy a column behind what is there."""
        self.lay_values(column.values_V, column.offsets)

    def lay_values(self, values_V: NDArray[Any], ends: NDArray[np.signedinteger[Any]]) -> None:
        """Copy a column behind what is there; of its boundaries the first may be any, see ``lying``."""
        self._begun(values_V, ends)[:] = values_V

    def lay_texts(self, values_V: NDArray[np.uint8], ends: NDArray[np.signedinteger[Any]]) -> bool:
        """Copy texts behind what is there, and say whether they are UTF-8: each byte is looked at as it is copied."""
        first, into_V = self._count, self._begun(values_V, ends)
        return is_utf8(values_V, self._ends[first : self._count + 1], into_V)

    def _begun(self, values_V: NDArray[Any], ends: NDArray[np.signedinteger[Any]]) -> NDArray[Any]:
        """Count a column as laid, and return the room that its values are to be copied to."""
        at, first = self._at, self._count + 1
        stop, last = at + len(values_V), self._count + len(ends)
        if stop > len(self._values_V):
            self._values_V = _grown(self._values_V, at, stop)
        if last > len(self._ends):
            self._ends = _grown(self._ends, first, last)
        behind = self._ends[first:last]
        behind[:] = ends[1:]
        behind += at - int(ends[0])
        self._at, self._count = stop, last - 1
        return self._values_V[at:stop]

    def finish(self) -> Ragged:
        """Return all columns as one; nothing is laid any more."""
        return Ragged(
            values_V=_fitted(self._values_V, self._at),
            offsets=_fitted(self._ends, self._count + 1),
        )


def _grown(held_V: NDArray[Any], used: int, wanted: int) -> NDArray[Any]:
    grown_V = _room(max(wanted, 2 * len(held_V)) * held_V.itemsize).view(held_V.dtype)
    grown_V[:used] = held_V[:used]
    return grown_V


def _fitted(held_V: NDArray[Any], used: int) -> NDArray[Any]:
    """Return what is used of some room, moved once more where much room lies beyond: it stays taken for as long."""
    if len(held_V) <= max(_LEAST_ROOM // held_V.itemsize, used + used // _SLACK):
        return held_V[:used]
    values_V = _room(used * held_V.itemsize).view(held_V.dtype)
    values_V[:] = held_V[:used]
    return values_V


def _room(size_bytes: int) -> NDArray[np.uint8]:
    # Of Arrow's memory, which it keeps for a while: numpy's own would be new pages for every block.
    return np.frombuffer(pa.allocate_buffer(size_bytes), np.uint8, size_bytes)


def text_array(column: Ragged) -> pa.LargeStringArray:
    """Show a column of UTF-8 bytes as an Arrow array of strings, without a copy."""
    return pa.LargeStringArray.from_buffers(
        len(column),
        pa.py_buffer(np.ascontiguousarray(column.offsets)),
        pa.py_buffer(column.values_V),
    )


def is_utf8(
    values_V: NDArray[np.uint8],
    ends: NDArray[np.signedinteger[Any]],
    into_V: NDArray[np.uint8] | None = None,
) -> bool:
    """Whether every sequence of bytes is a text: all of them are one, and none begins within a character.

    Args:
        values_V: The bytes.
        ends: Where sequences begin, and the last ends; see ``lying``.
        into_V: Where the bytes are copied to on the way, if they are.
    """
    signed_V, size, begin = values_V.view(np.int8), len(values_V), 0
    while begin < size:
        stop = min(begin + _WINDOW_BYTES, size)
        if into_V is not None:
            into_V[begin:stop] = values_V[begin:stop]
        # Much of most text is ASCII: four times as quick to tell as UTF-8, and nothing in it begins within a character.
        if np.minimum.reduce(signed_V[begin:stop]) < 0:
            # Up to where a character begins; one has four bytes at most, and what has more is found to be none.
            for _ in range(_CHARACTER_BYTES - 1):
                if stop < size and signed_V[stop] < _WITHIN_CHARACTER:
                    stop -= 1
            # Of the same type as boundaries: else all of them are cast.
            first, last = ends.searchsorted(np.array((begin, stop), ends.dtype) + ends[0])
            starts = signed_V[ends[first:last] - ends[0]]
            if not _is_text(values_V[begin:stop]) or (starts < _WITHIN_CHARACTER).any():
                return False
        begin = stop
    return True


def _is_text(values_V: NDArray[np.uint8]) -> bool:
    ends = pa.py_buffer(np.array([0, len(values_V)]))
    try:
        # One text of all bytes: of many short ones Arrow's look at each takes most of the time.
        pa.LargeStringArray.from_buffers(1, ends, pa.py_buffer(values_V)).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def text_bytes(texts: pa.Array) -> Ragged:
    """Show an Arrow array of strings as a column of UTF-8 bytes; only offsets are copied."""
    wide = PLAIN_TEXTS.get(texts.type)
    if wide is None:
        texts, wide = texts.cast(pa.large_string()), np.int64
    return _shown(texts, wide, np.dtype(np.uint8))


def lying(
    strings: pa.Array, wide: type[np.signedinteger[Any]]
) -> tuple[NDArray[np.uint8], NDArray[np.signedinteger[Any]]]:
    """Show the bytes of Arrow's strings, and their boundaries as Arrow counts: the first may be any; none is copied.

    Args:
        strings: The strings.
        wide: Type of their offsets.
    """
    _, offsets, values = strings.buffers()
    # Arrow leaves the buffer out where no string has a byte.
    if not len(strings) or values is None:
        return np.empty(0, np.uint8), np.zeros(len(strings) + 1, wide)
    # A slice has the buffers of the whole array, and begins somewhere in them.
    ends = np.frombuffer(offsets, wide, len(strings) + 1, strings.offset * np.dtype(wide).itemsize)
    return np.frombuffer(values, np.uint8)[ends[0] : ends[-1]], ends


def _shown(strings: pa.Array, wide: type[np.signedinteger[Any]], dtype: np.dtype[Any]) -> Ragged:
    """Show Arrow's strings, whose offsets are of the type ``wide``, as a column; only offsets are copied."""
    values_V, ends = lying(strings, wide)
    begins = np.subtract(ends, ends[0], dtype=np.int64)
    return Ragged(
        values_V=values_V.view(dtype),
        offsets=begins if dtype.itemsize == 1 else begins // dtype.itemsize,
    )
