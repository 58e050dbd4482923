"""Reading files by units: from memory at once, from disk or store in parallel, verified.

``try_read`` answers from memory or not at all and never waits; ``start`` sends what is
missing to the pools, units of one object in one ranged read, and returns what to wait
for. A mount calls both from its loop, so a hit costs no thread.
"""

import bisect
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future

from fusefs.cache.block_cache import Data
from fusefs.cache.local_copy import LocalCopy
from fusefs.format.file_segments import FileSegment
from fusefs.read.buffer_filler import BufferFiller
from fusefs.read.readahead import Closed, Fetch, Invalidated, Read, ReadAhead
from fusefs.read.speculation import SpeculativeReads
from fusefs.read.unit_fetcher import Fetcher, Wanted
from fusefs.read.unit_source import ReadEngine, UnitSource
from omniload.base.errors import IntegrityError

__all__ = ["FileReader", "Keeping"]

Keeping = list[tuple[Wanted, Future[Data]]]
"""Units on their way to where they are kept."""


class FileReader:
    """Random access to a file's bytes as they were when it was opened. Safe in threads."""

    def __init__(
        self,
        engine: ReadEngine,
        pieces: list[FileSegment],
        *,
        when_missing: Callable[[str], Exception] | None = None,
        when_read: Callable[[], None] | None = None,
        copy: LocalCopy | None = None,
    ) -> None:
        """Read ``pieces``; ``when_missing`` says what a missing object means.

        ``when_read`` is called after each read of the store, whose bytes are used unless it raises.
        """
        self._engine = engine
        self._copy = copy
        source = UnitSource(
            engine, copy, when_missing=when_missing or _missing, when_read=when_read
        )
        self._fetcher = Fetcher(engine, source)
        self._filler = BufferFiller(engine, source)
        self._pieces = [piece for piece in pieces if piece.size_bytes]
        self._starts = [piece.start for piece in self._pieces]
        self._ahead_lock = threading.Lock()
        self._num_invalidations = engine.cache.num_invalidations
        self.size_bytes = sum(piece.size_bytes for piece in self._pieces)
        self._ahead = ReadAhead(
            largest_bytes=engine.read_ahead,
            all_bytes=engine.cache.capacity_bytes // 2,
            block_bytes=engine.read_block,
            speculative=_speculative(engine, self.size_bytes),
        )

    def try_read(self, offset: int, size_bytes: int) -> bytes | memoryview | None:
        """Return the bytes if all of them are in memory; never waits."""
        parts = []
        for piece, unit, start, size in self._units(offset, size_bytes):
            data: Data | None = piece.cached_unit(unit)
            if data is None:
                data = self._engine.cache.get((piece.key, unit))
            if data is None:
                return None
            parts.append(memoryview(data)[start : start + size])
        found = parts[0] if len(parts) == 1 else b"".join(parts)
        self._engine.traffic.answered(len(parts), len(found))
        return found

    def read(self, offset: int, size_bytes: int, *, process: int = 0) -> bytes | memoryview:
        """Return the bytes of a range, cut at the end of the file.

        Raises:
            IntegrityError: A unit does not match its checksum, or is gone.
            UnavailableError: The store does not answer.
        """
        waiting = self.start(offset, size_bytes, process=process)
        return self.finish(offset, size_bytes, waiting)

    def start(self, offset: int, size_bytes: int, *, process: int = 0) -> list[Future[Data]]:
        """Fetch a range and what likely follows it; return one future per unit of the range."""
        self._engine.traffic.asked()
        ahead = self._units_ahead(offset, size_bytes, process)
        return self._fetcher.fetch(self._units(offset, size_bytes), needed=True, ahead=ahead)

    def _units_ahead(self, offset: int, size_bytes: int, process: int) -> Iterator[Wanted]:
        # Begins only when those wanted are claimed, which shows whether the kernel lost them.
        for command in self._noted(offset, size_bytes, process):
            yield from self._units(command.start, command.stop - command.start)

    def note(self, offset: int, size_bytes: int, *, process: int = 0) -> None:
        """Show read-ahead a read that memory answered."""
        for command in self._noted(offset, size_bytes, process):
            self.prefetch(command.start, command.stop - command.start)

    def served(self, offset: int, size_bytes: int) -> None:
        """Note that a range went into the kernel's page cache: what went there whole need not lie here too."""
        self._engine.cache.served(
            ((piece.key, unit), size) for piece, unit, _, size in self._units(offset, size_bytes)
        )

    def _noted(self, offset: int, size_bytes: int, process: int) -> tuple[Fetch, ...]:
        if offset >= self.size_bytes:
            return ()
        with self._ahead_lock:
            if (
                num_invalidations := self._engine.cache.num_invalidations
            ) != self._num_invalidations:
                self._num_invalidations = num_invalidations
                self._ahead.handle(Invalidated())
            return self._ahead.handle(Read(process, offset, size_bytes))

    def left(self, process: int) -> None:
        """Show read-ahead that a process or handle reads this file no more."""
        with self._ahead_lock:
            self._ahead.handle(Closed(process))

    def finish(
        self, offset: int, size_bytes: int, waiting: list[Future[Data]]
    ) -> bytes | memoryview:
        """Return the bytes of a range whose units ``start`` returned."""
        parts = []
        for future, (_, _, start, size) in zip(
            waiting, self._units(offset, size_bytes), strict=True
        ):
            parts.append(memoryview(future.result())[start : start + size])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def start_into(self, spans: Iterable[tuple[int, memoryview]]) -> list[Future[None]]:
        """Fill buffers from ranges of the file, past the cache: each unit is read once and copied once.

        Args:
            spans: First byte within the file, and the buffer to fill from there.

        Returns:
            One future per ranged read; the buffers are filled when all of them are done.

        Raises:
            ValueError: A span reaches past the end of the file.
        """
        wanted: dict[int, tuple[FileSegment, dict[int, list[tuple[int, memoryview]]]]] = {}
        for offset, buffer in spans:
            if offset + len(buffer) > self.size_bytes:
                raise ValueError(f"{offset}+{len(buffer)} is past the end at {self.size_bytes}")
            at = 0
            for piece, unit, start, size in self._units(offset, len(buffer)):
                _, targets = wanted.setdefault(id(piece), (piece, {}))
                targets.setdefault(unit, []).append((start, buffer[at : at + size]))
                at += size
        return [
            future
            for piece, targets in wanted.values()
            for future in self._filler.fill(piece, targets)
        ]

    def prefetch(self, offset: int, size_bytes: int) -> list[Future[Data]]:
        """Bring a range into the cache as far as it has room; wait on the result or do not."""
        return self._fetcher.fetch(self._units(offset, size_bytes), needed=False)

    def keep(self, offset: int, size_bytes: int) -> None:
        """Bring a range into the local copy where there is one, else into memory, and wait for it.

        Units that the copy has are compared with their checksums once, not read again.
        """
        self.finish_keeping(self.start_keeping(offset, size_bytes))

    def start_keeping(self, offset: int, size_bytes: int) -> Keeping:
        """Begin what ``keep`` does; hand the result to ``finish_keeping``."""
        missing = [
            wanted for wanted in self._units(offset, size_bytes) if not self._is_kept(wanted)
        ]
        futures = self._fetcher.fetch(missing, needed=True)
        return list(zip(missing, futures, strict=True))

    def finish_keeping(self, begun: Keeping) -> None:
        """Wait for a range to be kept as far as there is room."""
        parts_of: dict[int, tuple[FileSegment, dict[int, Data]]] = {}
        for (piece, unit, _, _), future in begun:
            parts_of.setdefault(id(piece), (piece, {}))[1][unit] = future.result()
        for piece, parts in parts_of.values():
            if self._copy is None or piece.data is not None:
                continue
            self._copy.keep(piece, parts)

    def held_bytes(self) -> tuple[int, int | None]:
        """Return the bytes of this version that lie in memory and in the local copy now, None without one."""
        held = self._engine.cache.holds
        memory = sum(
            size
            for piece, unit, _, size in self._units(0, self.size_bytes)
            if piece.data is not None or held((piece.key, unit))
        )
        return memory, self._copy.held_bytes() if self._copy is not None else None

    def is_cached(self) -> bool:
        """Return whether no byte need come from the store: memory, the local copy or the kernel has them."""
        return all(
            piece.data is not None
            or self._engine.cache.holds((piece.key, unit))
            or self._engine.cache.is_served((piece.key, unit))
            or (self._copy is not None and self._copy.has_whole(piece, unit))
            for piece, unit, _, _ in self._units(0, self.size_bytes)
        )

    def forget(self) -> int:
        """Drop this version's blocks from memory; return their bytes."""
        keys = [(p.key, u) for p, u, _, _ in self._units(0, self.size_bytes) if p.data is None]
        return self._engine.cache.drop(keys)

    def verify_copy(self) -> None:
        """Compare the local copy with its checksums in the background, unless another is being compared."""
        if self._copy is not None and self._copy.copy.comparing.acquire(blocking=False):
            self._copy.copy.acquire()
            self._engine.local_pool.submit(self._verify_held)

    def _verify_held(self) -> None:
        assert self._copy is not None
        try:
            self._copy.verify()
        finally:
            self._copy.copy.comparing.release()
            self._copy.copy.release()

    def _is_kept(self, wanted: Wanted) -> bool:
        piece, unit, _, _ = wanted
        return self._copy is not None and self._copy.is_sound(piece, unit)

    def _units(self, offset: int, size_bytes: int) -> Iterator[Wanted]:
        """Yield piece, unit, first byte within the unit, and bytes, in the order of the file."""
        end = min(offset + size_bytes, self.size_bytes)
        at = max(0, bisect.bisect_right(self._starts, offset) - 1)
        while offset < end:
            piece = self._pieces[at]
            unit_bytes = piece.layout.unit_bytes
            stop = min(end, piece.start + piece.size_bytes)
            while offset < stop:
                unit, start = divmod(offset - piece.start + piece.before_bytes, unit_bytes)
                size = min(unit_bytes - start, stop - offset)
                yield piece, unit, start, size
                offset += size
            at += 1


def _speculative(engine: ReadEngine, size_bytes: int) -> SpeculativeReads | None:
    block = engine.read_block
    wide = engine.longest_read // block * block if block else 0
    if wide <= block:
        return None
    most_bytes = 3 * engine.cache.capacity_bytes // 4
    return SpeculativeReads(block, wide, size_bytes, most_bytes=most_bytes, budget=engine.budget)


def _missing(path: str) -> Exception:
    return IntegrityError(
        f"object {path!r} is missing though a manifest names it; restore the file from another copy"
    )
