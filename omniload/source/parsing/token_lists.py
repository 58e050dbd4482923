"""Lists of token ids in Arrow's memory as records, and the faults of invalid lists.

Messages count rows, records and samples from 0, as pyarrow, pandas, ``datasets`` and MDS index them. They count lines
of a text file from 1, as editors do.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.errors import ConfigError
from omniload.base.ragged import Ragged, offsets_of
from omniload.source.columns import drained
from omniload.source.formats.format import Records
from omniload.source.parsing.nested_columns import said_of_fields, types_of

__all__ = [
    "LINE",
    "RowsAt",
    "fault_of",
    "holed",
    "id_records",
    "is_list",
    "list_offsets",
    "nulls_of",
    "row_at",
    "rows_of_ids",
    "said_of_choice",
    "said_of_columns",
    "said_of_place",
    "token_records",
    "type_asked_for",
]

_INT32_MAX = np.iinfo(np.int32).max
_OFFERED = 3
"""Most columns that a message offers."""
_PLAIN = re.compile(
    r"(?!(?:y|n|yes|no|on|off|true|false|null)\Z)[a-z_]\w*", re.ASCII | re.IGNORECASE
)
"""Matches names that YAML reads as text without quotes."""


LINE = "line "
"""Text before the number of a record of a file of lines: it counts from 1, as editors do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsAt:
    """Place of rows, for messages."""

    where: str
    """File, or the part of a file, in which rows are counted."""
    first: int = 0
    """Number of the first row there, from 0."""
    word: str = "row"
    """The format's word for a row."""
    names: Sequence[str] = ()
    """Name of each row, if it is not ``word`` and the number."""

    @override
    def __str__(self) -> str:
        return self.where


def said_of_place(place: tuple[str, str]) -> str:
    """Return the text for a place from ``Format.place_of``, for a message: ``FILE:3`` for a line."""
    path, record = place
    if record.startswith(LINE):
        return f"{path}:{record.removeprefix(LINE)}"
    return f"{path}: {record}" if record else path


def row_at(where: RowsAt | str, row: int) -> str:
    """Return the place of a row, as the beginning of a message."""
    at = where if isinstance(where, RowsAt) else RowsAt(where=where)
    return said_of_place((at.where, at.names[row] if at.names else f"{at.word} {at.first + row}"))


def said_of_columns(named: Sequence[str]) -> str:
    """Return the columns of a fault, as the beginning of its message; empty if they have no name."""
    names = " or ".join(map(repr, named))
    return f"column {names} " if names else ""


def said_of_choice(key: str, names: Sequence[str]) -> str:
    """Return the lines of a mix file that would choose among columns: ``write text: title or text: body``."""
    fit = [name for name in names if name and names.count(name) == 1]
    if not fit:
        return "name another column"
    lines = (
        f"{key}: {name if _PLAIN.fullmatch(name) else json.dumps(name, ensure_ascii=False)}"
        for name in fit[:_OFFERED]
    )
    return f"write {' or '.join(lines)}{', or another of them' * (len(fit) > _OFFERED)}"


def rows_of_ids(
    ids_V: NDArray[Any], offsets: NDArray[np.int64]
) -> tuple[Ragged, NDArray[np.bool_]]:
    """Return integers of rows that lie end to end as token ids; int32 is not copied if all are valid.

    Args:
        ids_V: The integers.
        offsets: First integer of each row, followed by the number of integers.

    Returns:
        The rows, and which of them have a negative integer, or one that is larger than any token id.
    """
    wrong_B = np.zeros(len(offsets) - 1, np.bool_)
    if _are_ids(ids_V):
        return Ragged(values_V=ids_V.astype(np.int32, copy=False), offsets=offsets), wrong_B
    wrong = np.flatnonzero(_wrong(ids_V))
    wrong_B[np.searchsorted(offsets[1:], wrong, side="right")] = True
    known_V = ids_V.astype(np.int32)
    known_V[wrong] = 0
    return Ragged(values_V=known_V, offsets=offsets), wrong_B


def id_records(
    ids_V: NDArray[Any],
    offsets: NDArray[np.int64],
    where: RowsAt,
    named: Sequence[str] = (),
    remedy: str = "",
) -> Records:
    """Return integers of rows that lie end to end as records; a row with an invalid token id is a bad record.

    Args:
        ids_V: The integers.
        offsets: First integer of each row, followed by the number of integers.
        where: Place of the rows.
        named: Names of their column; empty if it has no name.
        remedy: Remedy, if the fault is not in the shard.
    """
    column, bad_B = rows_of_ids(ids_V, offsets)
    reason = ""
    if bad_B.any():
        row = int(bad_B.argmax())
        fault = fault_of(ids_V[offsets[row] : offsets[row + 1]])
        reason = f"{row_at(where, row)}: {said_of_columns(named)}{fault}{remedy}"
    return Records(column=column, bad_B=bad_B, reason=reason)


