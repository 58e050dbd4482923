"""The state of a disk cache's copies: of each open copy, and an account of all copies that may be evicted."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fusefs.cache.disk_directory import CopyFiles
from fusefs.cache.disk_format import CopyVersion
from omniload.base.lru import Lru

__all__ = ["CopyState", "Ledger", "Span"]


@dataclass(frozen=True, slots=True)
class Span:
    """The place of a unit in a copy."""

    unit: int
    """Number within the version of the file."""
    offset: int
    """First byte within the file."""
    size_bytes: int


@dataclass(slots=True, eq=False)
class CopyState:
    """The state of one copy, shared by all its open views."""

    version: CopyVersion
    name: str
    checksums_U: NDArray[np.uint64]
    """Checksums of the units; 0 for a missing unit."""
    verified_U: NDArray[np.bool_]
    """Units whose bytes this process has written or compared."""
    files: CopyFiles | None = None
    """Files of the copy; None before the first unit is stored, and after the copy was evicted."""
    holders: int = 0
    """Number of views and tasks that have the copy open."""
    storing: set[int] = field(default_factory=set)
    """Units that are being written to the disk."""
    damaged: set[int] = field(default_factory=set)
    """Units that are not usable, but whose room on the disk is still taken, and charged."""

    @classmethod
    def empty(cls, version: CopyVersion) -> "CopyState":
        """Return the state of a copy without any unit."""
        num_units = version.num_units
        return cls(
            version, version.name, np.zeros(num_units, np.uint64), np.zeros(num_units, np.bool_)
        )

    def borrowed(self) -> CopyFiles | None:
        """Return the files for one more user, which releases them."""
        # Count the user before the lock is released, so that an eviction leaves the descriptors open.
        if self.files is not None:
            self.files.acquire()
        return self.files

    def stored(self, unit: int, checksum: int) -> None:
        """Note the outcome of writing a unit to the disk; 0: the disk refused it."""
        self.storing.discard(unit)
        self.checksums_U[unit] = checksum
        self.verified_U[unit] = bool(checksum)
        if not checksum:
            # The disk may have taken some of its pages, so their room stays charged.
            self.damaged.add(unit)

    def lost(self, unit: int) -> None:
        """Note that a unit is damaged; its room stays taken."""
        self.checksums_U[unit] = 0
        self.verified_U[unit] = False
        self.damaged.add(unit)

    def retire(self) -> None:
        """Release the files, which close as soon as nobody uses them."""
        if self.files is not None:
            self.files.release()
            self.files = None

    def clear(self) -> None:
        """Forget every unit."""
        self.damaged = set()
        self.checksums_U[:] = 0
        self.verified_U[:] = False
        self.storing = set()


class Ledger:
    """The account of copies that may stay: bytes by copy under a hard cap, least recently used out first. No I/O.

    Not safe in threads: its owner holds a lock. A copy is kept or evicted as a whole. A copy whose
    descriptor was given to somebody is pinned and stays, because its bytes would stay on the disk anyway until
    the last descriptor is closed.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lines: Lru[str, None] = Lru(capacity_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes of all copies; never above the capacity once the copies of ``make_room`` are removed."""
        return self._lines.used

    def __contains__(self, name: str) -> bool:
        return name in self._lines

    def size_of(self, name: str) -> int:
        """Return the bytes of a copy; 0 if it is not in the account."""
        return self._lines.size_of(name)

    def touch(self, name: str) -> None:
        """Note that a copy is used."""
        self._lines.get(name)

    def pin(self, name: str) -> None:
        """Keep a copy until ``unpin``; pins are counted."""
        self.charge(name, 0)
        self._lines.pin(name)
        self._lines.get(name)

    def unpin(self, name: str) -> None:
        """End one ``pin`` of a copy."""
        if name in self._lines and self._lines.unpin(name) and not self._lines.size_of(name):
            self._lines.pop(name)

    def charge(self, name: str, size_bytes: int) -> None:
        """Add bytes to a copy."""
        if name not in self._lines:
            self._lines.put(name, None, 0)
        self._lines.resize(name, self._lines.size_of(name) + size_bytes)

    def make_room(self, name: str, size_bytes: int) -> list[str] | None:
        """Return the copies that must go before ``size_bytes`` more of ``name`` fit.

        Returns:
            Names, least recently used first; they have left the account. None if even
            all evictable copies would not make room, and then none has left.
        """
        # Never evict the copy itself: the first part of a file larger than the cap stays (docs/design/fusefs/0013).
        gone = self._lines.make_room(size_bytes, but=name)
        return [other for other, _ in gone] if gone is not None else None

    def forget(self, name: str) -> None:
        """Remove a copy from the account; its pins stay, so that units that are stored next are kept."""
        if self._lines.is_pinned(name):
            self._lines.resize(name, 0)
        else:
            self._lines.pop(name)
