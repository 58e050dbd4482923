"""The protocol of a format, and the words it is spoken in.

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
    "said_of_place",
]

COUNTED = "counted from "
"""Behind what a record is called by its number: from where on."""

FIRST_BYTES = 1 << 20
"""Most bytes, decompressed, that are looked at for the first records of a source."""
LATER_BYTES = 1 << 16
"""Most bytes, decompressed, that are looked at for the first records of a later file of it."""
FIRST_RECORDS = 64
"""Most records that are looked at for the first of a source."""
MAX_UNIT_BYTES = LARGEST_UNIT_BYTES
"""Largest unit that is decoded in memory at once, decompressed."""
BESIDE_CHATS = (
    ("tools", "are", ("tools",)),
    ("system", "is", ("system", "system_prompt")),
)
"""What may stand beside the messages of a conversation, as ``chat`` has it, and what those who write it call it."""
MAX_UNIT_RECORDS = 1 << 27
"""Most records of a unit: their order alone takes 1 GiB of memory. A damaged head claims more than any file holds."""


class Unit(NamedTuple):
    """One unit: where it lies, and how many records it holds."""

    shard: int
    """Number of its shard."""
    start: int
    """As ``UnitTable.starts_U``."""
    stop: int
    """As ``UnitTable.stops_U``."""
    rows: int
    """Records in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTable:
    """What can be decoded on its own: row groups, byte ranges, groups of files."""

    rows_U: NDArray[np.int64]
    """Records in each unit."""
    shards_U: NDArray[np.int64]
    """Number of the shard that holds it; never falling."""
    starts_U: NDArray[np.int64]
    """Where the unit starts; a row group, a byte or a file, as the format counts."""
    stops_U: NDArray[np.int64]
    """Where it stops."""
    contents_F: tuple[str, ...] = ()
    """Digest of what each file holds, in the order of the files; empty for one that holds no record."""
    are_whole_files: bool = False
    """Whether a unit is a shard of its own and some files, of one record each, whose numbers ``starts_U`` and
    ``stops_U`` are; else the number of a shard is that of its file."""

    def __len__(self) -> int:
        return len(self.rows_U)

    def __getitem__(self, unit: int) -> Unit:
        """Return the unit of a number."""
        columns = (self.shards_U, self.starts_U, self.stops_U, self.rows_U)
        return Unit(*(int(column[unit]) for column in columns))

    def first_filled(self) -> int | None:
        """Return the number of the first unit that holds a record; ``None`` where no unit does."""
        filled = np.flatnonzero(self.rows_U)
        return int(filled[0]) if len(filled) else None

    def first_of(self, shard: int) -> int:
        """Return the number of the first unit of a shard."""
        return int(np.searchsorted(self.shards_U, shard))

    def rows_before(self, unit: int) -> int:
        """Return how many records the shard of a unit holds before it."""
        return int(self.rows_U[self.first_of(int(self.shards_U[unit])) : unit].sum())

    def files_of(self, unit: int) -> range:
        """Return the numbers of the files that a unit lies in."""
        if self.are_whole_files:
            return range(int(self.starts_U[unit]), int(self.stops_U[unit]))
        shard = int(self.shards_U[unit])
        return range(shard, shard + 1)

    def records_F(self, files: int) -> NDArray[np.int64]:
        """Return the records of each of so many files."""
        if self.are_whole_files:
            return np.ones(files, np.int64)
        return np.bincount(self.shards_U, self.rows_U, minlength=files).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The records of one unit."""

    column: Ragged
    """Token ids (int32) or UTF-8 text (uint8) of each record."""
    bad_B: NDArray[np.bool_]
    """True where a record could not be decoded; its sequence means nothing."""
    reason: str = ""
    """Where the first bad record is and what is wrong with it."""
    others: Mapping[str, Ragged] = field(default_factory=dict)
    """Further columns by name, a sequence a record; an aligned one has the lengths of ``column`` where that is good."""
    keys_B: NDArray[np.uint64] | None = None
    """Hash of what each record is known by, where its source names that; see ``omniload.mix.schema.splits``."""
    is_own: bool = False
    """Whether ``column`` lies in memory of its own, without room beyond it, so that a block holds it as it is."""
    kept_B: NDArray[np.bool_] | None = None
    """False where a condition of the source leaves a record out; ``None`` where it has none."""

    @classmethod
    def of_texts(cls, texts: "list[str | None]", reason: str = "") -> Self:
        """Hold texts; ``None`` is a bad record."""
        # Large: texts of a unit may be more than the 2 GiB that offsets of 32 bits reach.
        array = pa.array(texts, pa.large_string())
        bad = np.fromiter((text is None for text in texts), np.bool_, len(texts))
        return cls(column=text_bytes(array), bad_B=bad, reason=reason)

    def first(self, count: int) -> "Records":
        """Return the first records, as many as ``count``."""
        count = min(count, len(self.column))
        # Keys and further columns are left behind: whoever looks at first records asks for texts and lengths.
        offsets = self.column.offsets[: count + 1]
        column = Ragged(values_V=self.column.values_V[: offsets[-1]], offsets=offsets)
        bad_B = self.bad_B[:count]
        return type(self)(
            column=column,
            bad_B=bad_B,
            reason=self.reason if bad_B.any() else "",
            kept_B=None if self.kept_B is None else self.kept_B[:count],
        )

    def with_faults(self, faults: Mapping[int, str], place: Callable[[int], str]) -> "Records":
        """Return the records, of which further ones are bad.

        Args:
            faults: What is wrong with each of those, by its row.
            place: Says where a row lies, as a reason begins.
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
        """True where a record is sound, and no condition leaves it out."""
        return ~self.bad_B if self.kept_B is None else ~self.bad_B & self.kept_B


