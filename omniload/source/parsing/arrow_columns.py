"""Columns of Arrow tables as records: texts and lists of token ids, from any type of file.

Shape suffixes:
    B  rows of a unit        V  values of all sequences together
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.base.ragged import Ragged
from omniload.mix.columns import (
    LOSS_MASK,
    TEXT,
    ColumnKind,
    column_kind,
    name_outside,
)
from omniload.mix.schema.records import Condition
from omniload.mix.schema.splits import key_of
from omniload.mix.sources import ArrowSource, LanceSource, ParquetSource
from omniload.source.columns import PLAIN_TEXTS, drained, text_bytes
from omniload.source.formats.format import Records
from omniload.source.parsing.conditions import kept_columns, require_where, wanted_kind
from omniload.source.parsing.image_cells import require_images
from omniload.source.parsing.nested_columns import Table, column_of, said_of_fields, types_of
from omniload.source.parsing.token_lists import (
    RowsAt,
    is_list,
    nulls_of,
    row_at,
    said_of_choice,
    said_of_columns,
    token_records,
    type_asked_for,
)
from omniload.source.sample_tags import said_of_tag

__all__ = [
    "Holds",
    "TableSource",
    "as_objects",
    "index_kind",
    "kept_of",
    "laid_out",
    "records_of",
    "require_table",
    "texts_in",
    "with_keys",
]

_NO_TEXT = b"\xff"
"""Stands for a row that cannot be decoded: no UTF-8 contains it, so every check of texts finds it."""


Holds: TypeAlias = Literal["text", "tokens", "nested", "nested images"]
"""Content of the column of records; ``nested`` is text, or lists and objects that become JSON.

