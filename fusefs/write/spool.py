"""Changes at any place of a file: a spool holds them over a version, and a splice makes the next version of both.

A *spool* is a local file that holds the written bytes; all other bytes are read from the store. It is cut into
granules, each in one of three states::

    absent ---written---> changed ---published---> held
                             ^                       |
                             +-------written---------+

*Absent*: as in the base. *Held*: in the spool, and as in the base. *Changed*: only in the spool. So
writing one page of a large file fetches one granule and publishes one.

Objects never change, so a write in the middle becomes a new segment, the *patch*, and the *splice* is a
manifest that names ranges::

    before   [ A A A A A A A A ]
    changed        ^^    ^
    after    [ A A | P | A | P | A A ]      A and P are one segment each

Every splice leaves more ranges and more bytes that no range shows. A file that is worn by
this is rewritten as a whole.
"""

import bisect
import errno
import itertools
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from fusefs.format.manifest import Segment
from fusefs.read.file_reader import FileReader

__all__ = [
    "MOST_RANGES",
    "MOST_RANGES_CLOSED",
    "Granules",
    "Spool",
    "SpoolPlace",
    "filled",
    "is_worn",
    "splice",
]

MOST_RANGES = 1024
"""Most ranges of a file under change; its manifest is then some 50 KiB, written at every fsync."""
MOST_RANGES_CLOSED = 256
"""Most ranges of a file after its last close, because each costs its readers a request."""
_ABSENT, _HELD, _CHANGED = 0, 1, 2
_ABSENT_STATE, _HELD_STATE, _CHANGED_STATE = bytes([_ABSENT]), bytes([_HELD]), bytes([_CHANGED])
_CHANGED_RUN = re.compile(_CHANGED_STATE + b"+", re.DOTALL)
_COPY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class SpoolPlace:
    """Place and size limit of spools."""

    directory: str | None = None
    """Folder of spools; None: the system's directory for temporary files."""
    limit_bytes: int = 64 << 30
    """Most bytes of one spool: the written bytes, not the size of the file."""


