"""What was read of manifests and cannot have changed since: their headers, and the bytes of short ones."""

import threading
from collections import OrderedDict

from fusefs.format.manifest_header import Header
from fusefs.stores.protocol import Entry

__all__ = ["SETTLED_NS", "ManifestCache", "is_settled"]

SETTLED_NS = 3_000_000_000
"""Age from which a time stamp of whole seconds distinguishes versions, clocks a second off included."""

Version = tuple[int, int, str | None]
"""Size, time stamp and name, as the store says them."""


def is_settled(entry: Entry, now_ns: int) -> bool:
    """Return whether nothing that comes after ``now_ns`` can have the time stamp of ``entry``."""
    return bool(entry.mtime_ns) and now_ns - entry.mtime_ns > SETTLED_NS


class ManifestCache:
    """One version of each path; the least recently used go first. Safe in threads.

    The caller puts only settled, whole manifests: what is here is used without another look.

    Args:
        most_headers: Headers remembered.
        most_bytes: Bytes of whole manifests remembered, beside the headers.
    """

    def __init__(self, *, most_headers: int, most_bytes: int) -> None:
        self._most_headers = most_headers
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._headers: OrderedDict[str, tuple[Version, Header]] = OrderedDict()
        self._bodies: OrderedDict[str, tuple[Version, bytes]] = OrderedDict()
        self.used_bytes = 0
        """Of whole manifests."""

    def header(self, path: str, entry: Entry) -> Header | None:
        """Return the header of this version, if it is known."""
        with self._lock:
            known = self._headers.get(path)
            if known is None or known[0] != _version(entry):
                return None
            self._headers.move_to_end(path)
            return known[1]

    def whole(self, path: str, entry: Entry) -> bytes | None:
        """Return the whole manifest of this version, if it is known."""
        with self._lock:
            known = self._bodies.get(path)
            if known is None or known[0] != _version(entry):
                return None
            self._bodies.move_to_end(path)
            return known[1]

    def put_header(self, path: str, entry: Entry, header: Header) -> None:
        """Remember the header of a version, in place of another of this path."""
        with self._lock:
            self._headers[path] = (_version(entry), header)
            self._headers.move_to_end(path)
            if len(self._headers) > self._most_headers:
                self._headers.popitem(last=False)

    def put_body(self, path: str, entry: Entry, data: bytes) -> None:
        """Remember the whole manifest of a version, in place of another of this path."""
        with self._lock:
            self._drop_body(path)
            self._bodies[path] = (_version(entry), data)
            self.used_bytes += len(data)
            while self.used_bytes > self._most_bytes:
                self._drop_body(next(iter(self._bodies)))

    def forget(self, path: str) -> None:
        """Forget what is known at a path."""
        with self._lock:
            self._headers.pop(path, None)
            self._drop_body(path)

    def drop_below(self, path: str) -> None:
        """Forget what is known below a directory; the root is the empty path."""
        below = f"{path}/" if path else ""
        with self._lock:
            for known in [p for p in self._headers if p.startswith(below)]:
                del self._headers[known]
            for known in [p for p in self._bodies if p.startswith(below)]:
                self._drop_body(known)

    def _drop_body(self, path: str) -> None:
        if (known := self._bodies.pop(path, None)) is not None:
            self.used_bytes -= len(known[1])


def _version(entry: Entry) -> Version:
    return entry.size_bytes, entry.mtime_ns, entry.version
