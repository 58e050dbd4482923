"""Reading files by units: from memory at once, from the store in parallel, verified.

``try_read`` answers from memory or not at all and never waits; ``start`` sends what is
missing to the pool, units of one object in one ranged read, and returns what to wait
for. A mount calls both from its loop, so a hit costs no thread.
"""

import bisect
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fusefs.cache import Block, BlockCache, Data
from fusefs.layout import MAX_UNIT_BYTES, StripeLayout, UnitRun
from fusefs.manifest import MAGIC, Segment, unit_checksum
from fusefs.readahead import ReadAhead
from fusefs.stores.protocol import Store
from omniload.base.errors import IntegrityError

__all__ = ["FileReader", "Piece", "ReadEngine"]


@dataclass(frozen=True, slots=True)
class ReadEngine:
    """What all readers of a process share."""

    store: Store
    pool: ThreadPoolExecutor
    cache: BlockCache
    longest_read: int
    read_ahead: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A range of a file: one segment, or a whole plain file."""

    start: int
    """First byte within the file."""
    size_bytes: int
    """Bytes of the file that lie here."""
    layout: StripeLayout
    key: str
    """Names the bytes for the cache: other bytes, other key."""
    path_of: Callable[[int], str]
    """Path of an object by its number."""
    checksums_U: NDArray[np.uint64] | None = None
    """One per unit from ``before_bytes`` on; None for a plain file."""
    before_bytes: int = 0
    """Bytes of the objects ahead of the range that the file shows."""
    after_bytes: int = 0
    """Bytes of the objects behind it."""
    data: bytes | None = None
    """The bytes themselves, for a file that lies in its manifest."""

    @classmethod
    def of_segment(cls, segment: Segment, start: int) -> "Piece":
        """Return the piece of a file that a segment is."""
        return cls(
            start=start,
            size_bytes=segment.size_bytes,
            layout=segment.layout,
            key=segment.segment_id,
            path_of=segment.object_path,
            checksums_U=segment.checksums_U,
            before_bytes=segment.before_bytes,
            after_bytes=segment.after_bytes,
        )

    @property
    def stored_bytes(self) -> int:
        """Bytes of all its objects together, by which units lie."""
        return self.before_bytes + self.size_bytes + self.after_bytes

    @classmethod
    def of_bytes(cls, data: bytes, start: int) -> "Piece":
        """Return the piece of a file whose bytes are at hand."""
        layout = StripeLayout(MAX_UNIT_BYTES, 1)
        return cls(start=start, size_bytes=len(data), layout=layout, key="", path_of=str, data=data)

    def unit_at_hand(self, unit: int) -> bytes | None:
        """Return a unit that needs no fetching."""
        if self.data is None:
            return None
        unit_bytes = self.layout.unit_bytes
        return self.data[unit * unit_bytes : (unit + 1) * unit_bytes]


class FileReader:
    """Random access to a file's bytes as they were when it was opened. Safe in threads."""

    def __init__(
        self,
        engine: ReadEngine,
        pieces: list[Piece],
        *,
        when_missing: Callable[[str], Exception] | None = None,
    ) -> None:
        """Read ``pieces``; ``when_missing`` says what a missing object means."""
        self._engine = engine
        self._pieces = [piece for piece in pieces if piece.size_bytes]
        self._starts = [piece.start for piece in self._pieces]
        self._ahead = ReadAhead(largest_bytes=engine.read_ahead)
        self._when_missing = when_missing or _missing
        self.size_bytes = sum(piece.size_bytes for piece in self._pieces)

    def try_read(self, offset: int, size_bytes: int) -> bytes | memoryview | None:
        """Return the bytes if all of them are in memory; never waits."""
        parts = []
        for piece, unit, start, size in self._units(offset, size_bytes):
            data: Data | None = piece.unit_at_hand(unit)
            if data is None:
                data = self._engine.cache.get((piece.key, unit))
            if data is None:
                return None
            parts.append(memoryview(data)[start : start + size])
        return parts[0] if len(parts) == 1 else b"".join(parts)

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
        futures = self._fetch(offset, size_bytes, needed=True)
        ahead = self._ahead.observe(process, offset, size_bytes)
        if len(ahead):
            self._fetch(ahead.start, len(ahead), needed=False)
        return futures

    def note(self, offset: int, size_bytes: int, *, process: int = 0) -> None:
        """Tell read-ahead of a read that memory answered."""
        ahead = self._ahead.observe(process, offset, size_bytes)
        if len(ahead):
            self._fetch(ahead.start, len(ahead), needed=False)

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
        wanted: dict[int, tuple[Piece, dict[int, list[tuple[int, memoryview]]]]] = {}
        for offset, buffer in spans:
            if offset + len(buffer) > self.size_bytes:
                raise ValueError(f"{offset}+{len(buffer)} is past the end at {self.size_bytes}")
            at = 0
            for piece, unit, start, size in self._units(offset, len(buffer)):
                _, targets = wanted.setdefault(id(piece), (piece, {}))
                targets.setdefault(unit, []).append((start, buffer[at : at + size]))
                at += size
        return [
            self._engine.pool.submit(self._fill_run, piece, run, targets)
            for piece, targets in wanted.values()
            for run in piece.layout.runs(
                sorted(targets), piece.stored_bytes, longest_bytes=self._engine.longest_read
            )
        ]

    def prefetch(self, offset: int, size_bytes: int) -> list[Future[Data]]:
        """Bring a range into the cache as far as it has room; wait on the result or do not."""
        return self._fetch(offset, size_bytes, needed=False)

    def _units(self, offset: int, size_bytes: int) -> Iterator[tuple[Piece, int, int, int]]:
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

    def _fetch(self, offset: int, size_bytes: int, *, needed: bool) -> list[Future[Data]]:
        """Claim the units of a range, send the missing ones to the pool, return all their futures."""
        futures: list[Future[Data]] = []
        mine: dict[int, tuple[Piece, dict[int, Block | None]]] = {}
        for piece, unit, _, _ in self._units(offset, size_bytes):
            if (data := piece.unit_at_hand(unit)) is not None:
                futures.append(Future())
                futures[-1].set_result(data)
                continue
            size = piece.layout.unit_size(unit, piece.stored_bytes)
            block, to_fetch = self._engine.cache.claim((piece.key, unit), size)
            if block is None:
                if not needed:
                    break
                # The cache is full of blocks on their way: this one goes past it.
                block, to_fetch = Block(size), True
                cached = False
            else:
                cached = True
            futures.append(block.data)
            if to_fetch:
                _, blocks = mine.setdefault(id(piece), (piece, {}))
                blocks[unit] = None if cached else block
        for piece, blocks in mine.values():
            runs = piece.layout.runs(
                list(blocks), piece.stored_bytes, longest_bytes=self._engine.longest_read
            )
            for run in runs:
                self._engine.pool.submit(self._fetch_run, piece, run, blocks)
        return futures

    def _fetch_run(self, piece: Piece, run: UnitRun, blocks: dict[int, Block | None]) -> None:
        filled: dict[Hashable, Data] = {}
        failed: dict[int, BaseException] = {}
        try:
            data = self._read_run(piece, run)
            for unit, part in _units_of(data, run, piece.layout.unit_bytes):
                try:
                    self._verify(piece, unit, part)
                except IntegrityError as error:
                    failed[unit] = error
                    continue
                if (uncached := blocks[unit]) is None:
                    filled[piece.key, unit] = part
                else:
                    uncached.data.set_result(part)
        # Whatever happened, those who wait must hear of it; they raise it.
        except BaseException as error:  # noqa: BLE001
            failed = dict.fromkeys(run.units, error)
            filled = {}
        self._engine.cache.fill(filled)
        for unit, reason in failed.items():
            if (uncached := blocks[unit]) is None:
                self._engine.cache.fail((piece.key, unit), reason)
            else:
                uncached.data.set_exception(reason)

    def _fill_run(
        self, piece: Piece, run: UnitRun, targets: dict[int, list[tuple[int, memoryview]]]
    ) -> None:
        if piece.data is None:
            parts = dict(_units_of(self._read_run(piece, run), run, piece.layout.unit_bytes))
        else:
            parts = {unit: piece.unit_at_hand(unit) or b"" for unit in run.units}
        for unit, part in parts.items():
            self._verify(piece, unit, part)
            for start, buffer in targets[unit]:
                buffer[:] = part[start : start + len(buffer)]

    def _read_run(self, piece: Piece, run: UnitRun) -> bytes:
        path = piece.path_of(run.object_number)
        try:
            return self._engine.store.read(path, run.object_offset, run.size_bytes)
        except FileNotFoundError as error:
            raise self._when_missing(path) from error

    @staticmethod
    def _verify(piece: Piece, unit: int, data: Data) -> None:
        if piece.checksums_U is None:
            if unit == 0 and data[: len(MAGIC)] == MAGIC:
                raise IntegrityError(
                    f"{piece.path_of(0)!r} begins like a manifest and has {piece.size_bytes} bytes, "
                    "which no manifest has: it was cut short; restore it from another copy"
                )
            return
        first = piece.before_bytes // piece.layout.unit_bytes
        found, wanted = unit_checksum(data), int(piece.checksums_U[unit - first])
        if found != wanted:
            object_number, at = piece.layout.place(unit)
            raise IntegrityError(
                f"object {piece.path_of(object_number)!r}: {len(data)} bytes at {at} have checksum "
                f"{found:016x}, the manifest says {wanted:016x}; restore the file from another copy"
            )


def _units_of(data: bytes, run: UnitRun, unit_bytes: int) -> Iterator[tuple[int, Data]]:
    view = memoryview(data)
    for i, unit in enumerate(run.units):
        yield unit, view[i * unit_bytes : (i + 1) * unit_bytes]


def _missing(path: str) -> Exception:
    return IntegrityError(
        f"object {path!r} is missing though a manifest names it; restore the file from another copy"
    )
