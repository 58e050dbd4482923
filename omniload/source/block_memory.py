"""Decoded blocks of all sources of a loader under one budget; blocks over the budget go to the node's disk.

A shuffle draws from a block of several row groups. Each source therefore needs a block in memory, although its next
samples use little of the block. A block that does not fit is written to a file without a name and read from there. The
samples are the same. While the disk is full, a block lives only as long as one read.

Shape suffixes:
    R  records of a block        N  records asked for        V  values of all records together
"""

import os
import threading
import time
import weakref
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from omniload.base.errors import UnavailableError
from omniload.base.log import get_logger
from omniload.base.ragged import Ragged, Rows
from omniload.source.columns import held_together
from omniload.source.parts.held_column import HeldColumn, SpilledColumn, SpillFullError

__all__ = ["BlockMemory", "BlockWriter", "HeldBlock"]

_LOG = get_logger(__name__)

_DECODING = 3
"""Approximate memory of decoding a unit, as a multiple of its size: encoded, as Arrow decodes it, and as a column."""
_FOLDER = "/var/tmp"  # noqa: S108 -- files there have no name
_GIVE_BACK_EVERY_S = 10.0
"""Interval at which unused memory of Arrow's pool goes back to the system."""

_AWAY_S = 60.0
"""Time for which a full folder is not tried again."""
_WAIT_S = 30.0
"""Longest wait of a decoding for others to make room, so that a store that hangs does not block other sources."""


class HeldBlock:
    """Columns of the records of a block, in memory or in files. One thread may read while another moves the columns."""

    def __init__(self, columns: "Mapping[str, HeldColumn]") -> None:
        self._columns = columns

    @property
    def size_bytes(self) -> int:
        """Memory that the block takes."""
        return sum(column.size_bytes for column in self._columns.values())

    @property
    def is_in_memory(self) -> bool:
        """Whether the block has values in memory that could be moved to files."""
        return any(column.values_bytes for column in self._columns.values())

    def take(
        self, rows: Rows, *, lent: str | None = None, without: str | None = None
    ) -> dict[str, Ragged]:
        """Return records of each column, copied end to end in the requested order.

        Args:
            rows: The records.
            lent: A column that the caller releases before the block. Its records are not copied if they lie end to end.
            without: A column that is left out.
        """
        return {
            name: column.take(rows, lent=name == lent)
            for name, column in self._columns.items()
            if name != without
        }

    def texts(self, name: str, rows: Rows) -> pa.Array:
        """Return records of a column of texts without a copy. The caller must release them before the block."""
        return self._columns[name].texts(rows)

    def move_to(self, folder: Path) -> None:
        """Write the values in memory to files, and read them from there from now on."""
        for column in self._columns.values():
            column.move_to(folder)


