"""Columns of sequences of unequal length: one flat array of values and one of offsets.

Shape suffixes:
    N  sequences        V  values of all sequences together
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

__all__ = [
    "Ragged",
    "Ranges",
    "Rows",
    "gather_across",
    "gather_ranges",
    "numbers_of",
    "offsets_of",
    "run_of",
    "taken_across",
]

_FEW = 32
"""Largest number of ranges for which one slice each is faster than the preparations for Arrow."""
_WINDOW_BYTES = 1 << 30
_INLINE_BYTES = 12
Rows: TypeAlias = NDArray[np.int64] | range
"""Numbers of requested sequences, ``[N]``; a range if they are consecutive, as in most reads in file order, so that
none of them has to be inspected."""


def numbers_of(rows: Rows) -> NDArray[np.int64]:
    """Return the numbers of sequences as an array, ``[N]``."""
    return np.arange(rows.start, rows.stop) if isinstance(rows, range) else rows


def offsets_of(lengths_N: NDArray[Any]) -> NDArray[np.int64]:
    """Return the starts of sequences of given lengths laid end to end, and the end of the last: sums, ``[N + 1]``."""
    offsets = np.zeros(len(lengths_N) + 1, np.int64)
    np.cumsum(lengths_N, out=offsets[1:])
    return offsets


def run_of(rows: Rows) -> range | None:
    """Return consecutive sequences as a range; ``None`` if they are not consecutive, or if there are none."""
    if isinstance(rows, range):
        return rows or None
    count = len(rows)
    if count and rows[-1] - rows[0] == count - 1 and (rows[1:] > rows[:-1]).all():
        return range(int(rows[0]), int(rows[0]) + count)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ragged:
    """``N`` sequences end to end; sequence ``i`` is ``values_V[offsets[i]:offsets[i + 1]]``."""

    values_V: NDArray[Any]
    """Values of all sequences, in order."""
    offsets: NDArray[np.int64]
    """Boundaries, ``[N + 1]``, from 0 to ``V``; they never fall."""

    @classmethod
    def of(cls, sequences: Sequence[NDArray[Any]], dtype: type[np.generic] = np.int32) -> Self:
        """Lay ``sequences`` end to end."""
        lengths = np.fromiter((len(s) for s in sequences), dtype=np.int64, count=len(sequences))
        values = (
            np.concatenate(sequences).astype(dtype, copy=False) if sequences else np.empty(0, dtype)
        )
        return cls(values_V=values, offsets=offsets_of(lengths))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> NDArray[Any]:
        return self.values_V[self.offsets[i] : self.offsets[i + 1]]

    @property
    def lengths_N(self) -> NDArray[np.int64]:
        """Length of each sequence."""
        return self.offsets[1:] - self.offsets[:-1]

    def between(self, first: int, last: int) -> Self:
        """Return the sequences ``first`` to before ``last``; no value is copied."""
        offsets = self.offsets[first : last + 1]
        values = self.values_V[offsets[0] : offsets[-1]]
        return type(self)(values_V=values, offsets=offsets - offsets[0])

    def split(self, cuts: Sequence[int]) -> list[Self]:
        """Return the sequences between neighbouring ``cuts``, which rise from 0 to ``N``; no value is copied."""
        ends = self.offsets[cuts].tolist()
        return [
            type(self)(values_V=self.values_V[a:b], offsets=self.offsets[first : last + 1] - a)
            for (first, last), (a, b) in zip(pairwise(cuts), pairwise(ends), strict=True)
        ]

    def take(self, indices: NDArray[np.integer[Any]]) -> Self:
        """Return the sequences at ``indices``, copied end to end."""
        starts, stops = self.offsets[indices], self.offsets[indices + 1]
        values, offsets = gather_ranges(self.values_V, starts, stops)
        return type(self)(values_V=values, offsets=offsets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """``N`` sequences as references: sequence ``i`` is ``columns[which[i]][starts[i]:stops[i]]``.

    Values that are passed on within a process are copied only once, in the final layout.
    """

    columns: Sequence[NDArray[Any]]
    """Flat arrays of one type, each contiguous; at least one."""
    which_N: NDArray[np.int64]
    """Number of the column of each sequence."""
    starts_N: NDArray[np.int64]
    """First value of each sequence."""
    stops_N: NDArray[np.int64]
    """First value after the sequence."""

    @classmethod
    def of(cls, columns: Sequence[Ragged], dtype: type[np.generic] = np.int32) -> Self:
        """Join the sequences of several columns, in order, as references."""
        nothing = np.empty(0, np.int64)
        return cls(
            # One additional column, because without any column the type would be unknown.
            columns=[np.empty(0, dtype), *(column.values_V for column in columns)],
            which_N=np.arange(1, len(columns) + 1).repeat([len(column) for column in columns]),
            starts_N=np.concatenate([nothing, *(column.offsets[:-1] for column in columns)]),
            stops_N=np.concatenate([nothing, *(column.offsets[1:] for column in columns)]),
        )

    def __len__(self) -> int:
        return len(self.which_N)

    @property
    def lengths_N(self) -> NDArray[np.int64]:
        """Length of each sequence."""
        return self.stops_N - self.starts_N

    def take(self, indices: NDArray[np.integer[Any]]) -> Self:
        """Return the sequences at ``indices``; no value is copied."""
        return type(self)(
            columns=self.columns,
            which_N=self.which_N[indices],
            starts_N=self.starts_N[indices],
            stops_N=self.stops_N[indices],
        )

    def packed(self) -> Ragged:
        """Return the sequences copied end to end."""
        values, offsets = gather_across(self.columns, self.which_N, self.starts_N, self.stops_N)
        return Ragged(values_V=values, offsets=offsets)


def taken_across(columns: Sequence[Ragged], indices: Sequence[NDArray[np.integer[Any]]]) -> Ragged:
    """Return the sequences at ``indices[i]`` of ``columns[i]``, one column after another, copied end to end."""
    pairs = list(zip(columns, indices, strict=True))
    values, offsets = gather_across(
        [column.values_V for column in columns],
        np.arange(len(columns)).repeat(list(map(len, indices))),
        np.concatenate([column.offsets[at] for column, at in pairs]),
        np.concatenate([column.offsets[at + 1] for column, at in pairs]),
    )
    return Ragged(values_V=values, offsets=offsets)


def gather_ranges(
    values_V: NDArray[Any], starts_N: NDArray[np.int64], stops_N: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Copy ``values_V[starts[i]:stops[i]]`` for every ``i`` end to end.

    Returns:
        The copied values, and their boundaries ``[N + 1]``.
    """
    return gather_across([values_V], np.zeros(len(starts_N), np.int64), starts_N, stops_N)


