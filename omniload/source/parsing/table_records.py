"""Rows of a table as records: text or token ids, with masks, scores, further texts, keys and images.

Each table format (Arrow, Lance, Parquet) reads columns in its own way, but makes records of them in the same way.

Shape suffixes:
    B  rows of a unit        V  values of all rows together
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from omniload.base.ragged import Ragged
from omniload.mix.columns import (
    IGNORE_LABEL,
    LABELS,
    LONGEST_TAG,
    LOSS_MASK,
    TEXT,
    ColumnKind,
    column_kind,
    name_outside,
)
from omniload.mix.schema.messages import MessageTransform
from omniload.mix.schema.transforms import encoding_of
from omniload.source.columns import drained
from omniload.source.formats.format import BESIDE_CHATS, Records, doubt_of_beside
from omniload.source.parsing.arrow_columns import (
    TableSource,
    kept_of,
    laid_out,
    records_of,
    texts_in,
    with_keys,
)
from omniload.source.parsing.image_cells import with_images
from omniload.source.parsing.nested_columns import Table, column_of
from omniload.source.parsing.token_lists import (
    RowsAt,
    holed,
    is_list,
    list_offsets,
    nulls_of,
    row_at,
)
from omniload.source.sample_tags import said_of_long

__all__ = ["TableColumns", "doubt_of_labels", "fault_of_numbers", "numbers_as", "with_others"]


class TableColumns:
    """The columns that a source reads from its tables, and the records of their rows."""

    def __init__(self, config: TableSource) -> None:
        # Stored here, because a property of the configuration is computed at each access, and there are many units.
        self._config, self._holds, self._key = config, config.holds, config.key_column
        self.texts = (config.column, *config.beside_columns)
        """Columns that make up the text, or the token ids, of a record."""
        keys = () if self._key is None else (self._key,)
        self._further = config.columns_read
        self.others = tuple(dict.fromkeys((*self._further.values(), *keys, *config.where)))
        """Further columns, except images."""
        self.all = tuple(dict.fromkeys((*self.texts, *self.others)))
        """All columns except images."""
        self.doubted = self._doubted()
        """Columns that the source does not name, although it probably should; see ``doubt``."""

    def doubt(self, first: Mapping[str, pa.ChunkedArray]) -> str:
        """Describe which of the columns ``doubted`` have values in the first rows; empty if none has.

        Args:
            first: The existing ones of these columns.
        """
        there = [name for name in self.doubted if name in first]
        filled = [name for name in there if first[name].null_count < len(first[name])]
        if self._config.is_nested and self.doubted:
            return doubt_of_beside(self._config.transforms, {*filled, *self._config.beside_columns})
        return doubt_of_labels(first[LABELS]) if filled else ""

    def _doubted(self) -> tuple[str, ...]:
        if self._config.is_nested:
            if not isinstance(encoding_of(self._config.transforms), MessageTransform):
                return ()
            read = {self._config.column, *self._config.beside_columns}
            return tuple(name for *_, names in BESIDE_CHATS for name in names if name not in read)
        # A mask of their own makes labels an ordinary column.
        masked = not {LABELS, LOSS_MASK}.isdisjoint(self._further)
        return (LABELS,) if self._holds == "tokens" and not masked else ()

    def _text_records(
        self,
        table: Table,
        where: RowsAt | str,
        laid: tuple[Ragged, NDArray[np.bool_]] | None = None,
    ) -> Records:
        """Return records with only their text or token ids.

        Args:
            table: The columns ``texts``, and the columns of conditions.
            where: Place of the rows, for reasons.
            laid: Texts end to end, and which of them are null, ``[B]``, if ``table`` has no column of them; they own
                their memory.
        """
        conditions = self._config.where
        if laid is None:
            column = texts_in(table, self.texts, self._holds)
            kept_B = kept_of(conditions, table, len(column))
            return records_of(column, where, self._holds, kept_B, self.texts)
        kept_B = kept_of(conditions, table, len(laid[0]))
        return laid_out(*laid, where, kept_B, self.texts, is_own=True)

    def records(
        self,
        table: Table,
        where: RowsAt | str,
        *,
        images: pa.ChunkedArray | None,
        laid: tuple[Ragged, NDArray[np.bool_]] | None = None,
    ) -> Records:
        """Return complete records; a record whose further columns do not fit its text is bad.

        Args:
            table: The columns ``all``.
            where: As for ``_text_records``.
            images: Column of images, if the source has one.
            laid: As for ``_text_records``.
        """
        records = self._text_records(table, where, laid)
        others = {name: column_of(table, column) for name, column in self._further.items()}
        keys = None if self._key is None else column_of(table, self._key)
        records = with_keys(with_others(records, others, where), keys, where)
        return records if images is None else with_images(records, images, where)


def doubt_of_labels(column: pa.ChunkedArray) -> str:
    """Say whether labels mask out tokens, all of which are trained on if the source does not name the labels."""
    if not is_list(column.type) or not pa.types.is_integer(column.type.value_type):
        return ""
    if not pc.any(pc.equal(column.combine_chunks().flatten(), IGNORE_LABEL)).as_py():
        return ""
    return (
        f"the first records have {LABELS!r} of {IGNORE_LABEL} beside their tokens. These labels are not read, so "
        f"every token is trained on: write columns: {{{LABELS}: {LABELS}}}, unless that is meant"
    )


def with_others(
    records: Records, columns: Mapping[str, pa.ChunkedArray], where: RowsAt | str
) -> Records:
    """Add further columns to records; a record that a column does not fit is bad.

    These values do not fit: a null, or a list with a null; a mask or a user's column whose length differs from the
    tokens; a number outside of the column's type; a label of another token; and a text that is not UTF-8, or, in a
    user's column, too long. A null in a user's column of whole samples becomes the column's default, if it has one.
    Labels become the mask.
    """
    for name, column in columns.items():
        # Faults in a record that is left out anyway do not matter.
        other = _other(name, column, where, records)
        unlike_B = other.unlike_B & records.usable_B
        reason = records.reason
        if not reason and unlike_B.any():
            row = int(unlike_B.argmax())
            fault = _fault(name, column[row], records.column[row])
            reason = f"{row_at(where, row)}: {name_outside(name)} {fault}"
        records = replace(
            records,
            bad_B=records.bad_B | unlike_B,
            reason=reason,
            others={**records.others, LOSS_MASK if name == LABELS else name: other.column},
        )
        if name == "scores":
            records = replace(records, rounded=_rounded(column, records.usable_B, where))
    return records


@dataclass(frozen=True, slots=True, kw_only=True)
class _Other:
    """A further column, in the type in which it is kept."""

    column: Ragged
    unlike_B: NDArray[np.bool_]
    """Rows that do not fit; their values have no meaning."""


def _other(name: str, column: pa.ChunkedArray, where: RowsAt | str, records: Records) -> _Other:
    if name == TEXT:
        texts = records_of(column, where, "text", records.usable_B)
        return _Other(column=texts.column, unlike_B=texts.bad_B)
    kind = column_kind(name)
    if kind.is_tag:
        return _tag(column, kind, where, records)
    other = _numbers(column, kind)
    if not kind.aligned:
        return other
    unlike_B = other.unlike_B | (other.column.lengths_N != records.column.lengths_N)
    other = replace(other, unlike_B=unlike_B)
    return _mask_of(other, records.column) if name == LABELS else other


def _mask_of(labels: _Other, tokens: Ragged) -> _Other:
    """Return labels as a mask: a label equal to its token's id is trained on, and the label ``-100`` is not.

    A row with any other label does not fit, because shifted labels, or labels of another text, are no mask of its
    tokens.
    """
    is_label_V = labels.column.values_V != IGNORE_LABEL
    alike = np.flatnonzero(~labels.unlike_B)
    # Rows of other lengths have no pairs of token and label, and are left out.
    found, own = labels.column, tokens
    if len(alike) < len(found):
        found, own = found.take(alike), own.take(alike)
    other_V = (found.values_V != own.values_V) & (found.values_V != IGNORE_LABEL)
    unlike_B = labels.unlike_B.copy()
    unlike_B[alike[np.searchsorted(found.offsets[1:], np.flatnonzero(other_V), side="right")]] = (
        True
    )
    return _Other(column=replace(labels.column, values_V=is_label_V), unlike_B=unlike_B)


def _tag(
    column: pa.ChunkedArray, kind: ColumnKind, where: RowsAt | str, records: Records
) -> _Other:
    """Return values of whole records, with the default of the column in place of nulls."""
    if kind.dtype == np.uint8:
        texts = column.cast(pa.large_string())
        if kind.default is not None:
            texts = texts.fill_null(pa.scalar(kind.default, pa.large_string()))
        found = records_of(texts, where, "text", records.usable_B)
        return _Other(
            column=found.column, unlike_B=found.bad_B | (found.column.lengths_N > LONGEST_TAG)
        )
    if pa.types.is_null(column.type):
        column = column.cast(pa.from_numpy_dtype(kind.dtype))
    other = _numbers(column, kind)
    null_B = nulls_of(column)
    if kind.default is None or not null_B.any():
        return other
    # Each row has one value, so the number of a row is the number of its value.
    values_V = np.where(null_B, kind.default_V, other.column.values_V)
    return _Other(
        column=replace(other.column, values_V=values_V), unlike_B=other.unlike_B & ~null_B
    )


def _numbers(column: pa.ChunkedArray, kind: ColumnKind) -> _Other:
    parts, unlike = [], [np.zeros(0, np.bool_)]
    for chunk in column.chunks:
        part, unlike_B = _kept_as(chunk, kind.dtype)
        parts.append(part)
        unlike.append(unlike_B)
    unlike_B = np.concatenate(unlike) | nulls_of(column)
    return _Other(column=drained(parts, kind.dtype), unlike_B=unlike_B)


def _kept_as(rows: pa.Array, dtype: np.dtype[Any]) -> tuple[Ragged, NDArray[np.bool_]]:
    """Return lists of numbers, or single numbers as lists of one, and which rows do not fit the type."""
    if is_list(rows.type):
        values, offsets = rows.flatten(), list_offsets(rows)
    else:
        values, offsets = rows, np.arange(len(rows) + 1)
    unlike_B = holed(values, offsets)
    if values.null_count:
        values = values.fill_null(False if pa.types.is_boolean(values.type) else 0)
    return numbers_as(values.to_numpy(zero_copy_only=False), offsets, dtype, unlike_B)


def numbers_as(
    values_V: NDArray[Any],
    offsets: NDArray[np.int64],
    dtype: np.dtype[Any],
    unlike_B: NDArray[np.bool_],
) -> tuple[Ragged, NDArray[np.bool_]]:
    """Convert the numbers of rows to the type of a column; rows that do not fit it are added to ``unlike_B``."""
    odd_V = _odd(values_V, dtype)
    if odd_V is not None:
        unlike_B[np.searchsorted(offsets[1:], np.flatnonzero(odd_V), side="right")] = True
    with np.errstate(over="ignore", invalid="ignore"):  # these values are odd already
        return Ragged(values_V=values_V.astype(dtype, copy=False), offsets=offsets), unlike_B


def _odd(values_V: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[np.bool_] | None:
    """Return which values do not fit the type of a column; ``None`` if all do."""
    if values_V.dtype == np.bool_ or np.can_cast(values_V.dtype, dtype):
        return None
    odd_V: NDArray[np.bool_]
    if dtype == np.bool_:
        odd_V = (values_V != 0) & (values_V != 1)
    elif dtype.kind == "f":
        # Infinity and NaN are stored unchanged, but a finite number that becomes infinite is another number. Both
        # bounds are compared, because the least integer of a type has no positive counterpart.
        most = float(np.finfo(dtype).max)
        odd_V = np.isfinite(values_V) & ((values_V < -most) | (values_V > most))
    else:
        limits = np.iinfo(dtype)
        odd_V = (values_V < limits.min) | (values_V > limits.max)
    return odd_V


def _fault(name: str, cell: pa.Scalar, tokens: NDArray[Any]) -> str:
    """Describe why a cell does not fit a record with these tokens."""
    kind = column_kind(name)
    if not cell.is_valid:
        return f"is null{', and no default is given' if kind.is_tag else ''}"
    if name == TEXT or (kind.is_tag and kind.dtype == np.uint8):
        return _fault_of_text(cell)
    values = cell.as_py() if is_list(cell.type) else [cell.as_py()]
    if None in values:
        return "holds a null; write a value for each"
    values_V = np.asarray(values)
    if name == LABELS and len(values_V) == len(tokens):
        i = int(((values_V != tokens) & (values_V != IGNORE_LABEL)).argmax())
        return (
            f"holds {values_V[i]} for token {i}, which is {tokens[i]}; a label is the id of its own token, not of the "
            f"next, or {IGNORE_LABEL}"
        )
    return fault_of_numbers(values_V, name, len(tokens))


def _fault_of_text(cell: pa.Scalar) -> str:
    try:
        return said_of_long(len(cell.as_py().encode()))
    except UnicodeDecodeError:
        return "is not UTF-8"


def _rounded(column: pa.ChunkedArray, usable_B: NDArray[np.bool_], where: RowsAt | str) -> str:
    """Say where the first whole number is that float32 has no place for, and that is rounded; empty where none is.

    A number that stands for a thing, such as a row of a table, is another thing then, which nobody would notice.
    """
    row = 0
    for chunk in column.chunks:
        numbers, ends = chunk, np.arange(1, len(chunk) + 1)
        if is_list(chunk.type):
            numbers, ends = chunk.flatten(), list_offsets(chunk)[1:]
        values_V = numbers.fill_null(0).to_numpy(zero_copy_only=False)
        for i in np.flatnonzero(_is_rounded(values_V)).tolist():
            at = row + int(np.searchsorted(ends, i, side="right"))
            if usable_B[at]:
                return (
                    f"{row_at(where, at)}: scores holds {int(values_V[i])}, which float32 rounds to "
                    f"{int(np.float32(values_V[i]))}, as most above 16,777,216; read texts, by "
                    "columns: {text: COLUMN}, or write float32 where that is meant"
                )
        row += len(chunk)
    return ""


def _is_rounded(values_V: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which numbers are whole, and others as float32."""
    if np.can_cast(values_V.dtype, np.float32):
        return np.zeros(len(values_V), np.bool_)
    whole_V = values_V
    if values_V.dtype.kind == "f":
        # Beyond 2^53 a float64 is rounded itself.
        is_whole_V = (np.abs(values_V) < 1 << 53) & (np.rint(values_V) == values_V)
        whole_V = np.where(is_whole_V, values_V, 0).astype(np.int64)
    # Less its zeros at the end, in bits: float32 has 24 of them.
    odd_V = np.abs(whole_V) // np.maximum(np.abs(whole_V & -whole_V), 1)
    return np.asarray(odd_V >= 1 << 24)


def fault_of_numbers(values_V: NDArray[Any], name: str, tokens: int) -> str:
    """Describe the fault in a column's numbers for a record with this number of tokens."""
    kind = column_kind(name)
    if kind.aligned and len(values_V) != tokens:
        return f"has {len(values_V)} values for {tokens} tokens"
    odd_V = _odd(values_V, kind.dtype)
    assert odd_V is not None, "one does not fit"
    value = values_V[odd_V][0]
    if kind.dtype == np.bool_:
        labels = f"; labels are named as {LABELS} of a table, and of numpy written as labels != {IGNORE_LABEL}"
        return f"holds {value}, not 0 or 1{labels if value == IGNORE_LABEL else ''}"
    return f"holds {value}, which is more than a {kind.dtype} holds"
