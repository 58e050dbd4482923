"""The index of a layer: its entries, and the blocks from which every byte of it can be read.

The extents of a layer's entries point into its *stream*: the uncompressed tar, or, for
formats with a table of contents, their chunks one after another. The stream is cut into
*blocks*. A block is the unit that is fetched, decoded, compared with its own digest, and
kept; no byte of it is used before the digest matched. ``docs/design/snapshot/0020-images.md`` says
where the digests come from, and why they can be relied on.

Names are text. Bytes that are not UTF-8 are kept as lone surrogates, as in ``os.fsdecode``,
so that every name that a file system can hold survives.
"""

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import zstandard
from numpy.typing import NDArray

from omniload.base.compression.streams import WINDOW_BYTES, inflate, unzstd
from omniload.base.errors import IntegrityError
from snapshot.oci.digest import digest_of

__all__ = [
    "BLOCK",
    "MAX_BLOCK_BYTES",
    "MAX_ENTRIES",
    "MAX_FILE_BYTES",
    "BlockRange",
    "BlockRef",
    "Entry",
    "Extent",
    "Format",
    "Kind",
    "LayerIndex",
    "block_refs",
    "check_entry",
    "clean_path",
]

MAX_ENTRIES = 2_000_000
"""Most entries of one layer."""
# Including holes: the most that ext4 can hold.
MAX_FILE_BYTES = 1 << 44
_MAX_PATH_BYTES = 4095
_MAX_NAME_BYTES = 255
_MAX_XATTRS_BYTES = 1 << 20
_MAX_ID = (1 << 32) - 2  # chown(2) takes the largest number for "change nothing"

Kind = Literal["file", "directory", "symlink", "hardlink", "character", "block", "fifo"]


@dataclass(frozen=True, slots=True)
class Extent:
    """A piece of a file that is not a hole."""

    file_offset: int
    stream_offset: int
    """Offset in the layer's stream of blocks."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One path of a layer."""

    path: str
    """Path relative to the root, without ``.`` and ``..``; empty for the root itself."""
    kind: Kind
    mode: int = 0
    """Permission bits, set-user-id, set-group-id and sticky."""
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    size_bytes: int = 0
    target: str = ""
    """For a symbolic link, its target as written; for a hard link, a path like ``path``."""
    device: tuple[int, int] = (0, 0)
    """Major and minor number of a device."""
    xattrs: tuple[tuple[str, bytes], ...] = ()
    extents: tuple[Extent, ...] = ()
    """Extents in order and without overlap; bytes between them read as zeroes."""


def clean_path(name: str, *, layer: str) -> str:
    """Return a path of a layer in our form.

    Raises:
        IntegrityError: It is absolute, climbs with ``..``, or is longer than a path may be.
    """
    if name.startswith("/") or "\0" in name:
        raise IntegrityError(
            f"layer {layer}: path {name[:200]!r} is absolute or holds a zero byte; a layer that "
            "means to write outside its root is not used"
        )
    parts = [part for part in name.split("/") if part not in {"", "."}]
    if ".." in parts:
        raise IntegrityError(
            f"layer {layer}: path {name[:200]!r} climbs out with '..'; the layer is not used"
        )
    path = "/".join(parts)
    longest = max((len(_raw(part)) for part in parts), default=0)
    if len(_raw(path)) > _MAX_PATH_BYTES or longest > _MAX_NAME_BYTES:
        raise IntegrityError(
            f"layer {layer}: path {name[:200]!r}... is longer than {_MAX_PATH_BYTES} bytes, or a "
            f"name in it than {_MAX_NAME_BYTES}"
        )
    return path


def check_entry(entry: Entry, *, layer: str) -> Entry:
    """Return ``entry`` if a file system can hold its numbers.

    Raises:
        IntegrityError: It cannot, or the extents overlap or are outside the file.
    """
    faults = (
        (not 0 <= entry.size_bytes <= MAX_FILE_BYTES, f"size {entry.size_bytes}"),
        (not 0 <= entry.uid <= _MAX_ID or not 0 <= entry.gid <= _MAX_ID, "owner"),
        (not 0 <= entry.mode <= 0o7777, f"mode {entry.mode:o}"),
        (not all(0 <= number < 1 << 20 for number in entry.device), f"device {entry.device}"),
        (abs(entry.mtime_ns) >= 1 << 63, f"time {entry.mtime_ns}"),
        (_xattr_bytes(entry) > _MAX_XATTRS_BYTES, "extended attributes of more than 1 MiB"),
        (len(_raw(entry.target)) > _MAX_PATH_BYTES, "target longer than a path may be"),
        ("\0" in entry.target, "target with a zero byte"),
        (not entry.path and entry.kind != "directory", f"kind {entry.kind} of the root"),
    )
    for is_wrong, what in faults:
        if is_wrong:
            raise IntegrityError(f"layer {layer}: {entry.path[:200]!r} has {what}, out of range")
    at = 0
    for extent in entry.extents:
        if extent.file_offset < at or extent.size_bytes < 0 or extent.stream_offset < 0:
            raise IntegrityError(
                f"layer {layer}: {entry.path[:200]!r} has pieces that overlap at {at}"
            )
        at = extent.file_offset + extent.size_bytes
    if at > entry.size_bytes:
        raise IntegrityError(
            f"layer {layer}: {entry.path[:200]!r} has pieces up to {at}, its size is "
            f"{entry.size_bytes}"
        )
    return entry