def fault_of(ids_V: NDArray[Any]) -> str:
    """Describe the fault in the integers of a row that are not all token ids."""
    return f"holds token id {ids_V[_wrong(ids_V)][0]}; a token id is from 0 to {_INT32_MAX}"


def _are_ids(ids_V: NDArray[Any]) -> bool:
    dtype = ids_V.dtype
    # Types whose whole range fits need no check of values.
    if not len(ids_V) or (dtype.kind == "u" and np.can_cast(dtype, np.int32)):
        return True
    # As unsigned integers, negative ones are larger than any token id, so one comparison finds both.
    most = min(_INT32_MAX, int(np.iinfo(dtype).max))
    return int(ids_V.view(f"{dtype.byteorder}u{dtype.itemsize}").max()) <= most


def _wrong(ids_V: NDArray[Any]) -> NDArray[np.bool_]:
    wrong_V: NDArray[np.bool_] = (ids_V < 0) | (ids_V > _INT32_MAX)
    return wrong_V


def nulls_of(column: pa.ChunkedArray | pa.Array) -> NDArray[np.bool_]:
    """Return which rows of a column are null, ``[B]``, including rows that are null in a dictionary."""
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
    """Return lists of token ids as records; a row that is null, or has other values than token ids, is bad.

    Args:
        column: The lists.
        where: Place of the column, for reasons.
        kept_B: Rows that meet the conditions; faults of others do not matter.
        named: Names of the column there; empty if it has no name.
    """
    parts, wrong = [], [np.zeros(0, np.bool_)]
    for chunk in column.chunks:
        part, wrong_B = _ragged(chunk)
        parts.append(part)
        wrong.append(wrong_B)
    bad_B = nulls_of(column) | np.concatenate(wrong)
    if kept_B is not None:
        bad_B &= kept_B
    reason = ""
    if bad_B.any():
        first = int(bad_B.argmax())
        fault = _fault_at(column, first)
        reason = f"{row_at(where, first)}: {said_of_columns(named)}{fault}"
    found = drained(parts, np.dtype(np.int32))
    return Records(column=found, bad_B=bad_B, reason=reason, kept_B=kept_B)


def _fault_at(column: pa.ChunkedArray, row: int) -> str:
    """Describe the fault in a list that is no record."""
    values = column[row].values
    if values is None:
        return "is null"
    if values.null_count:
        return "holds a null among its token ids; write integers"
    return fault_of(values.to_numpy())


def list_offsets(lists: pa.Array) -> NDArray[np.int64]:
    """Return the starts of the lists of an array among its flattened values, and the end of the last list."""
    if pa.types.is_fixed_size_list(lists.type) or lists.null_count:
        lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        return offsets_of(lengths)
    stored = lists.offsets.to_numpy()
    # A slice begins somewhere in the values; ``flatten`` has cut the values there.
    offsets: NDArray[np.int64] = stored.astype(np.int64) - int(stored[0])
    return offsets


def holed(values: pa.Array, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which lists have a null among values that lie end to end."""
    holed_B = np.zeros(len(offsets) - 1, np.bool_)
    if values.null_count:
        holed_B[np.searchsorted(offsets[1:], np.flatnonzero(nulls_of(values)), side="right")] = True
    return holed_B


def _ragged(lists: pa.Array) -> tuple[Ragged, NDArray[np.bool_]]:
    """Return a list array as token ids, and which lists are invalid; int32 without nulls is not copied."""
    values, offsets = lists.flatten(), list_offsets(lists)
    holed_B = holed(values, offsets)
    if values.null_count:
        # A valid token id replaces the nulls, so that the ids of the other rows are checked.
        values = values.fill_null(0)
    found, wrong_B = rows_of_ids(values.to_numpy(), offsets)
    return found, holed_B | wrong_B


def is_list(found: pa.DataType) -> bool:
    """Return whether a column has lists."""
    return isinstance(found, (pa.ListType, pa.LargeListType, pa.FixedSizeListType))


def type_asked_for(
    schema: pa.Schema, column: str, path: str, *, by: str, remedy: str = ""
) -> pa.DataType:
    """Return the type of a column that a field of the source, ``by``, names, in the shard at ``path``.

    Raises:
        ConfigError: The column is missing, or exists more than once; names the columns of the shard.
    """
    if len(found := types_of(schema, column)) == 1:
        return found[0]
    inside = said_of_fields(schema, column)
    missing = f"{path}: has no single column {column!r} for {by}; it has {', '.join(schema.names)}{inside}"
    raise ConfigError(f"{missing}; {remedy}" if remedy else missing)