class BlockWriter:
    """A block while its units are decoded, one after another."""

    def __init__(self, memory: "BlockMemory") -> None:
        self._memory = memory
        self._parts: dict[str, list[Ragged]] = {}
        self._spilled: dict[str, SpilledColumn] = {}
        self._lent: set[str] = set()
        """Columns of which some unit has spare room, or is a view of memory that belongs to something else."""
        self._held_bytes = 0
        self.unit_bytes = 0
        """Size of the largest unit."""

    def append(self, columns: Mapping[str, Ragged], own: Container[str] = ()) -> None:
        """Add the records of a unit. All columns have the same number of records; the first unit has all columns.

        Args:
            columns: Columns of the unit.
            own: Columns that own their memory and have no spare room; they stay where they are.
        """
        size_bytes = sum(c.values_V.nbytes + c.offsets.nbytes for c in columns.values())
        self.unit_bytes = max(self.unit_bytes, size_bytes)
        for name, column in columns.items():
            self._parts.setdefault(name, []).append(column)
            if name not in own:
                self._lent.add(name)
        self._held_bytes += size_bytes
        # Once a unit is in a file, the following units go to files too: a block is in memory or in files, not in both.
        if self._spilled or not self._memory.has_room(self._held_bytes):
            self._write_out()

    def finish(self) -> HeldBlock:
        """Return the block."""
        # Every unit has been written, because no unit stays in memory once another is in a file.
        if self._spilled:
            return HeldBlock({name: column.finish() for name, column in self._spilled.items()})
        types = {name: parts[0].values_V.dtype for name, parts in self._parts.items()}
        return HeldBlock(
            {
                name: HeldColumn(held_together(parts, own=name not in self._lent), types[name])
                for name, parts in self._parts.items()
            }
        )

    def close(self) -> None:
        """Close the files that are not part of a block."""
        for column in self._spilled.values():
            column.close()

    def _write_out(self) -> None:
        try:
            for name, parts in self._parts.items():
                while parts:
                    if name not in self._spilled:
                        dtype = parts[0].values_V.dtype
                        self._spilled[name] = SpilledColumn(self._memory.folder, dtype)
                    self._spilled[name].append(parts[0])
                    parts.pop(0)
        except SpillFullError as error:
            self._memory.do_without(error)
            self._take_back()
        else:
            self._memory.found_room()
        self._held_bytes = sum(
            part.values_V.nbytes + part.offsets.nbytes
            for parts in self._parts.values()
            for part in parts
        )

    def _take_back(self) -> None:
        """Move all units back to memory: a block is in memory or in files, not in both."""
        for name, column in self._spilled.items():
            if (found := column.taken_back()) is not None:
                self._parts[name].insert(0, found)
        self._spilled.clear()


