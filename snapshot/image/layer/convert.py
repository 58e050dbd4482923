"""Conversion of an image to zstd:chunked: the same tars, compressed so that parts can be read.

The tar of a layer stays the same byte for byte, so its digest in the configuration stays
right, and any tool that reads zstd reads the layer. Only the compression is cut: each
header, and each 256 KiB of a file, becomes a zstd frame of its own. After the tar, in frames
that decoders skip, come the table of contents and a footer that points to it::

    [headers][file, first part][file, second part][headers][file]...[skip: table][skip: footer]
"""

import base64
import gzip
import hashlib
import io
import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import zstandard

from omniload.base.errors import IntegrityError
from omniload.base.log import get_logger
from snapshot.image.layer.index import Entry
from snapshot.image.layer.index_making import downloaded
from snapshot.image.layer.tar import ByteSource, read_table
from snapshot.image.layer.toc import CHECKSUM, KIND_OF, POSITION, zstd_place
from snapshot.oci.digest import digest_of, hasher_of
from snapshot.oci.image import Image
from snapshot.oci.manifest import MANIFEST_TYPE, Descriptor, compression_of, encode
from snapshot.oci.store import ImageStore, small_blob

__all__ = ["CHUNK_BYTES", "Converted", "convert_image", "uncompressed", "write_chunked"]

_log = get_logger(__name__)

