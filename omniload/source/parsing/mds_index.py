"""``index.json`` of MDS: what it says of each shard, checked before it is used."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.state import shown
from omniload.source.files import ShardFile
from omniload.source.parsing.litdata import REMEDY

__all__ = ["MdsShard", "shards_in"]

_VERSION = 2


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
