"""Reading files by units: from memory at once, from disk or store in parallel, verified.

``try_read`` answers from memory only and never waits. ``start`` sends missing units
to the pools, units of one object in one ranged read, and returns the futures to wait
for. A mount calls both from its loop, so a hit costs no thread.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future

from fusefs.cache.block_cache import Data
from fusefs.cache.local_copy import LocalCopy, runs_of
from fusefs.format.file_segments import FileSegment, FileUnits, UnitPart
from fusefs.format.layout import UnitRun
from fusefs.format.unit_check import check_unit
from fusefs.read.readahead import Closed, Fetch, Invalidated, Read, ReadAhead
from fusefs.read.speculation import SpeculativeReads
from fusefs.read.unit_fetcher import Fetcher
from fusefs.read.unit_source import ReadEngine, UnitSource
from fusefs.read.version_cache import VersionCache
from omniload.base.errors import IntegrityError

__all__ = ["BufferFiller", "FileReader", "Placement"]

Placement = Mapping[int, list[tuple[int, memoryview]]]
"""The buffers for each unit, each with the byte of the unit at which it begins."""


class FileReader:
    """Random access to the bytes of a file in the version that was opened. Safe in threads."""

    def __init__(
        self,
        engine: ReadEngine,
        pieces: list[FileSegment],
        *,
        when_missing: Callable[[str], Exception] | None = None,
        when_read: Callable[[], None] | None = None,
        copy: LocalCopy | None = None,
    ) -> None:
        """Read ``pieces``; ``when_missing`` returns the error for a missing object.

        ``when_read`` is called after each read of the store, whose bytes are used unless it raises.
        """
        self._engine = engine
        self._units = FileUnits(pieces)
        self.size_bytes = self._units.size_bytes
        source = UnitSource(
            engine, copy, when_missing=when_missing or _missing, when_read=when_read
        )
        self._fetcher = Fetcher(engine, source)
        self._filler = BufferFiller(engine, source)
        self.cached = VersionCache(engine, self._units, copy, self._fetcher)
        """Blocks of the version in the caches of this process."""
        self.ahead = _Ahead(engine, self.size_bytes)
        """Ranges that will probably be read next."""

    def try_read(self, offset: int, size_bytes: int) -> bytes | memoryview | None:
        """Return the bytes if all of them are in memory; never waits."""
        parts = []
        for piece, unit, start, size in self._units.of(offset, size_bytes):
            data: Data | None = piece.cached_unit(unit)
            if data is None:
                data = self._engine.cache.get((piece.key, unit))
            if data is None:
                return None
            parts.append(memoryview(data)[start : start + size])
        # Most reads are one part, a view of the block: no byte is copied before the kernel takes it.
        found = parts[0] if len(parts) == 1 else b"".join(parts)
        self._engine.traffic.answered(len(parts), len(found))
        return found

    def read(self, offset: int, size_bytes: int, *, process: int = 0) -> bytes | memoryview:
        """Return the bytes of a range, cut at the end of the file.

        Raises:
            IntegrityError: A unit does not match its checksum, or its object is gone.
            StateError: This process was forked off the one that opened the store.
            UnavailableError: The store does not answer.
        """
        waiting = self.start(offset, size_bytes, process=process)
        return self.finish(offset, size_bytes, waiting)

    def start(self, offset: int, size_bytes: int, *, process: int = 0) -> list[Future[Data]]:
        """Fetch a range and the bytes that will probably follow; return one future per unit of the range.

        Raises:
            StateError: Same as for ``read``.
        """
        # Before any lock: in a forked process, a thread of the parent may hold it, and nobody would release it here.
        self._engine.pool.check_process()
        self._engine.traffic.asked()
        ahead = self._units_ahead(offset, size_bytes, process)
        return self._fetcher.fetch(self._units.of(offset, size_bytes), needed=True, ahead=ahead)

    def _units_ahead(self, offset: int, size_bytes: int, process: int) -> Iterator[UnitPart]:
        # Runs only after the wanted units are claimed, because that shows whether the kernel lost them.
        for command in self.ahead.read(process, offset, size_bytes):
            yield from self._units.of(command.start, command.stop - command.start)

    def note(self, offset: int, size_bytes: int, *, process: int = 0) -> None:
        """Report a read that memory answered to read-ahead."""
        for command in self.ahead.read(process, offset, size_bytes):
            self.prefetch(command.start, command.stop - command.start)

    def served(self, offset: int, size_bytes: int) -> None:
        """Note that a range went into the kernel's page cache; a block that went there whole may be dropped here."""
        self._engine.cache.served(
            ((piece.key, unit), size) for piece, unit, _, size in self._units.of(offset, size_bytes)
        )

    def finish(
        self, offset: int, size_bytes: int, waiting: list[Future[Data]]
    ) -> bytes | memoryview:
        """Return the bytes of a range from the futures that ``start`` returned."""
        parts = []
        for future, (_, _, start, size) in zip(
            waiting, self._units.of(offset, size_bytes), strict=True
        ):
            parts.append(memoryview(future.result())[start : start + size])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def start_into(self, spans: Iterable[tuple[int, memoryview]]) -> list[Future[None]]:
        """Fill buffers from ranges of the file, bypassing the cache: each unit is read once and copied once.

        Args:
            spans: First byte within the file, and the buffer to fill from there.

        Returns:
            One future per ranged read; the buffers are filled when all of them are done.

        Raises:
            StateError: Same as for ``read``.
            ValueError: A span reaches past the end of the file.
        """
        self._engine.pool.check_process()  # as above
        wanted: dict[int, tuple[FileSegment, dict[int, list[tuple[int, memoryview]]]]] = {}
        for offset, buffer in spans:
            if offset + len(buffer) > self.size_bytes:
                raise ValueError(f"{offset}+{len(buffer)} is past the end at {self.size_bytes}")
            at = 0
            for piece, unit, start, size in self._units.of(offset, len(buffer)):
                _, targets = wanted.setdefault(id(piece), (piece, {}))
                targets.setdefault(unit, []).append((start, buffer[at : at + size]))
                at += size
        return [
            future
            for piece, targets in wanted.values()
            for future in self._filler.fill(piece, targets)
        ]

    def prefetch(self, offset: int, size_bytes: int) -> list[Future[Data]]:
        """Fetch a range into the cache as far as it has room; the caller need not wait for the result."""
        return self._fetcher.fetch(self._units.of(offset, size_bytes), needed=False)