# Uncompressed bytes: the most that a read of one byte costs.
CHUNK_BYTES = 256 << 10
_COPY_BYTES = 1 << 20
_MAX_TAR_BYTES = 1 << 40
_SKIPPABLE = b"\x50\x2a\x4d\x18"
_FOOTER_MAGIC = b"GNUlInUx"
_LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
_CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
_WORD_OF = {kind: word for word, kind in KIND_OF.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A converted image, and the results for its layers."""

    digest: str
    """Digest of the new manifest."""
    layers: tuple[Descriptor, ...]
    kept: tuple[str, ...]
    """Digests of layers that stay as they are."""


def convert_image(
    source: ImageStore, image: Image, target: ImageStore, tag: str, *, level: int = 3
) -> Converted:
    """Convert an image of one platform, and push it to ``target`` under ``tag``.

    Raises:
        IntegrityError: A layer does not match the manifest or the configuration.
    """
    layers, kept = [], []
    for layer, diff_id in zip(image.layers, image.config.rootfs.diff_ids, strict=True):
        if zstd_place(layer) is not None:
            new, reason = None, "it is zstd:chunked already"
        else:
            new, reason = _convert_layer(source, layer, diff_id, target, level)
        if new is None:
            _log.info("layer %s stays as it is: %s", layer.digest, reason)
            new = _copied(source, layer, target)
            kept.append(layer.digest)
        layers.append(new)
    config = image.manifest.config
    config_data = small_blob(source, config)
    target.push_blob(config, lambda: io.BytesIO(config_data))
    manifest = image.manifest.model_copy(
        update={
            "media_type": MANIFEST_TYPE,
            "config": config.model_copy(update={"media_type": _CONFIG_TYPE}),
            "layers": tuple(layers),
        }
    )
    digest = target.push_manifest(encode(manifest), MANIFEST_TYPE, tag)
    return Converted(digest=digest, layers=tuple(layers), kept=tuple(kept))


def write_chunked(
    tar: BinaryIO, entries: Iterable[Entry], out: BinaryIO, *, level: int = 3
) -> dict[str, str]:
    """Write a layer, whose tar is at its start and holds no sparse files, as zstd:chunked.

    Returns:
        The annotations that its descriptor must have.
    """
    writer = _Writer(tar, out, level)
    items: list[dict[str, Any]] = []
    for entry in entries:
        items += writer.entry(entry)
    writer.rest()
    table = orjson.dumps({"version": 1, "entries": items})
    packed = writer.compressor.compress(table)
    writer.skippable(packed)
    offset = writer.at - len(packed)
    numbers = (offset, len(packed), len(table), 1, 0, 0, 0)
    writer.skippable(struct.pack("<7Q", *numbers) + _FOOTER_MAGIC)
    return {POSITION: f"{offset}:{len(packed)}:{len(table)}:1", CHECKSUM: digest_of(packed)}


class _Writer:
    """Copies a tar into frames, and notes the begin of each frame."""

    def __init__(self, tar: BinaryIO, out: BinaryIO, level: int) -> None:
        self._tar = tar
        self._out = out
        self._tar_at = 0
        self.at = 0
        self.compressor = zstandard.ZstdCompressor(level=level, write_content_size=True)

    def entry(self, entry: Entry) -> Iterator[dict[str, Any]]:
        """Write headers and data of an entry; yield its items of the table."""
        item = _item(entry)
        if not entry.extents:
            yield item
            return
        (extent,) = entry.extents
        # Put headers into a frame of their own, because readers of a file do not need them.
        self._frame(self._read(extent.stream_offset - self._tar_at))
        start, whole = self.at, hashlib.sha256()
        chunks: list[dict[str, Any]] = []
        for at in range(0, extent.size_bytes, CHUNK_BYTES):
            data = self._read(min(CHUNK_BYTES, extent.size_bytes - at))
            whole.update(data)
            chunk = {"offset": self.at, "chunkOffset": at, "chunkSize": len(data)}
            chunks.append({**chunk, "chunkDigest": digest_of(data)})
            self._frame(data)
        item |= {"digest": f"sha256:{whole.hexdigest()}", "offset": start, "endOffset": self.at}
        if len(chunks) == 1:
            yield item
            return
        yield item | chunks[0]
        for chunk in chunks[1:]:
            yield {"type": "chunk", "name": item["name"], **chunk}

    def rest(self) -> None:
        """Write the rest after the last entry, and a first frame if there was none."""
        while data := self._tar.read(_COPY_BYTES):
            self._frame(data)
        if not self.at:
            self._frame(b"")

    def skippable(self, data: bytes) -> None:
        """Write a frame that decoders skip."""
        self._write(_SKIPPABLE + struct.pack("<I", len(data)) + data)

    def _read(self, size: int) -> bytes:
        data = self._tar.read(size)
        assert len(data) == size, "the table was read from this tar"
        self._tar_at += size
        return data

    def _frame(self, data: bytes) -> None:
        self._write(self.compressor.compress(data))

    def _write(self, data: bytes) -> None:
        self._out.write(data)
        self.at += len(data)


def _item(entry: Entry) -> dict[str, Any]:
    item: dict[str, Any] = {
        "type": _WORD_OF[entry.kind],
        "name": f"{entry.path or '.'}/" if entry.kind == "directory" else entry.path,
        "mode": entry.mode,
        "size": entry.size_bytes,
        "uid": entry.uid,
        "gid": entry.gid,
        "modtime": _rfc3339(entry.mtime_ns),
        "linkName": entry.target,
        "devMajor": entry.device[0],
        "devMinor": entry.device[1],
        "xattrs": {name: base64.b64encode(value).decode() for name, value in entry.xattrs},
    }
    always = {"type", "name", "modtime"}
    return {key: value for key, value in item.items() if value or key in always}


def _rfc3339(mtime_ns: int) -> str:
    seconds, nanoseconds = divmod(mtime_ns, 10**9)
    whole = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    fraction = f".{nanoseconds:09d}".rstrip("0").rstrip(".")
    return f"{whole:%Y-%m-%dT%H:%M:%S}{fraction}Z"


def _convert_layer(
    source: ImageStore, layer: Descriptor, diff_id: str, target: ImageStore, level: int
) -> tuple[Descriptor | None, str]:
    """Convert one layer and push it; return None and the reason if it cannot be converted."""
    with tempfile.TemporaryDirectory(prefix="omniload-convert-") as folder:
        tar, out = Path(folder, "tar"), Path(folder, "out")
        with downloaded(source, layer) as blob, tar.open("wb") as file:
            _unpack(blob, compression_of(layer), file, diff_id, layer.digest)
        with tar.open("rb") as file:
            entries = list(read_table(file, layer=layer.digest))
        if reason := _obstacle(entries):
            return None, reason
        with tar.open("rb") as file, out.open("wb") as packed:
            annotations = write_chunked(file, entries, packed, level=level)
        # The layer that is pushed may need the room.
        tar.unlink()
        with out.open("rb") as packed:
            digest = f"sha256:{hashlib.file_digest(packed, 'sha256').hexdigest()}"
        new = Descriptor(
            media_type=f"{_LAYER_TYPE}+zstd",
            digest=digest,
            size=out.stat().st_size,
            annotations=annotations,
        )
        target.push_blob(new, lambda: out.open("rb"))
    return new, ""


def _obstacle(entries: Iterable[Entry]) -> str:
    """Return why a layer cannot be converted; empty if it can."""
    at = 0
    for entry in entries:
        try:
            # Names are kept as the file system has them; but a table of contents is JSON, which is UTF-8.
            f"{entry.path}{entry.target}{entry.xattrs}".encode()
        except UnicodeEncodeError:
            return f"{entry.path!r} is no UTF-8, and a table of contents holds no other names"
        if not 0 <= entry.mtime_ns < 253_402_300_800 * 10**9:
            return f"{entry.path!r} has a time before 1970 or after 9999"
        covered = sum(extent.size_bytes for extent in entry.extents)
        if len(entry.extents) > 1 or covered != entry.size_bytes:
            return f"{entry.path!r} is sparse"
        if entry.extents and entry.extents[0].stream_offset < at:
            return f"{entry.path!r} lies before what precedes it"
        at = max([at, *(e.stream_offset + e.size_bytes for e in entry.extents)])
    return ""


def _copied(source: ImageStore, layer: Descriptor, target: ImageStore) -> Descriptor:
    if not target.has_blob(layer.digest):
        with downloaded(source, layer) as path:
            target.push_blob(layer, lambda: path.open("rb"))
    # The new manifest is of the OCI format, so its types must be, too.
    compression = compression_of(layer)
    suffix = "" if compression == "tar" else f"+{compression}"
    return layer.model_copy(update={"media_type": f"{_LAYER_TYPE}{suffix}"})


def _unpack(blob: Path, compression: str, out: BinaryIO, diff_id: str, name: str) -> None:
    """Write the uncompressed layer, and compare its digest.

    Raises:
        IntegrityError: The digest differs, or the layer does not decode.
    """
    hasher = hasher_of(diff_id)
    with blob.open("rb") as file:
        source = uncompressed(file, compression)
        try:
            while data := source.read(_COPY_BYTES):
                hasher.update(data)
                # The comparison comes only at the end; until then only this temporary file holds the bytes.
                out.write(data)
                if out.tell() > _MAX_TAR_BYTES:
                    raise IntegrityError(f"layer {name}: more than {_MAX_TAR_BYTES} bytes")
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            # A broken gzip is an OSError without an errno; an error with an errno is of the disk.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise IntegrityError(f"layer {name}: does not decode: {error}") from error
    found = f"{hasher.name}:{hasher.hexdigest()}"
    if found != diff_id:
        raise IntegrityError(
            f"layer {name}: uncompressed it is {found}, the configuration says {diff_id}; build "
            "the image anew"
        )


def uncompressed(file: BinaryIO, compression: str) -> ByteSource:
    """Return the bytes of a layer, uncompressed during the read."""
    if compression == "gzip":
        return gzip.GzipFile(fileobj=file)
    if compression == "zstd":
        decoder = zstandard.ZstdDecompressor(max_window_size=1 << 27)
        return decoder.stream_reader(file, read_across_frames=True)
    return file
