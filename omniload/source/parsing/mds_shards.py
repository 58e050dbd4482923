"""Shards of MDS: what ``index.json`` says of each, checked before it is used, and columns cut out of samples.

A sample holds the length (uint32) of each of its columns whose size differs from sample to sample, and then its
columns, end to end. Columns are cut out of all samples of a unit at once.

Shape suffixes:
    N  samples of a unit        K  columns of differing size        V  bytes of a column, or its ids
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.ragged import Ragged, gather_ranges, offsets_of
from omniload.base.state import shown
from omniload.mix.columns import said_of_inside
from omniload.mix.sources import MdsSource
from omniload.source.files import ShardFile
from omniload.source.formats.format import Records
from omniload.source.parsing.litdata import REMEDY
from omniload.source.parsing.token_lists import (
    RowsAt,
    fault_of,
    row_at,
    rows_of_ids,
    said_of_columns,
)

__all__ = ["MdsShard", "column_in", "encoding_in", "ids_in", "require_column", "shards_in"]

_VERSION = 2
_DTYPE_OF_CODE = {
    8: "<u1",
    9: "<i1",
    16: "<u2",
    17: "<i2",
    32: "<u4",
    33: "<i4",
    64: "<u8",
    65: "<i8",
}
_DTYPE_OF_NAME = {np.dtype(name).name: np.dtype(name) for name in _DTYPE_OF_CODE.values()}


@dataclass(frozen=True, slots=True, kw_only=True)
class MdsShard:
    """One shard as the index describes it."""

    name: str
    """Plain file."""
    zipped: str
    """Compressed file; empty where there is none."""
    samples: int
    size_bytes: int
    """Bytes of the plain file."""
    columns: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int, ...]
    """Bytes that each column takes in every sample; 0 where they differ."""


def shards_in(index: ShardFile, value: Mapping[str, Any]) -> list[MdsShard]:
    """Return the shards that an index lists.

    Raises:
        ConfigError: Its version, format or compression is not read.
        IntegrityError: It is no index of MDS.
    """
    if "chunks" in value and "shards" not in value:
        raise ConfigError(
            f"{index.path}: is an index of litdata, whose chunks are not read; {REMEDY}"
        )
    listed = value.get("shards")
    if value.get("version") != _VERSION or not isinstance(listed, list):
        raise ConfigError(
            f"{index.path}: is of version {shown(value.get('version'))}, with {type(listed).__name__} as shards; "
            f"an index of MDS, version {_VERSION}, is read"
        )
    return [_shard(f"{index.path}: shard {i}", each) for i, each in enumerate(listed)]


def _shard(where: str, value: object) -> MdsShard:
    if not isinstance(value, dict):
        raise _fault(where, "it", value)
    if value.get("format") != "mds" or value.get("version", _VERSION) != _VERSION:
        raise ConfigError(
            f"{where}: format {shown(value.get('format'))}, version {shown(value.get('version'))}; "
            f"mds, version {_VERSION}, is read"
        )
    raw, zipped = value.get("raw_data"), value.get("zip_data")
    compression = value.get("compression")
    # Behind the colon stands how hard it was compressed, which a reader need not know.
    if zipped is not None and str(compression).partition(":")[0] != "zstd":
        raise ConfigError(
            f"{where}: is compressed by {shown(compression)}; zstd is read, or nothing: "
            "write it anew, or unpack the shards"
        )
    if not isinstance(raw, dict):
        raise _fault(where, "raw_data", raw)
    columns = _texts(where, value, "column_names")
    encodings = _texts(where, value, "column_encodings")
    sizes = value.get("column_sizes")
    if not isinstance(sizes, list):
        raise _fault(where, "column_sizes", sizes)
    for key, listed in (("column_encodings", encodings), ("column_sizes", sizes)):
        if len(listed) != len(columns):
            raise IntegrityError(
                f"{where}: {key} has {len(listed)} entries for {len(columns)} columns; the index is corrupt, replace it"
            )
    return MdsShard(
        name=_file(where, raw),
        zipped="" if zipped is None else _file(where, zipped),
        samples=_count(where, "samples", value.get("samples")),
        size_bytes=_count(where, "raw_data.bytes", raw.get("bytes")),
        columns=columns,
        encodings=encodings,
        # Null where samples differ in it.
        sizes=tuple(_count(where, "column_sizes", size or 0) for size in sizes),
    )


def _fault(where: str, key: str, value: object) -> IntegrityError:
    return IntegrityError(f"{where}: {key} is {shown(value)}; the index is corrupt, replace it")


def _count(where: str, key: str, value: object) -> int:
    # Offsets of a shard are of 32 bits: no count of it is larger.
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 32:
        raise _fault(where, key, value)
    return value


def _file(where: str, value: object) -> str:
    # A name in text, or an object with a size beside it.
    name = value.get("basename") if isinstance(value, dict) else value
    if not isinstance(name, str):
        raise _fault(where, "basename", name)
    return name


def _texts(where: str, value: Mapping[str, Any], key: str) -> tuple[str, ...]:
    found = value.get(key)
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise _fault(where, key, found)
    return tuple(found)


def require_column(path: str, described: MdsShard, config: MdsSource) -> None:
    """Refuse a shard without the column that a source reads, or with one of another kind.

    Raises:
        ConfigError: With what the shard has.
    """
    encoding = encoding_in(path, described, config.column)
    kind, _, rest = encoding.partition(":")
    if config.holds_text and kind not in {"str", "bytes"}:
        raise ConfigError(
            f"{path}: column {config.column!r} is {encoding}, not str; name another column or use the key tokens"
        )
    if not config.holds_text and kind not in {"ndarray", "bytes"}:
        raise ConfigError(
            f"{path}: column {config.column!r} is {encoding}, not ndarray or bytes; name another column, or use "
            "the key text"
        )
    if not config.holds_text and kind == "bytes" and config.dtype is None:
        raise ConfigError(
            f"{path}: column {config.column!r} is of bytes; state the dtype of the ids in them, such as int64"
        )
    if kind == "ndarray" and rest and rest.partition(":")[0] not in _DTYPE_OF_NAME:
        raise ConfigError(
            f"{path}: column {config.column!r} is {encoding}; token ids are integers, name another column"
        )


def encoding_in(path: str, described: MdsShard, column: str, *, by: str = "") -> str:
    """Return the encoding of a column that a field of the source, ``by``, asks for.

    Raises:
        ConfigError: It is not there, or more than once; with what the shard has.
    """
    shown_columns = ", ".join(described.columns)[:300]
    if column not in described.columns:
        raise ConfigError(
            f"{path}: has no column {column!r}{by}; it has {shown_columns}"
            f"{said_of_inside(column, described.columns)}"
        )
    if described.columns.count(column) > 1:
        raise ConfigError(
            f"{path}: has more than one column {column!r}{by}; it has {shown_columns}: "
            "name another, or write the shard anew"
        )
    return described.encodings[described.columns.index(column)]


def column_in(
    data: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    described: MdsShard,
    column: str,
    where: RowsAt,
) -> Ragged:
    """Cut a column out of samples that lie end to end.

    Raises:
        IntegrityError: The columns of a sample do not fill it.
    """
    number = described.columns.index(column)
    sizes = np.array(described.sizes, np.int64)
    differing = np.flatnonzero(sizes == 0)
    begins_N, ends_N = offsets[:-1], offsets[1:]
    # Only columns that differ have a length in front; the others have the one that the index says.
    head = 4 * len(differing)
    if len(begins_N) and int((ends_N - begins_N).min()) < head:
        at = int((ends_N - begins_N).argmin())
        raise IntegrityError(
            f"{row_at(where, at)} has {ends_N[at] - begins_N[at]} bytes; replace the shard"
        )
    places = begins_N[:, None] + np.arange(head)
    lengths_NK = data[places].view("<u4").astype(np.int64).reshape(len(begins_N), len(differing))
    filled = begins_N + head + int(sizes.sum()) + lengths_NK.sum(axis=1)
    if (wrong := filled != ends_N).any():
        at = int(wrong.argmax())
        raise IntegrityError(
            f"{row_at(where, at)}: its columns end at byte {filled[at] - begins_N[at]} of "
            f"{ends_N[at] - begins_N[at]}; replace the shard"
        )
    before = int(np.searchsorted(differing, number))
    starts = begins_N + head + int(sizes[:number].sum()) + lengths_NK[:, :before].sum(axis=1)
    own = lengths_NK[:, before] if sizes[number] == 0 else np.full(len(starts), sizes[number])
    values, ends = gather_ranges(data, starts, starts + own)
    return Ragged(values_V=values, offsets=ends)


@dataclass(slots=True, kw_only=True)
class _BadSamples:
    """Which samples of a unit hold no token ids, and what is wrong with the first of them."""

    bad_N: NDArray[np.bool_]
    kept_N: NDArray[np.bool_] | None = None
    """Which conditions leave: of the others nothing is said."""
    first: int = -1
    said: str = ""

    def note(self, wrong_N: NDArray[np.bool_], say: Callable[[int], str]) -> None:
        """Take in samples that are wrong; what is said of one before stands."""
        told_N = wrong_N if self.kept_N is None else wrong_N & self.kept_N
        if told_N.any():
            at = int(told_N.argmax())
            if self.first < 0 or at < self.first:
                self.first, self.said = at, say(at)
        self.bad_N |= wrong_N


def ids_in(
    values: Ragged,
    encoding: str,
    dtype: str | None,
    place: tuple[RowsAt, str],
    kept_B: NDArray[np.bool_] | None = None,
) -> Records:
    """Read the arrays of a column; what is none, or holds something else than token ids, is a bad record.

    Args:
        values: The bytes of each sample.
        encoding: What the index says of the column.
        dtype: Type of ids where they are bytes.
        place: That of the samples, and the name of the column.
        kept_B: Which samples conditions leave; what is wrong with another is all one.
    """
    faults = _BadSamples(bad_N=np.zeros(len(values), np.bool_), kept_N=kept_B)
    kind, _, rest = encoding.partition(":")
    named, _, shape = rest.partition(":")
    starts, stops = values.offsets[:-1].copy(), values.offsets[1:]
    types: list[np.dtype[Any]]
    # ``ndarray:TYPE:SHAPE``: what is left out there stands before each array.
    if kind == "bytes" or named:
        types = [np.dtype(dtype) if kind == "bytes" else _DTYPE_OF_NAME[named]]
        chosen = np.zeros(len(values), np.int64)
    else:
        codes = _bytes_at(values, starts, faults)
        faults.note(
            ~np.isin(codes, list(_DTYPE_OF_CODE)),
            lambda at: f"is of type {codes[at]}, where integers belong; name another column",
        )
        codes[faults.bad_N] = next(iter(_DTYPE_OF_CODE))
        found = np.unique(codes).tolist()
        types = [np.dtype(_DTYPE_OF_CODE[code]) for code in found]
        chosen = np.searchsorted(found, codes)
        starts += 1
    if kind == "ndarray" and not shape:
        codes = _bytes_at(values, starts, faults)
        # The shape: how many numbers in the upper bits of its code, in the lower ones how wide each is.
        starts += 1 + (codes >> 2) * (1 << (codes & 3))
    column = _cast(values.values_V, starts, stops, types, chosen, faults)
    reason = ""
    if faults.said:
        where, name = place
        reason = f"{row_at(where, faults.first)}: {said_of_columns([name])}{faults.said}"
    bad_B = faults.bad_N if kept_B is None else faults.bad_N & kept_B
    return Records(column=column, bad_B=bad_B, reason=reason, kept_B=kept_B)


def _bytes_at(values: Ragged, places: NDArray[np.int64], faults: _BadSamples) -> NDArray[np.int64]:
    faults.note(places >= values.offsets[1:], lambda _: "has an array that is cut short")
    if not len(values.values_V):
        return np.zeros(len(places), np.int64)
    # Of those that are cut short any byte.
    return values.values_V[np.minimum(places, len(values.values_V) - 1)].astype(np.int64)


def _cast(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    types: list[np.dtype[Any]],
    chosen: NDArray[np.int64],
    faults: _BadSamples,
) -> Ragged:
    """Read ranges of bytes as token ids, each of the type that was chosen for it; of what is wrong nothing."""
    widths = np.array([each.itemsize for each in types] or [1], np.int64)[chosen]
    sizes = stops - starts
    faults.note(
        (sizes < 0) | (sizes % widths != 0),
        lambda at: f"has an array of {sizes[at]} bytes, of ids of {widths[at]}",
    )
    starts = np.where(faults.bad_N, stops, starts)
    offsets = offsets_of((stops - starts) // widths)
    ids = np.empty(0 if len(types) == 1 else int(offsets[-1]), np.int32)
    for number, dtype in enumerate(types):
        mine = np.flatnonzero(chosen == number)
        found, ends = gather_ranges(data, starts[mine], stops[mine])
        ids_V, ends = found.view(dtype), ends // dtype.itemsize
        part, wrong_B = rows_of_ids(ids_V, ends)
        wrong_N = np.zeros(len(chosen), np.bool_)
        wrong_N[mine[wrong_B]] = True
        faults.note(wrong_N, partial(_fault_of_owner, ids_V, ends, mine))
        # Nearly always: a writer gives a column one type.
        if len(types) == 1:
            return part
        counts = np.diff(ends)
        inside = np.arange(len(ids_V)) - np.repeat(ends[:-1], counts)
        # Back to the places of their samples.
        ids[np.repeat(offsets[mine], counts) + inside] = part.values_V
    return Ragged(values_V=ids, offsets=offsets)


def _fault_of_owner(
    ids_V: NDArray[Any], ends: NDArray[np.int64], mine: NDArray[np.int64], sample: int
) -> str:
    """Say what is wrong with the ids of a sample, by its place in the column, not among those of one type."""
    at = int(np.searchsorted(mine, sample))
    return fault_of(ids_V[ends[at] : ends[at + 1]])
