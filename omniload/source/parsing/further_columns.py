"""Columns beside the tokens of a table: masks, scores and texts, each held against the record that it belongs to.

Shape suffixes:
    B  rows of a unit        V  values of all rows together
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from omniload.base.ragged import Ragged
from omniload.mix.columns import COLUMNS, TEXT, TableColumn
from omniload.source.columns import drained
from omniload.source.formats.format import Records
from omniload.source.parsing.arrow_columns import records_of
from omniload.source.parsing.token_lists import (
    RowsAt,
    holed,
    is_list,
    list_offsets,
    nulls_of,
    row_at,
)

__all__ = ["with_others"]

_LARGEST_SCORE = float(np.finfo(COLUMNS["scores"].dtype).max)


def with_others(
    records: Records, columns: Mapping[TableColumn, pa.ChunkedArray], where: RowsAt | str
) -> Records:
    """Add further columns to records; a record that one of them does not fit is bad.

    A null does not fit, nor a list that holds one, a mask of another length than the tokens or of something else than
    0 and 1, a score that a float32 does not hold, or a text that is not UTF-8.
    """
    for name, column in columns.items():
        # What else is wrong with a record that is left out already is all one.
        other = _other(name, column, where, records)
        unlike_B = other.unlike_B & records.usable_B
        reason = records.reason
        if not reason and unlike_B.any():
            row = int(unlike_B.argmax())
            fault = _fault(name, column[row], int(records.column.lengths_N[row]))
            reason = f"{row_at(where, row)}: {name} {fault}"
        records = replace(
            records,
            bad_B=records.bad_B | unlike_B,
            reason=reason,
            others={**records.others, name: other.column},
        )
    return records


@dataclass(frozen=True, slots=True, kw_only=True)
class _Other:
    """A further column in the type that it is kept in."""

    column: Ragged
    unlike_B: NDArray[np.bool_]
    """Which rows hold something else; what stands in their place means nothing."""


def _other(name: str, column: pa.ChunkedArray, where: RowsAt | str, records: Records) -> _Other:
    if name == TEXT:
        texts = records_of(column, where, "text", records.usable_B)
        return _Other(column=texts.column, unlike_B=texts.bad_B)
    kind = COLUMNS[name]
    parts, unlike = [], [np.zeros(0, np.bool_)]
    for chunk in column.chunks:
        part, unlike_B = _kept_as(chunk, kind.dtype)
        parts.append(part)
        unlike.append(unlike_B)
    found, unlike_B = drained(parts, kind.dtype), np.concatenate(unlike) | nulls_of(column)
    if kind.aligned:
        unlike_B |= found.lengths_N != records.column.lengths_N
    return _Other(column=found, unlike_B=unlike_B)


def _kept_as(rows: pa.Array, dtype: np.dtype[Any]) -> tuple[Ragged, NDArray[np.bool_]]:
    """Show lists of numbers, or numbers, each of which stands for a list of one; and which do not fit the type."""
    if is_list(rows.type):
        values, offsets = rows.flatten(), list_offsets(rows)
    else:
        values, offsets = rows, np.arange(len(rows) + 1)
    unlike_B = holed(values, offsets)
    if values.null_count:
        values = values.fill_null(False if pa.types.is_boolean(values.type) else 0)
    values_V = values.to_numpy(zero_copy_only=False)
    odd_V = _odd(values_V, dtype)
    if odd_V is not None:
        unlike_B[np.searchsorted(offsets[1:], np.flatnonzero(odd_V), side="right")] = True
    with np.errstate(over="ignore"):  # those are odd
        return Ragged(values_V=values_V.astype(dtype, copy=False), offsets=offsets), unlike_B


def _odd(values_V: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[np.bool_] | None:
    """Return which values do not fit the type that a column is kept in; ``None`` where all do."""
    if values_V.dtype == np.bool_ or np.can_cast(values_V.dtype, dtype):
        return None
    odd_V: NDArray[np.bool_]
    if dtype == np.bool_:
        odd_V = (values_V != 0) & (values_V != 1)
    else:
        # What is infinite or no number is written so; what becomes infinite is another number.
        odd_V = np.isfinite(values_V) & (np.abs(values_V) > _LARGEST_SCORE)
    return odd_V


def _fault(name: str, cell: pa.Scalar, tokens: int) -> str:
    """Say what is wrong with a cell that does not fit a record of so many tokens."""
    if not cell.is_valid:
        return "is null"
    if name == TEXT:
        return "is not UTF-8"
    values = cell.as_py() if is_list(cell.type) else [cell.as_py()]
    if None in values:
        return "holds a null; write a value for each"
    if not COLUMNS[name].aligned:
        odd = next(value for value in values if _LARGEST_SCORE < abs(value) < np.inf)
        return f"holds {odd}, which is more than a float32 holds"
    if len(values) != tokens:
        return f"has {len(values)} values for {tokens} tokens"
    return f"holds {next(value for value in values if value not in (0, 1))}, not 0 or 1"
