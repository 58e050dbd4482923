"""The kind of file at a path: plain file, manifest, link or directory, found with as few store calls as possible."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from fusefs.format.manifest import Manifest
from fusefs.format.manifest_header import Header, has_manifest_size
from fusefs.stores.protocol import RESERVED, Entry, Store
from fusefs.tree.directory_attributes import NOT_KEPT, DirectoryAttributes, is_attributes
from fusefs.tree.manifests import SHORT_BYTES, ManifestReader
from omniload.base.errors import IntegrityError, StateError
from omniload.base.log import get_logger

__all__ = ["Catalog", "FileInfo", "described"]

_LOG = get_logger(__name__)
_ATTEMPTS = 3
"""Attempts to read one version of a path while others replace it."""

Result = TypeVar("Result")
Kind = Literal["file", "directory", "symlink"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """The attributes of a file for ``stat``."""

    name: str
    kind: Kind
    size_bytes: int
    mtime_ns: int
    mode: int
    stored: Literal["plain", "manifest", "directory"]
    entry: Entry
    """The store's entry of the path."""


class Catalog:
    """Describes paths of a store. Safe in threads.

    It remembers headers, and the bytes of short manifests, that cannot have changed: one version
    of each path, identified by the store's size and settled time stamp. So to look up a short
    manifest, to open it and to open it again reads it once. Each open asks the store
    for the present version, and makes no other request.
    """

    def __init__(
        self, store: Store, pool: ThreadPoolExecutor, directories: DirectoryAttributes
    ) -> None:
        self._store = store
        self._pool = pool
        self._directories = directories
        self._manifests = ManifestReader(store)

    def stat(self, path: str) -> FileInfo:
        """Describe a path; links are not followed."""
        # Read a short manifest whole, for an open that likely follows.
        describe = partial(self._described, path, short_bytes=SHORT_BYTES)
        return _of_one_version(self._store, path, describe)

    def current(self, path: str) -> tuple[FileInfo, Manifest | None]:
        """Describe the present file at a path, with its manifest if it has one."""
        return _of_one_version(self._store, path, partial(self.version, path))

    def manifest_or_none(self, path: str) -> Manifest | None:
        """Return the manifest at a path, or None; a broken manifest names nothing that could be removed."""
        try:
            return self.current(path)[1]
        except (FileNotFoundError, IntegrityError, NotADirectoryError):
            return None

    def listing(self, path: str) -> list[FileInfo]:
        """Describe every entry of a directory, sorted by name."""
        entries = [entry for entry in self._store.listing(path) if not is_attributes(entry.name)]
        if not path:
            # Hide it in the root alone, because below the root a user may give a folder this name.
            entries = [entry for entry in entries if entry.name != RESERVED]
        paths = [f"{path}/{entry.name}" if path else entry.name for entry in entries]
        # Only files with a manifest's size cost a read; the pool makes these reads concurrently.
        infos = self._pool.map(self._described_or_gone, paths, entries)
        return sorted((info for info in infos if info is not None), key=lambda info: info.name)

    def version(self, path: str, entry: Entry) -> tuple[FileInfo, Manifest | None]:
        """Like ``current``, for an entry that the store has just returned; one read suffices for a short manifest.

        Raises:
            IntegrityError: The manifest is broken.
            FileNotFoundError: The file was replaced since.
        """
        # The size alone tells most plain files from manifests, so a listing reads no byte of them.
        if entry.is_directory or not has_manifest_size(entry.size_bytes):
            return self._described(path, entry), None
        found = self._manifests.manifest(path, entry)
        if found is None:
            return _plain_info(entry), None
        header, manifest = found
        return _file_info(entry, header), manifest

    def forget(self, path: str) -> None:
        """Forget the manifests at a path, and below it, so that they are read again."""
        # A folder that was renamed to this path keeps its time stamps, so outdated entries would not look old.
        self._directories.forget(path)
        self._manifests.known.forget(path)
        self._manifests.known.drop_below(path)

    def invalidate(self, path: str) -> None:
        """Forget the manifest at a path, because a new version may have the time stamp of the old one."""
        self._manifests.known.forget(path)

    def _described_or_gone(self, path: str, entry: Entry) -> FileInfo | None:
        try:
            return self._described(path, entry)
        except FileNotFoundError:
            return None  # removed since the listing
        except (IntegrityError, StateError) as error:
            # One broken manifest must not hide its neighbours; opening it reports the fault.
            _LOG.warning("%s", error)
            return _plain_info(entry)
        except PermissionError as error:
            # A listing must also survive a file that another user of a local store keeps private.
            _LOG.debug("%s", error)
            return _plain_info(entry)

    def _described(self, path: str, entry: Entry, *, short_bytes: int = 0) -> FileInfo:
        if entry.is_directory:
            return _directory_info(entry, self._directories.of(path))
        if not has_manifest_size(entry.size_bytes):
            return _plain_info(entry)
        return _file_info(entry, self._manifests.header(path, entry, short_bytes))


def described(entry: Entry, manifest: Manifest | None) -> FileInfo:
    """Describe a file that a store has just taken, as ``Catalog.stat`` would."""
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


def _of_one_version(store: Store, path: str, describe: Callable[[Entry], Result]) -> Result:
    """Return the result of ``describe`` for the store's entry of a path; try again if the file was replaced."""
    for attempt in range(_ATTEMPTS):
        entry = store.stat(path)
        try:
            return describe(entry)
        except (IntegrityError, FileNotFoundError):
            # The file was replaced between stat and read, so the sizes did not fit.
            if attempt == _ATTEMPTS - 1 or store.stat(path) == entry:
                raise
    raise AssertionError("the last attempt returns or raises")


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


def _directory_info(entry: Entry, kept: Manifest | None) -> FileInfo:
    """Describe a directory, with the attributes that are kept for it."""
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
