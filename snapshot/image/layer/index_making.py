"""Indexes of layers in a store, made in the cheapest way that proves them.

If a layer has a table of contents, only the table is read. Any other layer is read whole, once: a tar
as it is, gzip in two passes. The first pass finds the places where a decoder can be restarted with
32 KiB of memory. The span between two places is a block: to read a block, exactly its bytes of
the blob are fetched, and nothing is decoded twice. The second pass proves that this works.
"""

import errno
import hashlib
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import zstandard

from omniload.base.compression.gzip_places import (
    BrokenGzipError,
    GzipPlace,
    indexed_gzip,
    places_of,
)
from omniload.base.compression.streams import inflate
from omniload.base.errors import ConfigError, IntegrityError, StateError
from omniload.base.log import get_logger
from snapshot.image.layer.index import BLOCK, MAX_BLOCK_BYTES, Entry, LayerIndex
from snapshot.image.layer.index_cache import IndexCache
from snapshot.image.layer.tar import ByteSource, read_table
from snapshot.image.layer.toc import index_of_toc, zstd_place, zstd_toc
from snapshot.oci.image import Image
from snapshot.oci.manifest import Descriptor, compression_of
from snapshot.oci.store import ImageStore, wanted_by_manifest

__all__ = [
    "SPAN_BYTES",
    "TAR_BLOCK_BYTES",
    "check_diff_id",
    "downloaded",
    "index_gzip",
    "index_image",
    "index_layer",
]

_log = get_logger(__name__)

TAR_BLOCK_BYTES = 1 << 20
"""Block size of a layer that is not compressed."""
# Uncompressed bytes between two places: smaller spans make small reads cheaper; these cost 2 to 3 % of index.
SPAN_BYTES = 1 << 20
MAX_STREAM_BYTES = 1 << 40


def index_image(store: ImageStore, image: Image, cache: IndexCache) -> tuple[LayerIndex, ...]:
    """Return the indexes of an image's layers, lowest first.

    Raises:
        IntegrityError: A layer does not match the manifest, or its uncompressed bytes do not match
            the configuration.
        ConfigError: A layer has a format that can be read only after ``convert``.
    """
    indexes = []
    for layer, diff_id in zip(image.layers, image.config.rootfs.diff_ids, strict=True):
        with wanted_by_manifest():
            index = index_layer(store, layer, cache)
        check_diff_id(index, diff_id)
        indexes.append(index)
    return tuple(indexes)


def check_diff_id(index: LayerIndex, diff_id: str) -> None:
    """Check that the uncompressed layer matches the configuration, if its index knows the digest.

    Raises:
        IntegrityError: It does not match.
    """
    # A table of contents does not hold the digest of the tar; then the manifest must suffice.
    if index.diff_id and index.diff_id != diff_id:
        raise IntegrityError(
            f"layer {index.blob_digest}: uncompressed it is {index.diff_id}, the configuration "
            f"says {diff_id}; build the image anew"
        )


def index_layer(store: ImageStore, layer: Descriptor, cache: IndexCache) -> LayerIndex:
    """Return the index of a layer: the kept one, its own table, or one that is built by reading it whole.

    Raises:
        ConfigError: A zstd layer without a table.
        IntegrityError: The layer does not match its manifest.
        StateError: It must be read whole, and the disk has no room.
    """
    if (kept := cache.get(layer.digest)) is not None:
        return kept
    compression = compression_of(layer)
    if compression == "zstd":
        index = _by_table(store, layer)
    else:
        _log.info("layer %s has no table of contents; read whole, once", layer.digest)
        index = _by_reading(store, layer, compression)
    try:
        cache.put(index)
    except OSError as error:  # this start can use it all the same
        _log.warning("index of layer %s is not kept: %s", layer.digest, error)
    return index


def _by_table(store: ImageStore, layer: Descriptor) -> LayerIndex:
    place = zstd_place(layer)
    if place is None:
        raise ConfigError(
            f"layer {layer.digest} is zstd without a table of contents, so it cannot be read "
            "in parts; run 'omniload image convert'"
        )
    raw = store.blob_range(layer.digest, place.offset, place.size_bytes)
    return index_of_toc(zstd_toc(raw, place, layer=layer.digest), layer, place.offset)


def _by_reading(store: ImageStore, layer: Descriptor, compression: str) -> LayerIndex:
    build = index_gzip if compression == "gzip" else _index_tar
    try:
        # On a disk, because a gzip is read twice, by its path.
        with downloaded(store, layer) as path:
            return build(path, layer.digest)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise StateError(
            f"layer {layer.digest} of {layer.size} bytes must be read whole, and there is no room "
            f"for it in {tempfile.gettempdir()}; set TMPDIR, or convert the image"
        ) from error


@contextmanager
def downloaded(store: ImageStore, layer: Descriptor) -> Iterator[Path]:
    """Yield a file with the whole layer, compared with its digest; it exists inside the block only.

    Raises:
        IntegrityError: It does not match its manifest, or is missing.
    """
    with tempfile.NamedTemporaryFile(prefix="omniload-layer-") as file:
        with wanted_by_manifest():
            for chunk in store.blob_chunks(layer):
                file.write(chunk)
        file.flush()
        yield Path(file.name)


