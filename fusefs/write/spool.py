"""A local file over a version of the store: what is written lies here, the rest is read there.

The file is cut into granules, each in one of three states::

    absent ---written---> changed ---published---> held
                             ^                       |
                             +-------written---------+

*Absent*: as in the base. *Held*: here, and as in the base. *Changed*: here alone. So
writing one page of a large file fetches one granule and publishes one.
"""

import errno
import itertools
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from fusefs.read.file_reader import FileReader

__all__ = ["Spool", "SpoolPlace"]

_ABSENT, _HELD, _CHANGED = 0, 1, 2
_HELD_STATE, _CHANGED_STATE = bytes([_HELD]), bytes([_CHANGED])
_CHANGED_RUN = re.compile(_CHANGED_STATE + b"+", re.DOTALL)
_COPY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class SpoolPlace:
    """Where spools lie and how large one may get."""

    directory: str | None = None
    """None: the system's directory for temporary files."""
    limit_bytes: int = 64 << 30
    """Most bytes of one spool: what was written, not the size of the file."""


class Spool:
    """Bytes of one file under change. Used by one thread at a time.

    Args:
        place: Where it lies.
        granule_bytes: Bytes that are fetched and published together.
        base: Reader of the version underneath; None for an empty one.
    """

    def __init__(self, place: SpoolPlace, granule_bytes: int, base: FileReader | None) -> None:
        self._place = place
        self._granule_bytes = granule_bytes
        self._base = base
        self.size_bytes = base.size_bytes if base is not None else 0
        """Bytes of the file as it is here."""
        # A byte per granule: 64 GiB by 64 KiB are a MiB.
        self._states = bytearray(self._num_granules(self.size_bytes))
        self._file, name = tempfile.mkstemp(prefix="omnifs-spool-", dir=place.directory)
        os.unlink(name)  # noqa: PTH108 -- nobody else needs its name, and a crash leaves nothing

    @property
    def is_complete(self) -> bool:
        """Whether nothing is read from the base any more."""
        return _ABSENT not in self._states

    def try_read(self, offset: int, size_bytes: int) -> bytes | None:
        """Return bytes that are at hand, cut at the end; None where the store would be asked."""
        return self._joined(offset, size_bytes, waits=False)

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return a range, cut at the end of the file."""
        data = self._joined(offset, size_bytes, waits=True)
        assert data is not None
        return data

    def writes_now(self, offset: int, size_bytes: int) -> bool:
        """Return whether a write would be taken without asking the store."""
        # A gap behind the end is filled from the end on.
        begin, end = min(offset, self.size_bytes), offset + size_bytes
        return not any(self._is_absent(edge) for edge in self._edges(begin, end))

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write anywhere; a gap behind the end becomes zeroes.

        Raises:
            OSError: ``EFBIG`` beyond the limit; what the base raised.
        """
        end = offset + len(data)
        if end == offset:
            return
        if offset > self.size_bytes:
            self.truncate(offset)
        self._check_limit(offset, end)
        self._hold_edges(offset, end)
        first, stop = offset // self._granule_bytes, self._num_granules(end)
        # Before writing: a disk that is full half-way has changed what was held already.
        self._states[first:stop] = self._states[first:stop].replace(_HELD_STATE, _CHANGED_STATE)
        self._put(offset, data)
        self.size_bytes = max(self.size_bytes, end)
        self._mark(offset, end)

    def truncate(self, size_bytes: int) -> None:
        """Cut the file, or extend it with zeroes."""
        old = self.size_bytes
        self._hold_edges(min(old, size_bytes), min(old, size_bytes))
        if size_bytes > old:
            self._check_limit(old, size_bytes)
        os.ftruncate(self._file, size_bytes)
        self.size_bytes = size_bytes
        del self._states[self._num_granules(size_bytes) :]
        if size_bytes > old:
            self._mark(old, size_bytes)

    def hold_all(self) -> None:
        """Fetch what is still read from the base."""
        self._check_limit(0, self.size_bytes)
        self._hold(0, len(self._states))

    def changed(self) -> list[range]:
        """Return the byte ranges that differ from the base, rising and apart."""
        size = self._granule_bytes
        return [
            range(run.start() * size, min(run.end() * size, self.size_bytes))
            for run in _CHANGED_RUN.finditer(self._states)
        ]

    def published(self, base: FileReader) -> None:
        """Note that ``base`` now holds every byte as it is here."""
        self._base = base
        self._states = self._states.replace(_CHANGED_STATE, _HELD_STATE)

    def close(self) -> None:
        """Let the bytes go."""
        os.close(self._file)

    # Inside

    def _num_granules(self, size_bytes: int) -> int:
        return -(-size_bytes // self._granule_bytes)

    def _edges(self, offset: int, end: int) -> set[int]:
        """Return the granules that a write to a range leaves some other bytes in."""
        whole_end = end >= self.size_bytes
        edges = set[int]()
        if offset % self._granule_bytes:
            edges.add(offset // self._granule_bytes)
        if end % self._granule_bytes and not whole_end:
            edges.add(end // self._granule_bytes)
        return edges

    def _is_absent(self, granule: int) -> bool:
        return granule < len(self._states) and self._states[granule] == _ABSENT

    def _hold_edges(self, offset: int, end: int) -> None:
        for edge in self._edges(offset, end):
            if self._is_absent(edge):
                self._hold(edge, edge + 1)

    def _hold(self, first: int, stop: int) -> None:
        """Fetch the absent granules of a range."""
        for start, end, here in self._runs(first * self._granule_bytes, stop * self._granule_bytes):
            for at in range(start, end, _COPY_BYTES) if not here else ():
                self._put(at, self._from_base(at, min(_COPY_BYTES, end - at)))
        for granule in range(first, min(stop, len(self._states))):
            self._states[granule] = max(self._states[granule], _HELD)

    def _put(self, at: int, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:
            done = os.pwrite(self._file, view, at)
            view, at = view[done:], at + done

    def _from_base(self, offset: int, size_bytes: int) -> bytes | memoryview:
        assert self._base is not None, "only granules of a base are absent"
        return self._base.read(offset, size_bytes)

    def _mark(self, offset: int, end: int) -> None:
        count = self._num_granules(end)
        self._states += bytes(max(0, count - len(self._states)))
        first = offset // self._granule_bytes
        self._states[first:count] = bytes([_CHANGED]) * (count - first)

    def _runs(self, offset: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """Yield start, end and whether the bytes are here, for a range cut at the end of the file."""
        end = max(offset, min(end, self.size_bytes))
        first, stop = offset // self._granule_bytes, self._num_granules(end)
        at = offset
        for here, run in itertools.groupby(self._states[first:stop], key=lambda s: s != _ABSENT):
            first += sum(1 for _ in run)
            until = min(end, first * self._granule_bytes)
            yield at, until, here
            at = until

    def _joined(self, offset: int, size_bytes: int, *, waits: bool) -> bytes | None:
        parts: list[bytes | memoryview] = []
        for start, end, here in self._runs(offset, offset + size_bytes):
            if here:
                parts.append(os.pread(self._file, end - start, start))
            elif waits:
                parts.append(self._from_base(start, end - start))
            else:
                assert self._base is not None
                data = self._base.try_read(start, end - start)
                if data is None:
                    return None
                parts.append(data)
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    def _check_limit(self, offset: int, end: int) -> None:
        """Refuse what would make the spool hold more than it may."""
        first, stop = offset // self._granule_bytes, self._num_granules(end)
        there = len(self._states) - self._states.count(_ABSENT)
        more = (stop - first) - (
            len(self._states[first:stop]) - self._states.count(_ABSENT, first, stop)
        )
        wanted = (there + more) * self._granule_bytes
        if more and wanted > max(self._place.limit_bytes, self._granule_bytes):
            raise OSError(
                errno.EFBIG,
                f"random writes need a spool of {wanted} bytes, limit {self._place.limit_bytes}; "
                "raise spool_limit or write the file front to back",
            )