class _Ahead:
    """The read-ahead of one version, for all threads that read it. Fetches nothing itself."""

    def __init__(self, engine: ReadEngine, size_bytes: int) -> None:
        self._kernel = engine.cache.kernel
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        # Losses of the kernel before this version was opened concern other versions.
        self._num_invalidations = self._kernel.num_invalidations
        self._machine = ReadAhead(
            largest_bytes=engine.read_ahead,
            # Streams share half of it, because bytes fetched for one must not push out another's
            # (docs/design/fusefs/0013).
            all_bytes=engine.cache.capacity_bytes // 2,
            block_bytes=engine.read_block,
            speculative=_speculative(engine, size_bytes),
        )

    def read(self, process: int, offset: int, size_bytes: int) -> tuple[Fetch, ...]:
        """Note a read, and any loss of the kernel since the last; return the ranges to fetch now."""
        if offset >= self._size_bytes:
            return ()
        with self._lock:
            if (num_invalidations := self._kernel.num_invalidations) != self._num_invalidations:
                self._num_invalidations = num_invalidations
                self._machine.handle(Invalidated())
            return self._machine.handle(Read(process, offset, size_bytes))

    def closed(self, process: int) -> None:
        """Note that a process or handle no longer reads this file."""
        with self._lock:
            self._machine.handle(Closed(process))


def _speculative(engine: ReadEngine, size_bytes: int) -> SpeculativeReads | None:
    block = engine.read_block
    wide = engine.longest_read // block * block if block else 0
    # Nothing to widen by, because a longest read does not hold two blocks.
    if wide <= block:
        return None
    most_bytes = 3 * engine.cache.capacity_bytes // 4
    return SpeculativeReads(block, wide, size_bytes, most_bytes=most_bytes, budget=engine.budget)


def _missing(path: str) -> Exception:
    return IntegrityError(
        f"object {path!r} is missing though a manifest names it; restore the file from another copy"
    )


class BufferFiller:
    """Fills buffers from one version of a file. Safe in threads."""

    def __init__(self, engine: ReadEngine, source: UnitSource) -> None:
        self._engine = engine
        self._source = source

    def fill(self, piece: FileSegment, targets: Placement) -> Iterator[Future[None]]:
        """Copy units into buffers, bypassing the cache; yield one future per read."""
        local, remote = self._source.parted(piece, sorted(targets))
        # Use a separate pool, so that reads of the disk do not wait behind a slow store.
        for units in runs_of(local, piece.layout.unit_bytes, self._engine.longest_read):
            yield self._engine.local_pool.submit(self._fill_from_copy, piece, units, targets)
        for run in self._source.runs(piece, remote):
            self._source.acquire()
            yield self._engine.pool.submit(self._fill_from_store, piece, run, targets)

    def _fill_from_copy(self, piece: FileSegment, units: list[int], targets: Placement) -> None:
        found = self._source.read_copy(piece, units)
        _place(found, targets)
        for run in self._source.runs(piece, [unit for unit in units if unit not in found]):
            self._source.acquire()
            self._fill_from_store(piece, run, targets)

    def _fill_from_store(self, piece: FileSegment, run: UnitRun, targets: Placement) -> None:
        try:
            if piece.data is not None:
                _place({unit: piece.cached_unit(unit) or b"" for unit in run.units}, targets)
                return
            parts = dict(self._source.read_store(piece, run))
            for unit, part in parts.items():
                check_unit(piece, unit, part)
            _place(parts, targets)
            self._source.keep(piece, parts)
        finally:
            self._source.release()


def _place(parts: Mapping[int, Data], targets: Placement) -> None:
    for unit, part in parts.items():
        for start, buffer in targets[unit]:
            buffer[:] = part[start : start + len(buffer)]
