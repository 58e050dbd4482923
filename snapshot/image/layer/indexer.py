"""From a layer in a store to its index, by the cheapest way that proves it."""

import errno
import hashlib
import tempfile
from pathlib import Path
from typing import BinaryIO

import numpy as np

from omniload.base.errors import ConfigError, IntegrityError, StateError
from omniload.base.log import get_logger
from snapshot.image.layer.gzip_index import index_gzip
from snapshot.image.layer.index import BLOCK, LayerIndex
from snapshot.image.layer.index_cache import IndexCache
from snapshot.image.layer.tar import read_table
from snapshot.image.layer.toc import (
    ESTARGZ_FOOTER_BYTES,
    estargz_place,
    estargz_toc,
    index_of_toc,
    zstd_place,
    zstd_toc,
)
from snapshot.oci.image import Image
from snapshot.oci.manifest import Descriptor, compression_of
from snapshot.oci.store import ImageStore, wanted_by_manifest

__all__ = ["TAR_BLOCK_BYTES", "check_diff_id", "index_image", "index_layer"]

_log = get_logger(__name__)

TAR_BLOCK_BYTES = 1 << 20
"""Block of a layer that is not compressed."""


def index_image(store: ImageStore, image: Image, cache: IndexCache) -> tuple[LayerIndex, ...]:
    """Return the indexes of an image's layers, lowest first.

    Args:
        store: Where the image is.
        image: The image.
        cache: Indexes of this node.

    Raises:
        IntegrityError: A layer is not what the manifest, or its uncompressed bytes not what
            the configuration says.
        ConfigError: A layer has a format that is read only after ``convert``.
    """
    indexes = []
    for layer, diff_id in zip(image.layers, image.config.rootfs.diff_ids, strict=True):
        with wanted_by_manifest():
            index = index_layer(store, layer, cache)
        check_diff_id(index, diff_id)
        indexes.append(index)
    return tuple(indexes)


def check_diff_id(index: LayerIndex, diff_id: str) -> None:
    """Check that a layer is, uncompressed, what the configuration says, where its index knows.

    A table of contents does not hold the digest of the tar; there the manifest must do.

    Raises:
        IntegrityError: It is something else.
    """
    if index.diff_id and index.diff_id != diff_id:
        raise IntegrityError(
            f"layer {index.blob_digest}: uncompressed it is {index.diff_id}, the configuration "
            f"says {diff_id}; build the image anew"
        )


def index_layer(store: ImageStore, layer: Descriptor, cache: IndexCache) -> LayerIndex:
    """Return the index of a layer: the kept one, its own table, or one built by reading it whole.

    Args:
        store: Where the layer is.
        layer: The layer.
        cache: Indexes of this node.

    Raises:
        ConfigError: A zstd layer without a table.
        IntegrityError: The layer is not what its manifest says.
        StateError: It must be read whole, and the disk has no room.
    """
    if (kept := cache.get(layer.digest)) is not None:
        return kept
    compression = compression_of(layer)
    index = _by_table(store, layer, compression)
    if index is None:
        _log.info("layer %s has no table of contents; read whole, once", layer.digest)
        index = _by_reading(store, layer, compression)
    try:
        cache.put(index)
    except OSError as error:  # it serves this start all the same
        _log.warning("index of layer %s is not kept: %s", layer.digest, error)
    return index


def _by_table(store: ImageStore, layer: Descriptor, compression: str) -> LayerIndex | None:
    if compression == "zstd":
        place = zstd_place(layer)
        if place is None:
            raise ConfigError(
                f"layer {layer.digest} is zstd without a table of contents, so it cannot be read "
                "in parts; run 'omniload image convert'"
            )
        raw = store.blob_range(layer.digest, place.offset, place.size_bytes)
        items = zstd_toc(raw, place, layer=layer.digest)
        index = index_of_toc(items, layer, "zstd:chunked", place.offset)
        if index is None:
            raise ConfigError(
                f"layer {layer.digest} has a table of contents without digests of its chunks; run "
                "'omniload image convert'"
            )
        return index
    if compression == "gzip" and layer.size > ESTARGZ_FOOTER_BYTES:
        if not any("stargz" in name for name in layer.annotations):
            return None
        start = layer.size - ESTARGZ_FOOTER_BYTES
        footer = store.blob_range(layer.digest, start, ESTARGZ_FOOTER_BYTES)
        place = estargz_place(layer, footer)
        if place is not None:
            raw = store.blob_range(layer.digest, place.offset, place.size_bytes)
            items = estargz_toc(raw, place, layer=layer.digest)
            return index_of_toc(items, layer, "estargz", place.offset)
    return None


def _by_reading(store: ImageStore, layer: Descriptor, compression: str) -> LayerIndex:
    build = index_gzip if compression == "gzip" else _index_tar
    try:
        with tempfile.NamedTemporaryFile(prefix="omniload-layer-") as file:
            for chunk in store.blob_chunks(layer):
                file.write(chunk)
            file.flush()
            return build(Path(file.name), layer.digest)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise StateError(
            f"layer {layer.digest} of {layer.size} bytes must be read whole, and there is no room "
            f"for it in {tempfile.gettempdir()}; set TMPDIR, or convert the image"
        ) from error


def _index_tar(path: Path, blob_digest: str) -> LayerIndex:
    with path.open("rb") as file:
        entries = tuple(read_table(file, layer=blob_digest))
        file.seek(0)
        blocks = list(_tar_blocks(file))
    size = path.stat().st_size
    return LayerIndex(
        blob_digest=blob_digest,
        blob_bytes=size,
        format="tar",
        stream_bytes=size,
        diff_id=blob_digest,
        blocks_B=np.array(blocks, BLOCK),
        entries=entries,
    )


def _tar_blocks(file: BinaryIO) -> list[tuple[int, int, int, int, int, int, bytes, bytes]]:
    blocks, at = [], 0
    while data := file.read(TAR_BLOCK_BYTES):
        digest = hashlib.sha256(data).digest()
        blocks.append((at, len(data), len(data), at, -1, 0, b"", digest))
        at += len(data)
    return blocks
