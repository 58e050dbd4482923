"""Sources of units: a version's local copy, or the store. Each read is counted and checked here."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from fusefs.base.huge_pages import LARGE_BYTES
from fusefs.base.thread_pools import StorePool
from fusefs.cache.block_cache import BlockCache, Data
from fusefs.cache.local_copy import LocalCopy
from fusefs.format.file_segments import FileSegment
from fusefs.format.layout import UnitRun
from fusefs.metrics.counters import Traffic
from fusefs.read.speculation import SpeculationBudget
from fusefs.stores.protocol import Store
from omniload.base.errors import IntegrityError

__all__ = ["ReadEngine", "UnitSource"]


@dataclass(frozen=True, slots=True)
class ReadEngine:
    """The pools, caches and counters that all readers of a process share."""

    store: Store
    pool: StorePool
    """Pool that reads the store, and writes the bytes to local copies."""
    local_pool: StorePool
    """Pool that reads local copies, so that a slow store does not delay them."""
    cache: BlockCache
    traffic: Traffic
    longest_read: int
    read_ahead: int
    read_block: int = 0
    budget: SpeculationBudget | None = None


class UnitSource:
    """Units of one version of a file. Safe in threads; each read waits for a disk or the store.

    Args:
        engine: Pools, cache and store.
        copy: The version's local copy, if there is a disk cache.
        when_missing: Returns the error for a missing object.
        when_read: Called after each read of the store; raises if the bytes may be of another version.
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
        self._when_read = when_read or _take_all

    def parted(self, piece: FileSegment, units: Iterable[int]) -> tuple[list[int], list[int]]:
        """Divide units into those that the local copy has and those that the store must provide."""
        if self._copy is None or piece.data is not None:
            return [], list(units)
        local: list[int] = []
        remote: list[int] = []
        for unit in units:
            (local if self._copy.has_whole(piece, unit) else remote).append(unit)
        self._engine.traffic.missed("disk", len(remote))
        return local, remote

    def runs(self, piece: FileSegment, units: list[int]) -> Iterator[UnitRun]:
        """Yield the ranged reads that fetch units from the store."""
        longest = self._engine.longest_read
        return piece.layout.runs(units, piece.stored_bytes, longest_bytes=longest)

    def read_copy(self, piece: FileSegment, units: list[int]) -> dict[int, memoryview]:
        """Return the units that are whole in the local copy."""
        assert self._copy is not None
        found = self._copy.read(piece, units)
        self._engine.traffic.hit("disk", len(found), sum(map(len, found.values())))
        self._engine.traffic.missed("disk", len(units) - len(found))
        return found

    def read_store(self, piece: FileSegment, run: UnitRun) -> Iterator[tuple[int, memoryview]]:
        """Yield the units of one ranged read; their checksums are not compared yet.

        Raises:
            IntegrityError: The object is missing though it is named, or too short.
            UnavailableError: The store does not answer.
        """
        path = piece.path_of(run.object_number)
        began_s = time.perf_counter()
        try:
            store = self._engine.store
            # Separate memory gains nothing for less than a huge page.
            read = store.read_large if run.size_bytes >= LARGE_BYTES else store.read
            data = read(path, run.object_offset, run.size_bytes)
        except FileNotFoundError as error:
            self._engine.traffic.failed("store")
            raise self._when_missing(path) from error
        except IntegrityError:
            self._engine.traffic.failed("store")
            self._when_read()  # the read may be short because another version is there
            raise
        except BaseException:
            self._engine.traffic.failed("store")
            raise
        self._engine.traffic.store_read(len(data), time.perf_counter() - began_s)
        # Check after the read: bytes at a path are of one version only if two looks around them agree.
        self._when_read()
        # Read-only, so that no caller can change the bytes of others.
        view, unit_bytes = memoryview(data).toreadonly(), piece.layout.unit_bytes
        for i, unit in enumerate(run.units):
            yield unit, view[i * unit_bytes : (i + 1) * unit_bytes]

    def keep(self, piece: FileSegment, parts: Mapping[int, Data]) -> None:
        """Write units to the local copy, as far as it has room."""
        if self._copy is not None:
            self._copy.keep(piece, parts)

    def acquire(self) -> None:
        """Keep the local copy for a task of a pool, until ``release``."""
        if self._copy is not None:
            self._copy.copy.acquire()

    def release(self) -> None:
        """End an ``acquire``."""
        if self._copy is not None:
            self._copy.copy.release()


def _take_all() -> None:
    """Accept every read, because objects are written once."""
