"""Token ids of every line, with masks, labels, scores, texts and values of a user's columns.

Shape suffixes:
    L  lines of a part        V  values of all lines together
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from omniload.base.ragged import offsets_of
from omniload.mix.columns import LABELS, LOSS_MASK, TEXT, column_kind
from omniload.mix.schema.splits import key_of
from omniload.mix.sources import JsonlSource
from omniload.source.formats.format import Records
from omniload.source.parsing.conditions import keeps
from omniload.source.parsing.json_lines.lines import (
    BadLineError,
    key_in,
    object_of,
    text_in,
    value_in,
)
from omniload.source.parsing.json_lines.many_lines import (
    NEWLINES,
    Integer,
    LineField,
    PlainLines,
    one_by_one,
    parts_of,
)
from omniload.source.parsing.table_records import doubt_of_labels, with_others
from omniload.source.parsing.token_lists import RowsAt, token_records
from omniload.source.sample_tags import LineTags, Tags

__all__ = ["TokenLines"]

_Values: TypeAlias = NDArray[Any] | bytes
"""Value of a line under a key: numbers, or a text in UTF-8."""
_FITTING: Mapping[str, tuple[tuple[type, ...], str]] = {
    "f": ((int, float), "numbers"),
    "b": ((bool, int), "0 and 1, or booleans"),
}
"""Python types of the numbers of a type, and their name in messages; other types are integers."""
_Line: TypeAlias = tuple[tuple[_Values, ...], int, bool, Tags]
"""Values of a line under each key, the hash of its key, whether it is drawn from at all, and its tags."""


class TokenLines:
    """Reads token ids under one key of every line, and further columns under other keys."""

    def __init__(self, config: JsonlSource) -> None:
        further = config.columns_read
        tags = {name: key for name, key in further.items() if column_kind(name).is_tag}
        self._beside = {
            name: _Texts(key=key) if name == TEXT else _Numbers.of(name, key)
            for name, key in further.items()
            if name not in tags
        }
        ids = _Numbers(
            key=str(config.tokens), wide=np.dtype(np.int64), fits=(int,), said="integers"
        )
        self._read_of_line: tuple[_Numbers | _Texts, ...] = (ids, *self._beside.values())
        self._known_by, self._where, self._tags = config.key_column, config.where, LineTags(tags)
        blank = tuple(each.blank for each in self._read_of_line)
        self._blank: _Line = (blank, 0, True, self._tags.blank)
        is_alone = not self._where and self._known_by is None
        fields = [*(each.field for each in self._read_of_line), *self._tags.fields]
        self._plain = PlainLines.of(fields) if is_alone else None
        self.doubts = {LABELS, LOSS_MASK}.isdisjoint(further)
        """Whether an unnamed column may say which tokens are trained on."""

    def doubt(self, lines: Sequence[Mapping[str, object]]) -> str:
        """Say whether lines have labels that mask out tokens; empty if none has."""
        labels = [
            held for line in lines if isinstance(held := line.get(LABELS), list) and len(held)
        ]
        whole = [each for each in labels if set(map(type, each)) == {int}]
        return doubt_of_labels(pa.chunked_array([pa.array(whole, pa.large_list(pa.int64()))]))

    def records(self, data: pa.Buffer, path: str, first_line: int) -> Records:
        """Read the records of lines.

        Args:
            data: Whole lines.
            path: Path of their file.
            first_line: Number of the first line in the file.
        """
        columns: list[list[pa.Array]] = [[] for _ in self._read_of_line]
        keys, kept, bad = [np.zeros(0, np.uint64)], [np.zeros(0, np.bool_)], [np.zeros(0, np.bool_)]
        tags, reason = self._tags.gathered(), ""
        for part, ends in parts_of(data):
            many = None if self._plain is None else self._plain.read(part, ends)
            if many is not None:
                for column, each, values in zip(columns, self._read_of_line, many, strict=False):
                    column.append(each.array_of_many(values))
                tags.add_many(many[len(columns) :])
                bad.append(np.zeros(len(ends), np.bool_))
                continue
            lines = part[: ends[-1]].tobytes().split(NEWLINES)
            read = one_by_one(lines, self._read, self._blank, path, first_line + sum(map(len, bad)))
            reason = reason or read.reason
            found_L, keys_L, kept_L, tags_L = zip(*read.found, strict=True)
            for column, each, found in zip(
                columns, self._read_of_line, zip(*found_L, strict=True), strict=True
            ):
                column.append(each.array_of_each(found))
            for each_tags in tags_L:
                tags.add(each_tags)
            keys.append(np.array(keys_L, np.uint64))
            kept.append(np.array(kept_L, np.bool_))
            bad.append(read.bad_L)
        where = RowsAt(where=path, first=first_line, word="line")
        laid = [
            pa.chunked_array(parts, each.type)
            for parts, each in zip(columns, self._read_of_line, strict=True)
        ]
        # Keys and conditions come only from lines that are read one by one, and then from all of them.
        kept_B = np.concatenate(kept) if self._where else None
        records = token_records(laid[0], where, kept_B, ())
        records = replace(
            _with_bad_lines(records, np.concatenate(bad), reason),
            keys_B=np.concatenate(keys) if self._known_by is not None else None,
            # Ids are wider when they are read, so they have been copied by now.
            is_own=True,
        )
        beside = dict(zip(self._beside, laid[1:], strict=True))
        return with_others(records, beside | tags.columns(), where)

    def _read(self, line: bytes | memoryview) -> _Line:
        """Return the content of a line.

        Raises:
            BadLineError: A value is missing, or of another type.
        """
        value = object_of(line)
        if value is None:
            return self._blank
        if self._where and not keeps(self._where, value):
            return self._blank[0], 0, False, self._tags.blank
        found = tuple(each.value_in(value) for each in self._read_of_line)
        known = 0 if self._known_by is None else key_of(key_in(value, self._known_by))
        return found, known, True, self._tags.of(value)


def _with_bad_lines(records: Records, bad_B: NDArray[np.bool_], reason: str) -> Records:
    """Return records in which lines that could not be read are bad too; these have no token."""
    if not bad_B.any():
        return records
    is_first = not records.bad_B.any() or bad_B.argmax() < records.bad_B.argmax()
    return replace(
        records,
        bad_B=records.bad_B | bad_B,
        reason=reason if is_first else records.reason,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbers:
    """A list of numbers under a key of every line."""

    key: str
    wide: np.dtype[Any]
    """Type for reading JSON, wide enough that a later check finds numbers that are too large."""
    fits: tuple[type, ...]
    """Python types of the numbers."""
    said: str
    """Name of the numbers in messages."""
    may_be_one: bool = False
    """Whether a single number stands for a list of one."""

    @classmethod
    def of(cls, name: str, key: str) -> "_Numbers":
        """Return the reader of a column, by its inside name."""
        kind = column_kind(name)
        fits, said = _FITTING.get(kind.dtype.kind, ((int,), "integers"))
        wide = np.dtype(np.float64 if kind.dtype.kind == "f" else np.int64)
        return cls(key=key, wide=wide, fits=fits, said=said, may_be_one=not kind.aligned)

    @property
    def blank(self) -> NDArray[Any]:
        """Value for a line that gives no sample."""
        return np.zeros(0, self.wide)

    @property
    def type(self) -> pa.DataType:
        """Type of the arrays."""
        return pa.large_list(pa.from_numpy_dtype(self.wide))

    @property
    def field(self) -> LineField:
        """Field for reading many lines at once."""
        one: Any = float if self.wide.kind == "f" else Integer
        one = one | bool if bool in self.fits else one
        return self.key, one | list[one] if self.may_be_one else list[one], False

    def value_in(self, line: dict[str, object]) -> NDArray[Any]:
        """Return the numbers of a line.

        Raises:
            BadLineError: The line has something else under its key.
        """
        found = value_in(line, self.key)
        held = [found] if self.may_be_one and not isinstance(found, list) else found
        if not isinstance(held, list):
            raise BadLineError(f"{self.key!r} is {found!r:.40}, not a list of {self.said}")
        if not set(map(type, held)).issubset(self.fits):
            wrong = next(each for each in held if type(each) not in self.fits)
            raise BadLineError(f"{self.key!r} holds {wrong!r:.40}; write {self.said}")
        try:
            return np.array(held, self.wide)
        except OverflowError:
            wrong = next(each for each in held if not -(1 << 63) <= each < 1 << 63)
            raise BadLineError(
                f"{self.key!r} holds {wrong!r:.40}, which is more than 64 bits hold"
            ) from None

    def array_of_many(self, lines: Sequence[Any]) -> pa.Array:
        """Return the numbers of lines that were read at once."""
        lists = lines
        if self.may_be_one:
            lists = [each if isinstance(each, list) else [each] for each in lines]
        offsets = offsets_of(np.fromiter(map(len, lists), np.int64, len(lists)))
        return self._array(
            np.fromiter(chain.from_iterable(lists), self.wide, int(offsets[-1])), offsets
        )

    def array_of_each(self, lines: Sequence[Any]) -> pa.Array:
        """Return the numbers of lines that were read one by one."""
        offsets = offsets_of(np.fromiter(map(len, lines), np.int64, len(lines)))
        return self._array(np.concatenate([self.blank, *lines]), offsets)

    def _array(self, values_V: NDArray[Any], offsets: NDArray[np.int64]) -> pa.Array:
        return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values_V))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Texts:
    """A text under a key of every line, next to its token ids."""

    key: str
    blank: bytes = b""

    @property
    def type(self) -> pa.DataType:
        """Type of the arrays."""
        return pa.large_string()

    @property
    def field(self) -> LineField:
        """Field for reading many lines at once."""
        return self.key, str, False

    def value_in(self, line: dict[str, object]) -> bytes:
        """Return the text of a line; see ``text_in``."""
        return text_in(line, self.key)

    def array_of_many(self, lines: Sequence[Any]) -> pa.Array:
        """Return the texts of lines that were read at once."""
        return pa.array(lines, pa.large_string())

    def array_of_each(self, lines: Sequence[Any]) -> pa.Array:
        """Return the texts of lines that were read one by one, and encoded as UTF-8 here."""
        return pa.array(lines, pa.large_binary()).view(pa.large_string())
