"""Fetching of units into memory, from a local copy if it has them, otherwise from the store, verified."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial

from fusefs.base.thread_pools import StorePool
from fusefs.cache.block_cache import Block, Data
from fusefs.cache.local_copy import runs_of
from fusefs.format.file_segments import FileSegment, UnitPart
from fusefs.format.layout import UnitRun
from fusefs.format.unit_check import check_unit
from fusefs.read.unit_source import ReadEngine, UnitSource
from omniload.base.errors import IntegrityError

__all__ = ["Fetcher"]

_Missing = dict[int, tuple[FileSegment, dict[int, Block | None]]]


class Fetcher:
    """Fetches units of one version of a file into the cache. Safe in threads."""

    def __init__(self, engine: ReadEngine, source: UnitSource) -> None:
        self._engine = engine
        self._source = source

    def fetch(
        self, wanted: Iterable[UnitPart], *, needed: bool, ahead: Iterable[UnitPart] = ()
    ) -> list[Future[Data]]:
        """Claim units, send the missing ones to the pools, return the futures of all of them.

        Args:
            wanted: Units in the order of the file.
            needed: Whether somebody waits for them. If not, units that the kernel has are skipped,
                fetching ends where the cache is full of blocks that are being fetched, and the futures of
                the rest are left out.
            ahead: Units around ``wanted`` that nobody waits for. They share the requests of ``wanted``,
                and their futures are left out.
        """
        mine: _Missing = {}
        futures = self._claim(wanted, mine, needed=needed)
        # Claim these after the wanted units, but send them together: units of one object share a request.
        self._claim(ahead, mine, needed=False)
        for piece, blocks in mine.values():
            self._send(piece, blocks)
        return futures

    def _claim(
        self, wanted: Iterable[UnitPart], mine: _Missing, *, needed: bool
    ) -> list[Future[Data]]:
        """Return the futures of units, and add the units to fetch to ``mine``."""
        futures: list[Future[Data]] = []
        hits = misses = hit_bytes = 0
        for piece, unit, _, wanted_bytes in wanted:
            if (data := piece.cached_unit(unit)) is not None:
                futures.append(Future())
                futures[-1].set_result(data)
                continue
            key, size = (piece.key, unit), piece.layout.unit_size(unit, piece.stored_bytes)
            block, to_fetch = self._engine.cache.claim(key, size, needed=needed)
            if block is None and not needed:
                # The kernel probably has it; only a reader that waits for it shows that the kernel dropped it.
                if self._engine.cache.is_served(key):
                    continue
                break
            # The cache is full of blocks that are being fetched, so this block bypasses it.
            uncached = Block(size) if block is None else None
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

    def _send(self, piece: FileSegment, blocks: dict[int, Block | None]) -> None:
        local, remote = self._source.parted(piece, sorted(blocks))
        for units in runs_of(local, piece.layout.unit_bytes, self._engine.longest_read):
            call = partial(self._from_copy, piece, units, blocks)
            self._submit(self._engine.local_pool, call, piece, units, blocks)
        self._send_to_store(piece, remote, blocks)

    def _send_to_store(
        self, piece: FileSegment, units: list[int], blocks: Mapping[int, Block | None]
    ) -> None:
        for run in self._source.runs(piece, units):
            call = partial(self._from_store, piece, run, blocks)
            self._submit(self._engine.pool, call, piece, run.units, blocks)

    def _submit(
        self,
        pool: StorePool,
        call: Callable[[], None],
        piece: FileSegment,
        units: Iterable[int],
        blocks: Mapping[int, Block | None],
    ) -> None:
        """Let a thread fetch units; if the pool refuses, all readers that wait for them get its error."""
        self._source.acquire()
        try:
            pool.submit(call)
        # The units are claimed, so a later reader would wait for a thread that never comes.
        except Exception as error:  # noqa: BLE001
            self._source.release()
            self._deliver(piece, {}, dict.fromkeys(units, error), blocks)

    def _from_copy(
        self, piece: FileSegment, units: list[int], blocks: Mapping[int, Block | None]
    ) -> None:
        waiting = list(units)
        try:
            found = self._source.read_copy(piece, units)
            self._deliver(piece, found, {}, blocks)
            # Units that were damaged or evicted since the first look.
            waiting = [unit for unit in units if unit not in found]
            self._send_to_store(piece, waiting, blocks)
        # Pass every error to the waiting readers, which raise it.
        except BaseException as error:  # noqa: BLE001
            self._deliver(piece, {}, dict.fromkeys(waiting, error), blocks)
        finally:
            self._source.release()

    def _from_store(
        self, piece: FileSegment, run: UnitRun, blocks: Mapping[int, Block | None]
    ) -> None:
        good: dict[int, Data] = {}
        failed: dict[int, BaseException] = {}
        try:
            for unit, part in self._source.read_store(piece, run):
                try:
                    check_unit(piece, unit, part)
                except IntegrityError as error:
                    failed[unit] = error
                else:
                    good[unit] = part
        except BaseException as error:  # noqa: BLE001 -- as above
            # Fail all of its units, because a run that broke off has answered none yet.
            good, failed = {}, dict.fromkeys(run.units, error)
        self._deliver(piece, good, failed, blocks)
        try:
            self._source.keep(piece, good)
        finally:
            self._source.release()

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
        # Fill them together, because blocks of one read are views of one memory, and are dropped together.
        self._engine.cache.fill(filled)
        for unit, reason in failed.items():
            if isinstance(reason, IntegrityError):
                self._engine.traffic.failed("store")
            if (uncached := blocks[unit]) is None:
                self._engine.cache.fail((piece.key, unit), reason)
            else:
                uncached.data.set_exception(reason)
