"""Decoded blocks of all sources of a loader under one budget; what is over it lies on the node's disk.

A shuffle draws from a block of several row groups, so that one must be at hand for each source, of which
its next samples need little. A block that does not fit is written to a file without a name, and
read from there: the samples are the same.

Shape suffixes:
    R  records of a block        N  records asked for        V  values of all records together
"""

import mmap
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from omniload.base.errors import UnavailableError
from omniload.base.ragged import Ragged
from omniload.source.columns import Pieces, held_together, lengths_bytes, take, text_array

__all__ = ["BlockMemory", "BlockWriter", "HeldBlock", "HeldColumn", "SpilledColumn"]


_DECODING = 3
"""Times its size that decoding a unit takes about: as it lies, as Arrow decodes it, and as a column."""
_FOLDER = "/var/tmp"  # noqa: S108 -- files there have no name
_GIVE_BACK_EVERY_S = 10.0
"""How often what Arrow holds beyond its need goes back to the system."""

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
        self, rows_N: NDArray[np.int64], *, lent: str | None = None, without: str | None = None
    ) -> dict[str, Ragged]:
        """Return records of each column, copied end to end in the order asked for.

        Args:
            rows_N: The records.
            lent: A column that is let go of before the block is, and need not be copied where records lie end to end.
            without: A column that is not asked for.
        """
        return {
            name: column.take(rows_N, lent=name == lent)
            for name, column in self._columns.items()
            if name != without
        }

    def texts(self, name: str, rows_N: NDArray[np.int64]) -> pa.Array:
        """Return records of a column of texts, to be let go of before the block is: they are shown where they lie."""
        return self._columns[name].texts(rows_N)

    def move_to(self, folder: Path) -> None:
        """Write what is in memory to files, and read it from there from now on."""
        for column in self._columns.values():
            column.move_to(folder)


@dataclass(slots=True)
class HeldColumn:
    """One column of a block, in memory or in a file."""

    held: Pieces | pa.LargeBinaryArray
    """Units where they are; or all of them end to end, where they are many, large, or in a file."""
    dtype: np.dtype[Any]
    mapped: mmap.mmap | None = None
    """The file that holds the values; ``None`` where memory does."""

    @property
    def values_bytes(self) -> int:
        """What its values take of memory."""
        return sum(values.size for values in self._values) if self.mapped is None else 0

    @property
    def size_bytes(self) -> int:
        """What it takes of memory."""
        if isinstance(held := self.held, Pieces):
            return held.size_bytes
        return int(held.buffers()[1].size) + self.values_bytes

    @property
    def lengths_R(self) -> NDArray[np.int64]:
        """Number of values of each record."""
        found = self.held
        sizes_R = found.lengths_bytes_N if isinstance(found, Pieces) else lengths_bytes(found)
        return sizes_R // self.dtype.itemsize

    @property
    def _values(self) -> list[pa.Buffer]:
        # Looked at once: a move in another thread sets it.
        if isinstance(held := self.held, Pieces):
            return held.values
        return [values for values in held.buffers()[2:] if values is not None]

    def take(self, rows_N: NDArray[np.int64], *, lent: bool = False) -> Ragged:
        """Return records end to end in the order asked for; copied, unless what lies in memory is ``lent``."""
        # In this order: a move in another thread sets the array first, and then the map.
        mapped, held = self.mapped, self.held
        if isinstance(held, Pieces):
            return held.take(rows_N, lent=lent)
        found = take(held, rows_N, self.dtype, lent=lent and mapped is None)
        if mapped is not None:
            # What was looked at would count as memory of this process until the block ends.
            mapped.madvise(mmap.MADV_DONTNEED)
        return found

    def texts(self, rows_N: NDArray[np.int64]) -> pa.Array:
        """Return records as texts in the order asked for, which may be shown where they lie."""
        if isinstance(held := self.held, Pieces):
            return held.texts(rows_N)
        return text_array(self.take(rows_N, lent=True))

    def move_to(self, folder: Path) -> None:
        """Write its values to a file, and read them from there from now on."""
        if self.values_bytes:
            ends = np.concatenate(([0], np.cumsum(self.lengths_R * self.dtype.itemsize)))
            with _spill_file(folder) as file:
                for values in self._values:
                    _write(file, memoryview(values), folder)
                mapped = _map(file)
            # A reader in another thread keeps what it began with. Offsets stay in memory: records are found by them.
            self.held = _binary(pa.py_buffer(ends), mapped, len(ends) - 1)
            self.mapped = mapped


