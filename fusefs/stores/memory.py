"""The reference store: a dictionary, for tests and as the model of every store."""

import errno
import threading
import time
from contextlib import suppress

from typing_extensions import override

from fusefs.stores.protocol import (
    Before,
    Entry,
    ObjectWriter,
    Store,
    Usage,
    check_rename,
    check_whole,
    is_at_or_below,
    name_of,
    not_empty,
    parent_of,
)

__all__ = ["MemoryStore"]

_DIRECTORY = None


class MemoryStore(Store):
    """Files in memory; nothing survives the process."""

    def __init__(self) -> None:
        # Reentrant, because some calls of the store make other calls of it.
        self._lock = threading.RLock()
        self._nodes: dict[str, bytes | None] = {"": _DIRECTORY}
        self.mtimes_ns: dict[str, int] = {"": 0}
        """Time stamps by path. A simulation may set them, as a skewed clock does."""

    @property
    @override
    def location(self) -> str:
        return "memory://"

    @override
    def stat(self, path: str) -> Entry:
        with self._lock:
            data = self._node(path)
            return Entry(name_of(path), data is None, len(data or b""), self.mtimes_ns[path])

    @override
    def listing(self, path: str) -> list[Entry]:
        with self._lock:
            if self._node(path) is not None:
                raise NotADirectoryError(errno.ENOTDIR, "not a directory", path)
            return [self.stat(child) for child in self._nodes if child and parent_of(child) == path]

    @override
    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        with self._lock:
            data = self._node(path)
        if data is None:
            raise IsADirectoryError(errno.EISDIR, "is a directory", path)
        return check_whole(data[offset : offset + size_bytes], path, offset, size_bytes)

    @override
    def create(self, path: str) -> ObjectWriter:
        with self._lock:
            if path in self._nodes:
                raise FileExistsError(errno.EEXIST, "objects are written once", path)
            self._make_parents(path)
            # Take the name at once: of two callers that create one object, the second must be refused before it writes.
            self._put(path, b"")
        return _MemoryWriter(self, path)

    @override
    def publish(
        self, path: str, data: bytes, before: Before | None = None, mode: int | None = None
    ) -> Entry | None:
        if before is not None:
            with self._lock:
                there = self.stat(path) if path in self._nodes else None
            # Without the lock, because the call may wait for threads that use this store.
            before(there)
        with self._lock:
            if path in self._nodes and self._nodes[path] is None:
                raise IsADirectoryError(errno.EISDIR, "a directory is there", path)
            self._make_parents(path)
            self._put(path, data)
            return Entry(name_of(path), False, len(data), self.mtimes_ns[path])

    @override
    def rename(self, source: str, target: str) -> None:
        with self._lock:
            self._node(source)
            if source == target:
                return
            there = self.stat(target) if target in self._nodes else None
            held = self.listing(target) if there is not None and there.is_directory else []
            check_rename(self.stat(source), there, held, target)
            if target.startswith(f"{source}/"):
                raise OSError(errno.EINVAL, "a directory cannot go into itself", target)
            self._make_parents(target)
            for path in [p for p in self._nodes if is_at_or_below(p, source)]:
                moved = target + path[len(source) :]
                self._nodes[moved] = self._nodes.pop(path)
                # Keep the time stamps, as a disk does: code that remembers by time stamps must cope with renamed files.
                self.mtimes_ns[moved] = self.mtimes_ns.pop(path)

    @override
    def remove(self, path: str) -> None:
        with self._lock:
            if self._node(path) is None:
                raise IsADirectoryError(errno.EISDIR, "is a directory", path)
            del self._nodes[path], self.mtimes_ns[path]

    @override
    def make_directory(self, path: str) -> None:
        with self._lock:
            if path in self._nodes:
                raise FileExistsError(errno.EEXIST, "something is there", path)
            self._make_parents(path)
            self._put(path, _DIRECTORY)

    @override
    def remove_directory(self, path: str) -> None:
        with self._lock:
            if self.listing(path):
                raise not_empty(path)
            del self._nodes[path], self.mtimes_ns[path]

    @override
    def usage(self) -> Usage | None:
        return None

    @override
    def close(self) -> None:
        pass

    def _append(self, path: str, data: bytes) -> None:
        with self._lock:
            self._put(path, (self._nodes.get(path) or b"") + data)

    def _node(self, path: str) -> bytes | None:
        if path not in self._nodes:
            above = parent_of(path)
            if path and self._nodes.get(above, b"") is not None and above in self._nodes:
                raise NotADirectoryError(errno.ENOTDIR, "a parent is a file", path)
            raise FileNotFoundError(errno.ENOENT, "nothing there", path)
        return self._nodes[path]

    def _make_parents(self, path: str) -> None:
        above = parent_of(path)
        if self._nodes.setdefault(above, _DIRECTORY) is not None:
            raise NotADirectoryError(errno.ENOTDIR, "a parent is a file", above)
        self.mtimes_ns.setdefault(above, time.time_ns())
        if above:
            self._make_parents(above)

    def _put(self, path: str, data: bytes | None) -> None:
        self._nodes[path] = data
        self.mtimes_ns[path] = time.time_ns()


class _MemoryWriter(ObjectWriter):
    def __init__(self, store: MemoryStore, path: str) -> None:
        self._store, self._path = store, path
        self._parts: list[bytes] = []

    @override
    def write(self, data: bytes | bytearray | memoryview) -> None:
        # Copy the bytes, because the caller may reuse its memory.
        self._parts.append(bytes(data))

    @override
    def close(self) -> None:
        self._store._append(self._path, b"".join(self._parts))
        self._parts.clear()

    @override
    def abort(self) -> None:
        self._parts.clear()
        with suppress(FileNotFoundError):
            self._store.remove(self._path)
