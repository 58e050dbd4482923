"""What is at a path: plain file, manifest, link or directory, found with as few store calls as can be."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from fusefs.format.manifest import Manifest, decode_manifest
from fusefs.format.manifest_header import (
    HEADER_BYTES,
    MAGIC,
    TAIL,
    Header,
    decode_header,
    has_manifest_size,
)
from fusefs.stores.protocol import RESERVED, Entry, Store
from fusefs.tree.directory_attributes import NOT_KEPT, DirectoryAttributes, is_attributes
from fusefs.tree.manifest_cache import ManifestCache, is_settled
from omniload.base.errors import IntegrityError, StateError
from omniload.base.log import get_logger

__all__ = ["Catalog", "FileInfo", "described"]

_LOG = get_logger(__name__)
_MOST_HEADERS = 100_000
_SHORT_BYTES = 64 << 10
"""Manifests of up to this size, of files of some GiB, are read whole at once, and remembered so."""
_PIECE_BYTES = 4 << 20
"""Of a longer manifest, read by one request."""
_KNOWN_BYTES = 16 << 20
"""Most bytes of whole manifests remembered."""
_ATTEMPTS = 3
"""At one version of a path that others replace meanwhile."""

Result = TypeVar("Result")
Kind = Literal["file", "directory", "symlink"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """What ``stat`` says."""

    name: str
    kind: Kind
    size_bytes: int
    mtime_ns: int
    mode: int
    stored: Literal["plain", "manifest", "directory"]
    entry: Entry
    """What the store says of the path."""


class Catalog:
    """Describes paths of a store. Safe in threads.

    Remembers headers, and the bytes of short manifests, that cannot have changed: one version
    of each path, distinguished from others by the store's size and settled time stamp. So to look a
    short manifest up, to open it and to open it again reads it once; each open asks the store
    which version it is, and that is all it asks.
    """

    def __init__(
        self, store: Store, pool: ThreadPoolExecutor, directories: DirectoryAttributes
    ) -> None:
        self._store = store
        self._pool = pool
        self._directories = directories
        self._reading_long = threading.Lock()
        """Held by the one thread that reads a long manifest: each may need ``MAX_MANIFEST_BYTES``."""
        self._known = ManifestCache(most_headers=_MOST_HEADERS, most_bytes=_KNOWN_BYTES)

    def stat(self, path: str) -> FileInfo:
        """Describe a path; links are not followed."""
        # A short manifest is read whole, for an open that likely follows.
        describe = partial(self._described, path, short_bytes=_SHORT_BYTES)
        return self._of_one_version(path, describe)

    def current(self, path: str) -> tuple[FileInfo, Manifest | None]:
        """Describe what is at a path now, with its manifest if it has one."""
        return self._of_one_version(path, partial(self.version, path))

    def manifest_or_none(self, path: str) -> Manifest | None:
        """Return the manifest at a path; a broken one, or none, names nothing that could be removed."""
        try:
            return self.current(path)[1]
        except (FileNotFoundError, IntegrityError, NotADirectoryError):
            return None

    def listing(self, path: str) -> list[FileInfo]:
        """Describe everything directly in a directory, sorted by name."""
        entries = [entry for entry in self._store.listing(path) if not is_attributes(entry.name)]
        if not path:
            entries = [entry for entry in entries if entry.name != RESERVED]
        paths = [f"{path}/{entry.name}" if path else entry.name for entry in entries]
        # Only what has a manifest's size costs a read; the pool does those side by side.
        infos = self._pool.map(self._described_or_gone, paths, entries)
        return sorted((info for info in infos if info is not None), key=lambda info: info.name)

    def version(self, path: str, entry: Entry) -> tuple[FileInfo, Manifest | None]:
        """As ``current``, of what the store has just said of a path; by one read where the manifest is short.

        Raises:
            IntegrityError, FileNotFoundError: It is broken; or it was replaced since.
        """
        if entry.is_directory or not has_manifest_size(entry.size_bytes):
            return self._described(path, entry), None
        if entry.size_bytes > _SHORT_BYTES:
            info = self._described(path, entry)
            if info.stored == "plain":
                return info, None
        data, asked_ns = self._whole(path, entry)
        info = self._file_info(entry, self._header_in(path, entry, data, asked_ns))
        if info.stored == "plain":
            return info, None
        return info, self._decoded(path, entry, data, asked_ns)

    def forget(self, path: str) -> None:
        """Read the manifests at a path, and below it, anew."""
        self._directories.forget(path)
        self._known.forget(path)
        self._known.drop_below(path)

    def invalidate(self, path: str) -> None:
        """Read the manifest at a path anew: what came there may bear the time stamp of what was there."""
        self._known.forget(path)

    def _of_one_version(self, path: str, describe: Callable[[Entry], Result]) -> Result:
        for attempt in range(_ATTEMPTS):
            entry = self._store.stat(path)
            try:
                return describe(entry)
            except (IntegrityError, FileNotFoundError):
                # Replaced between stat and read: the sizes of both did not fit.
                if attempt == _ATTEMPTS - 1 or self._store.stat(path) == entry:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _described_or_gone(self, path: str, entry: Entry) -> FileInfo | None:
        try:
            return self._described(path, entry)
        except FileNotFoundError:
            return None  # removed since the listing
        except (IntegrityError, StateError) as error:
            # One broken manifest must not hide its neighbours; opening it says what is wrong.
            _LOG.warning("%s", error)
            return _plain_info(entry)

    def _described(self, path: str, entry: Entry, *, short_bytes: int = 0) -> FileInfo:
        if entry.is_directory:
            return self._directory_info(path, entry)
        if not has_manifest_size(entry.size_bytes):
            return _plain_info(entry)
        return self._file_info(entry, self._header(path, entry, short_bytes))

    @staticmethod
    def _file_info(entry: Entry, header: Header | None) -> FileInfo:
        if header is None:
            return _plain_info(entry)
        return FileInfo(
            name=entry.name,
            kind=header.kind,
            size_bytes=header.size,
            mtime_ns=header.mtime_ns,
            mode=header.mode,
            stored="manifest",
            entry=entry,
        )

    def _directory_info(self, path: str, entry: Entry) -> FileInfo:
        kept = self._directories.of(path)
        mode, mtime_ns = entry.mode if entry.mode is not None else 0o755, entry.mtime_ns
        if kept is not None:
            mode = kept.mode
            mtime_ns = mtime_ns if kept.mtime_ns == NOT_KEPT else kept.mtime_ns
        return FileInfo(
            name=entry.name,
            kind="directory",
            size_bytes=0,
            mtime_ns=mtime_ns,
            mode=mode,
            stored="directory",
            entry=entry,
        )

    def _header(self, path: str, entry: Entry, short_bytes: int) -> Header | None:
        """Read the header at a path; None where a plain file has a manifest's size by chance.

        Args:
            path: Where.
            entry: What the store says of it.
            short_bytes: Up to this size all is read, for an open that likely follows. Not for a
                listing: of ten thousand files that may be hundreds of MiB.
        """
        if (known := self._known.header(path, entry)) is not None:
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

    def _whole(self, path: str, entry: Entry) -> tuple[bytes | bytearray, int]:
        """Return all bytes at a path, and when the store was asked for them at the latest."""
        asked_ns = time.time_ns()
        known = self._known.whole(path, entry)
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
        if len(data) <= _SHORT_BYTES and is_settled(entry, asked_ns):
            self._known.put_body(path, entry, bytes(data))
        return manifest

    def _header_in(
        self, path: str, entry: Entry, head: bytes | bytearray, asked_ns: int
    ) -> Header | None:
        """As ``_header``, with the first bytes at hand: those of the header, or all."""
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
            self._known.put_header(path, entry, header)
        return header


def described(entry: Entry, manifest: Manifest | None) -> FileInfo:
    """Describe what a store has just taken, as ``Catalog.stat`` would."""
    if manifest is None:
        return _plain_info(entry)
    return FileInfo(
        name=entry.name,
        kind="symlink" if manifest.kind == "symlink" else "file",
        size_bytes=manifest.size_bytes,
        mtime_ns=manifest.mtime_ns,
        mode=manifest.mode,
        stored="manifest",
        entry=entry,
    )


def _plain_info(entry: Entry) -> FileInfo:
    return FileInfo(
        name=entry.name,
        kind="file",
        size_bytes=entry.size_bytes,
        mtime_ns=entry.mtime_ns,
        mode=entry.mode if entry.mode is not None else 0o644,
        stored="plain",
        entry=entry,
    )