def _xattr_bytes(entry: Entry) -> int:
    return sum(len(_raw(name)) + len(value) for name, value in entry.xattrs)


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


Format = Literal["tar", "gzip", "zstd:chunked"]

# Uncompressed bytes: the most memory that one read may cost.
MAX_BLOCK_BYTES = 64 << 20
BLOCK = np.dtype(
    [
        ("stream_offset", "<u8"),
        ("size", "<u4"),
        ("blob_size", "<u4"),
        ("blob_offset", "<u8"),
        ("window", "<i4"),
        ("bits", "u1"),
        ("reserved", "V3"),
        ("sha256", "V32"),
    ]
)
"""One block: its place in stream and blob, and the sha256 of its uncompressed bytes.

``window`` is the number of the 32 KiB before the block, -1 if it needs none; ``bits`` are the bits of
the byte before ``blob_offset`` that belong to the block. Both are for gzip.
"""


@dataclass(frozen=True, slots=True)
class BlockRange:
    """A part of a block."""

    block: int
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerIndex:
    """Entries and blocks of one layer; B blocks, W windows."""

    blob_digest: str
    blob_bytes: int
    format: Format
    stream_bytes: int
    diff_id: str
    """Digest of the whole uncompressed tar; empty if only a table of contents was read."""
    blocks_B: NDArray[np.void]
    """Blocks, sorted by ``stream_offset``; they cover the stream without gap or overlap."""
    windows_W: tuple[bytes, ...] = ()
    """Bytes before blocks of gzip that refer back, compressed with zstd."""
    entries: tuple[Entry, ...] = ()

    def ranges(self, stream_offset: int, size_bytes: int) -> Iterator[BlockRange]:
        """Yield the parts of blocks that hold a range of the stream, in order.

        Raises:
            ValueError: The range leaves the stream.
        """
        end = stream_offset + size_bytes
        if stream_offset < 0 or size_bytes < 0 or end > self.stream_bytes:
            raise ValueError(
                f"bytes {stream_offset} to {end} of a stream of {self.stream_bytes}; an extent "
                "leaves its layer"
            )
        starts_B = self.blocks_B["stream_offset"]
        at = stream_offset
        block = int(np.searchsorted(starts_B, at, side="right")) - 1
        while at < end:
            start, size = int(starts_B[block]), int(self.blocks_B["size"][block])
            taken = min(end, start + size) - at
            yield BlockRange(block, at - start, taken)
            at += taken
            block += 1

    def blob_range(self, block: int) -> tuple[int, int]:
        """Return offset and size of the bytes of the blob that a block needs."""
        record = self.blocks_B[block]
        # The first bits of such a block are in the byte before.
        early = 1 if record["bits"] else 0
        return int(record["blob_offset"]) - early, int(record["blob_size"]) + early

    def digest(self, block: int) -> str:
        """Return the digest of a block's uncompressed bytes, which is its name in every cache."""
        return f"sha256:{self.blocks_B[block]['sha256'].tobytes().hex()}"

    def decode(self, block: int, raw: bytes | memoryview) -> bytes:
        """Decode the bytes at ``blob_range(block)`` into the block's bytes, and compare their digest.

        Raises:
            IntegrityError: They do not decode, or their digest differs.
        """
        size = int(self.blocks_B["size"][block])
        try:
            data = self._decoded(block, raw, size)
        except (zlib.error, zstandard.ZstdError, EOFError) as error:
            raise IntegrityError(
                f"layer {self.blob_digest}: block {block} does not decode: {error}; what was "
                "fetched is not what was stored"
            ) from error
        if len(data) != size or digest_of(data) != self.digest(block):
            raise IntegrityError(
                f"layer {self.blob_digest}: block {block} has {len(data)} bytes with digest "
                f"{digest_of(data)}, not {size} with {self.digest(block)}; what was fetched is "
                "not what was stored"
            )
        return data

    def _decoded(self, block: int, raw: bytes | memoryview, size: int) -> bytes:
        if self.format == "tar":
            return bytes(raw)
        if self.format == "zstd:chunked":
            return unzstd(raw, size)
        record = self.blocks_B[block]
        number = int(record["window"])
        window = b""
        if number >= 0:
            window = unzstd(self.windows_W[number], WINDOW_BYTES)
        return inflate(raw, int(record["bits"]), window, size)


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A block of a layer, and its place in the blob."""

    digest: str
    """Digest of the uncompressed bytes: blocks of two layers with the same digest are the same block."""
    blob: str
    number: int
    offset: int
    """Offset in the blob."""
    size_bytes: int
    """Size in the blob."""

    @property
    def end(self) -> int:
        """Offset of the next block of the blob."""
        return self.offset + self.size_bytes


def block_refs(index: LayerIndex, blocks: Iterable[int]) -> Iterator[BlockRef]:
    """Yield the facts about blocks of a layer that a fetcher needs."""
    for number in blocks:
        record = index.blocks_B[number]
        yield BlockRef(
            digest=index.digest(number),
            blob=index.blob_digest,
            number=number,
            offset=int(record["blob_offset"]),
            size_bytes=int(record["blob_size"]),
        )
