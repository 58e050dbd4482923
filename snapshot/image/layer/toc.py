"""Tables of contents: lists in layers of the place of each chunk of each file.

zstd:chunked keeps a JSON document in a skippable frame after the tar. The image's manifest holds the digest of
this document, so the digests in it are as trustworthy as the manifest.

Source:
    containers/storage ``pkg/chunked``.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
import zstandard

from omniload.base.compression.streams import unzstd
from omniload.base.errors import ConfigError, IntegrityError
from snapshot.image.layer.index import (
    BLOCK,
    MAX_BLOCK_BYTES,
    MAX_ENTRIES,
    MAX_FILE_BYTES,
    Entry,
    Extent,
    Kind,
    LayerIndex,
    check_entry,
    clean_path,
)
from snapshot.oci.digest import hasher_of, verified
from snapshot.oci.manifest import Descriptor, compression_of

__all__ = [
    "CHECKSUM",
    "KIND_OF",
    "POSITION",
    "TocPlace",
    "format_of",
    "index_of_toc",
    "zstd_place",
    "zstd_toc",
]

POSITION = "io.github.containers.zstd-chunked.manifest-position"
CHECKSUM = "io.github.containers.zstd-chunked.manifest-checksum"
# The tools of Debian 12 still write the annotations under their first names.
_OLD = ("io.github.containers.", "io.containers.")
MAX_TOC_BYTES = 256 << 20

_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)\Z")
KIND_OF: dict[str, Kind] = {
    "reg": "file",
    "dir": "directory",
    "symlink": "symlink",
    "hardlink": "hardlink",
    "char": "character",
    "block": "block",
    "fifo": "fifo",
}
"""Kind of an entry, by its word in a table of contents."""


@dataclass(frozen=True, slots=True)
class TocPlace:
    """Place of the table of contents in a blob, and the digest it must have."""

    offset: int
    size_bytes: int
    toc_bytes: int
    """Uncompressed size in bytes."""
    digest: str


def zstd_place(layer: Descriptor) -> TocPlace | None:
    """Return the place of the table of a zstd layer, or None if it has none.

    Raises:
        IntegrityError: The manifest's annotations are malformed.
    """
    for prefix in _OLD:
        position = layer.annotations.get(POSITION.replace(_OLD[0], prefix))
        checksum = layer.annotations.get(CHECKSUM.replace(_OLD[0], prefix))
        if position is None or checksum is None:
            continue
        numbers = position.split(":")
        if len(numbers) != 4 or not all(re.fullmatch(r"[0-9]{1,15}", n) for n in numbers):
            raise IntegrityError(f"layer {layer.digest}: table at {position!r}, not four numbers")
        offset, size, toc_bytes, kind = map(int, numbers)
        if not 0 < size <= MAX_TOC_BYTES or toc_bytes > MAX_TOC_BYTES or offset + size > layer.size:
            raise IntegrityError(
                f"layer {layer.digest}: table of {size} ({toc_bytes}) bytes at {offset} in a blob of "
                f"{layer.size}, and at most {MAX_TOC_BYTES} are read"
            )
        if kind != 1:
            raise IntegrityError(f"layer {layer.digest}: table of kind {kind}, only 1 is read")
        return TocPlace(offset, size, toc_bytes, checksum)
    return None


def zstd_toc(raw: bytes, place: TocPlace, *, layer: str) -> Sequence[Mapping[str, Any]]:
    """Return the entries of a zstd:chunked table; the digest is that of its compressed bytes.

    Raises:
        IntegrityError: The digest differs, or the bytes are no table.
    """
    verified(raw, place.digest, name=f"layer {layer}: table of contents")
    try:
        data = unzstd(raw, place.toc_bytes + 1)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"layer {layer}: table does not decode: {error}") from error
    if len(data) > place.toc_bytes:
        raise IntegrityError(
            f"layer {layer}: table is longer than the {place.toc_bytes} bytes that its manifest says; "
            "the layer is not used"
        )
    return _toc_entries(data, layer)


def index_of_toc(
    items: Sequence[Mapping[str, Any]], layer: Descriptor, toc_offset: int
) -> LayerIndex:
    """Make an index from a table of contents, which begins at ``toc_offset`` of its blob.

    Raises:
        IntegrityError: The table contradicts itself.
        ConfigError: It has chunks without a digest, or chunks larger than a block may be.
    """
    try:
        return _Reader(layer, toc_offset).read(items)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise IntegrityError(
            f"layer {layer.digest}: table of contents breaks its format: {error!r}"
        ) from error


class _Reader:
    """Collects chunks into a stream, and entries that point into it."""

    def __init__(self, layer: Descriptor, toc_offset: int) -> None:
        self._layer = layer
        self._toc_offset = toc_offset
        self._stream_at = 0
        self._blocks: list[tuple[int, int, int, int, int, int, bytes, bytes]] = []

    def read(self, items: Sequence[Mapping[str, Any]]) -> LayerIndex:
        if len(items) > MAX_ENTRIES:
            raise ValueError(f"{len(items)} entries, more than {MAX_ENTRIES}")
        # A chunk ends where the next chunk or other item begins, whichever file it belongs to.
        offsets = sorted({int(i["offset"]) for i in items if i.get("offset")} | {self._toc_offset})
        ends = dict(pairwise(offsets))
        entries: list[Entry] = []
        at = 0
        while at < len(items):
            following = at + 1
            while following < len(items) and items[following]["type"] == "chunk":
                following += 1
            entries.append(self._entry(items[at], items[at:following], ends))
            at = following
        return LayerIndex(
            blob_digest=self._layer.digest,
            blob_bytes=self._layer.size,
            format="zstd:chunked",
            stream_bytes=self._stream_at,
            diff_id="",
            blocks_B=np.array(self._blocks, BLOCK),
            entries=tuple(entries),
        )

    def _entry(
        self, head: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], ends: Mapping[int, int]
    ) -> Entry:
        kind = KIND_OF[head["type"]]
        size = int(head.get("size", 0)) if kind == "file" else 0
        name, target = self._layer.digest, str(head.get("linkName", ""))
        xattrs = (head.get("xattrs") or {}).items()
        if not 0 <= size <= MAX_FILE_BYTES:
            raise ValueError(f"{head['name']!r} has {size} bytes, more than a file may or fewer")
        extents = tuple(self._extents(parts, size, ends)) if size else ()
        entry = Entry(
            path=clean_path(str(head["name"]), layer=name),
            kind=kind,
            mode=int(head.get("mode", 0)) & 0o7777,
            uid=int(head.get("uid", 0)),
            gid=int(head.get("gid", 0)),
            mtime_ns=_mtime_ns(head.get("modtime")),
            size_bytes=size,
            target=clean_path(target, layer=name) if kind == "hardlink" else target,
            device=(int(head.get("devMajor", 0)), int(head.get("devMinor", 0))),
            xattrs=tuple(sorted((str(n), base64.b64decode(v, validate=True)) for n, v in xattrs)),
            extents=extents,
        )
        return check_entry(entry, layer=name)

    def _extents(
        self, parts: Sequence[Mapping[str, Any]], size: int, ends: Mapping[int, int]
    ) -> Sequence[Extent]:
        extents: list[Extent] = []
        at = 0
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            length = int(part.get("chunkSize", 0)) or (size - at if last else 0)
            if int(part.get("chunkOffset", 0)) != at or length <= 0:
                raise ValueError(f"chunk at {part.get('chunkOffset')} of {length} bytes, not {at}")
            if part.get("chunkType", "") != "zeros":
                extents.append(Extent(at, self._stream_at, length))
                self._add_block(part, length, ends, alone=len(parts) == 1)
            at += length
        if at != size:
            raise ValueError(f"chunks of {at} bytes for a file of {size}")
        return extents

    def _add_block(
        self, part: Mapping[str, Any], size: int, ends: Mapping[int, int], *, alone: bool
    ) -> None:
        """Append a chunk of ``size`` bytes to the stream."""
        digest = part.get("chunkDigest") or (part.get("digest") if alone else None)
        # A row of an index has 32 bytes for a digest, by which blocks of all layers share one store.
        if not digest or hasher_of(str(digest)).name != "sha256":
            raise ConfigError(
                f"layer {self._layer.digest} has a table of contents without a sha256 of each chunk; "
                "run 'omniload image convert'"
            )
        begin, end = int(part["offset"]), ends[int(part["offset"])]
        if not 0 <= begin < end <= self._toc_offset:
            raise ValueError(f"chunk at {begin} to {end}, outside the blob")
        # zstd makes incompressible bytes a little longer.
        if size > MAX_BLOCK_BYTES or end - begin > 2 * MAX_BLOCK_BYTES:
            raise ConfigError(
                f"layer {self._layer.digest} has a chunk of {size} bytes, more than the "
                f"{MAX_BLOCK_BYTES} of a block; run 'omniload image convert'"
            )
        sha256 = bytes.fromhex(str(digest).partition(":")[2])
        self._blocks.append((self._stream_at, size, end - begin, begin, -1, 0, b"", sha256))
        self._stream_at += size


def _toc_entries(data: bytes, layer: str) -> Sequence[Mapping[str, Any]]:
    try:
        value = orjson.loads(data)
        version, items = value["version"], value["entries"]
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"layer {layer}: table is not one: {error}") from error
    if version != 1 or not isinstance(items, list):
        raise IntegrityError(f"layer {layer}: table has version {version!r}, 1 is read")
    return items


def _mtime_ns(text: str | None) -> int:
    if not text:
        return 0
    found = _TIME.match(text)
    if found is None:
        raise ValueError(f"time {text!r} is not as in RFC 3339")
    whole = datetime.fromisoformat(found[1] + found[3].replace("Z", "+00:00"))
    seconds = int(whole.timestamp())
    # If a tar has no time, Go writes its zero time, of the year 1.
    return 0 if whole.year < 1902 else seconds * 10**9 + int((found[2] or "0").ljust(9, "0"))


def format_of(layer: Descriptor) -> str:
    """Return the format of a layer as its manifest names it, before it is read."""
    compression = compression_of(layer)
    if compression == "zstd":
        return "zstd:chunked" if zstd_place(layer) is not None else "zstd"
    return compression
