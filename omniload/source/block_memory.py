"""Decoded blocks of all sources of a loader under one budget; what is over it lies on the node's disk.

A shuffle draws from a block of several row groups, so that one must be at hand for each source, of which
its next samples need little. A block that does not fit is written to a file without a name, and
read from there: the samples are the same. While the disk is full, a block lives as long as one read.

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
"""Times its size that decoding a unit takes about: as it lies, as Arrow decodes it, and as a column."""
_FOLDER = "/var/tmp"  # noqa: S108 -- files there have no name
_GIVE_BACK_EVERY_S = 10.0
"""How often what Arrow holds beyond its need goes back to the system."""

_AWAY_S = 60.0
"""How long a folder that is full is left alone."""
_WAIT_S = 30.0
"""Longest that a decoding waits for others to make room: a store that hangs must not hold up other sources."""


class HeldBlock:
    """Columns of the records of a block, in memory or in files. One thread may read while another moves them."""

    def __init__(self, columns: "Mapping[str, HeldColumn]") -> None:
        self._columns = columns

    @property
    def size_bytes(self) -> int:
        """What it takes of memory."""
        return sum(column.size_bytes for column in self._columns.values())

    @property
    def is_in_memory(self) -> bool:
        """Whether any values of it could leave memory."""
        return any(column.values_bytes for column in self._columns.values())

    def take(
        self, rows: Rows, *, lent: str | None = None, without: str | None = None
    ) -> dict[str, Ragged]:
        """Return records of each column, copied end to end in the order asked for.

        Args:
            rows: The records.
            lent: A column that is let go of before the block is, and need not be copied where records lie end to end.
            without: A column that is not asked for.
        """
        return {
            name: column.take(rows, lent=name == lent)
            for name, column in self._columns.items()
            if name != without
        }

    def texts(self, name: str, rows: Rows) -> pa.Array:
        """Return records of a column of texts, to be let go of before the block is: they are shown where they lie."""
        return self._columns[name].texts(rows)

    def move_to(self, folder: Path) -> None:
        """Write what is in memory to files, and read it from there from now on."""
        for column in self._columns.values():
            column.move_to(folder)


class BlockWriter:
    """A block while its units are decoded, one after the other."""

    def __init__(self, memory: "BlockMemory") -> None:
        self._memory = memory
        self._parts: dict[str, list[Ragged]] = {}
        self._spilled: dict[str, SpilledColumn] = {}
        self._lent: set[str] = set()
        """Columns of which some unit has room beyond it, or lies in what is not its own."""
        self._held_bytes = 0
        self.unit_bytes = 0
        """The largest unit."""

    def append(self, columns: Mapping[str, Ragged], own: Container[str] = ()) -> None:
        """Add the records of a unit, each column of as many; the first unit has all columns.

        Args:
            columns: Of the unit.
            own: Columns that lie in memory of their own, without room beyond them: they stay where they are.
        """
        size_bytes = sum(c.values_V.nbytes + c.offsets.nbytes for c in columns.values())
        self.unit_bytes = max(self.unit_bytes, size_bytes)
        for name, column in columns.items():
            self._parts.setdefault(name, []).append(column)
            if name not in own:
                self._lent.add(name)
        self._held_bytes += size_bytes
        # Once a unit lies in a file the others follow: a block is in memory or in files, not in both.
        if self._spilled or not self._memory.has_room(self._held_bytes):
            self._write_out()

    def finish(self) -> HeldBlock:
        """Return the block."""
        # All of it was written: once a unit lies in a file, none behind it stays in memory.
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
        """Let go of the files that are not part of a block."""
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
        """Have all units in memory again: a block is in memory or in files, not in both."""
        for name, column in self._spilled.items():
            if (found := column.taken_back()) is not None:
                self._parts[name].insert(0, found)
        self._spilled.clear()


class BlockMemory:
    """The budget that the blocks of all sources of a process share. Safe to use from several threads."""

    def __init__(self, limit_bytes: int | None = None, folder: Path | None = None) -> None:
        """Hold blocks within a limit.

        Args:
            limit_bytes: What blocks, and decoding them, may take; ``None`` for any amount.
            folder: Where blocks lie that do not fit; by default ``TMPDIR``, where that is one, else ``/var/tmp``.
        """
        self.limit_bytes = limit_bytes
        # A container is often given the TMPDIR of its host, and not that folder.
        usual = Path(os.environ.get("TMPDIR") or _FOLDER)
        self.folder = folder or (usual if usual.is_dir() else Path(_FOLDER))
        # Its lock is taken twice by a thread in which the collector lets go of a block meanwhile.
        self._changed = threading.Condition()
        self._held: dict[int, weakref.ref[HeldBlock]] = {}
        """Blocks that may leave memory, the oldest first."""
        self._sizes: dict[int, int] = {}
        """What each block takes of memory; their sum beside them, since every read asks for it."""
        self._blocks_bytes = 0
        self._decodings = self._unit_bytes = self._others_bytes = 0
        self._give_back_s = time.monotonic()
        self._full_until_s = 0.0
        """Until when the folder is not asked for room; 0 while it had some the last time."""

    @property
    def used_bytes(self) -> int:
        """What blocks take, what is thought to be needed by decodings, and what was said of others."""
        with self._changed:
            return self._used()

    def has_room(self, size_bytes: int) -> bool:
        """Return whether one more block may lie in memory."""
        if self.limit_bytes is None or time.monotonic() < self._full_until_s:
            return True
        with self._changed:
            return self._used() + size_bytes <= self.limit_bytes

    def is_over(self) -> bool:
        """Tell whether a block is to be let go of behind a read, and decoded again: only while the folder is full.

        One block stays: without it each read would decode, for as much memory. So what is held goes beyond the limit
        by the blocks of reads under way.
        """
        if self.limit_bytes is None or not self._full_until_s:
            return False
        with self._changed:
            return len(self._held) > 1 and self._used() > self.limit_bytes

    def do_without(self, error: UnavailableError) -> None:
        """Ask the folder for no room for a while, as it has none: told once, until it has some again."""
        with self._changed:
            is_new, self._full_until_s = not self._full_until_s, time.monotonic() + _AWAY_S
        if is_new:
            # As text: whoever keeps what is logged would keep the error's frames too, and a block with them.
            _LOG.warning(
                "%s. Until then blocks over it are decoded again for each read, which is slow; the folder is tried "
                "again every %g s",
                *(str(error), _AWAY_S),
            )

    def found_room(self) -> None:
        """Note that the folder took something."""
        with self._changed:
            was_full, self._full_until_s = self._full_until_s > 0, 0.0
        if was_full:
            _LOG.warning("%s: there is room again for what is over loader.memory", self.folder)

    def set_others(self, size_bytes: int) -> None:
        """Say what else the process holds of samples: so much less is left for blocks."""
        with self._changed:
            self._others_bytes = size_bytes
        self._make_room()

    @contextmanager
    def writing(self) -> Iterator[BlockWriter]:
        """Give a writer of a block once there is room to decode a unit as large as the largest so far."""
        with self._changed:
            # Whatever came of it: a little over the budget is better than a source that never goes on.
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
                # What a unit takes is known only once one was decoded; the next is taken to be as large as the largest.
                self._unit_bytes = max(self._unit_bytes, writer.unit_bytes)
                self._changed.notify_all()
            self._give_back()

    def _give_back(self) -> None:
        """Have Arrow give back what was freed, now and then: what it keeps, the next block is decoded into."""
        if self.limit_bytes is not None and time.monotonic() >= self._give_back_s:
            self._give_back_s = time.monotonic() + _GIVE_BACK_EVERY_S
            pa.default_memory_pool().release_unused()

    def hold(self, block: HeldBlock) -> HeldBlock:
        """Count what a block takes, until nobody refers to it, and return it."""
        with self._changed:
            self._count(block)
            if block.is_in_memory:
                self._held[id(block)] = weakref.ref(block)
        # A finalizer runs at the end of the process too unless told not to, and nothing is counted by then.
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
        # A single one goes on whatever it takes; half of the budget stays for what is read again and again.
        wanted = (self._decodings + 1) * _DECODING * self._unit_bytes
        return not self._decodings or self.limit_bytes is None or wanted <= self.limit_bytes // 2

    def _make_room(self) -> None:
        """Move blocks to files, the oldest first, until all is within the limit."""
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
        """Return a block that must leave memory."""
        if self.limit_bytes is None or time.monotonic() < self._full_until_s:
            return None
        with self._changed:
            if self._used() <= self.limit_bytes:
                return None
            # Of a copy: letting go of the last reference to a block takes it out of here, in this very thread.
            blocks = (ref() for ref in list(self._held.values()))
            return next((b for b in blocks if b is not None and b.is_in_memory), None)
