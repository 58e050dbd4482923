"""Shards of MDS: their descriptions in ``index.json``, checked before use, and columns cut out of samples.

A sample has the length (uint32) of each of its columns of varying size, followed by its columns, end to end. Columns
are cut out of all samples of a unit at once.

Shape suffixes:
    N  samples of a unit        K  columns of varying size        V  bytes of a column
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.ragged import Ragged, gather_ranges
from omniload.base.state import shown
from omniload.mix.columns import said_of_inside
from omniload.mix.sources import MdsSource
from omniload.source.files import ShardFile
from omniload.source.parsing.litdata import REMEDY
from omniload.source.parsing.mds_arrays import INTEGERS_BY_NAME
from omniload.source.parsing.token_lists import RowsAt, row_at

__all__ = ["MdsShard", "column_in", "encoding_in", "require_column", "shards_in"]

_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MdsShard:
    """One shard as the index describes it."""

    name: str
    """Name of the plain file."""
    zipped: str
    """Name of the compressed file; empty if there is none."""
    samples: int
    size_bytes: int
    """Size of the plain file."""
    columns: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int, ...]
    """Bytes of each column in every sample; 0 for a column of varying size."""


def shards_in(index: ShardFile, value: Mapping[str, Any]) -> list[MdsShard]:
    """Return the shards that an index lists.

    Raises:
        ConfigError: The version, format or compression is not supported.
        IntegrityError: The file is no index of MDS.
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
    # The compression level follows the colon, and a reader need not know it.
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
        # Null if the size varies between samples.
        sizes=tuple(_count(where, "column_sizes", size or 0) for size in sizes),
    )


def _fault(where: str, key: str, value: object) -> IntegrityError:
    return IntegrityError(f"{where}: {key} is {shown(value)}; the index is corrupt, replace it")


def _count(where: str, key: str, value: object) -> int:
    # Offsets of a shard have 32 bits, so no count is larger.
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 32:
        raise _fault(where, key, value)
    return value


def _file(where: str, value: object) -> str:
    # A name as text, or an object with the name and a size.
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
    """Raise an error for a shard that lacks the column that a source reads, or has one of another kind.

    Raises:
        ConfigError: Names the columns of the shard.
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
    if kind == "ndarray" and rest and rest.partition(":")[0] not in INTEGERS_BY_NAME:
        raise ConfigError(
            f"{path}: column {config.column!r} is {encoding}; token ids are integers, name another column"
        )


def encoding_in(path: str, described: MdsShard, column: str, *, by: str = "") -> str:
    """Return the encoding of a column that a field of the source, ``by``, names.

    Raises:
        ConfigError: The column is missing, or exists more than once; names the columns of the shard.
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
        IntegrityError: The columns of a sample do not fill the sample.
    """
    number = described.columns.index(column)
    sizes = np.array(described.sizes, np.int64)
    differing = np.flatnonzero(sizes == 0)
    begins_N, ends_N = offsets[:-1], offsets[1:]
    # Only columns of varying size have a length in front; the index gives the sizes of other columns.
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
