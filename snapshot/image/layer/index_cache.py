"""The index of a layer as a file, and the folder that keeps these files by layer.

::

    {"omniload_layer_index": 1, ..., "body_sha256": ...}   one line of JSON
    blocks      64 bytes each, as ``layer_index.BLOCK``
    windows     for each its length, 4 bytes, then all of them
    entries     JSON, compressed with zstd

All numbers are little-endian. ``docs/design/snapshot/0020-images.md`` gives every byte.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import numpy as np
import orjson
import zstandard

from omniload.base.compression.streams import unzstd
from omniload.base.errors import IntegrityError, StateError
from omniload.base.reading import read_kept_file
from omniload.base.writing import write_whole
from snapshot.image.layer.index import BLOCK, Entry, Extent, Format, LayerIndex
from snapshot.oci.digest import check_digest
from snapshot.private_folder import is_own_folder, private_folder

__all__ = ["MAX_INDEX_BYTES", "VERSION", "IndexCache", "decode_index", "encode_index"]

VERSION = 1
_KEY = "omniload_layer_index"
MAX_INDEX_BYTES = 2 << 30
"""Largest file of an index."""
_MAX_ENTRIES_BYTES = 1 << 31
# The file identifies fields only by their position, so another order of them would be another version.
_FIELDS_OF = {kind: attrgetter(*(each.name for each in fields(kind))) for kind in (Entry, Extent)}
_PLAIN = [each.name for each in fields(Entry)][:-3]


def encode_index(index: LayerIndex) -> bytes:
    """Return the bytes of an index."""
    lengths = np.array([len(window) for window in index.windows_W], "<u4")
    # Plain JSON, because orjson cannot write lone surrogates, which this writes as ASCII escapes.
    table = json.dumps(index.entries, default=_plain, separators=(",", ":"))
    entries = zstandard.ZstdCompressor(level=6).compress(table.encode("ascii"))
    body = b"".join(
        [index.blocks_B.tobytes(), lengths.tobytes(), b"".join(index.windows_W), entries]
    )
    head = {
        _KEY: VERSION,
        "blob": index.blob_digest,
        "blob_bytes": index.blob_bytes,
        "format": index.format,
        "stream_bytes": index.stream_bytes,
        "diff_id": index.diff_id,
        "blocks": len(index.blocks_B),
        "windows": len(lengths),
        "windows_bytes": int(lengths.sum()),
        "entries": len(index.entries),
        "entries_bytes": len(entries),
        "table_bytes": len(table),
        "body_sha256": hashlib.sha256(body).hexdigest(),
    }
    return orjson.dumps(head) + b"\n" + body


def decode_index(data: bytes, *, name: str) -> LayerIndex:
    """Read an index.

    Raises:
        IntegrityError: It was altered, cut short, or contradicts itself.
        StateError: Another version wrote it.
    """
    text, _, body = data.partition(b"\n")
    try:
        head = orjson.loads(text)
        version = head[_KEY]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise IntegrityError(f"index {name}: no head of an index: {error}; remove it") from error
    if version != VERSION:
        raise StateError(f"index {name} has version {version!r}, this code reads {VERSION}")
    if hashlib.sha256(body).hexdigest() != head.get("body_sha256"):
        raise IntegrityError(f"index {name}: body does not have its checksum; remove it")
    try:
        return _decoded(head, body)
    except (
        *(KeyError, TypeError, ValueError, IndexError),
        *(OverflowError, RecursionError, zstandard.ZstdError),
    ) as error:
        raise IntegrityError(f"index {name}: breaks its format: {error!r}; remove it") from error


def _decoded(head: Mapping[str, Any], body: bytes) -> LayerIndex:
    split = int(head["blocks"]) * BLOCK.itemsize
    blocks_B = np.frombuffer(body[:split], BLOCK)
    at = split + int(head["windows"]) * 4
    lengths = np.frombuffer(body[split:at], "<u4")
    windows = []
    for length in lengths:
        windows.append(body[at : at + int(length)])
        at += int(length)
    if int(head["table_bytes"]) > _MAX_ENTRIES_BYTES or head["format"] not in get_args(Format):
        raise ValueError(f"format {head['format']!r}, table of {head['table_bytes']} bytes")
    rows = json.loads(unzstd(body[at:], int(head["table_bytes"])))
    sizes = blocks_B["size"].astype(np.uint64)
    starts = np.concatenate([np.zeros(1, np.uint64), np.cumsum(sizes, dtype=np.uint64)])
    if not np.array_equal(starts[:-1], blocks_B["stream_offset"]):
        raise ValueError("blocks leave gaps in the stream")
    if int(starts[-1]) != head["stream_bytes"] or len(rows) != head["entries"]:
        raise ValueError(f"{int(starts[-1])} bytes and {len(rows)} entries, the head says others")
    return LayerIndex(
        blob_digest=check_digest(head["blob"]),
        blob_bytes=int(head["blob_bytes"]),
        format=head["format"],
        stream_bytes=int(head["stream_bytes"]),
        diff_id=head["diff_id"],
        blocks_B=blocks_B,
        windows_W=tuple(windows),
        entries=tuple(_entry(row) for row in rows),
    )


def _plain(value: Any) -> Any:  # noqa: ANN401 -- what JSON calls this with, and any JSON
    return value.hex() if isinstance(value, bytes) else _FIELDS_OF[type(value)](value)


def _entry(row: Sequence[Any]) -> Entry:
    # The fields in the order in which ``_plain`` wrote them.
    *plain, device, xattrs, extents = row
    return Entry(
        **dict(zip(_PLAIN, plain, strict=True)),
        device=(device[0], device[1]),
        xattrs=tuple((name, bytes.fromhex(value)) for name, value in xattrs),
        extents=tuple(Extent(*extent) for extent in extents),
    )


class IndexCache:
    """A folder of indexes, one file for each layer. A broken index counts as absent."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def get(self, blob_digest: str) -> LayerIndex | None:
        """Return the index of a layer, if a good one of this version is there."""
        path = self._path(blob_digest)
        if not is_own_folder(self._folder):
            return None  # files of another user in this folder are not used
        try:
            index = decode_index(
                read_kept_file(path, most_bytes=MAX_INDEX_BYTES, what="an index"), name=str(path)
            )
        except (OSError, IntegrityError, StateError):
            return None
        # Even a valid file may have been copied to the name of another layer.
        return index if index.blob_digest == blob_digest else None

    def put(self, index: LayerIndex) -> None:
        """Keep an index, durably and atomically."""
        private_folder(self._folder)
        # Durable, because the index may have cost a read of the whole layer.
        write_whole(self._path(index.blob_digest), encode_index(index), durable=True)

    def _path(self, blob_digest: str) -> Path:
        return self._folder / f"{check_digest(blob_digest).replace(':', '-')}.v{VERSION}.index"
