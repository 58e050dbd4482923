"""Hand-made layers and images: tars, compressed in every way, and layouts with them."""

import functools
import hashlib
import io
import tarfile

import numpy as np
import orjson

from snapshot.image.layer.index_cache import IndexCache
from snapshot.image.layer.index_making import index_layer
from snapshot.oci.digest import digest_of
from snapshot.oci.image import resolve
from snapshot.oci.layout import OciLayout
from snapshot.oci.manifest import MANIFEST_TYPE, Descriptor
from tests.support.snapshot.registries.contract import CONFIG, push

__all__ = [
    "BlobSource",
    "a_layer",
    "a_member",
    "a_tar",
    "an_image",
    "an_index",
    "read_stream",
    "zran_friendly",
]

TYPE_OF = {
    "tar": "application/vnd.oci.image.layer.v1.tar",
    "gzip": "application/vnd.oci.image.layer.v1.tar+gzip",
    "zstd": "application/vnd.oci.image.layer.v1.tar+zstd",
}


def a_member(name, data=b"", kind=tarfile.REGTYPE, **changes):
    """Return a member and its data; ``xattrs`` are bytes by name."""
    member = tarfile.TarInfo(name)
    member.type, member.size, member.mode = kind, len(data), 0o644
    for key, value in changes.pop("xattrs", {}).items():
        member.pax_headers["SCHILY.xattr." + key] = value.decode("utf-8", "surrogateescape")
    for key, value in changes.items():
        setattr(member, key, value)
    return member, data


def a_tar(*members, tar_format=tarfile.PAX_FORMAT):
    out = io.BytesIO()
    with tarfile.open(
        fileobj=out, mode="w", format=tar_format, encoding="utf-8", errors="surrogateescape"
    ) as tar:
        for member, data in members:
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def zran_friendly(size, seed=1):
    """Return bytes that compress somewhat, in deflate blocks of the usual size."""
    return _friendly(1 << max(16, (size - 1).bit_length()), seed)[:size]


# Cached, because modules ask for megabytes when they are imported, in every worker that collects them.
@functools.cache
def _friendly(size, seed):
    words = [hashlib.sha256(b"%d %d" % (seed, i)).hexdigest()[:9].encode() for i in range(997)]
    # A linear congruential generator, computed at once: 64 bits overflow in the same way as 31 bits.
    powers = np.full(size // 10 + 1, 1103515245, np.uint64)
    np.multiply.accumulate(powers, out=powers)
    sums = np.cumsum(np.concatenate((np.ones(1, np.uint64), powers[:-1])), dtype=np.uint64)
    states = (powers * np.uint64(seed) + sums * np.uint64(12345)) % np.uint64(1 << 31)
    chosen = (states >> np.uint64(8)) % np.uint64(997)
    return b" ".join([words[i] for i in chosen.tolist()])[:size]


def a_layer(store, blob, compression="gzip", **annotations):
    media_type = TYPE_OF[compression]
    push(store, blob, media_type)
    return Descriptor(
        media_type=media_type, digest=digest_of(blob), size=len(blob), annotations=annotations
    )


def an_index(folder, tar):
    """Return the index of a layer, in a separate layout in a folder."""
    store = OciLayout.create(folder / "layout")
    return index_layer(store, a_layer(store, tar, "tar"), IndexCache(folder / "indexes"))


def an_image(store, layers, tag="v", command=("/bin/true",)):
    """Push an image of (descriptor, uncompressed tar) pairs, lowest first; return it resolved."""
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": list(command)},
        "rootfs": {"type": "layers", "diff_ids": [digest_of(tar) for _, tar in layers]},
    }
    value = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": push(store, orjson.dumps(config), CONFIG).model_dump(
            by_alias=True, exclude_none=True
        ),
        "layers": [layer.model_dump(by_alias=True, exclude_none=True) for layer, _ in layers],
    }
    store.push_manifest(orjson.dumps(value), MANIFEST_TYPE, tag)
    return resolve(store, tag)


class BlobSource:
    """Blocks straight from a store, each fetched on request; records the ranges."""

    def __init__(self, store):
        self.store, self.fetched = store, []

    def block(self, index, number):
        offset, size = index.blob_range(number)
        self.fetched.append((offset, size))
        return index.decode(number, self.store.blob_range(index.blob_digest, offset, size))


def read_stream(index, source, offset, size_bytes):
    """Return bytes of a layer's stream."""
    return b"".join(
        bytes(memoryview(source.block(index, part.block))[part.offset :][: part.size_bytes])
        for part in index.ranges(offset, size_bytes)
    )
