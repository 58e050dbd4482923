"""Bringing units into memory: from a local copy where it has them, else from the store, verified."""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from fusefs.base.huge_pages import LARGE_BYTES
from fusefs.cache.block_cache import Block, BlockCache, Data
from fusefs.cache.local_copy import LocalCopy, runs_of
from fusefs.format.file_segments import FileSegment, check_unit
from fusefs.format.layout import UnitRun
from fusefs.metrics.counters import Traffic
from fusefs.read.speculation import SpeculationBudget
from fusefs.stores.protocol import Store
from omniload.base.errors import IntegrityError

__all__ = ["Fetcher", "Placement", "ReadEngine", "Wanted"]

Wanted = tuple[FileSegment, int, int, int]
"""Piece, unit, first byte wanted within the unit, and bytes wanted."""
Placement = Mapping[int, list[tuple[int, memoryview]]]
"""Unit to the buffers that want bytes of it, each from a byte within the unit on."""
_Missing = dict[int, tuple[FileSegment, dict[int, Block | None]]]


@dataclass(frozen=True, slots=True)
class ReadEngine:
    """What all readers of a process share."""

    store: Store
    pool: ThreadPoolExecutor
    """Reads the store, and writes what it read to local copies."""
    local_pool: ThreadPoolExecutor
    """Reads local copies: a slow store must not keep what lies here waiting."""
    cache: BlockCache
    traffic: Traffic
    longest_read: int
    read_ahead: int
    read_block: int = 0
    budget: SpeculationBudget | None = None


