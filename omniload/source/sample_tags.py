"""Users' columns with one value per record, from the lines, fields or archive samples that have them.

Columns of tables are read by ``parsing.table_records`` as Arrow columns, and so are the columns found here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from omniload.base.errors import IntegrityError
from omniload.mix.columns import LONGEST_TAG, ColumnKind, column_kind
from omniload.mix.sources import SAMPLE_NAME
from omniload.source.parsing.arrays.npy import number_of_npy
from omniload.source.parsing.json_lines.lines import (
    MISSING,
    BadLineError,
    number_in,
    text_in,
    value_at,
    value_in,
)
from omniload.source.parsing.json_lines.many_lines import Integer, LineField

__all__ = [
    "GatheredTags",
    "LineTags",
    "MemberTags",
    "Tags",
    "said_of_long",
    "said_of_tag",
    "tags_of_fields",
]

_Tag: TypeAlias = bytes | bool | int | float | None
Tags: TypeAlias = tuple[_Tag, ...]
"""Values of a record, in the order of their columns; ``None`` stands for a default."""
_TRUTHS = {"true": True, "false": False, "1": True, "0": False}
_TYPES: Mapping[str, Any] = {"u": str, "b": bool, "i": Integer, "f": float}
"""Types for reading many lines at once; a line with any other value is read separately."""
_SAID = {"u": "a text", "b": "a boolean, or 0 or 1", "i": "an integer of 64 bits", "f": "a number"}


def said_of_tag(kind: ColumnKind) -> str:
    """Return the name of a column's values in messages."""
    return _SAID[kind.dtype.kind]


def said_of_long(size_bytes: int) -> str:
    """Return the fault of a text that is too long, as a predicate."""
    return f"has {size_bytes:,} bytes of UTF-8, more than {LONGEST_TAG:,}; write a shorter text"


