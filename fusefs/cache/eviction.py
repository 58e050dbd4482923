"""Which local copies may stay: bytes by copy under a hard cap, least recently used out first. No I/O."""

from collections import OrderedDict
from dataclasses import dataclass

__all__ = ["Ledger"]


@dataclass(slots=True)
class _Line:
    size_bytes: int = 0
    pins: int = 0


class Ledger:
    """The account of a disk cache. Not safe in threads: its owner holds a lock.

    A copy is kept or goes as a whole. A copy whose descriptor was handed out is pinned and
    stays: its bytes would stay on the disk anyway until the last descriptor is closed.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all copies; never above the capacity after ``make_room`` was obeyed."""
        return self._used_bytes

    def __contains__(self, name: str) -> bool:
        return name in self._lines

    def size_of(self, name: str) -> int:
        """Return the bytes of a copy; 0 for one that is not here."""
        line = self._lines.get(name)
        return line.size_bytes if line is not None else 0

    def touch(self, name: str) -> None:
        """Note that a copy is used."""
        if name in self._lines:
            self._lines.move_to_end(name)

    def pin(self, name: str) -> None:
        """Keep a copy until ``unpin``; pins are counted."""
        self._lines.setdefault(name, _Line()).pins += 1
        self._lines.move_to_end(name)

    def unpin(self, name: str) -> None:
        """Let a copy go again."""
        line = self._lines.get(name)
        if line is not None:
            line.pins -= 1
            if not line.pins and not line.size_bytes:
                del self._lines[name]

    def charge(self, name: str, size_bytes: int) -> None:
        """Add bytes to a copy."""
        self._lines.setdefault(name, _Line()).size_bytes += size_bytes
        self._used_bytes += size_bytes

    def make_room(self, name: str, size_bytes: int) -> list[str] | None:
        """Say which copies must go before ``size_bytes`` more of ``name`` fit.

        Returns:
            Names, least recently used first; they have left the account. None where even
            all that may go would not make room, and then nothing has left.
        """
        missing = self._used_bytes + size_bytes - self.capacity_bytes
        leaving: list[str] = []
        for other, line in self._lines.items():
            if missing <= 0:
                break
            if other != name and not line.pins and line.size_bytes:
                leaving.append(other)
                missing -= line.size_bytes
        if missing > 0:
            return None
        for other in leaving:
            self.forget(other)
        return leaving

    def forget(self, name: str) -> None:
        """Take a copy off the account; pins of it stay, so that what is stored next is kept."""
        line = self._lines.get(name)
        if line is None:
            return
        self._used_bytes -= line.size_bytes
        line.size_bytes = 0
        if not line.pins:
            del self._lines[name]