class BlockMemory:
    """The memory budget that the blocks of all sources of a process share. Thread-safe."""

    def __init__(self, limit_bytes: int | None = None, folder: Path | None = None) -> None:
        """Hold blocks within a limit.

        Args:
            limit_bytes: Memory for blocks and for decoding them; ``None`` for no limit.
            folder: Folder for blocks that do not fit; by default ``TMPDIR`` if that is a folder, else ``/var/tmp``.
        """
        self.limit_bytes = limit_bytes
        # A container often inherits TMPDIR from its host without having that folder.
        usual = Path(os.environ.get("TMPDIR") or _FOLDER)
        self.folder = folder or (usual if usual.is_dir() else Path(_FOLDER))
        # This lock must be reentrant: the garbage collector may release a block in a thread that holds the lock
        # already.
        self._changed = threading.Condition()
        self._held: dict[int, weakref.ref[HeldBlock]] = {}
        """Blocks that may leave memory, the oldest first."""
        self._sizes: dict[int, int] = {}
        """Memory of each block. Their sum is kept separately, because every read needs it."""
        self._blocks_bytes = 0
        self._decodings = self._unit_bytes = self._others_bytes = 0
        self._give_back_s = time.monotonic()
        self._full_until_s = 0.0
        """Time until which the folder is not asked for room; 0 if the last write succeeded."""

    @property
    def used_bytes(self) -> int:
        """Memory of blocks, the estimated need of decodings, and the memory that others reported."""
        with self._changed:
            return self._used()

    def has_room(self, size_bytes: int) -> bool:
        """Return whether one more block may stay in memory."""
        if self.limit_bytes is None or time.monotonic() < self._full_until_s:
            return True
        with self._changed:
            return self._used() + size_bytes <= self.limit_bytes

    def is_over(self) -> bool:
        """Return whether a block must be released after a read and decoded again.

        This happens only while the folder is full.

        One block stays, because without it each read would decode a block and take the same memory. The limit can
        therefore be exceeded by the blocks of reads in progress.
        """
        if self.limit_bytes is None or not self._full_until_s:
            return False
        with self._changed:
            return len(self._held) > 1 and self._used() > self.limit_bytes

    def do_without(self, error: UnavailableError) -> None:
        """Stop asking the full folder for room for a while. Warns once, until the folder has room again."""
        with self._changed:
            is_new, self._full_until_s = not self._full_until_s, time.monotonic() + _AWAY_S
        if is_new:
            # The error is logged as text, because a log handler that keeps the error would keep its frames, and with
            # them a block.
            _LOG.warning(
                "%s. Until then blocks over it are decoded again for each read, which is slow; the folder is tried "
                "again every %g s",
                *(str(error), _AWAY_S),
            )

    def found_room(self) -> None:
        """Note that a write to the folder succeeded."""
        with self._changed:
            was_full, self._full_until_s = self._full_until_s > 0, 0.0
        if was_full:
            _LOG.warning("%s: there is room again for what is over loader.memory", self.folder)

    def set_others(self, size_bytes: int) -> None:
        """Report other memory of samples in this process, which reduces the memory for blocks."""
        with self._changed:
            self._others_bytes = size_bytes
        self._make_room()

    @contextmanager
    def writing(self) -> Iterator[BlockWriter]:
        """Return a writer of a block once there is room to decode a unit as large as the largest so far."""
        with self._changed:
            # The result is ignored: exceeding the budget a little is better than a source that never continues.
            self._changed.wait_for(self.may_decode, _WAIT_S)
            self._decodings += 1
        writer = BlockWriter(self)
        try:
            self._make_room()
            yield writer
        finally:
            writer.close()
            with self._changed:
                self._decodings -= 1
                # The size of a unit is known only after it is decoded. The next is assumed to be as large as the
                # largest so far.
                self._unit_bytes = max(self._unit_bytes, writer.unit_bytes)
                self._changed.notify_all()
            self._give_back()

    def _give_back(self) -> None:
        """Return Arrow's freed memory to the system now and then. The next block is decoded into what Arrow keeps."""
        if self.limit_bytes is not None and time.monotonic() >= self._give_back_s:
            self._give_back_s = time.monotonic() + _GIVE_BACK_EVERY_S
            pa.default_memory_pool().release_unused()

    def hold(self, block: HeldBlock) -> HeldBlock:
        """Count the memory of a block until its last reference is gone, and return the block."""
        with self._changed:
            self._count(block)
            if block.is_in_memory:
                self._held[id(block)] = weakref.ref(block)
        # By default a finalizer also runs at the end of the process, where nothing is counted any more.
        weakref.finalize(block, self._forget, id(block)).atexit = False
        self._make_room()
        return block

    def _forget(self, key: int) -> None:
        with self._changed:
            self._held.pop(key, None)
            self._blocks_bytes -= self._sizes.pop(key, 0)

    def _count(self, block: HeldBlock) -> None:
        size_bytes = block.size_bytes
        self._blocks_bytes += size_bytes - self._sizes.get(id(block), 0)
        self._sizes[id(block)] = size_bytes

    def _used(self) -> int:
        decoding = self._decodings * _DECODING * self._unit_bytes
        return self._blocks_bytes + decoding + self._others_bytes

    def may_decode(self) -> bool:
        """Return whether there is room for one more decoding."""
        # A single decoding always continues. Half of the budget stays for blocks that are read again and again.
        wanted = (self._decodings + 1) * _DECODING * self._unit_bytes
        return not self._decodings or self.limit_bytes is None or wanted <= self.limit_bytes // 2

    def _make_room(self) -> None:
        """Move blocks to files, the oldest first, until everything is within the limit."""
        while (block := self._too_much()) is not None:
            try:
                block.move_to(self.folder)
            except SpillFullError as error:
                self.do_without(error)
                return
            self.found_room()
            with self._changed:
                self._count(block)
                if not block.is_in_memory:
                    self._held.pop(id(block), None)

    def _too_much(self) -> HeldBlock | None:
        """Return a block that must leave memory; ``None`` if the limit is kept."""
        if self.limit_bytes is None or time.monotonic() < self._full_until_s:
            return None
        with self._changed:
            if self._used() <= self.limit_bytes:
                return None
            # A copy is iterated, because dropping the last reference to a block removes the block from here in this
            # very thread.
            blocks = (ref() for ref in list(self._held.values()))
            return next((b for b in blocks if b is not None and b.is_in_memory), None)