In ``nested images``, bytes become ``data:`` URLs; in ``nested``, they are written as Python shows them.
"""
TableSource: TypeAlias = ArrowSource | LanceSource | ParquetSource
"""A source whose shards have typed columns."""


def index_kind(type_: str, config: TableSource) -> str:
    """Return the key of the index of a table: the columns that were checked in the schemas of shards, and their kinds.

    If a source needs a column as another kind of value, or in another place, the key differs, so the shards are checked
    again.
    """
    read = [
        *(type_, config.holds, config.column, config.columns_read),
        list(config.image_members),
        *(config.key_column, list(config.beside_columns)),
        {name: wanted_kind(condition) for name, condition in config.where.items()},
    ]
    return orjson.dumps(read).decode()


def require_table(schema: pa.Schema, config: TableSource, path: str) -> None:
    """Raise an error for a shard that lacks a column which the source reads, or has it with another type.

    Raises:
        ConfigError: Names the columns of the shard.
    """
    _require_column(schema, config.column, path, config.holds, is_main=True)
    # If no row of a shard has a tool, writers know no type for the column, which is then a column of nulls.
    may_lack = config.may_lack_beside
    for column in config.beside_columns:
        _require_column(schema, column, path, config.holds, may_be_null=column in may_lack)
    _require_others(schema, config.columns_read, path)
    _require_key(schema, config.key_column, path)
    require_where(schema, config.where, path)
    for column in config.image_members:
        require_images(schema, column, path)


def _require_column(
    schema: pa.Schema,
    column: str,
    path: str,
    holds: Holds,
    *,
    is_main: bool = False,
    may_be_null: bool = False,
) -> None:
    """Raise an error for a shard that lacks a column, or has it with another type.

    ``is_main`` marks the column of ``text`` or ``tokens``.

    Raises:
        ConfigError: Names the columns of the shard.
    """

    def fits(type_: pa.DataType) -> bool:
        if holds.startswith("nested") and (is_list(type_) or pa.types.is_struct(type_)):
            return True
        return _is_tokens(type_) if holds == "tokens" else _is_text(type_)

    found = types_of(schema, column)
    if len(found) != 1:
        has = "more than one column" if found else "no column"
        key, fit = (
            "tokens" if holds == "tokens" else "text",
            [f.name for f in schema if fits(f.type)],
        )
        choice = f": {said_of_choice(key, fit)}" if is_main and fit else ""
        choice += said_of_fields(schema, column)
        raise ConfigError(f"{path}: has {has} {column!r}; it has {', '.join(schema.names)}{choice}")
    if not fits(found[0]) and not (may_be_null and pa.types.is_null(found[0])):
        wanted = "text (string)" if holds != "tokens" else "token ids (a list of integers)"
        raise ConfigError(
            f"{path}: column {column!r} is {found[0]}, not {wanted}; "
            f"name another column or use the key {'tokens' if holds != 'tokens' else 'text'}"
        )


def kept_of(
    where: Mapping[str, Condition],
    columns: Table,
    rows: int,
) -> NDArray[np.bool_] | None:
    """Return the rows that meet the conditions, ``[B]``; ``None`` if there is no condition."""
    if not where:
        return None
    return kept_columns(where, {name: column_of(columns, name) for name in where}, rows)


def records_of(
    column: pa.ChunkedArray,
    where: RowsAt | str,
    holds: Holds,
    kept_B: NDArray[np.bool_] | None = None,
    named: Sequence[str] = (),
) -> Records:
    """Return a column as records; ``require_table`` has checked its type.

    Args:
        column: The column.
        where: Place of the column, for reasons.
        holds: Content of the column.
        kept_B: Rows that meet the conditions; a fault in another row does not matter, and no reason names it.
        named: Names of the column in the file, for reasons; several if it is made of several columns.
    """
    if holds == "tokens":
        return token_records(column, where, kept_B, named)
    if holds.startswith("nested") and not _is_text(column.type):
        chunks = [_as_json(chunk, holds) for chunk in column.chunks]
        column = pa.chunked_array(chunks, pa.large_string())
    found = _text_column(column)
    # Some text is not UTF-8; Arrow does not say which, so the column is checked row by row.
    if found is None:
        return _checked(column, where, kept_B, named)
    return laid_out(found, nulls_of(column), where, kept_B, named)


def laid_out(
    found: Ragged,
    null_B: NDArray[np.bool_],
    where: RowsAt | str,
    kept_B: NDArray[np.bool_] | None,
    named: Sequence[str] = (),
    *,
    is_own: bool = False,
) -> Records:
    """Return a column that lies end to end as records; a null is a bad record. ``is_own`` is as in ``Records``."""
    bad_B = null_B if kept_B is None else null_B & kept_B
    reason = (
        f"{row_at(where, int(bad_B.argmax()))}: {said_of_columns(named)}is null"
        if bad_B.any()
        else ""
    )
    return Records(column=found, bad_B=bad_B, reason=reason, kept_B=kept_B, is_own=is_own)


def texts_in(table: Table, names: Sequence[str], holds: Holds) -> pa.ChunkedArray:
    """Return the content of records: one column unchanged, or several columns as objects."""
    if len(names) == 1:
        return column_of(table, names[0])
    return as_objects({name: column_of(table, name) for name in names}, holds)


def as_objects(columns: Mapping[str, pa.ChunkedArray], holds: Holds = "nested") -> pa.ChunkedArray:
    """Return rows of several columns as JSON objects, in a column of text.

    A row with a text that is not UTF-8 becomes invalid UTF-8 itself, so that it is reported as such.
    """
    rows = zip(*(_values_of(column) for column in columns.values()), strict=True)
    written = (
        _NO_TEXT if _NO_TEXT in row else _json(dict(zip(columns, row, strict=True)), holds)
        for row in rows
    )
    return pa.chunked_array([_as_texts(written)])


def _as_json(values: pa.Array, holds: Holds) -> pa.Array:
    """Write nested values as JSON; nulls stay null, and invalid UTF-8 stays invalid."""
    return _as_texts(
        value if value is None or value is _NO_TEXT else _json(value, holds)
        for value in _values_of(values)
    )


def _values_of(column: pa.Array | pa.ChunkedArray) -> list[object]:
    """Return a column as Python values, with ``_NO_TEXT`` for a row that contains a text that is not UTF-8."""
    try:
        listed: list[object] = column.to_pylist()
    except UnicodeDecodeError:  # in any row
        listed = [_value_of(each) for each in column]
    return listed


def _value_of(cell: pa.Scalar) -> object:
    try:
        return cell.as_py()
    except UnicodeDecodeError:
        return _NO_TEXT


def _json(value: object, holds: Holds) -> bytes:
    # Dates and decimals of a column are written as Python shows them.
    return orjson.dumps(value, default=_with_urls if holds == "nested images" else str)


def _with_urls(value: object) -> str:
    if not isinstance(value, bytes):
        return str(value)
    return f"data:;base64,{base64.b64encode(value).decode()}"


def _as_texts(written: Iterable[bytes | None]) -> pa.Array:
    return pa.array(list(written), pa.large_binary()).view(pa.large_string())


def _require_others(schema: pa.Schema, columns: Mapping[str, str], path: str) -> None:
    """Raise an error for a shard that lacks a further column, or has it with another type.

    Raises:
        ConfigError: Names the columns of the shard.
    """
    for inside, column in columns.items():
        name, kind = name_outside(inside), column_kind(inside)
        found = type_asked_for(schema, column, path, by=f"columns.{name}")
        values = found.value_type if is_list(found) else found
        if kind.is_tag:
            fits, wanted = _is_tag(found, kind), f"{said_of_tag(kind)} of the whole record"
        elif kind.aligned and name != LOSS_MASK and kind.dtype.kind != "b":
            fits = is_list(found) and (
                pa.types.is_boolean(values)
                or pa.types.is_integer(values)
                or (kind.dtype.kind == "f" and pa.types.is_floating(values))
            )
            wanted = f"a list of numbers of {kind.dtype}"
        elif kind.aligned:
            fits = is_list(found) and (pa.types.is_boolean(values) or pa.types.is_integer(values))
            wanted = "a list of 0 and 1, or of booleans"
        elif name == TEXT:
            fits, wanted = _is_text(found), "a text"
        else:
            fits = pa.types.is_floating(values) or pa.types.is_integer(values)
            wanted = "a number, or a list of numbers"
        if not fits:
            raise ConfigError(f"{path}: column {column!r} is {found}, not {wanted}, as {name} is")


def _is_tag(found: pa.DataType, kind: ColumnKind) -> bool:
    """Return whether a column may have values of whole records; a column that is always null has no type."""
    if pa.types.is_null(found):
        return kind.default is not None
    if kind.dtype == np.uint8:
        return _is_text(found)
    if kind.dtype.kind == "f" and pa.types.is_floating(found):
        return True
    is_truth = kind.dtype.kind == "b" and pa.types.is_boolean(found)
    return is_truth or bool(pa.types.is_integer(found))


def _require_key(schema: pa.Schema, key: str | None, path: str) -> None:
    """Raise an error for a shard that lacks the column of keys, or has it with another type.

    Raises:
        ConfigError: Names the columns of the shard.
    """
    if key is None:
        return
    found = type_asked_for(schema, key, path, by="key")
    if not (_is_text(found) or pa.types.is_integer(found)):
        raise ConfigError(f"{path}: column {key!r} is {found}, not texts or integers, as a key is")


def with_keys(records: Records, column: pa.ChunkedArray | None, where: RowsAt | str) -> Records:
    """Add the keys of records; a record without a key is bad. An integer key becomes its decimal digits."""
    if column is None:
        return records
    null_B = nulls_of(column) & records.usable_B
    # Numbers become digits as text, and text is taken as bytes, because a key need not be UTF-8.
    texts = column.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()
    return replace(
        records,
        keys_B=np.fromiter((key_of(text or b"") for text in texts), np.uint64, len(texts)),
        bad_B=records.bad_B | null_B,
        reason=records.reason
        or (f"{row_at(where, int(null_B.argmax()))}: key is null" if null_B.any() else ""),
    )


def _is_text(found: pa.DataType) -> bool:
    if pa.types.is_dictionary(found):  # Arrow does not return the values of views in dictionaries
        return found.value_type in PLAIN_TEXTS
    return found in {*PLAIN_TEXTS, pa.string_view()}


def _is_tokens(found: pa.DataType) -> bool:
    return is_list(found) and bool(pa.types.is_integer(found.value_type))


def _text_column(column: pa.ChunkedArray) -> Ragged | None:
    """Return texts as bytes; ``None`` if a text is not UTF-8."""
    chunks = column.chunks if column.type in PLAIN_TEXTS else column.cast(pa.large_string()).chunks
    try:
        for chunk in chunks:
            # Arrow takes the bytes of a text unchanged, and one text that is not UTF-8 would make a batch fail to
            # tokenise.
            chunk.validate(full=True)
    except pa.ArrowInvalid:
        return None
    return drained([text_bytes(chunk) for chunk in chunks], np.dtype(np.uint8))


def _checked(
    column: pa.ChunkedArray,
    where: RowsAt | str,
    kept_B: NDArray[np.bool_] | None,
    named: Sequence[str],
) -> Records:
    """Decode text row by row, to find the rows that are not UTF-8."""
    texts: list[str | None] = []
    reason = ""
    # As bytes, because Python cannot decode the row that is searched for.
    for row, value in enumerate(column.cast(pa.large_binary()).to_pylist()):
        try:
            texts.append(None if value is None else value.decode())
            fault = "" if value is not None else "is null"
        except UnicodeDecodeError as error:
            texts.append(None)
            fault = f"is not UTF-8: {error}"
        if fault and not reason and (kept_B is None or kept_B[row]):
            reason = f"{row_at(where, row)}: {said_of_columns(named)}{fault}"
    records = Records.of_texts(texts, reason)
    bad_B = records.bad_B if kept_B is None else records.bad_B & kept_B
    return replace(records, bad_B=bad_B, kept_B=kept_B)
