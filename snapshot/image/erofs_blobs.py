"""Blobs: the contents of a layer's files one after another, each from a whole block on.

A tar starts every file at a multiple of 512 bytes; the kernel maps files by blocks of 4096.
So the bytes a kernel reads lie in another file, the *blob* of the layer, and this module
tells for any range of it where in the layer's stream its bytes are. The blob depends on
the layer alone: every image with that layer shares it, whatever is hidden in each::

    stream   [head]aaaaaaaa[head]bbbbb[head]cc      512-aligned
    blob     aaaaaaaa....bbbbb.......cc......       4096-aligned; dots are zeroes
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from snapshot.image.entries import Entry, Extent
from snapshot.image.erofs_format import BLOCK_BYTES

__all__ = ["BlobLayout", "Piece", "Placed", "blob_layout"]

_MAX_BLOCKS = 0xFFFFFFFE
_MAX_CHUNKS = 1 << 14
"""Of one file with holes: its chunks grow until there are no more."""

_SEGMENT = np.dtype([("blob", "<i8"), ("size", "<i8"), ("stream", "<i8")])
_Key = tuple[tuple[Extent, ...], int]


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a file's chunks lie in the blob."""

    order: int
    """A chunk has ``2**order`` blocks."""
    blocks: tuple[int | None, ...]
    """First block of each chunk; None for a hole."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a blob, and where the stream has them. What no piece covers is zero."""

    offset: int
    size_bytes: int
    stream_offset: int


@dataclass(frozen=True, slots=True, eq=False)
class BlobLayout:
    """Where the bytes of a layer's blob come from; S segments."""

    size_bytes: int
    """A multiple of the block."""
    places: Mapping[_Key, Placed]
    segments_S: NDArray[np.void]
    """Runs that lie together in blob and stream, sorted by ``blob``."""
    by_stream_S: NDArray[np.void]
    """The same, sorted by ``stream``."""
    longest_bytes: int
    """Of the segments."""

    @property
    def name(self) -> str:
        """What tells this layout from any other, also of the same layer by another index; 32 digits."""
        return hashlib.sha256(self.segments_S.tobytes()).hexdigest()[:32]

    def place(self, extents: tuple[Extent, ...], size_bytes: int) -> Placed:
        """Return where a file of the layer lies."""
        return self.places[extents, size_bytes]

    def pieces(self, offset: int, size_bytes: int) -> Iterator[Piece]:
        """Yield what of a range of the blob comes from the stream, in order."""
        end = offset + size_bytes
        starts_S = self.segments_S["blob"]
        number = max(int(np.searchsorted(starts_S, offset, side="right")) - 1, 0)
        for blob, size, stream in self.segments_S[number:]:
            if blob >= end:
                return
            start, stop = max(offset, int(blob)), min(end, int(blob + size))
            if start < stop:
                yield Piece(start, stop - start, int(stream) + start - int(blob))

    def ranges_of(self, stream_offset: int, size_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield the whole blocks of the blob that a range of the stream fills by itself.

        A block at an edge, for which more of the stream is needed, is left out.

        Yields:
            Offset and size, multiples of the block.
        """
        end = stream_offset + size_bytes
        for blob, size, stream in self._overlapping(stream_offset, end):
            start = _up(int(blob) + max(stream_offset - int(stream), 0))
            stop = int(blob) + min(end - int(stream), int(size))
            # Whether zeroes or another segment come behind the end decides about its last block.
            at_end = stop == int(blob + size) and not any(self.pieces(stop, -stop % BLOCK_BYTES))
            stop = _up(stop) if at_end else stop - stop % BLOCK_BYTES
            if start < stop:
                yield start, stop - start

    def uses(self, stream_offset: int, size_bytes: int) -> bool:
        """Tell whether the blob holds anything of a range of the stream."""
        return any(self._overlapping(stream_offset, stream_offset + size_bytes))

    def _overlapping(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the segments that have bytes between two places of the stream."""
        starts_S = self.by_stream_S["stream"]
        # They may overlap, where two files share bytes; none is longer than this.
        number = int(np.searchsorted(starts_S, start - self.longest_bytes, side="right"))
        for segment in self.by_stream_S[number:]:
            blob, size, stream = segment.tolist()
            if stream >= end:
                return
            if stream + size > start:
                yield blob, size, stream


def blob_layout(entries: Iterable[Entry]) -> BlobLayout:
    """Lay out the blob of a layer.

    Args:
        entries: Of the layer, in the order of its tar.

    Raises:
        ConfigError: It would have more blocks than EROFS can name.
    """
    places: dict[_Key, Placed] = {}
    segments: list[tuple[int, int, int]] = []
    at = 0
    for entry in entries:
        key = (entry.extents, entry.size_bytes)
        if entry.kind != "file" or key in places or not any(e.size_bytes for e in entry.extents):
            continue
        placed, at = _placed(entry, at)
        if at > _MAX_BLOCKS:
            raise ConfigError(
                f"file {entry.path[:200]!r} ends at block {at} of its layer, more than {_MAX_BLOCKS}; "
                "mount the image through FUSE"
            )
        places[key] = placed
        segments += _segments(entry, placed)
    by_blob = np.array(sorted(segments), _SEGMENT)
    longest = int(by_blob["size"].max()) if len(by_blob) else 0
    by_stream = by_blob[np.argsort(by_blob["stream"], kind="stable")]
    return BlobLayout(at * BLOCK_BYTES, places, by_blob, by_stream, longest)


def _placed(entry: Entry, at: int) -> tuple[Placed, int]:
    """Return the chunks of a file that is laid at block ``at``, and the block behind it."""
    blocks = -(-entry.size_bytes // BLOCK_BYTES)
    if _is_dense(entry):
        # One chunk, however large: the kernel reads no more of it than the file has.
        return Placed((blocks - 1).bit_length(), (at,)), at + blocks
    order = max((-(-blocks // _MAX_CHUNKS) - 1).bit_length(), 0)
    chunk = BLOCK_BYTES << order
    used: set[int] = set()
    for extent in entry.extents:
        if extent.size_bytes:
            last = (extent.file_offset + extent.size_bytes - 1) // chunk
            used.update(range(extent.file_offset // chunk, last + 1))
    found: list[int | None] = []
    for number in range(-(-entry.size_bytes // chunk)):
        if number not in used:
            found.append(None)
            continue
        found.append(at)
        at += min(1 << order, blocks - (number << order))
    return Placed(order, tuple(found)), at


def _is_dense(entry: Entry) -> bool:
    at = 0
    for extent in entry.extents:
        if extent.size_bytes and extent.file_offset != at:
            return False
        at = max(at, extent.file_offset + extent.size_bytes)
    return at == entry.size_bytes


def _segments(entry: Entry, placed: Placed) -> Iterator[tuple[int, int, int]]:
    chunk = BLOCK_BYTES << placed.order
    for extent in entry.extents:
        at, end = extent.file_offset, extent.file_offset + extent.size_bytes
        while at < end:
            number = at // chunk
            block = placed.blocks[number]
            assert block is not None, "every chunk with data is placed"
            size = min(end, (number + 1) * chunk) - at
            stream = extent.stream_offset + at - extent.file_offset
            yield block * BLOCK_BYTES + at - number * chunk, size, stream
            at += size


def _up(offset: int) -> int:
    return offset + -offset % BLOCK_BYTES
