"""Manifests at paths of a store: read with as few calls as can be, remembered where they cannot have changed."""

import threading
import time
from contextlib import suppress

from fusefs.format.manifest import Manifest, decode_manifest
from fusefs.format.manifest_header import HEADER_BYTES, MAGIC, TAIL, Header, decode_header
from fusefs.stores.protocol import Entry, Store
from fusefs.tree.manifest_cache import ManifestCache, is_settled
from omniload.base.errors import IntegrityError, StateError

__all__ = ["SHORT_BYTES", "ManifestReader"]

_MOST_HEADERS = 100_000
SHORT_BYTES = 64 << 10
"""Manifests of up to this size, of files of some GiB, are read whole at once, and remembered so."""
_PIECE_BYTES = 4 << 20
"""Of a longer manifest, read by one request."""
_KNOWN_BYTES = 16 << 20
"""Most bytes of whole manifests remembered."""


class ManifestReader:
    """Reads what may be a manifest, by what the store has just said of its path. Safe in threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reading_long = threading.Lock()
        """Held by the one thread that reads a long manifest: each may need ``MAX_MANIFEST_BYTES``."""
        self.known = ManifestCache(most_headers=_MOST_HEADERS, most_bytes=_KNOWN_BYTES)

    def header(self, path: str, entry: Entry, short_bytes: int) -> Header | None:
        """Read the header at a path; None where a plain file has a manifest's size by chance.

        Args:
            path: Where.
            entry: What the store says of it.
            short_bytes: Up to this size all is read, for an open that likely follows. Not for a
                listing: of ten thousand files that may be hundreds of MiB.
        """
        if (known := self.known.header(path, entry)) is not None:
            return known
        is_short = entry.size_bytes <= short_bytes
        asked_ns = time.time_ns()
        head = self._store.read(path, 0, entry.size_bytes if is_short else HEADER_BYTES)
        header = self._header_in(path, entry, head, asked_ns)
        if is_short and header is not None:
            # A broken body is none of the header's business: opening it says what is wrong.
            with suppress(IntegrityError, StateError):
                self._decoded(path, entry, head, asked_ns)
        return header

    def manifest(self, path: str, entry: Entry) -> tuple[Header, Manifest] | None:
        """Read all that is at a path, by one read where it is short; None where it is a plain file.

        Raises:
            IntegrityError, FileNotFoundError: It is broken; or it was replaced since.
        """
        if entry.size_bytes > SHORT_BYTES and self.header(path, entry, 0) is None:
            return None
        data, asked_ns = self._whole(path, entry)
        header = self._header_in(path, entry, data, asked_ns)
        return (header, self._decoded(path, entry, data, asked_ns)) if header is not None else None

    def _whole(self, path: str, entry: Entry) -> tuple[bytes | bytearray, int]:
        """Return all bytes at a path, and when the store was asked for them at the latest."""
        asked_ns = time.time_ns()
        known = self.known.whole(path, entry)
        if known is not None:
            return known, asked_ns
        if entry.size_bytes <= _PIECE_BYTES:
            return self._store.read(path, 0, entry.size_bytes), asked_ns
        with self._reading_long:
            return self._read_by_pieces(path, entry.size_bytes), asked_ns

    def _read_by_pieces(self, path: str, size_bytes: int) -> bytearray:
        """Read a long manifest, whose header has said that this is its size."""
        data = bytearray()
        for at in range(0, size_bytes, _PIECE_BYTES):
            data += self._store.read(path, at, min(_PIECE_BYTES, size_bytes - at))
        return data

    def _decoded(self, path: str, entry: Entry, data: bytes | bytearray, asked_ns: int) -> Manifest:
        """Decode a manifest, and remember it: not before its checksums, which the next read may match."""
        manifest = decode_manifest(data, name=path)
        if len(data) <= SHORT_BYTES and is_settled(entry, asked_ns):
            self.known.put_body(path, entry, bytes(data))
        return manifest

    def _header_in(
        self, path: str, entry: Entry, head: bytes | bytearray, asked_ns: int
    ) -> Header | None:
        """As ``header``, with the first bytes at hand: those of the header, or all."""
        if not head.startswith(MAGIC):
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
        if header.manifest_bytes != entry.size_bytes:
            raise IntegrityError(
                f"manifest {path!r} has {entry.size_bytes} bytes, its header says "
                f"{header.manifest_bytes}; restore the file from another copy"
            )
        if is_settled(entry, asked_ns):
            self.known.put_header(path, entry, header)
        return header
