"""Arrays in samples of MDS: token ids, and numbers of a user's columns.

An array is the bytes of its numbers. The parts of ``ndarray:TYPE:SHAPE`` that the index leaves out come before each
array: a code for the type, and a code for the shape with its numbers.

Shape suffixes:
    N  samples of a unit        V  bytes of a column, or its numbers
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ragged, Ranges, gather_ranges, offsets_of
from omniload.source.formats.format import Records
from omniload.source.parsing.table_records import numbers_as
from omniload.source.parsing.token_lists import (
    RowsAt,
    fault_of,
    row_at,
    rows_of_ids,
    said_of_columns,
)

__all__ = ["DTYPE_OF_CODE", "INTEGERS_BY_NAME", "ids_in", "numbers_in", "numbers_of"]

DTYPE_OF_CODE = {
    code: np.dtype(name)
    for code, name in (
        *((8, "<u1"), (9, "<i1"), (16, "<u2"), (17, "<i2"), (32, "<u4"), (33, "<i4")),
        *((64, "<u8"), (65, "<i8"), (18, "<f2"), (34, "<f4"), (66, "<f8")),
    )
}
"""Types of numbers, by the code that comes before an array with its own type."""
_INTEGERS = {code: each for code, each in DTYPE_OF_CODE.items() if each.kind != "f"}
INTEGERS_BY_NAME = {each.name: each for each in _INTEGERS.values()}
"""Types that token ids may have."""


@dataclass(slots=True, kw_only=True)
class _BadSamples:
    """The samples of a unit that have no token ids, and the fault of the first of them."""

    bad_N: NDArray[np.bool_]
    kept_N: NDArray[np.bool_] | None = None
    """Samples that meet the conditions; faults of others are not reported."""
    first: int = -1
    said: str = ""

    def note(self, wrong_N: NDArray[np.bool_], say: Callable[[int], str]) -> None:
        """Add bad samples; an earlier reason stays."""
        told_N = wrong_N if self.kept_N is None else wrong_N & self.kept_N
        if told_N.any():
            at = int(told_N.argmax())
            if self.first < 0 or at < self.first:
                self.first, self.said = at, say(at)
        self.bad_N |= wrong_N


def ids_in(
    values: Ragged,
    encoding: str,
    dtype: str | None,
    place: tuple[RowsAt, str],
    kept_B: NDArray[np.bool_] | None = None,
) -> Records:
    """Read the arrays of a column; a sample without an array, or with other values than token ids, is a bad record.

    Args:
        values: Bytes of each sample.
        encoding: Encoding of the column in the index.
        dtype: Type of the ids if they are bytes.
        place: Place of the samples, and the name of the column.
        kept_B: Samples that meet the conditions; faults of others do not matter.
    """
    faults = _BadSamples(bad_N=np.zeros(len(values), np.bool_), kept_N=kept_B)
    kind, _, rest = encoding.partition(":")
    named, _, shape = rest.partition(":")
    starts, stops = values.offsets[:-1].copy(), values.offsets[1:]
    types: list[np.dtype[Any]]
    # The parts that ``ndarray:TYPE:SHAPE`` leaves out come before each array.
    if kind == "bytes" or named:
        types = [np.dtype(dtype) if kind == "bytes" else INTEGERS_BY_NAME[named]]
        chosen = np.zeros(len(values), np.int64)
    else:
        codes = _bytes_at(values, starts, faults)
        faults.note(
            ~np.isin(codes, list(_INTEGERS)),
            lambda at: f"is of type {codes[at]}, where integers belong; name another column",
        )
        codes[faults.bad_N] = next(iter(_INTEGERS))
        found = np.unique(codes).tolist()
        types = [_INTEGERS[code] for code in found]
        chosen = np.searchsorted(found, codes)
        starts += 1
    if kind == "ndarray" and not shape:
        codes = _bytes_at(values, starts, faults)
        # The shape: the upper bits of its code are the number of dimensions, the lower bits the width of each.
        starts += 1 + (codes >> 2) * (1 << (codes & 3))
    column = _cast(values.values_V, starts, stops, types, chosen, faults)
    reason = ""
    if faults.said:
        where, name = place
        reason = f"{row_at(where, faults.first)}: {said_of_columns([name])}{faults.said}"
    bad_B = faults.bad_N if kept_B is None else faults.bad_N & kept_B
    return Records(column=column, bad_B=bad_B, reason=reason, kept_B=kept_B)


def _bytes_at(values: Ragged, places: NDArray[np.int64], faults: _BadSamples) -> NDArray[np.int64]:
    faults.note(places >= values.offsets[1:], lambda _: "has an array that is cut short")
    if not len(values.values_V):
        return np.zeros(len(places), np.int64)
    # For a truncated array, any byte.
    return values.values_V[np.minimum(places, len(values.values_V) - 1)].astype(np.int64)


def _cast(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    types: list[np.dtype[Any]],
    chosen: NDArray[np.int64],
    faults: _BadSamples,
) -> Ragged:
    """Read ranges of bytes as token ids, each with its chosen type; a faulty range gives no ids."""
    widths = np.array([each.itemsize for each in types] or [1], np.int64)[chosen]
    sizes = stops - starts
    faults.note(
        (sizes < 0) | (sizes % widths != 0),
        lambda at: f"has an array of {sizes[at]} bytes, of ids of {widths[at]}",
    )
    starts = np.where(faults.bad_N, stops, starts)
    offsets = offsets_of((stops - starts) // widths)
    ids = np.empty(0 if len(types) == 1 else int(offsets[-1]), np.int32)
    for number, dtype in enumerate(types):
        mine = np.flatnonzero(chosen == number)
        found, ends = gather_ranges(data, starts[mine], stops[mine])
        ids_V, ends = found.view(dtype), ends // dtype.itemsize
        part, wrong_B = rows_of_ids(ids_V, ends)
        wrong_N = np.zeros(len(chosen), np.bool_)
        wrong_N[mine[wrong_B]] = True
        faults.note(wrong_N, partial(_fault_of_owner, ids_V, ends, mine))
        # This is nearly always so, because a writer gives a column one type.
        if len(types) == 1:
            return part
        counts = np.diff(ends)
        inside = np.arange(len(ids_V)) - np.repeat(ends[:-1], counts)
        # Back to the places of their samples.
        ids[np.repeat(offsets[mine], counts) + inside] = part.values_V
    return Ragged(values_V=ids, offsets=offsets)


def _fault_of_owner(
    ids_V: NDArray[Any], ends: NDArray[np.int64], mine: NDArray[np.int64], sample: int
) -> str:
    """Describe the fault in the ids of a sample, whose number counts samples of all types."""
    at = int(np.searchsorted(mine, sample))
    return fault_of(ids_V[ends[at] : ends[at + 1]])


def numbers_in(
    values: Ragged, encoding: str, dtype: np.dtype[Any]
) -> tuple[Ragged, NDArray[np.bool_], NDArray[np.bool_]]:
    """Read arrays of numbers as one type.

    Args:
        values: Bytes of each sample.
        encoding: Encoding of the column in the index: ``bytes`` or ``ndarray``, of numbers.
        dtype: Wanted type, which is also the type of plain bytes.

    Returns:
        The numbers, none for a sample without an array; which samples do not fit the type; and which have an array.
    """
    stored, is_array_N = _stored_in(values, encoding, dtype)
    parts, owners, odd = [], [np.zeros(0, np.int64)], [np.zeros(0, np.bool_)]
    for mine, numbers_V, offsets in stored:
        part, odd_N = numbers_as(numbers_V, offsets, dtype, np.zeros(len(mine), np.bool_))
        parts.append(part)
        odd.append(odd_N)
        owners.append(mine)
    in_order = np.argsort(np.concatenate(owners))
    column = Ranges.of(parts, dtype.type).take(in_order).packed()
    return column, np.concatenate(odd)[in_order] | ~is_array_N, is_array_N


def numbers_of(cell_V: NDArray[np.uint8], encoding: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the numbers of one sample as they are stored, to find the number that its column cannot have.

    Args:
        cell_V: Bytes of the sample.
        encoding: As for ``numbers_in``.
        dtype: Wanted type, as for ``numbers_in``.
    """
    values = Ragged(values_V=cell_V, offsets=np.array([0, len(cell_V)]))
    ((_, numbers_V, _),), _ = _stored_in(values, encoding, dtype)
    return numbers_V


