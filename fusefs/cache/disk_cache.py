"""Local copies of versions of files: on a disk, under a hard cap, never used without their checksum.

Below the memory cache and above the store. A copy is a plain sparse file with every unit at
its place, so one that holds all units is the file, and may be read without us.
"""

import threading
from collections.abc import Sequence
from pathlib import Path

from fusefs.cache.copy_state import CopyState, Span
from fusefs.cache.disk_directory import CopyFiles, DiskDirectory, Stamp
from fusefs.cache.disk_format import CopyVersion, decode_map, footprint, room_for
from fusefs.cache.eviction import Ledger
from fusefs.config import FilesConfig
from fusefs.format.manifest import unit_checksum
from fusefs.metrics.counters import Traffic
from omniload.base.log import get_logger

__all__ = ["DiskCache", "DiskCopy", "disk_cache_of"]

_LOG = get_logger(__name__)


class DiskCache:
    """All copies in one directory. Safe in threads; its lock is never held while data is read or written.

    Args:
        directory: Made if it is not there; used by one process at a time.
        capacity_bytes: Most bytes on the disk.
        traffic: Counts evictions and errors.

    Raises:
        ConfigError, StateError: As ``DiskDirectory``.
    """

    def __init__(self, directory: str, capacity_bytes: int, traffic: Traffic | None = None) -> None:
        self._directory = DiskDirectory(directory)
        self._traffic = traffic or Traffic()
        self._lock = threading.Lock()
        self._stored = threading.Condition(self._lock)
        self._ledger = Ledger(capacity_bytes)
        self._copies: dict[str, CopyState] = {}
        self._trusted: dict[str, Stamp] = {}
        """Copies that were found whole by this process, and how their data file looked then."""
        self._writable = True
        self.comparing = threading.Lock()
        """Held while a copy is compared in the background: one at a time, so that readers get on."""
        for name, size_bytes in self._directory.found():
            self._ledger.charge(name, size_bytes)
        with self._lock:
            # A directory filled under a larger cap is cut to this one.
            aside = self._evict(self._ledger.make_room("", 0) or [])
        _remove(aside)

    @property
    def capacity_bytes(self) -> int:
        """Most bytes on the disk."""
        return self._ledger.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all copies, those being written included; never above the capacity."""
        return self._ledger.used_bytes

    @property
    def is_writable(self) -> bool:
        """Whether units are still stored: no longer once the disk refused one."""
        return self._writable

    def open(self, version: CopyVersion) -> "DiskCopy":
        """Return the copy of a version, whether any of it is here or not."""
        name = version.name
        with self._lock:
            copy = self._copies.get(name)
            if copy is None:
                copy = self._copies[name] = self._loaded(version, name)
            copy.holders += 1
            self._ledger.touch(name)
        return DiskCopy(self, copy)

    def drop(self, version: CopyVersion) -> int:
        """Forget the copy of a version and return the bytes it took; an open descriptor keeps its bytes."""
        with self._lock:
            size_bytes = self._ledger.size_of(version.name)
            aside = self._forgotten(version.name)
        _remove(aside)
        return size_bytes

    def close(self) -> None:
        """Let the directory go."""
        with self._lock:
            self._writable = False
            for copy in self._copies.values():
                if copy.files is not None:
                    copy.files.retire()
                    copy.files = None
                copy.clear()
            self._copies.clear()
        self._directory.close()

    # For DiskCopy

    def read(self, copy: CopyState, spans: Sequence[Span]) -> dict[int, memoryview]:
        """Return those of adjacent units that are here and whole; one that is damaged is dropped."""
        files = self._borrowed(copy)
        if files is None:
            return {}
        start, stop = spans[0].offset, spans[-1].offset + spans[-1].size_bytes
        wanted = [int(copy.checksums_U[span.unit]) for span in spans]
        try:
            data = memoryview(files.read(start, stop - start))
        except OSError as error:
            _LOG.warning("disk cache: %s cannot be read: %s", copy.name, error)
            data = memoryview(b"")
        found = {}
        for span, checksum in zip(spans, wanted, strict=True):
            part = data[span.offset - start :][: span.size_bytes]
            if checksum and unit_checksum(part) == checksum:
                found[span.unit] = part
        with self._lock:
            files.release()
            if copy.files is files:
                copy.verified_U[list(found)] = True
                for span, checksum in zip(spans, wanted, strict=True):
                    if checksum and span.unit not in found:
                        self._drop_unit(copy, files, span)
        self._note_if_whole(copy)
        return found

    def store(self, copy: CopyState, span: Span, data: bytes | memoryview) -> bool:
        """Keep a unit, if it fits and the disk takes it; never raises for the disk's sake.

        Waits where somebody else is storing the same unit.
        """
        files, aside = self._reserve(copy, span)
        _remove(aside)
        if files is None:
            return bool(copy.checksums_U[span.unit])
        # 0 says that a unit is missing; one whose checksum it is will be fetched each time.
        checksum = unit_checksum(data) or 1
        try:
            files.write(span.offset, data)
            files.mark(span.unit, checksum)
        except OSError as error:
            self._refused(error)
            checksum = 0
        with self._lock:
            files.release()
            self._stored.notify_all()
            if copy.files is files:
                copy.storing.discard(span.unit)
                copy.checksums_U[span.unit] = checksum
                copy.verified_U[span.unit] = bool(checksum)
                if not checksum:
                    copy.damaged.add(span.unit)
        self._note_if_whole(copy)
        return bool(checksum)

    def descriptor(self, copy: CopyState, *, first: bool) -> int | None:
        """Open the data of a copy that is whole and as this process found it; else None."""
        with self._lock:
            trusted, files = self._trusted.get(copy.name), copy.files
            if trusted is None or files is None or not copy.checksums_U.all():
                return None
            if files.stamp() != trusted:
                # Somebody else wrote to it: every unit is to be compared again.
                self._trusted.pop(copy.name)
                copy.verified_U[:] = False
                return None
            try:
                descriptor = files.reopened()
            except OSError:
                return None
            if first:
                self._ledger.pin(copy.name)
            return descriptor

    def release(self, copy: CopyState, *, pinned: bool) -> None:
        """Count a holder less."""
        with self._lock:
            if pinned:
                self._ledger.unpin(copy.name)
            copy.holders -= 1
            if not copy.holders and self._copies.get(copy.name) is copy:
                del self._copies[copy.name]
                if copy.files is not None:
                    copy.files.retire()
                    copy.files = None

    def acquire(self, copy: CopyState) -> None:
        """Count a holder more."""
        with self._lock:
            copy.holders += 1

    # Inside

    def _loaded(self, version: CopyVersion, name: str) -> CopyState:
        copy = CopyState.empty(version)
        if name not in self._ledger:
            return copy
        opened = self._directory.open(version)
        checksums = decode_map(opened[1], version) if opened is not None else None
        if opened is None or checksums is None:
            _remove(self._forgotten(name))
            return copy
        copy.files, copy.checksums_U = opened[0], checksums
        if self._trusted.get(name) == copy.files.stamp():
            copy.verified_U = checksums != 0
        return copy

    def _reserve(self, copy: CopyState, span: Span) -> tuple[CopyFiles | None, list[Path]]:
        """Make room for a unit and files to hold it; borrowed files, or None where it is not to be written."""
        with self._lock:
            self._stored.wait_for(lambda: span.unit not in copy.storing)
            # What is no longer open here may be open anew: files have one state at a time.
            is_current = self._copies.get(copy.name) is copy
            if not self._writable or not is_current or copy.checksums_U[span.unit]:
                return None, []
            size_bytes = 0 if span.unit in copy.damaged else room_for(span.offset, span.size_bytes)
            if copy.files is None:
                size_bytes += footprint(copy.version.num_units)
            leaving = self._ledger.make_room(copy.name, size_bytes)
            if leaving is None:
                return None, []
            aside = self._evict(leaving)
            self._traffic.evicted("disk", len(leaving))
            if copy.files is None:
                try:
                    copy.files = self._directory.make(copy.version)
                except OSError as error:
                    self._refused(error)
                    return None, aside
            self._ledger.charge(copy.name, size_bytes)
            self._ledger.touch(copy.name)
            copy.damaged.discard(span.unit)
            copy.storing.add(span.unit)
            copy.files.acquire()
            return copy.files, aside

    def _evict(self, names: list[str]) -> list[Path]:
        return [path for name in names for path in self._forgotten(name)]

    def _forgotten(self, name: str) -> list[Path]:
        self._ledger.forget(name)
        self._trusted.pop(name, None)
        copy = self._copies.get(name)
        if copy is not None:
            if copy.files is not None:
                copy.files.retire()
                copy.files = None
            copy.clear()
        return self._directory.set_aside(name)

    def _drop_unit(self, copy: CopyState, files: CopyFiles, span: Span) -> None:
        if not copy.checksums_U[span.unit]:
            return  # another reader met the same damage
        self._traffic.failed("disk")
        copy.checksums_U[span.unit] = 0
        copy.verified_U[span.unit] = False
        self._trusted.pop(copy.name, None)
        copy.damaged.add(span.unit)
        _LOG.warning("disk cache: unit %d of %s is damaged and dropped", span.unit, copy.name)
        try:
            files.mark(span.unit, 0)
        except OSError as error:
            _LOG.debug("disk cache: %s stays marked, and fails again: %s", copy.name, error)

    def _note_if_whole(self, copy: CopyState) -> None:
        with self._lock:
            if copy.files is not None and not copy.storing and copy.verified_U.all():
                self._trusted[copy.name] = copy.files.stamp()

    def _borrowed(self, copy: CopyState) -> CopyFiles | None:
        with self._lock:
            if copy.files is not None:
                copy.files.acquire()
                self._ledger.touch(copy.name)
            return copy.files

    def _refused(self, error: OSError) -> None:
        self._traffic.failed("disk")
        if self._writable:
            self._writable = False
            _LOG.warning(
                "disk cache: the disk refuses to be written (%s); what is cached is still read, "
                "nothing is added until the next start",
                error,
            )


class DiskCopy:
    """One holder's view of a copy."""

    def __init__(self, cache: DiskCache, copy: CopyState) -> None:
        self._cache = cache
        self._copy = copy
        self.comparing = cache.comparing
        """Taken by one thread and let go by another: by the task of the background that compares."""
        self._lent = False
        self._open = True

    @property
    def is_whole(self) -> bool:
        """Whether every unit is here."""
        return bool(self._copy.checksums_U.all())

    def has(self, unit: int) -> bool:
        """Return whether a unit is here, so far as its map says. Never waits."""
        return bool(self._copy.checksums_U[unit])

    def is_verified(self, unit: int) -> bool:
        """Return whether this process has written or compared a unit that is here."""
        return bool(self._copy.verified_U[unit])

    def read(self, spans: Sequence[Span]) -> dict[int, memoryview]:
        """Return those of adjacent units that are here and whole; one that is damaged is dropped."""
        return self._cache.read(self._copy, spans)

    def store(self, span: Span, data: bytes | memoryview) -> bool:
        """Keep a unit; return whether it is here now. Never raises for the disk's sake."""
        return self._cache.store(self._copy, span, data)

    def descriptor(self) -> int | None:
        """Open a copy that is whole and verified, for reading; else None. Not evicted before ``close``."""
        descriptor = self._cache.descriptor(self._copy, first=not self._lent)
        self._lent = self._lent or descriptor is not None
        return descriptor

    def acquire(self) -> None:
        """Keep the copy for a task of the background, until ``release``."""
        self._cache.acquire(self._copy)

    def release(self) -> None:
        """End an ``acquire``."""
        self._cache.release(self._copy, pinned=False)

    def close(self) -> None:
        """End this view."""
        if self._open:
            self._open = False
            self._cache.release(self._copy, pinned=self._lent)


def disk_cache_of(config: FilesConfig, traffic: Traffic) -> DiskCache | None:
    """Open the disk cache that is configured; None where there is none.

    Raises:
        ConfigError, StateError: As ``DiskDirectory``.
    """
    chosen = config.disk_cache
    return None if chosen is None else DiskCache(chosen.directory, chosen.capacity, traffic)


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
