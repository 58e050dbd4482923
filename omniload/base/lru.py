"""Values under a hard cap: the least recently used are removed first, and pinned ones stay.

::

    oldest                                newest
    [ a | b* | c | d ]  put(e) ------> [ b* | c | d | e ]      a is returned, b* is pinned

One mechanism for all caches in memory. Whatever is special to one of them (a time, a file to close, blocks that share
memory) is in its values and its owner.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Lru"]

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


@dataclass(slots=True)
class _Line(Generic[Value]):
    value: Value
    size: int
    pins: int = 0


class Lru(Generic[Key, Value]):
    """Values by key. Thread-safe: each call is atomic.

    Args:
        capacity: Limit of the sum of all sizes: bytes, or a number of values if each has size 1. ``used`` never
            exceeds it, except by what ``resize`` adds.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._lines: OrderedDict[Key, _Line[Value]] = OrderedDict()
        self._used = 0

    @property
    def used(self) -> int:
        """Sum of the sizes of all values."""
        return self._used

    def __len__(self) -> int:
        return len(self._lines)

    def __contains__(self, key: object) -> bool:
        # Without the lock, because one look into a dictionary is atomic in the interpreter.
        return key in self._lines

    def __iter__(self) -> Iterator[Key]:
        """Yield the current keys, the least recently used first."""
        with self._lock:
            # A copy, because the caller may put and pop during the iteration.
            return iter(list(self._lines))

    def get(self, key: Key) -> Value | None:
        """Return a value and count this as a use; None if there is none."""
        with self._lock:
            line = self._lines.get(key)
            if line is None:
                return None
            self._lines.move_to_end(key)
            return line.value

    def peek(self, key: Key) -> Value | None:
        """Return a value without counting this as a use."""
        line = self._lines.get(key)
        return line.value if line is not None else None

    def values(self) -> list[Value]:
        """Return all values, the least recently used first."""
        with self._lock:
            return [line.value for line in self._lines.values()]

    def size_of(self, key: Key) -> int:
        """Return the size of a value; 0 if there is none."""
        line = self._lines.get(key)
        return line.size if line is not None else 0

    def put(self, key: Key, value: Value, size: int = 1) -> list[tuple[Key, Value]]:
        """Store a value; it replaces an earlier value of its key and takes over its pins.

        Returns:
            The removed values, the least recently used first. If removing all unpinned values would not make enough
            room, the new value itself is returned, and nothing else is removed.
        """
        with self._lock:
            before = self._lines.pop(key, None)
            self._used -= before.size if before is not None else 0
            # A value without a size needs no room, even if pinned values exceed the capacity.
            gone = self._make_room(size) if size else []
            if gone is None:
                return [(key, value)]
            self._lines[key] = _Line(value, size, before.pins if before is not None else 0)
            self._used += size
            return gone

    def make_room(self, size: int, *, but: Key | None = None) -> list[tuple[Key, Value]] | None:
        """Remove values until ``size`` more fits, except for those without a size, pinned ones and ``but``.

        Returns:
            The removed values, the least recently used first; None if removing all such values would not make enough
            room, and then nothing is removed.
        """
        with self._lock:
            return self._make_room(size, but)

    def oldest(self) -> Key | None:
        """Return the key of the least recently used value that is not pinned."""
        with self._lock:
            return next((key for key, line in self._lines.items() if not line.pins), None)

    def resize(self, key: Key, size: int) -> None:
        """Set the size of a value without removing another."""
        with self._lock:
            line = self._lines[key]
            self._used += size - line.size
            line.size = size

    def pin(self, key: Key) -> None:
        """Keep a value until ``unpin``; pins are counted."""
        with self._lock:
            self._lines[key].pins += 1

    def unpin(self, key: Key) -> bool:
        """Remove a pin; return whether it was the last."""
        with self._lock:
            line = self._lines[key]
            line.pins -= 1
            return not line.pins

    def is_pinned(self, key: Key) -> bool:
        """Return whether a value has a pin."""
        line = self._lines.get(key)
        return line is not None and line.pins > 0

    def pop(self, key: Key) -> Value | None:
        """Remove a value, pinned or not, and return it; None if there is none."""
        with self._lock:
            return self._popped(key) if key in self._lines else None

    def pop_where(self, chosen: Callable[[Key], bool]) -> list[Value]:
        """Remove the values of all chosen keys, and return them."""
        with self._lock:
            keys = [key for key in self._lines if chosen(key)]
            return [self._popped(key) for key in keys]

    def clear(self) -> None:
        """Remove all values."""
        with self._lock:
            self._lines.clear()
            self._used = 0

    def _popped(self, key: Key) -> Value:
        line = self._lines.pop(key)
        self._used -= line.size
        return line.value

    def _make_room(self, size: int, but: Key | None = None) -> list[tuple[Key, Value]] | None:
        missing = self._used + size - self.capacity
        if missing <= 0:
            return []
        # Chosen before removal: if there is not enough to remove, nothing is removed.
        leaving: list[Key] = []
        for key, line in self._lines.items():
            if line.size and not line.pins and key != but:
                leaving.append(key)
                missing -= line.size
                if missing <= 0:
                    return [(key, self._popped(key)) for key in leaving]
        return None