class _RecordTags:
    """Values of whole records that are read one record at a time."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        """Prepare to read ``columns``: their places in a record, by inside names of the columns."""
        self._names = tuple(columns)
        self._wanted = tuple((key, column_kind(inside)) for inside, key in columns.items())
        self.blank: Tags = tuple(
            b"" if kind.dtype == np.uint8 else kind.dtype.type(0).item() for _, kind in self._wanted
        )
        """Values of a record that gives no sample."""

    def gathered(self) -> "GatheredTags":
        """Return a collector of the values of the records of a unit."""
        return GatheredTags(self._names, [_arrow(kind) for _, kind in self._wanted])


class LineTags(_RecordTags):
    """Reads values of whole records from the objects of lines, each under its key."""

    def of(self, line: dict[str, object]) -> Tags:
        """Return the values of a line.

        Raises:
            BadLineError: The line lacks a key without a default, or has a value of another kind under a key.
        """
        return tuple(_value_in(line, key, kind) for key, kind in self._wanted)

    @property
    def fields(self) -> list[LineField]:
        """Fields for reading many lines at once."""
        return [
            (key, _TYPES[kind.dtype.kind] | None, True)
            if kind.default is not None
            else (key, _TYPES[kind.dtype.kind], False)
            for key, kind in self._wanted
        ]


class MemberTags(_RecordTags):
    """Reads values of whole records from samples of an archive, each at the place that its column names.

    ``.cls`` is the member with that extension, ``__key__`` is the name of the sample, and any other word is a key of
    its object.
    """

    def __init__(self, columns: Mapping[str, str]) -> None:
        """Prepare to read ``columns``, as they are written in a mix file, by their inside names."""
        super().__init__(columns)
        keys = [kind for where, kind in self._wanted if _is_key(where)]
        self.wants_object = bool(keys)
        """Whether any column is read under a key."""
        self.may_lack_object = all(kind.default is not None for kind in keys)
        """Whether a sample may lack its object, because each column under a key has a default."""

    def of(
        self,
        name: str,
        member: Callable[[str], bytes | None],
        held: dict[str, object],
    ) -> Tags:
        """Return the values of a sample.

        Args:
            name: Name of the sample.
            member: Returns the content of the member with an extension; ``None`` if there is none.
            held: Object of the sample; empty if it has none.

        Raises:
            BadLineError: The sample lacks a value without a default, or has a value of another kind.
        """
        return tuple(self._value(where, kind, name, member, held) for where, kind in self._wanted)

    def _value(
        self,
        where: str,
        kind: ColumnKind,
        name: str,
        member: Callable[[str], bytes | None],
        held: dict[str, object],
    ) -> _Tag:
        if where == SAMPLE_NAME:
            return _value_of_bytes(name.encode(), where, kind)
        if _is_key(where):
            return _value_in(held, where, kind)
        found = member(where.removeprefix("."))
        if found is None and kind.default is None:
            raise BadLineError(f"has no member {where}, and no default is given")
        if found is None:
            return None
        if not where.endswith(".npy"):
            return _value_of_bytes(found, where, kind)
        try:
            number = number_of_npy(where, found)
        except IntegrityError as error:
            raise BadLineError(str(error)) from error
        return _value_in({where: number}, where, kind)


def _is_key(where: str) -> bool:
    return where != SAMPLE_NAME and not where.startswith(".")


class GatheredTags:
    """Collects values of records as columns, in the order of records, one record or many at a time."""

    def __init__(self, names: Sequence[str], types: Sequence[pa.DataType]) -> None:
        self._names, self._types = names, types
        self._parts: list[list[pa.Array]] = [[] for _ in names]
        self._lines: list[Tags] = []

    def add(self, tags: Tags) -> None:
        """Add the values of a line."""
        self._lines.append(tags)

    def add_many(self, columns: Sequence[Sequence[Any]]) -> None:
        """Add the values of several lines, one sequence per column."""
        lines, self._lines = self._lines, []
        for i, (part, type_) in enumerate(zip(self._parts, self._types, strict=True)):
            if lines:
                values = [tags[i] for tags in lines]
                # Bytes are texts that were already found to be UTF-8.
                is_text = type_ == pa.large_string()
                array = pa.array(values, pa.large_binary() if is_text else type_)
                part.append(array.view(type_) if is_text else array)
            if columns:
                part.append(pa.array(columns[i], type_))

    def columns(self) -> dict[str, pa.ChunkedArray]:
        """Return all columns by their inside names; null stands for a default."""
        self.add_many(())
        parts = zip(self._names, self._parts, self._types, strict=True)
        return {name: pa.chunked_array(part, type_) for name, part, type_ in parts}


def _arrow(kind: ColumnKind) -> pa.DataType:
    if kind.dtype == np.uint8:
        return pa.large_string()
    # With the widest type of JSON numbers, so that a later conversion finds numbers that are too large.
    return pa.from_numpy_dtype(np.float64 if kind.dtype.kind == "f" else kind.dtype)


def tags_of_fields(
    fields: pa.ChunkedArray, column: str, inside: str
) -> tuple[pa.ChunkedArray, dict[int, str]]:
    """Return fields without a type as the values of a user's column, with the faults by row.

    An empty field is an empty text, and null if a number or a boolean is needed.

    Args:
        fields: Bytes of the fields.
        column: Name of the column in the file.
        inside: Name of the user's column inside omniload.
    """
    kind = column_kind(inside)
    if kind.dtype == np.uint8:
        # Unchecked, because the caller that adds them to records checks each.
        texts = [chunk.view(pa.large_string()) for chunk in fields.chunks]
        return pa.chunked_array(texts, pa.large_string()), {}
    values, faults = list[_Tag](), dict[int, str]()
    for row, field in enumerate(fields.to_pylist()):
        try:
            values.append(_value_of_bytes(field, repr(column), kind) if field else None)
        except BadLineError as error:
            faults[row] = str(error)
            values.append(kind.dtype.type(0).item())
    return pa.chunked_array([pa.array(values, _arrow(kind))]), faults


def _value_of_bytes(found: bytes, where: str, kind: ColumnKind) -> _Tag:
    """Return the value that a text stands for, in any usual notation.

    Raises:
        BadLineError: The text is no value of this kind.
    """
    try:
        text = found.decode()
    except UnicodeDecodeError as error:
        raise BadLineError(f"{where} is not UTF-8: {error}") from error
    if kind.dtype == np.uint8:
        return found
    text = text.strip()
    read: object = _TRUTHS.get(text.lower()) if kind.dtype.kind == "b" else number_in(text)
    return _fitting(text if read is None else read, where, kind)


def _value_in(line: dict[str, object], key: str, kind: ColumnKind) -> _Tag:
    found = value_in(line, key) if kind.default is None else value_at(line, key)
    if kind.default is not None and (found is None or found is MISSING):
        return None
    if kind.dtype == np.uint8:
        return text_in(line, key)
    return _fitting(found, repr(key), kind)


def _fitting(found: object, where: str, kind: ColumnKind) -> bool | int | float:
    """Return a value as a kind that is no text.

    Raises:
        BadLineError: The value is of another kind.
    """
    # In Python, a boolean is a number.
    if kind.dtype.kind == "b" and isinstance(found, int) and found in {0, 1}:
        return bool(found)
    if not isinstance(found, bool):
        if kind.dtype.kind == "i" and isinstance(found, int) and -(1 << 63) <= found < 1 << 63:
            return found
        if kind.dtype.kind == "f" and isinstance(found, int | float):
            return float(found)
    raise BadLineError(f"{where} is {found!r:.40}, not {said_of_tag(kind)}")
