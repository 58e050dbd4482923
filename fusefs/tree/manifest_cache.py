"""What was read of manifests and cannot have changed since: their headers, and the bytes of short ones."""

from fusefs.format.manifest_header import Header
from fusefs.stores.protocol import Entry
from omniload.base.lru import Lru

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
        self._headers: Lru[str, tuple[Version, Header]] = Lru(most_headers)
        self._bodies: Lru[str, tuple[Version, bytes]] = Lru(most_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes of whole manifests."""
        return self._bodies.used

    def header(self, path: str, entry: Entry) -> Header | None:
        """Return the header of this version, if it is known."""
        known = self._headers.peek(path)
        if known is None or known[0] != _version(entry):
            return None
        self._headers.get(path)
        return known[1]

    def whole(self, path: str, entry: Entry) -> bytes | None:
        """Return the whole manifest of this version, if it is known."""
        known = self._bodies.peek(path)
        if known is None or known[0] != _version(entry):
            return None
        self._bodies.get(path)
        return known[1]

    def put_header(self, path: str, entry: Entry, header: Header) -> None:
        """Keep the header of a version, in place of another of this path."""
        self._headers.put(path, (_version(entry), header))

    def put_body(self, path: str, entry: Entry, data: bytes) -> None:
        """Keep the whole manifest of a version, in place of another of this path."""
        self._bodies.put(path, (_version(entry), data), len(data))

    def forget(self, path: str) -> None:
        """Forget what is known at a path."""
        self._headers.pop(path)
        self._bodies.pop(path)

    def drop_below(self, path: str) -> None:
        """Forget what is known below a directory; the root is the empty path."""
        below = f"{path}/" if path else ""
        for lru in (self._headers, self._bodies):
            lru.pop_where(lambda known: known.startswith(below))


def _version(entry: Entry) -> Version:
    return entry.size_bytes, entry.mtime_ns, entry.version
