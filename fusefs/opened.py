"""Versions of files held open, and how each is read: its pieces, its local copy, what a missing object means."""

import errno
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Self

from fusefs.catalog import Catalog, FileInfo
from fusefs.disk_cache import DiskCache
from fusefs.fetching import ReadEngine
from fusefs.keeper import ObjectKeeper
from fusefs.known import is_settled
from fusefs.layout import StripeLayout
from fusefs.local_copy import LocalCopy, version_of
from fusefs.manifest import Manifest
from fusefs.pieces import Piece, pieces_of
from fusefs.reading import FileReader
from fusefs.stores.protocol import Entry
from omniload.base.errors import IntegrityError, OmniloadError

__all__ = ["MOST_VERSIONS", "OpenedFile", "Opener"]

MOST_VERSIONS = 100
"""Of a file that others replace meanwhile, one of so many is opened, or gets attributes."""
_PLAIN_BLOCK = 1 << 20


class OpenedFile:
    """A version of a file, held open: its objects stay until it is closed, on this process's part."""

    def __init__(
        self,
        keeper: ObjectKeeper,
        *,
        info: FileInfo,
        manifest: Manifest | None,
        reader: FileReader,
        location: list[str],
        copy: LocalCopy | None = None,
    ) -> None:
        self._keeper = keeper
        self._open = True
        self.info = info
        self.manifest = manifest
        """None for a plain file."""
        self.reader = reader
        self._location = location
        self._copy = copy

    @property
    def path(self) -> str:
        """Where it lies by now, as far as this process moved it."""
        return self._location[0]

    def moved(self, path: str) -> None:
        """Follow a rename in this process: a plain version is read where it lies now."""
        self._location[:] = [path]

    def local_copy(self) -> int | None:
        """Open a complete, verified copy of this version on the local disk; None where there is none.

        Never waits for the store, nor for the disk: a copy that this process has not compared
        with its checksums yet is compared in the background, for those who ask later. The caller
        closes the descriptor; it stays readable though the copy is dropped meanwhile. Keep this
        version open for as long as the descriptor is used, so that its bytes stay counted.

        Returns:
            A descriptor to read from only: byte ``i`` of the file is byte ``i`` of the copy.
        """
        if self._copy is None or not self._copy.copy.is_whole:
            return None
        descriptor = self._copy.copy.descriptor()
        if descriptor is None:
            self.reader.verify_copy()
        return descriptor

    def close(self) -> None:
        """Let the version go."""
        if self._open:
            self._open = False
            if self._copy is not None:
                self._copy.copy.close()
            if self.manifest is not None:
                self._keeper.unpin(self.manifest)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Opener:
    """Opens versions that the catalog described.

    Args:
        engine: Reads them.
        catalog: Says what is at a path.
        keeper: Keeps the objects of striped ones.
        disk: Local copies, where they are configured.
        most_brought: A plain file of up to so many bytes comes with them.
    """

    def __init__(
        self,
        engine: ReadEngine,
        catalog: Catalog,
        keeper: ObjectKeeper,
        disk: DiskCache | None,
        *,
        most_brought: int,
    ) -> None:
        self._engine = engine
        self._catalog = catalog
        self._keeper = keeper
        self._disk = disk
        self._most_brought = most_brought

    def open(self, path: str, *, believed: FileInfo | None, brings: bool) -> OpenedFile:
        """Open what is at a path now; see ``StripedFiles.open``."""
        if brings and believed is not None and self._comes_whole(believed):
            file = self._plain(path, believed)
            if self._bring(file):
                return file
            file.close()
        for _ in range(MOST_VERSIONS):
            info, manifest = self._catalog.current(path)
            if info.kind == "directory":
                raise IsADirectoryError(errno.EISDIR, "is a directory", path)
            if manifest is not None:
                return self._striped(path, info, manifest)
            file = self._plain(path, info)
            if not (brings and self.lacks_bytes(file)) or self._bring(file):
                return file
            file.close()
        raise OSError(errno.ESTALE, f"replaced {MOST_VERSIONS} times meanwhile; try again", path)

    def lacks_bytes(self, file: OpenedFile) -> bool:
        """Tell whether bytes that come with an open are not at hand."""
        return self._comes_whole(file.info) and not file.reader.is_at_hand()

    def _comes_whole(self, info: FileInfo) -> bool:
        return info.stored == "plain" and info.size_bytes <= self._most_brought

    def _plain(self, path: str, info: FileInfo) -> OpenedFile:
        location = [path]
        pieces = [_plain_piece(location, info.entry)]
        # Seconds on the clock tell versions apart for minutes, not for the life of a disk.
        copied = info.entry.version or (
            is_settled(info.entry, time.time_ns()) and info.entry.mtime_ns % 10**9
        )

        def is_current() -> bool:
            return self._is_at(location[0], info.entry)

        copy = self._copy_of(pieces, self._engine.store.location, is_current) if copied else None
        reader = FileReader(self._engine, pieces, when_missing=_stale, copy=copy)
        return OpenedFile(
            self._keeper, info=info, manifest=None, reader=reader, location=location, copy=copy
        )

    def _bring(self, file: OpenedFile) -> bool:
        """Have the bytes of a plain file at hand; False where another version is at its path by now.

        A store reads whatever lies at a path. Only between two looks that found the same it is one version.
        """
        if not file.reader.is_at_hand():
            # What fails though this version is there fails again when it is read, and says so then.
            with suppress(OSError, OmniloadError):
                file.reader.read(0, file.reader.size_bytes)
        if self._is_at(file.path, file.info.entry):
            return True
        file.reader.forget()
        return False

    def _is_at(self, path: str, entry: Entry) -> bool:
        try:
            found = self._engine.store.stat(path)
        except (OSError, OmniloadError):
            return False
        return replace(found, name=entry.name) == entry

    def _striped(self, path: str, info: FileInfo, manifest: Manifest) -> OpenedFile:
        self._keeper.pin(manifest)

        def when_missing(object_path: str) -> Exception:
            # What is known of the path may be of a version that is gone, too.
            self._catalog.doubt(path)
            named = self._catalog.manifest_or_none(path)
            if named is not None and object_path in named.object_paths():
                return IntegrityError(
                    f"object {object_path!r} is missing though manifest {path!r} names it; "
                    "restore the file from another copy"
                )
            return _stale(path)

        pieces = pieces_of(manifest)
        copy = self._copy_of(pieces, "")
        reader = FileReader(self._engine, pieces, when_missing=when_missing, copy=copy)
        return OpenedFile(
            self._keeper, info=info, manifest=manifest, reader=reader, location=[path], copy=copy
        )

    def drop(self, file: OpenedFile) -> tuple[int, int]:
        """Forget what is cached of a version; return the bytes that were in memory and on the disk."""
        copy = file._copy
        on_disk = 0
        if copy is not None and self._disk is not None:
            on_disk = self._disk.drop(copy.version)
        return file.reader.forget(), on_disk

    def _copy_of(
        self, pieces: list[Piece], prefix: str, is_current: Callable[[], bool] | None = None
    ) -> LocalCopy | None:
        version = version_of(pieces, prefix) if self._disk is not None else None
        if version is None or self._disk is None or not version.size_bytes:
            return None
        return LocalCopy(self._disk.open(version), version, pieces, is_current=is_current)


def _plain_piece(location: list[str], entry: Entry) -> Piece:
    """Return a plain file as one piece, cached across opens only where its version has a name."""
    if entry.version is not None:
        version = f"{entry.version}-{entry.size_bytes}"
    elif is_settled(entry, time.time_ns()):
        version = f"{entry.mtime_ns}-{entry.size_bytes}"
    else:
        version = uuid.uuid4().hex
    return Piece(
        start=0,
        size_bytes=entry.size_bytes,
        layout=StripeLayout(_PLAIN_BLOCK, 1),
        key=f"{location[0]}\0{version}",
        path_of=lambda _: location[0],
    )


def _stale(path: str) -> Exception:
    return OSError(errno.ESTALE, "the version that was opened is gone; open the file again", path)
