"""Local copies of versions of files: on a disk, under a hard cap, never used without a checksum.

They are below the memory cache and above the store. A copy is a plain sparse file with every unit at
its place. So a copy with all units equals the file, and may be read without this process.
"""

import threading
from collections.abc import Sequence
from pathlib import Path

from fusefs.cache.copy_state import CopyState, Ledger, Span
from fusefs.cache.disk_directory import CopyFiles, DiskDirectory, Stamp
from fusefs.cache.disk_format import CopyVersion, decode_map, footprint, room_for
from fusefs.config import FilesConfig
from fusefs.format.manifest import unit_checksum
from fusefs.metrics.counters import Traffic
from omniload.base.log import get_logger

__all__ = ["DiskCache", "DiskCopy", "disk_cache_of"]

_LOG = get_logger(__name__)


class DiskCache:
    """All copies in one directory. Safe in threads; its lock is never held while data is read or written.

    Args:
        directory: Created if missing; used by one process at a time.
        capacity_bytes: Most bytes on the disk.
        traffic: Counts evictions and errors.

    Raises:
        ConfigError, StateError: Same as for ``DiskDirectory``.
    """

    def __init__(self, directory: str, capacity_bytes: int, traffic: Traffic | None = None) -> None:
        self._stored = threading.Condition()
        """Condition on the lock that guards ``_table``; notified when a unit was stored."""
        ledger = Ledger(capacity_bytes)
        self._table = _CopyTable(DiskDirectory(directory), ledger, traffic or Traffic())
        self._comparing = threading.Lock()
        """Lock held while a copy is compared in the background: one at a time, so that readers are not delayed."""
        for name, size_bytes in self._table.directory.found():
            ledger.charge(name, size_bytes)
        with self._stored:
            # If the directory was filled under a larger cap, evict down to this one.
            aside = [
                path for old in ledger.make_room("", 0) or [] for path in self._table.forget(old)
            ]
        _remove(aside)

    @property
    def capacity_bytes(self) -> int:
        """Most bytes on the disk."""
        return self._table.ledger.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all copies, including units that are being written; never above the capacity."""
        return self._table.ledger.used_bytes

    @property
    def is_writable(self) -> bool:
        """Whether units are still stored; no longer once the disk refused one."""
        return self._table.is_writable

    def open(self, version: CopyVersion) -> "DiskCopy":
        """Return the copy of a version, even if no unit of it is here."""
        with self._stored:
            copy = self._table.open(version)
        return DiskCopy(self._table, self._stored, copy, self._comparing)

    def drop(self, version: CopyVersion) -> int:
        """Forget the copy of a version and return the bytes it took; an open descriptor keeps its bytes."""
        with self._stored:
            size_bytes = self._table.ledger.size_of(version.name)
            aside = self._table.forget(version.name)
        _remove(aside)
        return size_bytes

    def close(self) -> None:
        """Release the directory."""
        with self._stored:
            self._table.close()
        self._table.directory.close()


class DiskCopy:
    """One holder's view of a copy. Data is read and written here, outside the lock.

    Args:
        table: Table of all copies.
        stored: Condition on the table's lock, on which threads wait for a unit that another thread stores.
        copy: State of the copy; this holder is already counted.
        comparing: Lock of the cache's background comparison.
    """

    def __init__(
        self,
        table: "_CopyTable",
        stored: threading.Condition,
        copy: CopyState,
        comparing: threading.Lock,
    ) -> None:
        self._table = table
        self._stored = stored
        self._copy = copy
        self.comparing = comparing
        """Lock that one thread takes and another releases, the thread of the background comparison."""
        self._lent = False
        self._open = True

    @property
    def is_whole(self) -> bool:
        """Whether every unit is in the copy."""
        return bool(self._copy.checksums_U.all())

    def has(self, unit: int) -> bool:
        """Return whether a unit is in the copy, according to its map. Never waits."""
        return bool(self._copy.checksums_U[unit])

    def is_verified(self, unit: int) -> bool:
        """Return whether this process has written or compared a unit of the copy."""
        return bool(self._copy.verified_U[unit])

    def read(self, spans: Sequence[Span]) -> dict[int, memoryview]:
        """Return the cached and undamaged ones of adjacent units; a damaged unit is dropped."""
        copy = self._copy
        with self._stored:
            files = copy.borrowed()
            if files is None:
                return {}
            self._table.ledger.touch(copy.name)
        start, stop = spans[0].offset, spans[-1].offset + spans[-1].size_bytes
        # Take the checksums before the read, because a unit stored in between is not the one that is read.
        wanted = [int(copy.checksums_U[span.unit]) for span in spans]
        try:
            data = memoryview(files.read(start, stop - start))
        except OSError as error:
            _LOG.warning("disk cache: %s cannot be read: %s", copy.name, error)
            data = memoryview(b"")
        found, damaged = {}, []
        for span, checksum in zip(spans, wanted, strict=True):
            part = data[span.offset - start :][: span.size_bytes]
            if checksum and unit_checksum(part) == checksum:
                found[span.unit] = part
            elif checksum:
                damaged.append(span.unit)
        with self._stored:
            files.release()
            self._table.compared(copy, files, list(found), damaged)
        return found

    def store(self, span: Span, data: bytes | memoryview) -> bool:
        """Keep a unit, if it fits and the disk takes it; return whether it is in the copy now.

        Never raises for a fault of the disk. Waits while another thread stores the same unit.
        """
        copy = self._copy
        with self._stored:
            self._stored.wait_for(lambda: span.unit not in copy.storing)
            files, aside = self._table.reserve(copy, span)
        _remove(aside)
        if files is None:
            return self.has(span.unit)
        # 0 marks a missing unit, so a unit whose checksum is 0 gets 1; it never matches, and is fetched each time.
        checksum = unit_checksum(data) or 1
        try:
            files.write(span.offset, data)
            files.mark(span.unit, checksum)
        except OSError as error:
            _refused(self._table, error)
            checksum = 0
        with self._stored:
            files.release()
            self._stored.notify_all()
            # Otherwise the copy was evicted, and perhaps made again, while this unit was written.
            if copy.files is files:
                copy.stored(span.unit, checksum)
            self._table.trust_if_whole(copy)
        return bool(checksum)

    def descriptor(self) -> int | None:
        """Open a complete copy for reading, if its files are as this process verified them; otherwise return None.

        The copy is not evicted before ``close``.
        """
        with self._stored:
            descriptor = self._table.reopened(self._copy, first=not self._lent)
        self._lent = self._lent or descriptor is not None
        return descriptor

    def acquire(self) -> None:
        """Keep the copy for a background task, until ``release``."""
        with self._stored:
            self._copy.holders += 1

    def release(self) -> None:
        """End an ``acquire``."""
        with self._stored:
            self._table.release(self._copy, pinned=False)

    def close(self) -> None:
        """End this view."""
        if self._open:
            self._open = False
            with self._stored:
                self._table.release(self._copy, pinned=self._lent)


class _CopyTable:
    """States of all copies, and the changes that each allows. Not safe in threads: its owner holds a lock.

    It reads and writes no data, but creates files and moves them away.
    """

    def __init__(self, directory: DiskDirectory, ledger: Ledger, traffic: Traffic) -> None:
        self.directory = directory
        self.copies: dict[str, CopyState] = {}
        """Copies that somebody holds, by name."""
        self.is_writable = True
        self.ledger = ledger
        self.traffic = traffic
        self._trusted: dict[str, Stamp] = {}
        """Copies that this process found complete, and the state of their data files at that time."""

    def open(self, version: CopyVersion) -> CopyState:
        """Return a copy for one more holder, loaded if nobody holds it yet."""
        copy = self.copies.get(version.name)
        if copy is None:
            copy = self.copies[version.name] = self._loaded(version, version.name)
        copy.holders += 1
        self.ledger.touch(version.name)
        return copy

    def _loaded(self, version: CopyVersion, name: str) -> CopyState:
        copy = CopyState.empty(version)
        if name not in self.ledger:
            return copy
        opened = self.directory.open(version)
        checksums = decode_map(opened[1], version) if opened is not None else None
        if opened is None or checksums is None:
            _remove(self.forget(name))
            return copy
        copy.files, copy.checksums_U = opened[0], checksums
        if self._trusted.get(name) == copy.files.stamp():
            copy.verified_U = checksums != 0
        return copy

    def compared(
        self, copy: CopyState, files: CopyFiles, sound: list[int], damaged: list[int]
    ) -> None:
        """Note the results of reading units from ``files``; damaged units are dropped."""
        if copy.files is files:
            copy.verified_U[sound] = True
            # Except units in which another reader met the same damage.
            for unit in damaged:
                if not copy.checksums_U[unit]:
                    continue
                self.traffic.failed("disk")
                copy.lost(unit)
                self._trusted.pop(copy.name, None)
                _LOG.warning("disk cache: unit %d of %s is damaged and dropped", unit, copy.name)
                try:
                    files.mark(unit, 0)
                except OSError as error:
                    _LOG.debug("disk cache: %s stays marked, fails again: %s", copy.name, error)
        self.trust_if_whole(copy)

    def reserve(self, copy: CopyState, span: Span) -> tuple[CopyFiles | None, list[Path]]:
        """Make room for a unit; return borrowed files to hold it, or None if it is not to be written.

        The second value lists files that are still to be removed.
        """
        # A copy that was closed here may have been opened again, with a new state: files have one state at a time.
        is_current = self.copies.get(copy.name) is copy
        # A refusal ends writing until the next start: a full disk would be asked again for every unit.
        if not self.is_writable or not is_current or copy.checksums_U[span.unit]:
            return None, []
        size_bytes = 0 if span.unit in copy.damaged else room_for(span.offset, span.size_bytes)
        if copy.files is None:
            size_bytes += footprint(copy.version.num_units)
        leaving = self.ledger.make_room(copy.name, size_bytes)
        if leaving is None:
            return None, []
        aside = [path for name in leaving for path in self.forget(name)]
        self.traffic.evicted("disk", len(leaving))
        if copy.files is None:
            try:
                copy.files = self.directory.make(copy.version)
            except OSError as error:
                _refused(self, error)
                return None, aside
        # Charge before a byte is written, so that the cap is never exceeded.
        self.ledger.charge(copy.name, size_bytes)
        self.ledger.touch(copy.name)
        copy.damaged.discard(span.unit)
        copy.storing.add(span.unit)
        return copy.borrowed(), aside

    def trust_if_whole(self, copy: CopyState) -> None:
        """Note a copy of which every unit was written or compared, and the state of its data file."""
        if copy.files is not None and not copy.storing and copy.verified_U.all():
            self._trusted[copy.name] = copy.files.stamp()

    def reopened(self, copy: CopyState, *, first: bool) -> int | None:
        """Open the data of a trusted copy if its file has not changed; the ``first`` descriptor pins the copy."""
        trusted, files = self._trusted.get(copy.name), copy.files
        if trusted is None or files is None or not copy.checksums_U.all():
            return None
        if files.stamp() != trusted:
            # Somebody else wrote to the file, so every unit must be compared again.
            self._trusted.pop(copy.name)
            copy.verified_U[:] = False
            return None
        try:
            descriptor = files.reopened()
        except OSError:
            return None
        if first:
            self.ledger.pin(copy.name)
        return descriptor

    def release(self, copy: CopyState, *, pinned: bool) -> None:
        """Count one holder less."""
        if pinned:
            self.ledger.unpin(copy.name)
        copy.holders -= 1
        if not copy.holders and self.copies.get(copy.name) is copy:
            del self.copies[copy.name]
            copy.retire()

    def forget(self, name: str) -> list[Path]:
        """Forget all units of a copy; return the files that are still to be removed."""
        self.ledger.forget(name)
        self._trusted.pop(name, None)
        if (copy := self.copies.get(name)) is not None:
            copy.retire()
            copy.clear()
        return self.directory.set_aside(name)

    def close(self) -> None:
        """Stop keeping and reading copies."""
        # Threads that still run find a table that accepts nothing, and files that stay open for them.
        self.is_writable = False
        for copy in self.copies.values():
            copy.retire()
            copy.clear()
        self.copies.clear()


def disk_cache_of(config: FilesConfig, traffic: Traffic) -> DiskCache | None:
    """Open the configured disk cache; None if there is none.

    Raises:
        ConfigError, StateError: Same as for ``DiskDirectory``.
    """
    chosen = config.disk_cache
    return None if chosen is None else DiskCache(chosen.directory, chosen.capacity, traffic)


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            # The cache must not make a read fail; the next start empties the folder of the remaining file.
            _LOG.info("disk cache: %s stays until the next start: %s", path, error)


def _refused(table: _CopyTable, error: OSError) -> None:
    """Store no more units, because the disk is full, or worse."""
    table.traffic.failed("disk")
    if table.is_writable:
        table.is_writable = False
        _LOG.warning(
            "disk cache: the disk refuses to be written (%s); what is cached is still read, "
            "nothing is added until the next start",
            error,
        )
