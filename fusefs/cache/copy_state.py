"""What a disk cache knows of its copies while they are open."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fusefs.cache.disk_directory import CopyFiles
from fusefs.cache.disk_format import CopyVersion

__all__ = ["CopyState", "Span"]


@dataclass(frozen=True, slots=True)
class Span:
    """A unit's place in a copy."""

    unit: int
    """Number within the version of the file."""
    offset: int
    """First byte within the file."""
    size_bytes: int


@dataclass(slots=True, eq=False)
class CopyState:
    """What is known of one copy, shared by all its open views."""

    version: CopyVersion
    name: str
    checksums_U: NDArray[np.uint64]
    """0 where a unit is missing."""
    verified_U: NDArray[np.bool_]
    """Units whose bytes this process has written or compared."""
    files: CopyFiles | None = None
    """None before the first unit is stored, and after the copy was evicted."""
    holders: int = 0
    """Views and tasks that have it open."""
    storing: set[int] = field(default_factory=set)
    """Units on their way to the disk."""
    damaged: set[int] = field(default_factory=set)
    """Units that are not here and whose room is still taken, and charged."""

    @classmethod
    def empty(cls, version: CopyVersion) -> "CopyState":
        """Return the state of a copy of which nothing is here."""
        num_units = version.num_units
        return cls(
            version, version.name, np.zeros(num_units, np.uint64), np.zeros(num_units, np.bool_)
        )

    def borrowed(self) -> CopyFiles | None:
        """Return the files for one more user, which releases them."""
        if self.files is not None:
            self.files.acquire()
        return self.files

    def stored(self, unit: int, checksum: int) -> None:
        """Note what became of a unit on its way to the disk; 0: the disk refused it."""
        self.storing.discard(unit)
        self.checksums_U[unit] = checksum
        self.verified_U[unit] = bool(checksum)
        if not checksum:
            # The disk may have taken some of its pages: their room stays charged.
            self.damaged.add(unit)

    def lost(self, unit: int) -> None:
        """Note that a unit is damaged; its room stays taken."""
        self.checksums_U[unit] = 0
        self.verified_U[unit] = False
        self.damaged.add(unit)

    def retire(self) -> None:
        """Let the files go, as soon as nobody uses them."""
        if self.files is not None:
            self.files.retire()
            self.files = None

    def clear(self) -> None:
        """Forget every unit."""
        self.damaged = set()
        self.checksums_U[:] = 0
        self.verified_U[:] = False
        self.storing = set()