class Format(Protocol):
    """Cuts the files of a source into units and decodes one at a time. Not thread-safe."""

    units_are_bytes: bool = False
    """Whether a unit is a range of bytes, of what is decompressed where a shard is compressed."""
    holds_text: bool
    """Whether records are text, to be tokenised, or token ids."""
    records_from: str = "0"
    """What the first record of a shard is called, and where it stands."""

    def units(self) -> UnitTable:
        """Return the units of the source; they do not change while it is open.

        Raises:
            ConfigError: A shard has no such column, or a unit is too large.
            IntegrityError: A shard is cut short, corrupt, or changed.
        """
        ...

    def read_unit(self, unit: int) -> Records:
        """Decode the records of a unit.

        Raises:
            IntegrityError: The shard is cut short, corrupt, or changed since the source was
                opened. Single bad records are marked instead.
            UnavailableError: The store did not answer.
        """
        ...

    def sizes_U(self) -> NDArray[np.int64] | None:
        """Return what the records of each unit take, ``[U]``, in bytes of one kind, for a few reads of footers at most.

        Returns:
            Below 0 for a unit of which it is not known; ``None`` where none is.

        Raises:
            OmniloadError: As for ``units``.
        """
        units = self.units()
        return units.stops_U - units.starts_U if self.units_are_bytes else None

    def reach(self, unit: int) -> None:  # noqa: ARG002 -- most formats are there at once
        """Go to where a unit begins, where that takes anything: reading it then takes what its own bytes do.

        Raises:
            OmniloadError: As for ``read_unit``.
        """
        return

    def name_of_record(self, number: int) -> str:
        """Return what people call a record of a shard that has ``number`` before it."""
        return f"record {number}, {COUNTED}{self.records_from}"

    def place_of(self, shard: str, unit: int, before: int, row: int) -> tuple[str, str]:  # noqa: ARG002 -- of groups
        """Return the path of the file that holds a record, and what people call the record there: nothing of all of it.

        Args:
            shard: Path of its shard.
            unit: Number of its unit.
            before: Records of the shard before the unit.
            row: Its row in the unit.
        """
        return shard, self.name_of_record(before + row)

    def found_at(self, shard: str, unit: int, before: int, row: int) -> tuple[str, str]:
        """Return what ``place_of`` does, by a name that is in the data, where records have one: it is read for that.

        Raises:
            OmniloadError: As for ``read_unit``.
        """
        return self.place_of(shard, unit, before, row)

    def first_records(self) -> Records:
        """Decode a few records from the start of the source, from at most about ``FIRST_BYTES`` or one unit.

        Returns:
            Those records; none where even the first is larger.

        Raises:
            OmniloadError: As for ``read_unit``.
        """
        ...

    def first_records_of(self, file: int) -> Records | None:  # noqa: ARG002 -- of tables an index sees every column
        """Decode a few records from the start of a file, from at most about ``LATER_BYTES`` or one unit of text.

        Where the first record is longer, that may be ``FIRST_BYTES``.

        Returns:
            Those records; ``None`` where an index says as much of a file, or they take more.

        Raises:
            OmniloadError: As for ``read_unit``.
        """
        return None

    def doubt(self) -> str:
        """Say what of the first records is left out though it looks like a part of them; empty where nothing is.

        Raises:
            OmniloadError: As for ``read_unit``.
        """
        return ""


