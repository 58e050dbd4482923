"""One column of a block: in memory, or in a file without a name.

Shape suffixes:
    R  records of a block        N  records asked for        V  values of all records together
"""

import errno
import mmap
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from omniload.base.errors import UnavailableError
from omniload.base.ragged import Ragged, Rows, offsets_of
from omniload.base.writing import FULL, free_in
from omniload.source.columns import Pieces, lengths_bytes, take, text_array

__all__ = ["HeldColumn", "SpillFullError", "SpilledColumn"]


_REFUSED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
"""Errors of a folder that cannot be written, such as a folder of a container whose root is read-only."""


class SpillFullError(UnavailableError):
    """The folder has no room at present, or cannot be written; the data stays in memory."""


@dataclass(frozen=True, slots=True)
class _Spilling:
    """Adds the folder and the remedy to errors of the system in this context.

    This is no generator: since Python 3.13, the frame of a generator is in a reference cycle with the error. The cycle
    would keep the frames inside, and their blocks, until the garbage collector runs.
    """

    folder: Path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, OSError):
            return
        is_refused = error.errno in _REFUSED
        raised = SpillFullError if is_refused or error.errno in FULL else UnavailableError
        remedy = "; have it writable" if is_refused else f", {free_in(self.folder)}; make room"
        raise raised(
            f"{self.folder}: a decoded block that is over loader.memory cannot be written there: "
            f"{error.strerror or error}{remedy}, name another folder in loader.spill, or raise loader.memory"
        ) from error


@dataclass(slots=True)
class HeldColumn:
    """One column of a block, in memory or in a file."""

    held: Pieces | pa.LargeBinaryArray
    """Units where they were decoded, or all units end to end if they are many, large, or in a file."""
    dtype: np.dtype[Any]
    mapped: mmap.mmap | None = None
    """Map of the file that has the values; ``None`` if they are in memory."""

    @property
    def values_bytes(self) -> int:
        """Memory that the values take."""
        return sum(values.size for values in self._values) if self.mapped is None else 0

    @property
    def size_bytes(self) -> int:
        """Memory that the column takes."""
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
        # Read only once, because a move in another thread sets it.
        if isinstance(held := self.held, Pieces):
            return held.values
        return [values for values in held.buffers()[2:] if values is not None]

    def take(self, rows: Rows, *, lent: bool = False) -> Ragged:
        """Return records end to end in the requested order; copied, unless they are in memory and ``lent``."""
        # Read in this order, because a move in another thread sets the array first and the map after it.
        mapped, held = self.mapped, self.held
        if isinstance(held, Pieces):
            return held.take(rows, lent=lent)
        found = take(held, rows, self.dtype, lent=lent and mapped is None)
        if mapped is not None:
            # The pages that were read would count as memory of this process until the block ends.
            mapped.madvise(mmap.MADV_DONTNEED)
        return found

    def texts(self, rows: Rows) -> pa.Array:
        """Return records as texts in the requested order; the texts may be views of the column."""
        if isinstance(held := self.held, Pieces):
            return held.texts(rows)
        return text_array(self.take(rows, lent=True))

    def move_to(self, folder: Path) -> None:
        """Write the values to a file, and read them from there from now on."""
        if self.values_bytes:
            ends = offsets_of(self.lengths_R * self.dtype.itemsize)
            with _Spilling(folder), _nameless_file(folder) as file:
                for values in self._values:
                    _add_to(file, memoryview(values))
                shown = _mapped(file)
            # A reader in another thread keeps what it began with. Offsets stay in memory, because they locate the
            # records.
            self.held = _binary(pa.py_buffer(ends), shown, len(ends) - 1)
            self.mapped = shown


class SpilledColumn:
    """A column while it is written to a file without a name. Not thread-safe."""

    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        self._folder, self._dtype = folder, dtype
        with _Spilling(folder):
            self._file = _nameless_file(folder)
        # Of a unit that was filled in part nobody closes it: a plane may end at any record.
        weakref.finalize(self, self._file.close)
        self._lengths: list[NDArray[np.int64]] = []

    def append(self, part: Ragged) -> None:
        """Append sequences to the file.

        Raises:
            UnavailableError: The disk is full; nothing of the part was added.
        """
        with _Spilling(self._folder):
            _add_to(self._file, np.ascontiguousarray(part.values_V).data.cast("B"))
        self._lengths.append(part.lengths_N)

    def finish(self) -> HeldColumn:
        """Return all parts as one column; at least one part is needed. Nothing can be added afterwards."""
        lengths_R = np.concatenate(self._lengths)
        # The values were written as they came, so only now is the place of each record known.
        ends = offsets_of(lengths_R * self._dtype.itemsize)
        # An empty file cannot be mapped.
        shown = _mapped(self._file) if ends[-1] else None
        return HeldColumn(_binary(pa.py_buffer(ends), shown, len(lengths_R)), self._dtype, shown)

    def taken_back(self) -> Ragged | None:
        """Return all parts in memory and close the file; ``None`` if there is no part."""
        found: Ragged | None = None
        if self._lengths:
            held = self.finish()
            found = held.take(range(len(held.lengths_R)))
        self.close()
        return found

    def close(self) -> None:
        """Close the file; maps of it stay valid."""
        self._file.close()


def _binary(offsets: pa.Buffer, mapped: mmap.mmap | None, count: int) -> pa.LargeBinaryArray:
    values = pa.py_buffer(b"" if mapped is None else mapped)
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), count, [None, offsets, values])


def _nameless_file(folder: Path) -> IO[bytes]:
    """Open a new file without a name, which vanishes with the last process that has it open.

    Raises:
        OSError: The folder takes no file.
    """
    # With O_TMPFILE, if the file system has it, the file never has a name.
    file: IO[bytes] = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
    return file


def _add_to(file: IO[bytes], data: memoryview) -> None:
    """Write all data at the end of the file. If it cannot be written completely, the file is left as it was.

    Raises:
        OSError: The data cannot be written.
    """
    begin = file.tell()
    try:
        # Not buffered, so the system may accept only a part of the data.
        while len(data):
            data = data[file.write(data) :]
    except OSError:
        file.seek(begin)
        file.truncate()
        raise


def _mapped(file: IO[bytes]) -> mmap.mmap:
    """Map the content of a file, at least one byte; the map stays valid when the file is closed."""
    # No other process has the file, so it cannot be truncated under the map.
    return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