class Granules:
    """The granules of a file that are in the spool, and the length of the file: no I/O.

    Args:
        granule_bytes: Size of each granule but the last, which ends with the file.
        size_bytes: Size of the base, which is entirely absent.
    """

    def __init__(self, granule_bytes: int, size_bytes: int) -> None:
        self.granule_bytes = granule_bytes
        self.size_bytes = size_bytes
        """Bytes of the file with its changes."""
        # One byte per granule: 1 MiB for 64 GiB in granules of 64 KiB.
        self._states = bytearray(_count(size_bytes, granule_bytes))

    def num_missing(self, offset: int = 0, end: int | None = None) -> int:
        """Return how many granules of a byte range, or of the file, are not in the spool: absent, or past its end."""
        known = len(self._states)
        first = offset // self.granule_bytes
        stop = known if end is None else _count(end, self.granule_bytes)
        behind_end = max(0, stop - max(first, known))
        return behind_end + self._states.count(_ABSENT, first, stop)

    def absent_edges(self, offset: int, end: int) -> list[int]:
        """Return the absent granules that a write to a byte range changes only in part."""
        # A granule that a write fills needs nothing of the base, so only the granules at both ends may be fetched.
        edges = set[int]()
        if offset % self.granule_bytes:
            edges.add(offset // self.granule_bytes)
        if end % self.granule_bytes and end < self.size_bytes:
            edges.add(end // self.granule_bytes)
        states = self._states
        return [edge for edge in edges if edge < len(states) and states[edge] == _ABSENT]

    def runs(self, offset: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """Yield start, end and whether the bytes are in the spool, for a range cut at the end of the file."""
        end = max(offset, min(end, self.size_bytes))
        first, stop = offset // self.granule_bytes, _count(end, self.granule_bytes)
        at = offset
        # Yield runs, not granules, because one read fetches each absent run.
        for here, run in itertools.groupby(self._states[first:stop], key=lambda s: s != _ABSENT):
            first += sum(1 for _ in run)
            until = min(end, first * self.granule_bytes)
            yield at, until, here
            at = until

    def changed(self) -> list[range]:
        """Return the byte ranges that differ from the base, rising and disjoint."""
        size = self.granule_bytes
        return [
            range(run.start() * size, min(run.end() * size, self.size_bytes))
            for run in _CHANGED_RUN.finditer(self._states)
        ]

    def fetched(self, first: int, stop: int) -> None:
        """Note that the absent granules of a run are in the spool now."""
        states = self._states[first:stop]
        self._states[first:stop] = states.replace(_ABSENT_STATE, _HELD_STATE)

    def being_written(self, offset: int, end: int) -> None:
        """Note, before a write, that the granules of its range in the spool will differ from the base."""
        first, stop = offset // self.granule_bytes, _count(end, self.granule_bytes)
        # Absent granules stay absent, so that nothing of them is lost if the disk becomes full during the write.
        self._states[first:stop] = self._states[first:stop].replace(_HELD_STATE, _CHANGED_STATE)

    def written(self, offset: int, end: int) -> None:
        """Note that a byte range is only in the spool; the write may have extended the file."""
        self.size_bytes = max(self.size_bytes, end)
        first, stop = offset // self.granule_bytes, _count(end, self.granule_bytes)
        self._states += bytes(max(0, stop - len(self._states)))
        self._states[first:stop] = _CHANGED_STATE * (stop - first)

    def resized(self, size_bytes: int) -> None:
        """Note that the file was truncated, or extended with zeroes."""
        old, self.size_bytes = self.size_bytes, size_bytes
        del self._states[_count(size_bytes, self.granule_bytes) :]
        if size_bytes > old:
            self.written(old, size_bytes)

    def published(self) -> None:
        """Note that the base now equals the file."""
        self._states = self._states.replace(_CHANGED_STATE, _HELD_STATE)


class Spool:
    """Bytes of one file under change. Used by one thread at a time.

    Args:
        place: Place of the spool.
        granule_bytes: Bytes that are fetched and published together.
        base: Reader of the version below; None for an empty one.
    """

    def __init__(self, place: SpoolPlace, granule_bytes: int, base: FileReader | None) -> None:
        self._place = place
        self._base = base
        # No byte of the base is copied in advance: a page written to a large file costs one granule.
        self.granules = Granules(granule_bytes, base.size_bytes if base is not None else 0)
        """Granules in the spool, and the size of the file; only this spool changes them."""
        self._file, name = tempfile.mkstemp(prefix="omnifs-spool-", dir=place.directory)
        os.unlink(name)  # noqa: PTH108 -- nobody else needs its name, and a crash leaves nothing

    def try_read(self, offset: int, size_bytes: int) -> bytes | None:
        """Return bytes in the spool, cut at the end; None if the store would have to be asked."""
        fetch = self._base.try_read if self._base is not None else _no_base
        return _joined(self._file, self.granules.runs(offset, offset + size_bytes), fetch)

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return a range, cut at the end of the file."""
        fetch = self._base.read if self._base is not None else _no_base
        data = _joined(self._file, self.granules.runs(offset, offset + size_bytes), fetch)
        assert data is not None, "a read that waits brings something"
        return data

    def writes_now(self, offset: int, size_bytes: int) -> bool:
        """Return whether a write would be accepted without asking the store."""
        # A gap past the end is filled from the end on.
        begin = min(offset, self.granules.size_bytes)
        return not self.granules.absent_edges(begin, offset + size_bytes)

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write at any place; a gap past the end becomes zeroes.

        Raises:
            OSError: ``EFBIG``: the spool would exceed its limit; or an error of the base.
        """
        end = offset + len(data)
        if end == offset:
            return
        if offset > self.granules.size_bytes:
            # Write the gap, too, because its zeroes are not in the base.
            self.truncate(offset)
        _check_limit(self.granules, self._place, offset, end)
        for edge in self.granules.absent_edges(offset, end):
            self._hold(edge, edge + 1)
        # Before the write, because a disk that becomes full during it has already changed held granules.
        self.granules.being_written(offset, end)
        _put(self._file, offset, data)
        self.granules.written(offset, end)

    def truncate(self, size_bytes: int) -> None:
        """Truncate the file, or extend it with zeroes."""
        old = self.granules.size_bytes
        cut = min(old, size_bytes)
        # Hold the granule of the cut, because reading it from the base again would bring back truncated bytes.
        for edge in self.granules.absent_edges(cut, cut):
            self._hold(edge, edge + 1)
        if size_bytes > old:
            _check_limit(self.granules, self._place, old, size_bytes)
        os.ftruncate(self._file, size_bytes)
        self.granules.resized(size_bytes)

    def hold_all(self) -> None:
        """Fetch all granules that are still read from the base."""
        _check_limit(self.granules, self._place, 0, self.granules.size_bytes)
        self._hold(0, _count(self.granules.size_bytes, self.granules.granule_bytes))

    def published(self, base: FileReader) -> None:
        """Note that ``base`` now holds every byte of the file."""
        self._base = base
        self.granules.published()

    def close(self) -> None:
        """Release the bytes."""
        os.close(self._file)

    def _hold(self, first: int, stop: int) -> None:
        """Fetch the absent granules of a run."""
        size = self.granules.granule_bytes
        for start, end, here in self.granules.runs(first * size, stop * size):
            for at in range(start, end, _COPY_BYTES) if not here else ():
                assert self._base is not None, "only granules of a base are absent"
                _put(self._file, at, self._base.read(at, min(_COPY_BYTES, end - at)))
        self.granules.fetched(first, stop)


def _count(size_bytes: int, granule_bytes: int) -> int:
    """Return the number of granules that hold ``size_bytes``."""
    return -(-size_bytes // granule_bytes)


def _no_base(offset: int, size_bytes: int) -> bytes:
    raise AssertionError(f"{size_bytes} bytes at {offset} are absent, and there is no base")


def _put(file: int, at: int, data: bytes | bytearray | memoryview) -> None:
    view = memoryview(data).cast("B")
    while view:
        done = os.pwrite(file, view, at)
        view, at = view[done:], at + done


def _joined(
    file: int,
    runs: Iterable[tuple[int, int, bool]],
    fetch: Callable[[int, int], bytes | memoryview | None],
) -> bytes | None:
    """Return the bytes of adjacent runs, from the file or ``fetch``; None if ``fetch`` returns nothing."""
    parts: list[bytes | memoryview] = []
    for start, end, here in runs:
        data = os.pread(file, end - start, start) if here else fetch(start, end - start)
        if data is None:
            return None
        parts.append(data)
    return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)


def _check_limit(granules: Granules, place: SpoolPlace, offset: int, end: int) -> None:
    """Refuse a write that would make a spool too large."""
    if not (more := granules.num_missing(offset, end)):
        return
    size = granules.granule_bytes
    there = _count(granules.size_bytes, size) - granules.num_missing()
    # Granules that are held count as well, because the limit is one of the disk.
    wanted = (there + more) * size
    # One granule is always allowed, or a limit below it would refuse every write.
    if wanted > max(place.limit_bytes, size):
        raise OSError(
            errno.EFBIG,
            f"random writes need a spool of {wanted} bytes, limit {place.limit_bytes}; "
            "raise spool_limit or write the file front to back",
        )


Plan = list[Segment | int]
"""A file in order: ranges that stay, and the numbers of patch bytes between them."""


def splice(base: Sequence[Segment], size_bytes: int, changed: Sequence[range]) -> Plan:
    """Plan a file whose ``changed`` ranges come from a patch and whose other bytes stay.

    Args:
        base: Segments of the file before.
        size_bytes: Size of the file afterwards.
        changed: Byte ranges within the file, rising, disjoint, none empty. Bytes past the
            end of ``base`` must be among them.

    Returns:
        A plan whose sizes sum to ``size_bytes`` and whose patch bytes sum to those of ``changed``.

    Raises:
        ValueError: An unchanged byte is past the end of ``base``.
    """
    starts = list(itertools.accumulate((s.size_bytes for s in base), initial=0))
    plan: Plan = []
    at = 0
    for hole in [*changed, range(size_bytes, size_bytes)]:
        if hole.start > at:
            plan += _parts(base, starts, range(at, hole.start))
        if len(hole):
            plan.append(len(hole))
        at = max(at, hole.stop)
    return plan


def filled(plan: Plan, patch: Segment | None) -> tuple[Segment, ...]:
    """Return the segments of a planned file, once its patch is written.

    Args:
        plan: Result of ``splice``.
        patch: The changed bytes one after the other; None if nothing changed.
    """
    segments: list[Segment] = []
    taken = 0
    for item in plan:
        if isinstance(item, Segment):
            segments.append(item)
        else:
            assert patch is not None, "bytes changed, so there is a patch"
            segments.append(patch.part(taken, item))
            taken += item
    return tuple(segments)


def is_worn(plan: Plan, *, most_ranges: int = MOST_RANGES) -> bool:
    """Return whether rewriting the whole file is better than this splice.

    It is better if most of the file changes anyway, if its objects would hold more than
    twice its bytes, or if too many ranges would be left. So a file costs at most
    twice its space, and earlier savings pay for the rewriting.
    """
    fresh = sum(item for item in plan if isinstance(item, int))
    stay = [item for item in plan if isinstance(item, Segment)]
    size = fresh + sum(segment.size_bytes for segment in stay)
    # Count each segment once, and whole, because its objects stay whole even if only a range of them is shown.
    stored = sum({s.segment_id: s.stored_bytes for s in stay}.values())
    return len(plan) > most_ranges or fresh * 2 > size or stored + fresh > 2 * size


def _parts(base: Sequence[Segment], starts: list[int], wanted: range) -> Iterator[Segment]:
    if wanted.stop > starts[-1]:
        raise ValueError(f"bytes up to {wanted.stop} are to stay, the file had {starts[-1]}")
    number = bisect.bisect_right(starts, wanted.start) - 1
    at = wanted.start
    while at < wanted.stop:
        segment, start = base[number], starts[number]
        stop = min(wanted.stop, start + segment.size_bytes)
        if stop > at:
            yield segment.part(at - start, stop - at)
        at, number = stop, number + 1
