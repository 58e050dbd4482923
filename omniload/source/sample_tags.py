"""Columns of a user's own with one value for a whole record: what a line has of them, and what is said of a wrong one.

Of tables they are read by ``parsing.table_records``, as columns of Arrow; so are those of lines, once they are found.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from omniload.mix.columns import LONGEST_TAG, ColumnKind, column_kind
from omniload.source.parsing.lines import BadLineError, text_in, value_in

__all__ = ["GatheredTags", "LineTags", "Tags", "said_of_long", "said_of_tag"]

Tags: TypeAlias = tuple[bytes | bool | int | float | None, ...]
"""Values of a line, in the order of their columns; ``None`` for a default."""
_Whole = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_TYPES = {"u": str, "b": bool, "i": _Whole, "f": float}
"""What a line is read as at once with many others; one that has anything else is read by itself."""
_SAID = {"u": "a text", "b": "a boolean, or 0 or 1", "i": "an integer of 64 bits", "f": "a number"}


def said_of_tag(kind: ColumnKind) -> str:
    """Return what the values of a column are, as a message says it."""
    return _SAID[kind.dtype.kind]


def said_of_long(size_bytes: int) -> str:
    """Return what is wrong with a text that is too long, as a predicate of it."""
    return f"has {size_bytes:,} bytes of UTF-8, more than {LONGEST_TAG:,}; write a shorter text"


class LineTags:
    """Reads values of whole records from the objects of lines."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        """Read ``columns``: keys by the names of columns inside."""
        self._names = tuple(columns)
        self._wanted = tuple((key, column_kind(inside)) for inside, key in columns.items())
        self.blank: Tags = tuple(
            b"" if kind.dtype == np.uint8 else kind.dtype.type(0).item() for _, kind in self._wanted
        )
        """Of a line that gives no sample."""

    def of(self, line: dict[str, object]) -> Tags:
        """Return the values of a line.

        Raises:
            BadLineError: It lacks a key that has no default, or has a value of another kind under it.
        """
        return tuple(_value_in(line, key, kind) for key, kind in self._wanted)

    @property
    def fields(self) -> list[tuple[str, Any, bool]]:
        """Key of each column, type of its values, and whether a line may lack it, as ``PlainTexts`` takes them."""
        return [
            (key, _TYPES[kind.dtype.kind] | None, True)
            if kind.default is not None
            else (key, _TYPES[kind.dtype.kind], False)
            for key, kind in self._wanted
        ]

    def gathered(self) -> "GatheredTags":
        """Return what gathers the values of the lines of a unit."""
        return GatheredTags(self._names, [_arrow(kind) for _, kind in self._wanted])


class GatheredTags:
    """Values of lines as columns, in their order; of lines one by one, or of many."""

    def __init__(self, names: Sequence[str], types: Sequence[pa.DataType]) -> None:
        self._names, self._types = names, types
        self._parts: list[list[pa.Array]] = [[] for _ in names]
        self._lines: list[Tags] = []

    def add(self, tags: Tags) -> None:
        """Add the values of a line."""
        self._lines.append(tags)

    def add_many(self, columns: Sequence[Sequence[Any]]) -> None:
        """Add the values of lines, a sequence a column."""
        lines, self._lines = self._lines, []
        for i, (part, type_) in enumerate(zip(self._parts, self._types, strict=True)):
            if lines:
                values = [tags[i] for tags in lines]
                # Bytes are texts that were looked at: each was found to be UTF-8.
                is_text = type_ == pa.large_string()
                array = pa.array(values, pa.large_binary() if is_text else type_)
                part.append(array.view(type_) if is_text else array)
            if columns:
                part.append(pa.array(columns[i], type_))

    def columns(self) -> dict[str, pa.ChunkedArray]:
        """Return all of them by the names of columns inside; a null stands for a default."""
        self.add_many(())
        parts = zip(self._names, self._parts, self._types, strict=True)
        return {name: pa.chunked_array(part, type_) for name, part, type_ in parts}


def _arrow(kind: ColumnKind) -> pa.DataType:
    if kind.dtype == np.uint8:
        return pa.large_string()
    # As wide as JSON has numbers: whoever narrows them sees which are too large.
    return pa.from_numpy_dtype(np.float64 if kind.dtype.kind == "f" else kind.dtype)


def _value_in(
    line: dict[str, object], key: str, kind: ColumnKind
) -> bytes | bool | int | float | None:
    found = line.get(key) if kind.default is not None else value_in(line, key)
    if found is None and kind.default is not None:
        return None
    if kind.dtype == np.uint8:
        return text_in(line, key)
    # To Python a truth is a number.
    if kind.dtype.kind == "b" and isinstance(found, int) and found in {0, 1}:
        return bool(found)
    if not isinstance(found, bool):
        if kind.dtype.kind == "i" and isinstance(found, int) and -(1 << 63) <= found < 1 << 63:
            return found
        if kind.dtype.kind == "f" and isinstance(found, int | float):
            return float(found)
    raise BadLineError(f"{key!r} is {found!r:.40}, not {said_of_tag(kind)}")