class SpilledColumn:
    """A column while it is written to a file without a name. For one thread."""

    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        self._folder, self._dtype = folder, dtype
        self._file = _spill_file(folder)
        self._lengths: list[NDArray[np.int64]] = []

    def append(self, part: Ragged) -> None:
        """Add sequences behind those that are there.

        Raises:
            UnavailableError: The disk takes no more.
        """
        self._lengths.append(part.lengths_N)
        _write(self._file, np.ascontiguousarray(part.values_V).data.cast("B"), self._folder)

    def finish(self) -> HeldColumn:
        """Return what was added, at least once; the column takes no more."""
        lengths_R = np.concatenate(self._lengths)
        # Written as they came: only here is it known where each begins.
        ends = np.concatenate(([0], np.cumsum(lengths_R * self._dtype.itemsize)))
        # An empty file cannot be mapped.
        mapped = _map(self._file) if ends[-1] else None
        return HeldColumn(_binary(pa.py_buffer(ends), mapped, len(lengths_R)), self._dtype, mapped)

    def close(self) -> None:
        """Close the file; what is mapped stays."""
        self._file.close()


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
        for name, parts in self._parts.items():
            for part in parts:
                if name not in self._spilled:
                    self._spilled[name] = SpilledColumn(self._memory.folder, part.values_V.dtype)
                self._spilled[name].append(part)
            parts.clear()
        self._held_bytes = 0


class BlockMemory:
    """The budget that the blocks of all sources of a process share. Safe to use from several threads."""

    def __init__(self, limit_bytes: int | None = None, folder: Path | None = None) -> None:
        """Hold blocks within a limit.

        Args:
            limit_bytes: What blocks, and decoding them, may take; ``None`` for any amount.
            folder: Where blocks lie that do not fit; by default ``TMPDIR``, else ``/var/tmp``.
        """
        self.limit_bytes = limit_bytes
        self.folder = folder or Path(os.environ.get("TMPDIR") or _FOLDER)
        # Its lock is taken twice by a thread in which the collector lets go of a block meanwhile.
        self._changed = threading.Condition()
        self._held: dict[int, weakref.ref[HeldBlock]] = {}
        """Blocks that may leave memory, the oldest first."""
        self._sizes: dict[int, int] = {}
        """What each block takes of memory; their sum beside them, since every read asks for it."""
        self._blocks_bytes = 0
        self._decodings = self._unit_bytes = self._others_bytes = 0
        self._give_back_s = time.monotonic()

    @property
    def used_bytes(self) -> int:
        """What blocks take, what is thought to be needed by decodings, and what was said of others."""
        with self._changed:
            return self._used()

    def has_room(self, size_bytes: int) -> bool:
        """Return whether one more block may lie in memory."""
        if self.limit_bytes is None:
            return True
        with self._changed:
            return self._used() + size_bytes <= self.limit_bytes

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
            block.move_to(self.folder)
            with self._changed:
                self._count(block)
                if not block.is_in_memory:
                    self._held.pop(id(block), None)

    def _too_much(self) -> HeldBlock | None:
        """Return a block that must leave memory."""
        if self.limit_bytes is None:
            return None
        with self._changed:
            if self._used() <= self.limit_bytes:
                return None
            # Of a copy: letting go of the last reference to a block takes it out of here, in this very thread.
            blocks = (ref() for ref in list(self._held.values()))
            return next((b for b in blocks if b is not None and b.is_in_memory), None)


def _binary(offsets: pa.Buffer, mapped: mmap.mmap | None, count: int) -> pa.LargeBinaryArray:
    values = pa.py_buffer(b"" if mapped is None else mapped)
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), count, [None, offsets, values])


def _spill_file(folder: Path) -> IO[bytes]:
    """Open a file without a name: it ends with the last process that has it, however that ends."""
    try:
        # By O_TMPFILE where the file system has it: there is no moment at which the file has a name.
        file: IO[bytes] = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
    except OSError as error:
        raise _refused(folder, error) from error
    return file


def _write(file: IO[bytes], data: memoryview, folder: Path) -> None:
    try:
        # Not buffered: the system may take a part of what it is given.
        while len(data):
            data = data[file.write(data) :]
    except OSError as error:
        raise _refused(folder, error) from error


def _refused(folder: Path, error: OSError) -> UnavailableError:
    return UnavailableError(
        f"{folder}: a decoded block that is over loader.memory cannot be written there: {error.strerror or error}; "
        "make room, name another folder in loader.spill, or raise loader.memory"
    )


def _map(file: IO[bytes]) -> mmap.mmap:
    # Nobody else has the file, so it cannot be cut short under the map.
    return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
