"""Layers and images made by hand: tars, compressed in every way, and layouts that hold them."""

import base64
import functools
import gzip
import hashlib
import io
import struct
import tarfile

import numpy as np
import orjson

from snapshot.oci.digest import digest_of
from snapshot.oci.image import resolve
from snapshot.oci.manifest import MANIFEST_TYPE, Descriptor
from tests.support.snapshot.registry_contract import CONFIG, push

__all__ = [
    "BlobSource",
    "a_layer",
    "a_member",
    "a_tar",
    "an_estargz",
    "an_image",
    "read_stream",
    "zran_friendly",
]

TYPE_OF = {
    "tar": "application/vnd.oci.image.layer.v1.tar",
    "gzip": "application/vnd.oci.image.layer.v1.tar+gzip",
    "zstd": "application/vnd.oci.image.layer.v1.tar+zstd",
}
TOC_DIGEST = "containerd.io/snapshot/stargz/toc.digest"


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


# Modules ask for megabytes as they are imported, by every worker that collects them.
@functools.cache
def _friendly(size, seed):
    words = [hashlib.sha256(b"%d %d" % (seed, i)).hexdigest()[:9].encode() for i in range(997)]
    # A linear congruential generator all at once: 64 bits overflow as 31 would.
    powers = np.full(size // 10 + 1, 1103515245, np.uint64)
    np.multiply.accumulate(powers, out=powers)
    sums = np.cumsum(np.concatenate((np.ones(1, np.uint64), powers[:-1])), dtype=np.uint64)
    states = (powers * np.uint64(seed) + sums * np.uint64(12345)) % np.uint64(1 << 31)
    chosen = (states >> np.uint64(8)) % np.uint64(997)
    return b" ".join([words[i] for i in chosen.tolist()])[:size]


def an_estargz(members, chunk_bytes=4096):
    """Return a blob in the eStargz format, and the digest of its table."""
    blob, items = io.BytesIO(), []
    pending = b""

    def flush():
        nonlocal pending
        if pending:
            blob.write(gzip.compress(pending, mtime=0))
            pending = b""

    kinds = {tarfile.REGTYPE: "reg", tarfile.DIRTYPE: "dir", tarfile.SYMTYPE: "symlink"}
    kinds |= {tarfile.LNKTYPE: "hardlink", tarfile.CHRTYPE: "char", tarfile.FIFOTYPE: "fifo"}
    for member, data in members:
        pending += member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        item = {
            "name": member.name,
            "type": kinds[member.type],
            "mode": member.mode,
            "uid": member.uid,
            "gid": member.gid,
            "modtime": "2020-01-02T03:04:05Z",
            "linkName": member.linkname,
            "devMajor": member.devmajor,
            "devMinor": member.devminor,
            "xattrs": {
                key.removeprefix("SCHILY.xattr."): base64.b64encode(
                    value.encode("utf-8", "surrogateescape")
                ).decode()
                for key, value in member.pax_headers.items()
            },
        }
        if data:
            item |= {"size": len(data), "digest": digest_of(data)}
            flush()
        for at in range(0, len(data), chunk_bytes):
            chunk = data[at : at + chunk_bytes]
            last = at + chunk_bytes >= len(data)
            item |= {"offset": blob.tell(), "chunkOffset": at, "chunkDigest": digest_of(chunk)}
            item |= {"chunkSize": 0 if last else len(chunk)}
            items.append(item)
            item = {"name": member.name, "type": "chunk"}
            pending = chunk + (b"\0" * (-len(data) % 512) if last else b"")
            if not last:
                flush()
        if not data:
            items.append(item)
    flush()
    toc = orjson.dumps({"version": 1, "entries": items})
    toc_offset = blob.tell()
    header = tarfile.TarInfo("stargz.index.json")
    header.size = len(toc)
    tail = header.tobuf(tarfile.USTAR_FORMAT) + toc + b"\0" * (-len(toc) % 512 + 1024)
    blob.write(gzip.compress(tail, mtime=0))
    extra = b"SG" + struct.pack("<H", 22) + b"%016xSTARGZ" % toc_offset
    footer = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff" + struct.pack("<H", len(extra)) + extra
    blob.write(footer + b"\x01\0\0\xff\xff" + struct.pack("<II", 0, 0))
    return blob.getvalue(), digest_of(toc)


def a_layer(store, blob, compression="gzip", **annotations):
    media_type = TYPE_OF[compression]
    push(store, blob, media_type)
    return Descriptor(
        media_type=media_type, digest=digest_of(blob), size=len(blob), annotations=annotations
    )


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
    """Blocks straight from a store, each fetched when asked; remembers the ranges."""

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