def gather_across(
    columns: Sequence[NDArray[Any]],
    which_N: NDArray[np.integer[Any]],
    starts_N: NDArray[np.int64],
    stops_N: NDArray[np.int64],
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Copy ``columns[which[i]][starts[i]:stops[i]]`` for every ``i`` end to end.

    Ranges of 650 tokens move at 5.9 G tokens/s on one core, compared with 1.5 for one numpy slice each, because Arrow
    copies them as binary views and releases the interpreter lock.

    Args:
        columns: Flat arrays of one type, each contiguous; at least one.
        which_N: Number of the column of each range.
        starts_N: First value of each range.
        stops_N: First value after each range.

    Returns:
        The copied values, and their boundaries ``[N + 1]``.

    Raises:
        ValueError: A range is not within its column. Arrow would read arbitrary memory in this case.
    """
    dtype = columns[0].dtype
    if len(which_N) <= _FEW and (few := _gather_few(columns, which_N, starts_N, stops_N)):
        return few
    _require_within(columns, which_N, starts_N, stops_N)
    lengths_N = stops_N - starts_N
    offsets = offsets_of(lengths_N)
    if not offsets[-1]:
        return np.empty(0, dtype), offsets
    # The sum of an offset and a length, both below the window's size, fits into 31 bits.
    if int(lengths_N.max()) * dtype.itemsize >= _WINDOW_BYTES:
        return _gather_long(columns, which_N, starts_N, offsets), offsets
    binary = pa.Array.from_buffers(
        pa.binary_view(), len(lengths_N), _views(columns, which_N, starts_N, lengths_N)
    ).cast(pa.large_binary())
    # After validity and offsets, the third buffer contains the values end to end.
    return np.frombuffer(binary.buffers()[2], dtype, int(offsets[-1])), offsets


def _gather_few(
    columns: Sequence[NDArray[Any]],
    which_N: NDArray[np.integer[Any]],
    starts_N: NDArray[np.int64],
    stops_N: NDArray[np.int64],
) -> tuple[NDArray[Any], NDArray[np.int64]] | None:
    """Copy a few ranges, slice by slice; ``None`` if a range is not within its column."""
    # An empty part gives the type if there are no ranges, because ``concatenate`` refuses an empty list.
    parts, bounds = [columns[0][:0]], [0]
    if not len(which_N) == len(starts_N) == len(stops_N):
        return None
    for which, start, stop in zip(
        which_N.tolist(), starts_N.tolist(), stops_N.tolist(), strict=True
    ):
        # Not refused here, because the method for many ranges reports which range is wrong.
        if not (0 <= which < len(columns) and 0 <= start <= stop <= len(columns[which])):
            return None
        parts.append(columns[which][start:stop])
        bounds.append(bounds[-1] + stop - start)
    return np.concatenate(parts), np.array(bounds, np.int64)


def _require_within(
    columns: Sequence[NDArray[Any]],
    which_N: NDArray[np.integer[Any]],
    starts_N: NDArray[np.int64],
    stops_N: NDArray[np.int64],
) -> None:
    if not len(which_N) == len(starts_N) == len(stops_N):
        raise ValueError(
            f"{len(which_N)} columns, {len(starts_N)} starts and {len(stops_N)} stops; give one each of every range"
        )
    if not len(which_N):
        return
    if which_N.min() < 0 or which_N.max() >= len(columns):
        raise ValueError(
            f"ranges lie in columns {which_N.min()} to {which_N.max()}; there are {len(columns)}, numbered from 0"
        )
    sizes = np.fromiter(map(len, columns), np.int64, len(columns))
    wrong_N = (starts_N < 0) | (stops_N < starts_N) | (stops_N > sizes[which_N])
    if wrong_N.any():
        i = int(wrong_N.argmax())
        raise ValueError(
            f"range {i} is {starts_N[i]} to {stops_N[i]} of column {which_N[i]}, which has {sizes[which_N[i]]} values; "
            "0 <= start <= stop <= values"
        )


def _views(
    columns: Sequence[NDArray[Any]],
    which_N: NDArray[np.integer[Any]],
    starts_N: NDArray[np.int64],
    lengths_N: NDArray[np.int64],
) -> list[pa.Buffer | None]:
    """Return the buffers of an array of binary views: validity, views, and the data that they point to.

    A view consists of four integers: number of bytes, the first four bytes (used only in comparisons), buffer, and
    offset in the buffer. Up to twelve bytes are stored in the view itself.
    """
    itemsize = columns[0].itemsize
    # An offset in a view has 31 bits, so a long column becomes several buffers, which overlap to its end.
    windows = [
        pa.py_buffer(column).slice(at) if at else pa.py_buffer(column)
        for column in columns
        for at in range(0, max(column.nbytes, 1), _WINDOW_BYTES)
    ]
    counts = [-(-max(column.nbytes, 1) // _WINDOW_BYTES) for column in columns]
    first_window = np.cumsum([0, *counts[:-1]])
    at_N = starts_N * itemsize
    views_N4 = np.zeros((len(starts_N), 4), np.int32)
    views_N4[:, 0] = lengths_N * itemsize
    views_N4[:, 2] = first_window[which_N] + at_N // _WINDOW_BYTES
    views_N4[:, 3] = at_N % _WINDOW_BYTES
    short = np.flatnonzero(views_N4[:, 0] <= _INLINE_BYTES)
    if len(short):
        views_N4[short, 2:] = 0
        _write_inline(views_N4, short, columns, which_N, starts_N, lengths_N)
    return [None, pa.py_buffer(views_N4), *windows]


def _write_inline(
    views_N4: NDArray[np.int32],
    short: NDArray[np.int64],
    columns: Sequence[NDArray[Any]],
    which_N: NDArray[np.integer[Any]],
    starts_N: NDArray[np.int64],
    lengths_N: NDArray[np.int64],
) -> None:
    """Write the values of ranges that are short enough to be stored in their views; ``short`` has their indices."""
    bytes_N16 = views_N4.view(np.uint8)
    if len(short) <= _FEW * len(columns):
        for i, which, start, length in zip(
            short.tolist(),
            which_N[short].tolist(),
            starts_N[short].tolist(),
            lengths_N[short].tolist(),
            strict=True,
        ):
            inline = columns[which][start : start + length].view(np.uint8)
            bytes_N16[i, 4 : 4 + len(inline)] = inline
        return
    # The first values of all ranges of a column at once, then the second: documents may be in rows by two tokens each.
    dtype = columns[0].dtype
    most = _INLINE_BYTES // dtype.itemsize
    values_NI = bytes_N16[:, 4 : 4 + most * dtype.itemsize].view(dtype)
    ordered = short[np.argsort(which_N[short], kind="stable")]
    bounds = np.searchsorted(which_N[ordered], np.arange(len(columns) + 1)).tolist()
    for column, (first, last) in zip(columns, pairwise(bounds), strict=True):
        at = ordered[first:last]
        for i in range(most):
            at = at[lengths_N[at] > i]
            values_NI[at, i] = column[starts_N[at] + i]


def _gather_long(
    columns: Sequence[NDArray[Any]],
    which_N: NDArray[np.integer[Any]],
    starts_N: NDArray[np.int64],
    offsets: NDArray[np.int64],
) -> NDArray[Any]:
    """Copy ranges if some of them are too long for a view."""
    out = np.empty(int(offsets[-1]), columns[0].dtype)
    for which, start, (at, end) in zip(
        which_N.tolist(), starts_N.tolist(), pairwise(offsets.tolist()), strict=True
    ):
        out[at:end] = columns[which][start : start + end - at]
    return out
