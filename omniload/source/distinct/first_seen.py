"""Finds the first record of each key in bounded memory; keys over the limit are in a file.

Keys are divided by their highest bits, so that equal keys are in one part, and each part is small enough to be sorted::

    add      buffer of keys and records ──full──▶ repeated ones out, sorted by part ──▶ one stretch of the file
    finish   part 0 of every stretch ──▶ first of each key ──▶ bits        part 1 ...

Repeated keys are removed from a buffer before it is written, so that a source with one document a billion times has
small parts, too.

Shape suffixes:
    N  records of a call        B  records of one unit
"""

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

__all__ = ["KEY_BYTES", "Bits", "FirstSeen"]

_BUFFER_RECORDS = 1 << 21
"""Records in memory: 32 MiB, and four times as much during a sort. A part has about half as many records."""

_RECORD = np.dtype([("key", "<u8"), ("record", "<i8")])
KEY_BYTES = _RECORD.itemsize
"""Bytes of a record on the disk if there are more records than fit into memory."""


class Bits:
    """A boolean for each record of a source, eight to a byte, the lowest bit first."""

    def __init__(self, packed: NDArray[np.uint8], count: int) -> None:
        self.packed, self.count = packed, count

    @classmethod
    def none(cls, count: int) -> Self:
        """Return bits that are all false."""
        return cls(np.zeros((count + 7) // 8, np.uint8), count)

    @classmethod
    def of(cls, column: pa.BooleanArray) -> Self:
        """Return truths of Arrow, without nulls: as they are, for a byte of each would be 1.3 GB of FineWeb-Edu."""
        count, size, held = len(column), (len(column) + 7) // 8, column.buffers()[1]
        # One that begins inside a buffer is none that we wrote.
        if column.offset or held is None or len(held) < size:
            return cls(np.packbits(column.to_numpy(zero_copy_only=False), bitorder="little"), count)
        packed = np.frombuffer(held, np.uint8, size).copy()
        if count % 8:  # what lies behind the last is no truth
            packed[-1] &= (1 << count % 8) - 1
        return cls(packed, count)

    def set(self, records_N: NDArray[np.int64]) -> None:
        """Set the bits of some records to true."""
        # ``at``, because with indexing only the last of several records in one byte would count.
        np.bitwise_or.at(
            self.packed, records_N >> 3, np.uint8(1) << (records_N & 7).astype(np.uint8)
        )

    def clear(self, records_N: NDArray[np.int64]) -> None:
        """Set the bits of some records to false."""
        np.bitwise_and.at(
            self.packed, records_N >> 3, ~(np.uint8(1) << (records_N & 7).astype(np.uint8))
        )

    def between(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return the bits of records ``start`` to ``stop``, exclusive, ``[B]``."""
        begin = start >> 3
        bits = np.unpackbits(self.packed[begin : (stop + 7) >> 3], bitorder="little")
        return bits[start - 8 * begin : stop - 8 * begin].astype(np.bool_)

    def total(self) -> int:
        """Return the number of true bits."""
        return int(np.bitwise_count(self.packed).sum(dtype=np.int64))


class FirstSeen:
    """Receives the keys of records in any order, and finds the record that is the first of each key.

    It is a context manager, whose exit removes its file.
    """

    def __init__(
        self, records: int, *, folder: Path | None = None, buffer_records: int = _BUFFER_RECORDS
    ) -> None:
        """Begin without keys.

        Args:
            records: Records of the source.
            folder: Folder for keys beyond ``buffer_records``, 16 bytes per record; ``None`` for the system's folder.
            buffer_records: Records in memory.
        """
        self._records, self._folder, self._most = records, folder, buffer_records
        # Parts have half a buffer on average: hashes spread evenly, and a part above the mean still fits.
        self._parts = max(1, -(-2 * records // buffer_records))
        self._held: list[NDArray[Any]] = []
        self._held_records = 0
        self._stretches: list[NDArray[np.int64]] = []
        """Start of each part of each stretch in the file, counted in records, followed by the end."""
        self._file: IO[bytes] | None = None
        self._written = 0
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def add(self, keys_N: NDArray[np.uint64], records_N: NDArray[np.int64]) -> None:
        """Add some records, by their keys.

        Raises:
            OSError: The keys cannot be written.
        """
        entries = np.empty(len(keys_N), _RECORD)
        entries["key"], entries["record"] = keys_N, records_N
        # A unit may have more records than a buffer.
        for start in range(0, len(entries), self._most):
            some = entries[start : start + self._most]
            self._held.append(some)
            self._held_records += len(some)
            if self._held_records >= self._most:
                self._write()

    def finish(self) -> Bits:
        """Return which records are the first of their key.

        Raises:
            OSError: The file cannot be read.
        """
        first = Bits.none(self._records)
        if self._file is None:
            first.set(_firsts(self._taken())["record"])
            return first
        self._write()
        for part in range(self._parts):
            found = [
                self._read(int(stretch[part]), int(stretch[part + 1]))
                for stretch in self._stretches
            ]
            first.set(_firsts(np.concatenate(found))["record"])
        return first

    def _taken(self) -> NDArray[Any]:
        entries = np.concatenate([np.empty(0, _RECORD), *self._held])
        self._held, self._held_records = [], 0
        return entries

    def _write(self) -> None:
        """Append the buffer to the file, sorted by key, and thus by part."""
        # Repeated keys are removed before writing, because they would all be in one part.
        entries = _firsts(self._taken())
        if self._file is None:
            file = TemporaryFile(dir=self._folder)  # noqa: SIM115 -- closed with this object
            self._file = self._closing.enter_context(file)
        self._file.write(entries.tobytes())
        bounds = [(part << 64) // self._parts for part in range(1, self._parts)]
        inner = np.searchsorted(entries["key"], np.asarray(bounds, np.uint64))
        self._stretches.append(self._written + np.array([0, *inner, len(entries)], np.int64))
        self._written += len(entries)

    def _read(self, start: int, stop: int) -> NDArray[Any]:
        assert self._file is not None, "something was written"
        # This also flushes, because numpy reads from the descriptor, past Python's buffer.
        self._file.seek(start * _RECORD.itemsize)
        return np.fromfile(self._file, _RECORD, stop - start)


def _firsts(entries: NDArray[Any]) -> NDArray[Any]:
    """Return the entry with the least record of each key, sorted by key."""
    # By record among equal keys, so that the first record in the order of the files comes first.
    entries = entries[np.lexsort((entries["record"], entries["key"]))]
    first_N = np.ones(len(entries), np.bool_)
    first_N[1:] = entries["key"][1:] != entries["key"][:-1]
    return entries[first_N]
