"""Lists of token ids in Arrow's memory as records, and what is wrong with one that is none.

Rows, records and samples are counted from 0 in what is said of them, as pyarrow, pandas, ``datasets`` and MDS index
them; lines of a text file from 1, as editors do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.errors import IntegrityError
from omniload.base.ragged import Ragged
from omniload.source.columns import drained
from omniload.source.formats.format import Records

__all__ = [
    "RowsAt",
    "ids_of_rows",
    "nulls_of",
    "row_at",
    "said_of_columns",
    "token_ids",
    "token_records",
]

_INT32_MAX = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsAt:
    """Where rows lie, for what is said of them."""

    where: str
    """The file, or the part of it in which rows are counted."""
    first: int = 0
    """Number there of the first of the rows, from 0."""
    word: str = "row"
    """What the format calls one."""

    @override
    def __str__(self) -> str:
        return self.where


def row_at(where: RowsAt | str, row: int) -> str:
    """Return the place of one of the rows that lie somewhere, as a message begins."""
    at = where if isinstance(where, RowsAt) else RowsAt(where=where)
    return f"{at.where}: {at.word} {at.first + row}"


def said_of_columns(named: Sequence[str]) -> str:
    """Return the columns of a fault, as its message begins; nothing where they have no name."""
    names = " or ".join(map(repr, named))
    return f"column {names} " if names else ""


def token_ids(
    ids_V: NDArray[Any], where: str, remedy: str = "write the shard anew"
) -> NDArray[np.int32]:
    """Show integers as token ids; int32 is not copied.

    Args:
        ids_V: The integers.
        where: Their place, for messages.
        remedy: What mends a shard that holds others.

    Raises:
        IntegrityError: One is negative or larger than a token id.
    """
    # Types that fit need no look at their values.
    small = np.can_cast(ids_V.dtype, np.int32) and ids_V.dtype.kind == "u"
    if not small and len(ids_V):
        low, high = int(ids_V.min()), int(ids_V.max())
        if low < 0 or high > _INT32_MAX:
            raise IntegrityError(
                f"{where}: holds token id {low if low < 0 else high}; a token id is from 0 to {_INT32_MAX}, "
                f"{remedy}"
            )
    return ids_V.astype(np.int32, copy=False)


def nulls_of(column: pa.ChunkedArray | pa.Array) -> NDArray[np.bool_]:
    """Return which rows of a column are null, ``[B]``: also those that a dictionary has a null for."""
    if pa.types.is_dictionary(column.type):
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        if any(chunk.dictionary.null_count for chunk in chunks):
            column = column.cast(column.type.value_type)
    if not column.null_count:
        return np.zeros(len(column), np.bool_)
    return np.asarray(column.is_null().to_numpy(zero_copy_only=False), np.bool_)


def token_records(
    column: pa.ChunkedArray,
    where: RowsAt | str,
    kept_B: NDArray[np.bool_] | None,
    named: Sequence[str],
) -> Records:
    """Show lists of token ids as records; one that is null, or holds a null, is a bad one.

    Args:
        column: The lists.
        where: Its place, for reasons.
        kept_B: Which rows conditions leave; what is wrong with another is all one.
        named: What it is called there; nothing where it has no name.

    Raises:
        IntegrityError: A token id is negative or too large; with its row.
    """
    parts, holed, start = [], [np.zeros(0, np.bool_)], 0
    for chunk in column.chunks:
        part, holed_B = _ragged(chunk, _Place(where, start, named))
        parts.append(part)
        holed.append(holed_B)
        start += len(chunk)
    null_B = nulls_of(column)
    bad_B = null_B | np.concatenate(holed)
    if kept_B is not None:
        bad_B &= kept_B
    reason = ""
    if bad_B.any():
        first = int(bad_B.argmax())
        fault = "is null" if null_B[first] else "holds a null among its token ids; write integers"
        reason = f"{row_at(where, first)}: {said_of_columns(named)}{fault}"
    found = drained(parts, np.dtype(np.int32))
    return Records(column=found, bad_B=bad_B, reason=reason, kept_B=kept_B)


def ids_of_rows(
    ids_V: NDArray[Any], ends_N: NDArray[np.int64], where: RowsAt | str, named: Sequence[str]
) -> NDArray[np.int32]:
    """Show the integers of rows that lie end to end as token ids; int32 is not copied.

    Args:
        ids_V: The integers.
        ends_N: Number of the integer behind each row.
        where: Place of the rows.
        named: What their column is called.

    Raises:
        IntegrityError: One is negative or larger than a token id; with its row.
    """
    return _ids(ids_V, ends_N, _Place(where, 0, named))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a chunk of a column lies."""

    where: RowsAt | str
    start: int
    """Rows before it."""
    named: Sequence[str]

    def of(self, row: int) -> str:
        """Return the place of a row of the chunk, as a message begins."""
        column = said_of_columns(self.named).rstrip()
        return row_at(self.where, self.start + row) + (f": {column}" if column else "")


def _ragged(lists: pa.Array, place: _Place) -> tuple[Ragged, NDArray[np.bool_]]:
    """Show a list array as token ids, and which lists hold a null; int32 without nulls is not copied.

    Raises:
        IntegrityError: One is negative or too large; ``place`` names the row.
    """
    values = lists.flatten()
    if pa.types.is_fixed_size_list(lists.type) or lists.null_count:
        lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))
    else:
        stored = lists.offsets.to_numpy()
        # A slice begins somewhere in the values; ``flatten`` has cut them there.
        offsets = stored.astype(np.int64) - int(stored[0])
    holed_B = np.zeros(len(lists), np.bool_)
    if values.null_count:
        nulls = np.flatnonzero(nulls_of(values))
        holed_B[np.searchsorted(offsets[1:], nulls, side="right")] = True
        # In place of them a token id, so that those of the other rows are looked at.
        values = values.fill_null(0)
    return Ragged(values_V=_ids(values.to_numpy(), offsets[1:], place), offsets=offsets), holed_B


def _ids(ids_V: NDArray[Any], ends_N: NDArray[np.int64], place: _Place) -> NDArray[np.int32]:
    try:
        return token_ids(ids_V, "")
    except IntegrityError:
        low = int(ids_V.argmin())
        at = low if ids_V[low] < 0 else int(ids_V.argmax())
        return token_ids(ids_V, place.of(int(np.searchsorted(ends_N, at, side="right"))))
