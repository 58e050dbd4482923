"""Which local copies may stay: bytes by copy under a hard cap, least recently used out first. No I/O."""

from omniload.base.lru import Lru

__all__ = ["Ledger"]


class Ledger:
    """The account of a disk cache. Not safe in threads: its owner holds a lock.

    A copy is kept or goes as a whole. A copy whose descriptor was handed out is pinned and
    stays: its bytes would stay on the disk anyway until the last descriptor is closed.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lines: Lru[str, None] = Lru(capacity_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes of all copies; never above the capacity after ``make_room`` was obeyed."""
        return self._lines.used

    def __contains__(self, name: str) -> bool:
        return name in self._lines

    def size_of(self, name: str) -> int:
        """Return the bytes of a copy; 0 for one that is not here."""
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
        """Let a copy go again."""
        if name in self._lines and self._lines.unpin(name) and not self._lines.size_of(name):
            self._lines.pop(name)

    def charge(self, name: str, size_bytes: int) -> None:
        """Add bytes to a copy."""
        if name not in self._lines:
            self._lines.put(name, None, 0)
        self._lines.resize(name, self._lines.size_of(name) + size_bytes)

    def make_room(self, name: str, size_bytes: int) -> list[str] | None:
        """Say which copies must go before ``size_bytes`` more of ``name`` fit.

        Returns:
            Names, least recently used first; they have left the account. None where even
            all that may go would not make room, and then nothing has left.
        """
        # Not its own: of a file larger than the cap the part that came first stays (docs/design/0013).
        gone = self._lines.make_room(size_bytes, but=name)
        return [other for other, _ in gone] if gone is not None else None

    def forget(self, name: str) -> None:
        """Take a copy off the account; pins of it stay, so that what is stored next is kept."""
        if self._lines.is_pinned(name):
            self._lines.resize(name, 0)
        else:
            self._lines.pop(name)