class IndexedFormat(Format):
    """A format whose units are known once it is open."""

    _units: UnitTable

    @override
    def units(self) -> UnitTable:
        return self._units

    @override
    def first_records(self) -> Records:
        unit = self._units.first_filled()
        return Records.of_texts([]) if unit is None else self._first_of(unit)

    def _first_of(self, unit: int) -> Records:
        """Return the first records of a unit that holds some."""
        return self.read_unit(unit).first(FIRST_RECORDS)


def require_as_indexed(path: str, unit: Unit, found: int, what: str = "records") -> None:
    """Refuse a unit of bytes that holds another number of records than its index says.

    Args:
        path: Of its shard.
        unit: Where it lies, and how many records it had.
        found: Records that it holds now.
        what: What the format calls its records.

    Raises:
        IntegrityError: The shard was written anew since.
    """
    if found != unit.rows:
        raise IntegrityError(
            f"{path}: bytes {unit.start} to {unit.stop} hold {found} {what}, {unit.rows} in the index; "
            "the file is not the one that was indexed, start anew"
        )


def said_of_place(place: tuple[str, str]) -> str:
    """Return a place as ``Format.place_of`` gives it, for a message."""
    return ": ".join(filter(None, place))


def doubt_of_beside(transforms: Sequence[TransformConfig], filled: Collection[str]) -> str:
    """Say whether what stands beside conversations is not read, or is looked for where it is not; empty if all is well.

    Args:
        transforms: Of the source.
        filled: Keys or columns under which any of the first records has something.
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
                f"the first records have {there!r} beside their messages, which {what} not read: say {key}: {there} in "
                f"the transform {chat.type}, unless it is to be left out"
            )
        # One inside another is looked for in its place alone.
        if named is not None and named not in filled and "." not in named:
            return (
                f"none of the first records has {key} under {named!r}, which the transform {chat.type} names: correct "
                "the name, unless later ones have it"
            )
    return ""


def doubt_of_prompt(transforms: Sequence[TransformConfig], there: Collection[str]) -> str:
    """Say which part of a prompt none of the first lines has; empty where there is none such.

    Args:
        transforms: Of the source.
        there: Keys that any of the first lines has, whatever lies under them.
    """
    completion = encoding_of(transforms)
    # A prompt under one key is in every line, or its line is a bad one.
    if not isinstance(completion, CompletionTransform) or isinstance(completion.prompt, str):
        return ""
    absent = next((key for key in completion.asks if key not in there and "." not in key), None)
    if absent is None:
        return ""
    return (
        f"none of the first lines has a key {absent!r}, which prompt of the transform completion names: correct the "
        "name, unless later ones have it"
    )
