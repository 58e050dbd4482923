"""Manifests at paths of a store: read with as few calls as possible, remembered if they cannot have changed."""

import threading
import time
from contextlib import suppress

from fusefs.format.manifest import Manifest, decode_manifest
from fusefs.format.manifest_header import HEADER_BYTES, MAGIC, TAIL, Header, decode_header
from fusefs.stores.protocol import Entry, Store
from omniload.base.errors import IntegrityError, StateError
from omniload.base.lru import Lru

__all__ = ["SETTLED_NS", "SHORT_BYTES", "ManifestCache", "ManifestReader", "is_settled"]

SETTLED_NS = 3_000_000_000
"""Age from which a time stamp of whole seconds distinguishes versions, even with clocks that differ by a second."""

Version = tuple[int, int, str | None]
"""Size, time stamp and version name, as the store reports them."""
_MOST_HEADERS = 100_000
SHORT_BYTES = 64 << 10
"""Size up to which manifests, for files of some GiB, are read whole at once, and remembered whole."""
_PIECE_BYTES = 4 << 20
"""Bytes that one request reads of a longer manifest."""
_KNOWN_BYTES = 16 << 20
"""Most bytes of whole manifests that are remembered."""


def is_settled(entry: Entry, now_ns: int) -> bool:
    """Return whether no later version than ``now_ns`` can have the time stamp of ``entry``."""
    return bool(entry.mtime_ns) and now_ns - entry.mtime_ns > SETTLED_NS


class ManifestCache:
    """One version of each path; the least recently used go first. Safe in threads.

    The caller puts only settled, whole manifests, because they are used without another check.

    Args:
        most_headers: Most headers kept.
        most_bytes: Most bytes of whole manifests kept, in addition to the headers.
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
        # Count the use only now, because another version of the path is useless.
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
        """Forget everything about a path."""
        self._headers.pop(path)
        self._bodies.pop(path)

    def drop_below(self, path: str) -> None:
        """Forget everything below a directory; the root is the empty path."""
        below = f"{path}/" if path else ""
        for lru in (self._headers, self._bodies):
            lru.pop_where(lambda known: known.startswith(below))


def _version(entry: Entry) -> Version:
    # The mode is left out: chmod on the store itself changes no byte.
    return entry.size_bytes, entry.mtime_ns, entry.version


class ManifestReader:
    """Reads files that may be manifests, given the store's latest entry of their path. Safe in threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reading_long = threading.Lock()
        """Lock of the one thread that reads a long manifest, because each may need ``MAX_MANIFEST_BYTES``."""
        self.known = ManifestCache(most_headers=_MOST_HEADERS, most_bytes=_KNOWN_BYTES)

    def header(self, path: str, entry: Entry, short_bytes: int) -> Header | None:
        """Read the header at a path; None for a plain file that has a manifest's size by chance.

        Args:
            path: Path of the file.
            entry: The store's entry of the path.
            short_bytes: Files up to this size are read whole, for an open that likely follows. Not for a
                listing, in which ten thousand files may be hundreds of MiB.
        """
        if (known := self.known.header(path, entry)) is not None:
            return known
        is_short = entry.size_bytes <= short_bytes
        asked_ns = time.time_ns()
        head = self._store.read(path, 0, entry.size_bytes if is_short else HEADER_BYTES)
        header = self._header_in(path, entry, head, asked_ns)
        if is_short and header is not None:
            # A broken body does not matter for the header; opening the file reports the fault.
            with suppress(IntegrityError, StateError):
                self._decoded(path, entry, head, asked_ns)
        return header

    def manifest(self, path: str, entry: Entry) -> tuple[Header, Manifest] | None:
        """Read the whole manifest at a path, by one read if it is short; None for a plain file.

        Raises:
            IntegrityError: The manifest is broken.
            FileNotFoundError: The file was replaced since.
        """
        if entry.size_bytes > SHORT_BYTES and self.header(path, entry, 0) is None:
            return None
        data, asked_ns = self._whole(path, entry)
        header = self._header_in(path, entry, data, asked_ns)
        return (header, self._decoded(path, entry, data, asked_ns)) if header is not None else None

    def _whole(self, path: str, entry: Entry) -> tuple[bytes | bytearray, int]:
        """Return all bytes at a path, and the latest time at which the store was asked for them."""
        asked_ns = time.time_ns()
        known = self.known.whole(path, entry)
        if known is not None:
            return known, asked_ns
        if entry.size_bytes <= _PIECE_BYTES:
            return self._store.read(path, 0, entry.size_bytes), asked_ns
        # One at a time, because sixteen readers of a huge sparse file would need two GiB.
        with self._reading_long:
            return self._read_by_pieces(path, entry.size_bytes), asked_ns

    def _read_by_pieces(self, path: str, size_bytes: int) -> bytearray:
        """Read a long manifest, whose header has confirmed its size."""
        data = bytearray()
        for at in range(0, size_bytes, _PIECE_BYTES):
            data += self._store.read(path, at, min(_PIECE_BYTES, size_bytes - at))
        return data

    def _decoded(self, path: str, entry: Entry, data: bytes | bytearray, asked_ns: int) -> Manifest:
        """Decode a manifest, and remember it; but not before its checksums, which the next read may match."""
        manifest = decode_manifest(data, name=path)
        if len(data) <= SHORT_BYTES and is_settled(entry, asked_ns):
            self.known.put_body(path, entry, bytes(data))
        return manifest

    def _header_in(
        self, path: str, entry: Entry, head: bytes | bytearray, asked_ns: int
    ) -> Header | None:
        """Like ``header``, with the first bytes already read: those of the header, or the whole file."""
        if not head.startswith(MAGIC):
            # If the first bytes are the whole file, its end needs no further request.
            whole = len(head) == entry.size_bytes
            at = entry.size_bytes - len(TAIL)
            tail = head[at:] if whole else self._store.read(path, at, len(TAIL))
            if tail == TAIL:
                raise IntegrityError(
                    f"manifest {path!r} ends as one and begins with {head[:10]!r}; "
                    "restore the file from another copy"
                )
            return None
        header = decode_header(head, name=path)
        if header.kind == "directory":
            raise IntegrityError(
                f"{path!r} holds the attributes of a directory under a file's name; remove it"
            )
        # Check this before the body is read, because the header decides the size of that read.
        if header.manifest_bytes != entry.size_bytes:
            raise IntegrityError(
                f"manifest {path!r} has {entry.size_bytes} bytes, its header says "
                f"{header.manifest_bytes}; restore the file from another copy"
            )
        if is_settled(entry, asked_ns):
            self.known.put_header(path, entry, header)
        return header