def _index_tar(path: Path, blob_digest: str) -> LayerIndex:
    with path.open("rb") as file:
        entries = tuple(read_table(file, layer=blob_digest))
        file.seek(0)
        blocks, size = [], 0
        while data := file.read(TAR_BLOCK_BYTES):
            digest = hashlib.sha256(data).digest()
            blocks.append((size, len(data), len(data), size, -1, 0, b"", digest))
            size += len(data)
    return LayerIndex(
        blob_digest=blob_digest,
        blob_bytes=size,
        format="tar",
        stream_bytes=size,
        diff_id=blob_digest,
        blocks_B=np.array(blocks, BLOCK),
        entries=entries,
    )


class _Hashing:
    """A source that hashes and counts the bytes that are read through it."""

    def __init__(self, source: ByteSource, *, layer: str) -> None:
        self._source, self._layer = source, layer
        self.hasher = hashlib.sha256()
        self.size_bytes = 0

    def read(self, size: int, /) -> bytes:
        data = self._source.read(size)
        self.hasher.update(data)
        self.size_bytes += len(data)
        if self.size_bytes > MAX_STREAM_BYTES:
            raise IntegrityError(
                f"layer {self._layer}: more than {MAX_STREAM_BYTES} bytes uncompressed; not used"
            )
        return data


def index_gzip(path: Path, blob_digest: str) -> LayerIndex:
    """Build the index of a gzip layer whose digest was already compared.

    Returns:
        The index. Every block was decoded in the way of a lazy read, and together
        the blocks gave the stream whose digest is ``diff_id``.

    Raises:
        IntegrityError: It is not a gzip of a whole tar, or has no place to start in
            64 MiB; then ``convert`` it.
        ConfigError: ``indexed_gzip`` is not installed.
    """
    points, entries, diff_id = _first_pass(path, blob_digest)
    blob_bytes = path.stat().st_size
    # Places are borders: a block is between two of them, and the last one is the end of the blob.
    blocks_B = np.zeros(max(len(points) - 1, 0), BLOCK)
    windows: list[bytes] = []
    compressor = zstandard.ZstdCompressor(level=3)
    for record, (point, following) in zip(blocks_B, pairwise(points), strict=True):
        size = following.offset - point.offset
        if size > MAX_BLOCK_BYTES:
            raise IntegrityError(
                f"layer {blob_digest}: {size} bytes without a place to start, more than "
                f"{MAX_BLOCK_BYTES}; convert the image with 'omniload image convert'"
            )
        record["stream_offset"], record["size"] = point.offset, size
        record["blob_offset"] = point.raw_offset
        record["blob_size"] = following.raw_offset - point.raw_offset
        record["bits"], record["window"] = point.bits, -1
        if point.window:
            record["window"] = len(windows)
            windows.append(compressor.compress(point.window))
    _second_pass(path, blob_digest, blocks_B, points, diff_id)
    return LayerIndex(
        blob_digest=blob_digest,
        blob_bytes=blob_bytes,
        format="gzip",
        stream_bytes=points[-1].offset if points else 0,
        diff_id=diff_id,
        blocks_B=blocks_B,
        windows_W=tuple(windows),
        entries=tuple(entries),
    )


def _first_pass(path: Path, blob_digest: str) -> tuple[list[GzipPlace], list[Entry], str]:
    """Decode the whole layer once: read the table, hash the stream, find the places."""
    raw_bytes = path.stat().st_size
    try:
        with (
            path.open("rb") as blob,
            indexed_gzip(blob, spacing_bytes=SPAN_BYTES, what="a gzip layer") as file,
        ):
            source = _Hashing(file, layer=blob_digest)
            entries = list(read_table(source, layer=blob_digest))
            file.build_full_index()
            with tempfile.NamedTemporaryFile(prefix="omniload-") as exported:
                file.export_index(filename=exported.name)
                points = list(places_of(Path(exported.name).read_bytes(), raw_bytes))
    except (BrokenGzipError, OSError) as error:
        # A full disk is no fault of the layer.
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        raise IntegrityError(f"layer {blob_digest}: not a whole gzip: {error}") from error
    if source.size_bytes == 0:
        points = []
    elif not points or points[-1].offset != source.size_bytes:
        points.append(GzipPlace(raw_bytes, source.size_bytes, 0, b""))
    return points, entries, f"sha256:{source.hasher.hexdigest()}"


def _second_pass(
    path: Path,
    blob_digest: str,
    blocks_B: np.ndarray[tuple[int], np.dtype[np.void]],
    points: list[GzipPlace],
    diff_id: str,
) -> None:
    """Decode block by block as a lazy read does, and write each digest into its record."""
    whole = hashlib.sha256()
    with path.open("rb") as file:
        for number, (record, point) in enumerate(zip(blocks_B, points, strict=False)):
            # Deflate is a stream of bits, so a place may begin inside the previous byte.
            early = 1 if point.bits else 0
            file.seek(point.raw_offset - early)
            raw = file.read(int(record["blob_size"]) + early)
            try:
                data = inflate(raw, point.bits, point.window, int(record["size"]))
            except zlib.error as error:
                raise IntegrityError(
                    f"layer {blob_digest}: span {number}, {len(raw)} bytes at offset "
                    f"{point.raw_offset - early}, does not decode alone: {error}; convert the "
                    "image with 'omniload image convert'"
                ) from error
            whole.update(data)
            record["sha256"] = np.void(hashlib.sha256(data).digest())
    if f"sha256:{whole.hexdigest()}" != diff_id:
        raise IntegrityError(
            f"layer {blob_digest}: decoded by blocks it is not what it is decoded whole; "
            "convert the image with 'omniload image convert'"
        )
