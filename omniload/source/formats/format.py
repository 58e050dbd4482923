"""The protocol of a format, and the types that it uses.

Shape suffixes:
    U  units of a source      B  records of one unit        F  files of a source
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.errors import IntegrityError
from omniload.base.ragged import Ragged
from omniload.mix.schema.messages import MessageTransform
from omniload.mix.schema.transforms import (
    CompletionTransform,
    TransformConfig,
    encoding_of,
)
from omniload.mix.sources import LARGEST_UNIT_BYTES
from omniload.source.columns import text_bytes

__all__ = [
    "BESIDE_CHATS",
    "COUNTED",
    "FIRST_BYTES",
    "FIRST_RECORDS",
    "LATER_BYTES",
    "MAX_UNIT_BYTES",
    "MAX_UNIT_RECORDS",
    "Format",
    "IndexedFormat",
    "Records",
    "Unit",
    "UnitTable",
    "doubt_of_beside",
    "doubt_of_prompt",
    "require_as_indexed",
]

COUNTED = "counted from "
"""Text after the number of a record in messages, before the start of the count."""

FIRST_BYTES = 1 << 20
"""Most decompressed bytes that are read for the first records of a source."""
LATER_BYTES = 1 << 16
"""Most decompressed bytes that are read for the first records of each later file of a source."""
FIRST_RECORDS = 64
"""Most records that are decoded for the first records of a source."""
MAX_UNIT_BYTES = LARGEST_UNIT_BYTES
"""Largest decompressed unit that is decoded in memory at once."""
BESIDE_CHATS = (
    ("tools", "are", ("tools",)),
    ("system", "is", ("system", "system_prompt")),
)
"""Fields of ``chat`` that may accompany the messages of a conversation, with the names that data sets give them."""
MAX_UNIT_RECORDS = 1 << 27
"""Most records of a unit: their order alone takes 1 GiB. A damaged head may claim more records than any file has."""


class Unit(NamedTuple):
    """One unit: its place, and the number of its records."""

    shard: int
    """Number of its shard."""
    start: int
    """Start of the unit; see ``UnitTable.starts_U``."""
    stop: int
    """End of the unit; see ``UnitTable.stops_U``."""
    rows: int
    """Records of the unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTable:
    """The units of a source, which can be decoded separately: row groups, byte ranges, or groups of files."""

    rows_U: NDArray[np.int64]
    """Records in each unit."""
    shards_U: NDArray[np.int64]
    """Number of the shard of each unit, never falling."""
    starts_U: NDArray[np.int64]
    """Start of each unit: a row group, a byte or a file, depending on the format."""
    stops_U: NDArray[np.int64]
    """End of each unit, exclusive."""
    contents_F: tuple[str, ...] = ()
    """Digest of the content of each file, in the order of the files; empty for a file without records."""
    are_whole_files: bool = False
    """Whether each unit is a shard of its own that consists of files, one record each.

    If so, ``starts_U`` and ``stops_U`` are numbers of files; otherwise the number of a shard is the number of its file.
    """

    def __len__(self) -> int:
        return len(self.rows_U)

    def __getitem__(self, unit: int) -> Unit:
        """Return the unit with a number."""
        columns = (self.shards_U, self.starts_U, self.stops_U, self.rows_U)
        return Unit(*(int(column[unit]) for column in columns))

    def first_filled(self) -> int | None:
        """Return the number of the first unit that has a record; ``None`` if no unit has one."""
        filled = np.flatnonzero(self.rows_U)
        return int(filled[0]) if len(filled) else None

    def first_of(self, shard: int) -> int:
        """Return the number of the first unit of a shard."""
        return int(np.searchsorted(self.shards_U, shard))

    def rows_before(self, unit: int) -> int:
        """Return the number of records in the shard of a unit before the unit."""
        return int(self.rows_U[self.first_of(int(self.shards_U[unit])) : unit].sum())

    def files_of(self, unit: int) -> range:
        """Return the numbers of the files of a unit."""
        if self.are_whole_files:
            return range(int(self.starts_U[unit]), int(self.stops_U[unit]))
        shard = int(self.shards_U[unit])
        return range(shard, shard + 1)

    def records_F(self, files: int) -> NDArray[np.int64]:
        """Return the number of records of each file, ``[F]``; ``files`` is the number of files."""
        if self.are_whole_files:
            return np.ones(files, np.int64)
        return np.bincount(self.shards_U, self.rows_U, minlength=files).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The records of one unit."""

    column: Ragged
    """Token ids (int32) or UTF-8 text (uint8) of each record."""
    bad_B: NDArray[np.bool_]
    """Whether each record could not be decoded, ``[B]``; the sequence of a bad record has no meaning."""
    reason: str = ""
    """Place of the first bad record, and its fault."""
    others: Mapping[str, Ragged] = field(default_factory=dict)
    """Further columns by name, one sequence per record.

    Aligned columns have the lengths of ``column`` in good records.
    """
    keys_B: NDArray[np.uint64] | None = None
    """Hash of the key of each record, ``[B]``, if the source names a key; see ``omniload.mix.schema.splits``."""
    is_own: bool = False
    """Whether ``column`` owns its memory and has no spare room, so that a block can hold it without a copy."""
    kept_B: NDArray[np.bool_] | None = None
    """False for records that a condition of the source leaves out, ``[B]``; ``None`` if there is no condition."""
    rounded: str = ""
    """Where the first whole number of ``scores`` is that is kept as another one, and what to do."""

    @classmethod
    def of_texts(cls, texts: "list[str | None]", reason: str = "") -> Self:
        """Make records of texts; ``None`` stands for a bad record."""
        # Large strings, because the texts of a unit may exceed the 2 GiB that 32-bit offsets can address.
        array = pa.array(texts, pa.large_string())
        bad = np.fromiter((text is None for text in texts), np.bool_, len(texts))
        return cls(column=text_bytes(array), bad_B=bad, reason=reason)

    def first(self, count: int) -> "Records":
        """Return the first ``count`` records."""
        count = min(count, len(self.column))
        # Keys and further columns are left out, because callers only need the texts and lengths of first records.
        offsets = self.column.offsets[: count + 1]
        column = Ragged(values_V=self.column.values_V[: offsets[-1]], offsets=offsets)
        bad_B = self.bad_B[:count]
        return type(self)(
            column=column,
            bad_B=bad_B,
            reason=self.reason if bad_B.any() else "",
            kept_B=None if self.kept_B is None else self.kept_B[:count],
            rounded=self.rounded,
        )

    def with_faults(self, faults: Mapping[int, str], place: Callable[[int], str]) -> "Records":
        """Return the records with further records marked as bad.

        Args:
            faults: Fault of each further bad record, by row.
            place: Returns the place of a row, for the beginning of a reason.
        """
        if not faults:
            return self
        first = min(faults)
        told = bool(self.bad_B[:first].any())
        bad_B = self.bad_B.copy()
        bad_B[list(faults)] = True
        reason = self.reason if told else f"{place(first)}: {faults[first]}"
        return replace(self, bad_B=bad_B, reason=reason)

    @property
    def usable_B(self) -> NDArray[np.bool_]:
        """True for each sound record that no condition leaves out."""
        return ~self.bad_B if self.kept_B is None else ~self.bad_B & self.kept_B


class Format(Protocol):
    """Divides the files of a source into units and decodes one unit at a time. Not thread-safe."""

    units_are_bytes: bool = False
    """Whether a unit is a range of bytes; in a compressed shard, of decompressed bytes."""
    holds_text: bool
    """Whether records are text, which must be tokenised, or token ids."""
    records_from: str = "0"
    """Number or name of the first record of a shard in messages."""

    def units(self) -> UnitTable:
        """Return the units of the source; they do not change while the source is open.

        Raises:
            ConfigError: A shard lacks the column, or a unit is too large.
            IntegrityError: A shard is truncated, corrupt, or changed.
        """
        ...

    def read_unit(self, unit: int) -> Records:
        """Decode the records of a unit.

        Raises:
            IntegrityError: The shard is truncated, corrupt, or changed since the source was opened. Single bad records
                are marked instead.
            UnavailableError: The store did not answer.
        """
        ...

    def sizes_U(self) -> NDArray[np.int64] | None:
        """Return the bytes of the records of each unit, ``[U]``, all measured in the same way.

        Reads a few footers at most.

        Returns:
            Below 0 for a unit of unknown size; ``None`` if no size is known.

        Raises:
            OmniloadError: As for ``units``.
        """
        units = self.units()
        return units.stops_U - units.starts_U if self.units_are_bytes else None

    def reach(self, unit: int) -> None:  # noqa: ARG002 -- most formats reach a unit directly
        """Move to the start of a unit if this takes any work, so that reading the unit only has to read its own bytes.

        Raises:
            OmniloadError: As for ``read_unit``.
        """
        return

    def name_of_record(self, number: int) -> str:
        """Return the name in messages of the record that has ``number`` records before it in its shard."""
        return f"record {number}, {COUNTED}{self.records_from}"

    def place_of(self, shard: str, unit: int, before: int, row: int) -> tuple[str, str]:  # noqa: ARG002 -- of groups
        """Return the file of a record, and the record's name there; the name is empty if the file is the record.

        Args:
            shard: Path of the shard.
            unit: Number of the unit.
            before: Records of the shard before the unit.
            row: Row of the record in the unit.
        """
        return shard, self.name_of_record(before + row)

    def found_at(self, shard: str, unit: int, before: int, row: int) -> tuple[str, str]:
        """Return the same as ``place_of``, but with the name that the data gives the record, if there is one.

        The name is read from the data.

        Raises:
            OmniloadError: As for ``read_unit``.
        """
        return self.place_of(shard, unit, before, row)

    def first_records(self) -> Records:
        """Decode a few records from the start of the source, from at most about ``FIRST_BYTES`` or one unit.

        Returns:
            The records; none if even the first record is larger.

        Raises:
            OmniloadError: As for ``read_unit``.
        """
        ...

    def first_records_of(self, file: int) -> Records | None:  # noqa: ARG002 -- the index of a table sees every column
        """Decode a few records from the start of a file, from at most about ``LATER_BYTES`` or one unit of text.

        If the first record is longer, up to ``FIRST_BYTES`` are read.

        Returns:
            The records; ``None`` if the index says as much about the file, or if the records take more bytes.

        Raises:
            OmniloadError: As for ``read_unit``.
        """
        return None

    def doubt(self) -> str:
        """Describe data that the first records leave out although it looks like a part of them; empty if there is none.

        Raises:
            OmniloadError: As for ``read_unit``.
        """
        return ""


class IndexedFormat(Format):
    """A format whose units are known once it is opened."""

    _units: UnitTable

    @override
    def units(self) -> UnitTable:
        return self._units

    @override
    def first_records(self) -> Records:
        unit = self._units.first_filled()
        return Records.of_texts([]) if unit is None else self._first_of(unit)

    def _first_of(self, unit: int) -> Records:
        """Return the first records of a unit that has records."""
        return self.read_unit(unit).first(FIRST_RECORDS)


def require_as_indexed(path: str, unit: Unit, found: int, what: str = "records") -> None:
    """Raise an error for a unit of bytes that has another number of records than its index says.

    Args:
        path: Path of the shard.
        unit: The unit as the index describes it.
        found: Number of records that the unit has now.
        what: Name of the format's records in the plural.

    Raises:
        IntegrityError: The shard was rewritten since it was indexed.
    """
    if found != unit.rows:
        raise IntegrityError(
            f"{path}: bytes {unit.start} to {unit.stop} hold {found} {what}, {unit.rows} in the index; "
            "the file is not the one that was indexed, start anew"
        )


def doubt_of_beside(transforms: Sequence[TransformConfig], filled: Collection[str]) -> str:
    """Describe fields next to conversations that are unread, or missing where they are read; empty if all is well.

    Args:
        transforms: Transforms of the source.
        filled: Keys or columns that have a value in any of the first records.
    """
    chat = encoding_of(transforms)
    if not isinstance(chat, MessageTransform) or getattr(chat, "form", "chat") == "text":
        return ""
    for key, what, names in BESIDE_CHATS:
        if not hasattr(chat, key):
            continue
        named: str | None = getattr(chat, key)
        there = next((name for name in names if name in filled and name not in chat.beside), None)
        if named is None and there is not None:
            return (
                f"the first records have {there!r} beside their messages, which {what} not read: say {key}: {there} "
                f"in the transform {chat.type}, unless it is to be left out"
            )
        # A nested field is only looked for in its own place.
        if named is not None and named not in filled and "." not in named:
            return (
                f"none of the first records has {key} under {named!r}, which the transform {chat.type} names: correct "
                "the name, unless later ones have it"
            )
    return ""


def doubt_of_prompt(transforms: Sequence[TransformConfig], there: Collection[str]) -> str:
    """Name the part of a prompt that none of the first lines has; empty if there is no such part.

    Args:
        transforms: Transforms of the source.
        there: Keys that any of the first lines has, with any value.
    """
    completion = encoding_of(transforms)
    # If the prompt is one key, each line has it or is a bad line.
    if not isinstance(completion, CompletionTransform) or isinstance(completion.prompt, str):
        return ""
    absent = next((key for key in completion.asks if key not in there and "." not in key), None)
    if absent is None:
        return ""
    return (
        f"none of the first lines has a key {absent!r}, which prompt of the transform completion names: correct the "
        "name, unless later ones have it"
    )