class Fetcher:
    """Fetches units of one version of a file. Safe in threads.

    Args:
        engine: Pools, cache and store.
        copy: The version's local copy, where there is a disk cache.
        when_missing: Says what a missing object means.
        when_read: Called after each read of the store; raises where it may be of another version.
    """

    def __init__(
        self,
        engine: ReadEngine,
        copy: LocalCopy | None,
        *,
        when_missing: Callable[[str], Exception],
        when_read: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._copy = copy
        self._when_missing = when_missing
        self._when_read = when_read or _believe

    def fetch(
        self, wanted: Iterable[Wanted], *, needed: bool, ahead: Iterable[Wanted] = ()
    ) -> list[Future[Data]]:
        """Claim units, send the missing ones to the pools, return the futures of all of them.

        Args:
            wanted: In the order of the file.
            needed: Whether somebody waits for them. If not, what the kernel has is passed over,
                fetching ends where the cache is full of blocks on their way, and the futures of
                the rest are left out.
            ahead: Units around those wanted that nobody waits for: they share their requests,
                and their futures are left out.
        """
        mine: _Missing = {}
        futures = self._claim(wanted, mine, needed=needed)
        self._claim(ahead, mine, needed=False)
        for piece, blocks in mine.values():
            self._send(piece, blocks)
        return futures

    def _claim(
        self, wanted: Iterable[Wanted], mine: _Missing, *, needed: bool
    ) -> list[Future[Data]]:
        """Return the futures of units, and add to ``mine`` those that are to be fetched."""
        futures: list[Future[Data]] = []
        hits = misses = hit_bytes = 0
        for piece, unit, _, wanted_bytes in wanted:
            if (data := piece.cached_unit(unit)) is not None:
                futures.append(Future())
                futures[-1].set_result(data)
                continue
            key, size = (piece.key, unit), piece.layout.unit_size(unit, piece.stored_bytes)
            if not needed and self._engine.cache.is_served(key):
                continue
            block, to_fetch = self._engine.cache.claim(key, size)
            # The cache is full of blocks on their way: this one goes past it, or not at all.
            uncached = Block(size) if block is None else None
            if uncached is not None and not needed:
                break
            block = block or uncached
            assert block is not None
            futures.append(block.data)
            if to_fetch or uncached is not None:
                _, blocks = mine.setdefault(id(piece), (piece, {}))
                blocks[unit] = uncached
                misses += 1
            elif block.data.done():
                hits, hit_bytes = hits + 1, hit_bytes + wanted_bytes
            else:
                misses += 1
        if needed:
            self._engine.traffic.hit("memory", hits, hit_bytes)
            self._engine.traffic.missed("memory", misses)
        return futures

    def fill(self, piece: FileSegment, targets: Placement) -> Iterator[Future[None]]:
        """Copy units into buffers, past the cache; yield one future per read."""
        local, remote = self._parted(piece, sorted(targets))
        for units in runs_of(local, piece.layout.unit_bytes, self._engine.longest_read):
            yield self._engine.local_pool.submit(self._fill_from_copy, piece, units, targets)
        for run in self._runs(piece, remote):
            self._hold()
            yield self._engine.pool.submit(self._fill_from_store, piece, run, targets)

    def _send(self, piece: FileSegment, blocks: dict[int, Block | None]) -> None:
        local, remote = self._parted(piece, sorted(blocks))
        for units in runs_of(local, piece.layout.unit_bytes, self._engine.longest_read):
            self._hold()
            self._engine.local_pool.submit(self._from_copy, piece, units, blocks)
        self._send_to_store(piece, remote, blocks)

    def _send_to_store(
        self, piece: FileSegment, units: list[int], blocks: Mapping[int, Block | None]
    ) -> None:
        for run in self._runs(piece, units):
            self._hold()
            self._engine.pool.submit(self._from_store, piece, run, blocks)

    def _parted(self, piece: FileSegment, units: Iterable[int]) -> tuple[list[int], list[int]]:
        """Part units into those the local copy has and those the store must give."""
        if self._copy is None or piece.data is not None:
            return [], list(units)
        local: list[int] = []
        remote: list[int] = []
        for unit in units:
            (local if self._copy.has_whole(piece, unit) else remote).append(unit)
        self._engine.traffic.missed("disk", len(remote))
        return local, remote

    def _runs(self, piece: FileSegment, units: list[int]) -> Iterator[UnitRun]:
        longest = self._engine.longest_read
        return piece.layout.runs(units, piece.stored_bytes, longest_bytes=longest)

    def _from_copy(
        self, piece: FileSegment, units: list[int], blocks: Mapping[int, Block | None]
    ) -> None:
        waiting = list(units)
        try:
            found = self._read_copy(piece, units)
            self._deliver(piece, found, {}, blocks)
            # What was damaged or evicted since it was looked for.
            waiting = [unit for unit in units if unit not in found]
            self._send_to_store(piece, waiting, blocks)
        # Whatever happened, waiting readers must get it; they raise it.
        except BaseException as error:  # noqa: BLE001
            self._deliver(piece, {}, dict.fromkeys(waiting, error), blocks)
        finally:
            self._let_go()

    def _from_store(
        self, piece: FileSegment, run: UnitRun, blocks: Mapping[int, Block | None]
    ) -> None:
        good: dict[int, Data] = {}
        failed: dict[int, BaseException] = {}
        try:
            for unit, part in self._read_store(piece, run):
                try:
                    check_unit(piece, unit, part)
                except IntegrityError as error:
                    failed[unit] = error
                else:
                    good[unit] = part
        except BaseException as error:  # noqa: BLE001 -- as above
            good, failed = {}, dict.fromkeys(run.units, error)
        self._deliver(piece, good, failed, blocks)
        self._keep(piece, good)
        self._let_go()

    def _deliver(
        self,
        piece: FileSegment,
        good: Mapping[int, Data],
        failed: Mapping[int, BaseException],
        blocks: Mapping[int, Block | None],
    ) -> None:
        filled: dict[Hashable, Data] = {}
        for unit, part in good.items():
            if (uncached := blocks[unit]) is None:
                filled[piece.key, unit] = part
            else:
                uncached.data.set_result(part)
        self._engine.cache.fill(filled)
        for unit, reason in failed.items():
            if isinstance(reason, IntegrityError):
                self._engine.traffic.failed("store")
            if (uncached := blocks[unit]) is None:
                self._engine.cache.fail((piece.key, unit), reason)
            else:
                uncached.data.set_exception(reason)

    def _fill_from_copy(self, piece: FileSegment, units: list[int], targets: Placement) -> None:
        found = self._read_copy(piece, units)
        _place(found, targets)
        for run in self._runs(piece, [unit for unit in units if unit not in found]):
            self._hold()
            self._fill_from_store(piece, run, targets)

    def _fill_from_store(self, piece: FileSegment, run: UnitRun, targets: Placement) -> None:
        try:
            if piece.data is not None:
                _place({unit: piece.cached_unit(unit) or b"" for unit in run.units}, targets)
                return
            parts = dict(self._read_store(piece, run))
            for unit, part in parts.items():
                check_unit(piece, unit, part)
            _place(parts, targets)
            self._keep(piece, parts)
        finally:
            self._let_go()

    def _read_copy(self, piece: FileSegment, units: list[int]) -> dict[int, memoryview]:
        assert self._copy is not None
        found = self._copy.read(piece, units)
        self._engine.traffic.hit("disk", len(found), sum(map(len, found.values())))
        self._engine.traffic.missed("disk", len(units) - len(found))
        return found

    def _read_store(self, piece: FileSegment, run: UnitRun) -> Iterator[tuple[int, memoryview]]:
        path = piece.path_of(run.object_number)
        began_s = time.perf_counter()
        try:
            store = self._engine.store
            read = store.read_large if run.size_bytes >= LARGE_BYTES else store.read
            data = read(path, run.object_offset, run.size_bytes)
        except FileNotFoundError as error:
            self._engine.traffic.failed("store")
            raise self._when_missing(path) from error
        except IntegrityError:
            self._engine.traffic.failed("store")
            self._when_read()  # it may be cut short because another version is there
            raise
        except BaseException:
            self._engine.traffic.failed("store")
            raise
        self._engine.traffic.store_read(len(data), time.perf_counter() - began_s)
        self._when_read()
        # Any caller that gets a view of it must not change what others read.
        view, unit_bytes = memoryview(data).toreadonly(), piece.layout.unit_bytes
        for i, unit in enumerate(run.units):
            yield unit, view[i * unit_bytes : (i + 1) * unit_bytes]

    def _keep(self, piece: FileSegment, parts: Mapping[int, Data]) -> None:
        if self._copy is not None:
            self._copy.keep(piece, parts)

    def _hold(self) -> None:
        if self._copy is not None:
            self._copy.copy.acquire()

    def _let_go(self) -> None:
        if self._copy is not None:
            self._copy.copy.release()


def _believe() -> None:
    """Have nothing against what was read: objects are written once."""


def _place(parts: Mapping[int, Data], targets: Placement) -> None:
    for unit, part in parts.items():
        for start, buffer in targets[unit]:
            buffer[:] = part[start : start + len(buffer)]
