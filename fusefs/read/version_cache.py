"""Blocks of one version in memory or in its local copy, and calls that fetch blocks to keep them there."""

from concurrent.futures import Future

from fusefs.cache.block_cache import Data
from fusefs.cache.local_copy import LocalCopy
from fusefs.format.file_segments import FileSegment, FileUnits, UnitPart
from fusefs.read.unit_fetcher import Fetcher
from fusefs.read.unit_source import ReadEngine
from omniload.base.errors import StateError
from omniload.base.log import get_logger

__all__ = ["Keeping", "VersionCache"]

_LOG = get_logger(__name__)

Keeping = list[tuple[UnitPart, Future[Data]]]
"""Units that are being fetched into the place where they are kept."""


class VersionCache:
    """The blocks of one version in the caches of a process. Safe in threads.

    Args:
        engine: Pools, and the memory cache.
        units: Units of the version.
        copy: Its local copy, if there is a disk cache.
        fetcher: Fetches missing units.
    """

    def __init__(
        self, engine: ReadEngine, units: FileUnits, copy: LocalCopy | None, fetcher: Fetcher
    ) -> None:
        self._engine = engine
        self._units = units
        self.copy = copy
        """Local copy of the version, if there is a disk cache."""
        self._fetcher = fetcher

    def held_bytes(self) -> tuple[int, int | None]:
        """Return the bytes that are in memory and in the local copy now; the second is None without a copy."""
        held = self._engine.cache.holds
        memory = sum(
            size
            for piece, unit, _, size in self._units.all()
            if piece.data is not None or held((piece.key, unit))
        )
        return memory, self.copy.held_bytes() if self.copy is not None else None

    def is_complete(self) -> bool:
        """Return whether no byte has to come from the store: memory, the local copy or the kernel has them."""
        return all(
            piece.data is not None
            or self._engine.cache.holds((piece.key, unit))
            or self._engine.cache.is_served((piece.key, unit))
            or (self.copy is not None and self.copy.has_whole(piece, unit))
            for piece, unit, _, _ in self._units.all()
        )

    def keep(self, offset: int, size_bytes: int) -> None:
        """Fetch a range into the local copy if there is one, otherwise into memory, and wait for it.

        Units of the copy are compared with their checksums once, instead of being read again.
        """
        self.finish_keeping(self.start_keeping(offset, size_bytes))

    def start_keeping(self, offset: int, size_bytes: int) -> Keeping:
        """Begin a ``keep``; pass the result to ``finish_keeping``."""
        copy = self.copy
        missing = [
            part
            for part in self._units.of(offset, size_bytes)
            if copy is None or not copy.is_sound(part[0], part[1])
        ]
        # Mark the units as needed: otherwise units that the kernel has would be skipped, and never reach the copy.
        futures = self._fetcher.fetch(missing, needed=True)
        return list(zip(missing, futures, strict=True))

    def finish_keeping(self, begun: Keeping) -> None:
        """Wait until a range is kept, as far as there is room."""
        parts_of: dict[int, tuple[FileSegment, dict[int, Data]]] = {}
        for (piece, unit, _, _), future in begun:
            parts_of.setdefault(id(piece), (piece, {}))[1][unit] = future.result()
        for piece, parts in parts_of.values():
            if self.copy is None or piece.data is not None:
                continue
            self.copy.keep(piece, parts)

    def forget(self) -> int:
        """Drop the version's blocks from memory; return their bytes."""
        keys = [(piece.key, unit) for piece, unit, _, _ in self._units.all() if piece.data is None]
        return self._engine.cache.drop(keys)

    def verify_soon(self) -> None:
        """Compare the local copy with its checksums in the background, unless another copy is being compared."""
        # One at a time, because comparing reads the whole copy, and other readers would wait for the disk.
        if self.copy is not None and self.copy.copy.comparing.acquire(blocking=False):
            self.copy.copy.acquire()
            try:
                self._engine.local_pool.submit(_verify, self.copy)
            # The pool is closed, or the system gives it no thread: the open that triggered this continues.
            except (StateError, RuntimeError) as error:
                _release(self.copy)
                _LOG.debug("%s is not compared: %s", self.copy.version.name, error)


def _verify(copy: LocalCopy) -> None:
    try:
        copy.verify()
    finally:
        _release(copy)


def _release(copy: LocalCopy) -> None:
    # One thread takes this lock and another releases it, so it cannot be reentrant.
    copy.copy.comparing.release()
    copy.copy.release()
