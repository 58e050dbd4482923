"""Blocks of a shard: the blocks of a range, the blocks of one request, and a range made of blocks."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fusefs.cache.disk_format import CopyVersion

__all__ = [
    "BLOCK_BYTES",
    "CLAIMED",
    "blocks_of",
    "extent_of",
    "gaps_of",
    "how_many_fit",
    "joined",
    "room_for",
    "room_of",
    "runs_of",
    "span_of",
]

BLOCK_BYTES = 256 << 10
"""Bytes of a block, which is stored and checked as a whole: fine enough for a footer; 200 GB have 6 MB of checksums."""

_PAGE = 4096
CLAIMED = 1
"""Stands for the checksum of a block that has room on the disk but no bytes yet, or damaged ones."""

_Range = tuple[int, int]


def span_of(version: CopyVersion, block: int) -> _Range:
    """Return the start and the size of a block."""
    start = block * BLOCK_BYTES
    return start, min(BLOCK_BYTES, version.size_bytes - start)


def room_for(size_bytes: int, block: int) -> int:
    """Return the room that a block of a shard of this size takes on the disk, in whole pages."""
    return -(-min(BLOCK_BYTES, size_bytes - block * BLOCK_BYTES) // _PAGE) * _PAGE


def room_of(size_bytes: int, sums_U: NDArray[np.uint64]) -> int:
    """Return the room of all blocks of a copy that have room, according to its map.

    Args:
        size_bytes: Size of the shard.
        sums_U: Checksum of each block, 0 for a block without room.
    """
    last = room_for(size_bytes, len(sums_U) - 1) if sums_U[-1] else 0
    return int(np.count_nonzero(sums_U[:-1])) * BLOCK_BYTES + last


def extent_of(version: CopyVersion, run: _Range) -> _Range:
    """Return the first byte of a run of blocks, and the byte after its last."""
    begin, end = run
    return begin * BLOCK_BYTES, min(end * BLOCK_BYTES, version.size_bytes)


def runs_of(blocks: Sequence[int]) -> list[_Range]:
    """Return the first block, and the block after the last, of each run of consecutive blocks."""
    runs: list[_Range] = []
    for block in blocks:
        if runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs


def blocks_of(span: _Range) -> range:
    """Return the blocks of a range of bytes."""
    start, stop = span
    return range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)) if stop > start else range(0)


def gaps_of(span: _Range, held: Mapping[int, memoryview]) -> Iterator[_Range]:
    """Yield the parts of a range whose blocks are missing; neighbouring parts are one."""
    start, stop = span
    for begin, end in runs_of([block for block in blocks_of(span) if block not in held]):
        yield max(start, begin * BLOCK_BYTES), min(stop, end * BLOCK_BYTES)


def joined(span: _Range, held: Mapping[int, memoryview], gaps: Mapping[_Range, bytes]) -> bytes:
    """Return the bytes of a range.

    Args:
        span: The range.
        held: Whole blocks.
        gaps: Bytes of ``gaps_of``; the result ends at a gap with fewer bytes than its size.
    """
    start, stop = span
    ends = {first: (last, data) for (first, last), data in gaps.items() if first >= start}
    parts: list[bytes | memoryview] = []
    at = start
    while at < stop:
        begin = at // BLOCK_BYTES * BLOCK_BYTES
        if (block := held.get(at // BLOCK_BYTES)) is not None:
            end = min(stop, begin + BLOCK_BYTES)
            parts.append(block[at - begin : end - begin])
        else:
            end, data = ends[at]
            parts.append(data)
            if len(data) < end - at:
                break
        at = end
    return parts[0] if len(parts) == 1 and isinstance(parts[0], bytes) else b"".join(parts)


def how_many_fit(sizes: Sequence[int], free: int) -> int:
    """Return how many of the first sizes fit together."""
    for count, size in enumerate(sizes):
        free -= size
        if free < 0:
            return count
    return len(sizes)
