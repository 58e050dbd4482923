"""What is at a path: plain file, manifest, link or directory, found with as few store calls as can be."""

import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from fusefs.directories import NOT_KEPT, DirectoryAttributes, is_attributes
from fusefs.manifest import (
    HEADER_BYTES,
    MAGIC,
    TAIL,
    Header,
    Manifest,
    decode_header,
    decode_manifest,
    has_manifest_size,
)
from fusefs.stores.protocol import RESERVED, Entry, Store
from omniload.base.errors import IntegrityError, OmniloadError
from omniload.base.log import get_logger

__all__ = ["Catalog", "FileInfo"]

_LOG = get_logger(__name__)
SETTLED_NS = 3_000_000_000
"""Age from which a time stamp of whole seconds tells versions apart, clocks a second off included."""
_MOST_HEADERS = 100_000
_SHORT_BYTES = 64 << 10
"""Manifests of up to this size, of files of some GiB, are read whole at once."""

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
    """Describes paths of a store. Safe in threads; remembers headers that cannot have changed."""

    def __init__(
        self, store: Store, pool: ThreadPoolExecutor, directories: DirectoryAttributes
    ) -> None:
        self._store = store
        self._pool = pool
        self._directories = directories
        self._lock = threading.Lock()
        self._headers: OrderedDict[tuple[str, int, int], Header] = OrderedDict()

    def stat(self, path: str) -> FileInfo:
        """Describe a path; links are not followed."""
        return self._described(path, self._store.stat(path))

    def described(self, path: str, entry: Entry) -> FileInfo:
        """Describe what the store has just said of a path."""
        return self._described(path, entry)

    def listing(self, path: str) -> list[FileInfo]:
        """Describe everything directly in a directory, sorted by name."""
        entries = [entry for entry in self._store.listing(path) if not is_attributes(entry.name)]
        if not path:
            entries = [entry for entry in entries if entry.name != RESERVED]
        paths = [f"{path}/{entry.name}" if path else entry.name for entry in entries]
        # Only what has a manifest's size costs a read; the pool does those side by side.
        infos = self._pool.map(self._described_or_gone, paths, entries)
        return sorted((info for info in infos if info is not None), key=lambda info: info.name)

    def manifest(self, path: str, info: FileInfo) -> Manifest | None:
        """Read the manifest of a file that ``stat`` described; None for a plain file."""
        if info.stored != "manifest":
            return None
        return decode_manifest(self._store.read(path, 0, info.entry.size_bytes), name=path)

    def version(self, path: str, entry: Entry) -> tuple[FileInfo, Manifest | None]:
        """As ``described`` and ``manifest`` together, by one read where the manifest is short."""
        if entry.is_directory or not has_manifest_size(entry.size_bytes):
            return self._described(path, entry), None
        if entry.size_bytes > _SHORT_BYTES:
            info = self._described(path, entry)
            return info, self.manifest(path, info)
        data = self._store.read(path, 0, entry.size_bytes)
        info = self._file_info(entry, self._header_in(path, entry, data))
        return info, decode_manifest(data, name=path) if info.stored == "manifest" else None

    def forget(self, path: str) -> None:
        """Read the headers at a path, and below it, anew."""
        self._directories.forget(path)
        below = f"{path}/" if path else ""
        with self._lock:
            for key in [k for k in self._headers if k[0] == path or k[0].startswith(below)]:
                del self._headers[key]

    def _described_or_gone(self, path: str, entry: Entry) -> FileInfo | None:
        try:
            return self._described(path, entry)
        except FileNotFoundError:
            return None  # removed since the listing
        except OmniloadError as error:
            # One broken manifest must not hide its neighbours; opening it says what is wrong.
            _LOG.warning("%s", error)
            return _plain_info(entry)

    def _described(self, path: str, entry: Entry) -> FileInfo:
        if entry.is_directory:
            return self._directory_info(path, entry)
        header = self._header(path, entry) if has_manifest_size(entry.size_bytes) else None
        return self._file_info(entry, header)

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

    def _header(self, path: str, entry: Entry) -> Header | None:
        """Read the header at a path; None where a plain file has a manifest's size by chance."""
        key = (path, entry.size_bytes, entry.mtime_ns)
        with self._lock:
            if (known := self._headers.get(key)) is not None:
                self._headers.move_to_end(key)
                return known
        return self._header_in(path, entry, self._store.read(path, 0, HEADER_BYTES))

    def _header_in(self, path: str, entry: Entry, head: bytes) -> Header | None:
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
        if time.time_ns() - entry.mtime_ns > SETTLED_NS:
            with self._lock:
                self._headers[path, entry.size_bytes, entry.mtime_ns] = header
                if len(self._headers) > _MOST_HEADERS:
                    self._headers.popitem(last=False)
        return header


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
