"""A shard of a store, read through a cache: each block comes from the copy or from the store."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from fusefs.cache.disk_format import CopyVersion
from omniload.source.stores.asking import changed, is_other, ranges_of
from omniload.source.stores.blocks import (
    BLOCK_BYTES,
    blocks_of,
    extent_of,
    gaps_of,
    joined,
    runs_of,
    span_of,
)

if TYPE_CHECKING:
    import fsspec

    from omniload.source.stores.shard_cache import ShardCache

__all__ = ["KeptShard"]

_AHEAD_BYTES = 8 << 20
"""Bytes that are read ahead for a reader that reads a file from its beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptShard:
    """A shard of a store whose blocks are stored once they are read."""

    cache: "ShardCache"
    """Cache of its blocks."""
    version: CopyVersion
    """Name and size of its copy."""
    store: "fsspec.AbstractFileSystem"
    """Store of the shard."""
    path: str
    """Path of the shard in the store."""
    stamp: str
    """Value that changes if the shard is written again."""

    def open(self) -> io.BufferedIOBase:
        """Open the shard for reading, from the copy and the store."""
        return _KeptFile(self)

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each range, or fewer if the file ends before the range does.

        Raises:
            ConfigError: The shard is on a server that only sends whole files.
            IntegrityError: The store says that the shard was written again.
            Exception: What the store's client raises.
        """
        size = self.version.size_bytes
        ranges = [(min(start, size), min(stop, size)) for start, stop in ranges]
        wanted = sorted({block for each in ranges for block in blocks_of(each)})
        held = self.cache.blocks(self.version, wanted)
        missing = [block for block in wanted if block not in held]
        fetched = self._fetched(missing) if missing and self.cache.is_open() else {}
        held |= fetched
        # Bytes that will not be stored are requested exactly, without bytes around them.
        gaps = [gap for each in ranges for gap in gaps_of(each, held)]
        data = dict(zip(gaps, self._from_store(gaps), strict=True)) if gaps else {}
        # Checked after the read, whether or not blocks are stored, because the bytes may be of a version written
        # meanwhile.
        if (fetched or data) and self._is_unchanged():
            self.cache.keep(self.version, fetched)
        return [joined(each, held, data) for each in ranges]

    def _fetched(self, missing: Sequence[int]) -> dict[int, memoryview]:
        """Read blocks from the store, neighbours in one request; return the complete ones."""
        extents = [extent_of(self.version, run) for run in runs_of(missing)]
        blocks: dict[int, memoryview] = {}
        for (start, _), data in zip(extents, self._from_store(extents), strict=True):
            view = memoryview(data)
            for at in range(0, len(view), BLOCK_BYTES):
                block = (start + at) // BLOCK_BYTES
                part = view[at : at + BLOCK_BYTES]
                # The last block of a truncated file is incomplete. It is read again as a gap, which shows the fault.
                if len(part) == span_of(self.version, block)[1]:
                    blocks[block] = part
        return blocks

    def _is_unchanged(self) -> bool:
        """Return whether the store says that the shard is unchanged; without an answer nothing is stored.

        Raises:
            IntegrityError: The shard has changed. No other check notices this while a client answers from a cached
                listing.
        """
        try:
            now = self.cache.version_now(self.store, self.path)
        except Exception as error:  # noqa: BLE001 -- any error of its client: the next check reports it
            said = f"{self.path} is not kept: its store does not say what it is now: {error}"
            self.cache.tell("unasked", said)
            return False
        then = (self.version.size_bytes, self.stamp)
        if is_other(then, now):
            raise changed(self.path, then, now)
        return True

    def _from_store(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        found = ranges_of(self.store, self.path, self.version.size_bytes, ranges)
        self.cache.count_fetched(sum(map(len, found)))
        return found


class _KeptFile(io.BufferedIOBase):
    """A shard as a file, which reads ahead in a sequential read. Not thread-safe."""

    def __init__(self, shard: KeptShard) -> None:
        self._shard, self._at = shard, 0
        self._start, self._window = 0, b""

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at}.get(whence, self._shard.version.size_bytes)
        self._at = max(0, base + offset)
        return self._at

    @override
    def tell(self) -> int:
        return self._at

    @override
    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self._shard.version.size_bytes - self._at)
        size = left if size is None or size < 0 else min(size, left)
        held = self._start <= self._at and self._at + size <= self._start + len(self._window)
        if size and not held:
            follows = self._start <= self._at <= self._start + len(self._window)
            ahead = max(size, _AHEAD_BYTES) if follows else size
            stop = min(self._at + ahead, self._shard.version.size_bytes)
            (self._window,) = self._shard.read_ranges([(self._at, stop)])
            self._start = self._at
        begin = self._at - self._start
        data = self._window[begin : begin + size] if size else b""
        self._at += len(data)
        return data
