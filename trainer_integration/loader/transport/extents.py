"""Which bytes of a worker's memory are free."""

from bisect import bisect_left

__all__ = ["ALIGNMENT", "Extents"]

ALIGNMENT = 64
"""Bytes; a cache line, and more than any dtype asks for."""


class Extents:
    """Free extents in the order of their addresses; the lowest that fits is taken, so that few pages are touched."""

    def __init__(self, size_bytes: int) -> None:
        """Begin with one free extent."""
        self._starts, self._sizes = [0], [size_bytes]

    @property
    def free_bytes(self) -> int:
        """Bytes that are free, in whatever pieces."""
        return sum(self._sizes)

    def take(self, size_bytes: int) -> int | None:
        """Return the start of ``size_bytes`` that were free, or ``None`` where no extent is large enough."""
        wanted = _rounded(size_bytes)
        for place, free in enumerate(self._sizes):
            if free >= wanted:
                start = self._starts[place]
                if free == wanted:
                    del self._starts[place], self._sizes[place]
                else:
                    self._starts[place], self._sizes[place] = start + wanted, free - wanted
                return start
        return None

    def give(self, start: int, size_bytes: int) -> None:
        """Free what ``take`` returned for ``size_bytes``; neighbours become one extent."""
        size, place = _rounded(size_bytes), bisect_left(self._starts, start)
        if place < len(self._starts) and start + size == self._starts[place]:
            size += self._sizes[place]
            del self._starts[place], self._sizes[place]
        before = place - 1
        if before >= 0 and self._starts[before] + self._sizes[before] == start:
            self._sizes[before] += size
            return
        self._starts.insert(place, start)
        self._sizes.insert(place, size)


def _rounded(size_bytes: int) -> int:
    """Return a size as whole cache lines."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