def _stored_in(
    values: Ragged, encoding: str, dtype: np.dtype[Any]
) -> tuple[list[tuple[NDArray[np.int64], NDArray[Any], NDArray[np.int64]]], NDArray[np.bool_]]:
    """Return for each stored type its samples, with their numbers and offsets; and which samples have an array."""
    kind, _, rest = encoding.partition(":")
    named, _, shape = rest.partition(":")
    faults = _BadSamples(bad_N=np.zeros(len(values), np.bool_))
    starts, stops = values.offsets[:-1].copy(), values.offsets[1:]
    if kind == "bytes" or named:
        # Booleans are stored as bytes of 0 and 1.
        stored = np.dtype(named) if named else np.dtype(np.uint8) if dtype == np.bool_ else dtype
        codes = np.full(len(values), next(c for c, each in DTYPE_OF_CODE.items() if each == stored))
    else:
        codes = _bytes_at(values, starts, faults)
        faults.bad_N |= ~np.isin(codes, list(DTYPE_OF_CODE))
        codes[faults.bad_N] = next(iter(DTYPE_OF_CODE))
        starts += 1
    if kind == "ndarray" and not shape:
        shapes = _bytes_at(values, starts, faults)
        starts += 1 + (shapes >> 2) * (1 << (shapes & 3))
    found, unlike_N = [], faults.bad_N
    for code in np.unique(codes).tolist():
        stored, mine = DTYPE_OF_CODE[code], np.flatnonzero(codes == code)
        sizes = stops[mine] - starts[mine]
        unlike_N[mine] |= (sizes < 0) | (sizes % stored.itemsize != 0)
        begins = np.where(unlike_N[mine], stops[mine], starts[mine])
        found_V, ends = gather_ranges(values.values_V, begins, stops[mine])
        found.append((mine, found_V.view(stored), ends // stored.itemsize))
    return found, ~unlike_N
