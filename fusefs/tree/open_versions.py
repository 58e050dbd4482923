"""Open versions of files: their pieces, their local copies, and the meaning of a missing object."""

import errno
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from typing import Self

from fusefs.cache.disk_cache import DiskCache
from fusefs.cache.local_copy import LocalCopy, version_of
from fusefs.format.content import Content
from fusefs.format.file_segments import FileSegment, file_segments_of
from fusefs.format.layout import StripeLayout
from fusefs.format.manifest import Manifest
from fusefs.read.file_reader import FileReader
from fusefs.read.unit_source import ReadEngine
from fusefs.stores.protocol import Entry, name_of
from fusefs.tree.catalog import Catalog, FileInfo
from fusefs.tree.manifests import is_settled
from fusefs.tree.object_references import ObjectReferences
from fusefs.tree.publish import Published
from fusefs.tree.version_identity import is_content, segments_of
from fusefs.tree.version_location import Place, stale_suppressed, stale_version
from omniload.base.errors import IntegrityError, OmniloadError, StateError

__all__ = ["MOST_VERSIONS", "OpenVersion", "Opener", "Versions"]

MOST_VERSIONS = 100
"""Versions of a file, replaced by others meanwhile, that are tried before an open or a change of attributes fails."""
_PLAIN_BLOCK = 1 << 20


class OpenVersion:
    """An open version of a file: this process keeps its objects until it is closed.

    Args:
        references: Keeps its objects.
        info: Its description.
        manifest: Its manifest; None for a plain file.
        reader: Its reader.
        place: Its place.
        copy: Its local copy.
    """

    def __init__(
        self,
        references: ObjectReferences,
        *,
        info: FileInfo,
        manifest: Manifest | None,
        reader: FileReader,
        place: Place,
        copy: LocalCopy | None = None,
    ) -> None:
        self._references = references
        self._open = True
        self.mark = object()
        """Identity of this opening of the version."""
        self.info = info
        self.manifest = manifest
        self.reader = reader
        self.place = place
        """Present place of the version."""
        self._copy = copy
        # Before the store was asked, bytes in memory may have been replaced by as many others.
        self.is_known = (manifest is not None or self.reads_path) and _is_known(info.entry)
        """Whether the store's entry, ``info.entry``, can belong to no other version."""

    @property
    def path(self) -> str:
        """Present path of the version, as far as this process moved it."""
        return self.place.path

    @property
    def reads_path(self) -> bool:
        """Whether its bytes are read at its path itself, and so depend on its staying there."""
        return self.place.entry is not None

    def moved(self, path: str, *, was_there: bool = False) -> None:
        """Follow a rename in this process: a plain version is read at its present path. May ask the store.

        Args:
            path: Its present path.
            was_there: Whether it was still there just before; then the store's present entry is taken over.
        """
        if (entry := self.place.moved(path, was_there=was_there)) is not None:
            self.info = replace(self.info, entry=entry)

    def found_as(self, info: FileInfo, manifest: Manifest | None) -> None:
        """Take over the store's present entry of this version, whose attributes may have changed."""
        self.info = info
        if manifest is not None and self.manifest is not None:
            self.manifest = manifest
        elif self.place.entry is not None:
            self.place.entry = info.entry
        self.is_known = _is_known(info.entry)

    def local_copy(self) -> int | None:
        """Open a complete, verified copy of this version on the local disk; None if there is none.

        Never waits for the store, nor for the disk: a copy that this process has not compared
        with its checksums yet is compared in the background, for later reads. The caller
        closes the descriptor; it stays readable even if the copy is dropped meanwhile. Keep this
        version open while the descriptor is used, so that its bytes stay counted.

        Returns:
            A descriptor for reading only: byte ``i`` of the file is byte ``i`` of the copy.
        """
        if self._copy is None or not self._copy.copy.is_whole:
            return None
        descriptor = self._copy.copy.descriptor()
        if descriptor is None:
            self.reader.cached.verify_soon()
        return descriptor

    @property
    def closes_now(self) -> bool:
        """Whether closing makes no request to the store or the disk."""
        has_objects = self.manifest is not None and bool(self.manifest.segments)
        return self._copy is None and not has_objects

    def close(self) -> None:
        """Release the version."""
        if self._open:
            self._open = False
            if self._copy is not None:
                self._copy.copy.close()
            if self.manifest is not None:
                self._references.unpin(self.manifest)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Versions:
    """Makes open versions: their pieces, a reader, a local copy.

    Args:
        engine: Reads the versions.
        catalog: Decides whether an object is missing, or its whole version is gone.
        references: Keeps the objects of striped versions.
        disk: Local copies, if they are configured.
    """

    def __init__(
        self,
        engine: ReadEngine,
        catalog: Catalog,
        references: ObjectReferences,
        disk: DiskCache | None,
    ) -> None:
        self._engine = engine
        self._catalog = catalog
        self._references = references
        self._disk = disk

    def plain(self, path: str, info: FileInfo) -> OpenVersion:
        """Return a plain version that is read at its path."""
        place = Place(self._engine.store, path, info.entry)
        pieces = [_plain_piece(place, info.entry)]
        # Whole seconds distinguish versions for minutes, but not for the life of a disk.
        copied = info.entry.version or (
            is_settled(info.entry, time.time_ns()) and info.entry.mtime_ns % 10**9
        )
        copy = self._copy_of(pieces, self._engine.store.location) if copied else None
        reader = FileReader(
            self._engine, pieces, when_missing=stale_version, when_read=place.check, copy=copy
        )
        return OpenVersion(
            self._references, info=info, manifest=None, reader=reader, place=place, copy=copy
        )

    def cached(self, path: str, info: FileInfo, data: bytes) -> OpenVersion:
        """Return a plain version whose bytes are known, at the path where they probably are."""
        # Read from memory only, because the path may hold another version now.
        reader = FileReader(self._engine, [FileSegment.of_bytes(data, 0)])
        place = Place(self._engine.store, path)
        return OpenVersion(self._references, info=info, manifest=None, reader=reader, place=place)

    def striped(self, path: str, info: FileInfo, manifest: Manifest) -> OpenVersion:
        """Return a striped version; its objects stay until it is closed."""
        # Pin it before it is read, so that a later version leaves its objects.
        self._references.pin(manifest)

        def when_missing(object_path: str) -> Exception:
            # The cached entry of the path may belong to a removed version, too.
            self._catalog.invalidate(path)
            named = self._catalog.manifest_or_none(path)
            if named is not None and object_path in named.object_paths():
                return IntegrityError(
                    f"object {object_path!r} is missing though manifest {path!r} names it; "
                    "restore the file from another copy"
                )
            return stale_version(path)

        pieces = file_segments_of(manifest)
        # No prefix, because a segment's name is random, so two paths, or stores, may share its copy.
        copy = self._copy_of(pieces, "")
        reader = FileReader(self._engine, pieces, when_missing=when_missing, copy=copy)
        return OpenVersion(
            self._references,
            info=info,
            manifest=manifest,
            reader=reader,
            place=Place(self._engine.store, path),
            copy=copy,
        )

    def reader_of(self, content: Content) -> FileReader:
        """Return a reader of durable content that may be unpublished."""
        inline = content if isinstance(content, bytes) else b""
        manifest = Manifest(mtime_ns=0, segments=segments_of(content), inline=inline)
        return FileReader(self._engine, file_segments_of(manifest))

    def drop(self, file: OpenVersion) -> tuple[int, int]:
        """Forget the cached blocks of a version; return the bytes that were in memory and on the disk."""
        copy = file._copy
        on_disk = 0
        if copy is not None and self._disk is not None:
            on_disk = self._disk.drop(copy.version)
        return file.reader.cached.forget(), on_disk

    def _copy_of(self, pieces: list[FileSegment], prefix: str) -> LocalCopy | None:
        version = version_of(pieces, prefix) if self._disk is not None else None
        if version is None or self._disk is None or not version.size_bytes:
            return None
        return LocalCopy(self._disk.open(version), version, pieces)


class Opener:
    """Opens the file at a path: finds out which version it is, while others may replace it.

    Args:
        catalog: Describes the file at a path.
        versions: Makes open versions.
        most_brought: Size in bytes up to which a plain file is read when it is opened.
    """

    def __init__(self, catalog: Catalog, versions: Versions, *, most_brought: int) -> None:
        self._catalog = catalog
        self.versions = versions
        self._most_brought = most_brought

    def open(self, path: str, *, expected: FileInfo | None, brings: bool) -> OpenVersion:
        """Open the file that is at a path now; see ``StripedFiles.open``."""
        if brings and expected is not None and self.comes_whole(expected):
            file = self.versions.plain(path, expected)
            if _bring(file):
                return self._kept(file)
            file.close()
        for _ in range(MOST_VERSIONS):
            info, manifest = self._catalog.current(path)
            if info.kind == "directory":
                raise IsADirectoryError(errno.EISDIR, "is a directory", path)
            if manifest is not None:
                return self.versions.striped(path, info, manifest)
            file = self.versions.plain(path, info)
            if not (brings and self.comes_whole(info)):
                return file
            if file.reader.cached.is_complete() or _bring(file):
                return self._kept(file)
            file.close()
        raise OSError(errno.ESTALE, f"replaced {MOST_VERSIONS} times meanwhile; try again", path)

    def open_published(self, path: str, content: Content, published: Published) -> OpenVersion:
        """Open the version that was just published here, even if another mount may have replaced it since."""
        # Otherwise the store is asked, and may return a version that another mount has put there since.
        if published.info is not None:  # the store reported what it took
            if published.manifest is not None:
                return self.versions.striped(path, published.info, published.manifest)
            if isinstance(content, bytes):
                return self.versions.cached(path, published.info, content)
        with suppress(FileNotFoundError, NotADirectoryError, IntegrityError, StateError):
            info, manifest = self._catalog.current(path)
            if manifest is not None and is_content(manifest, content):
                return self.versions.striped(path, info, manifest)
            is_plain = manifest is None and info.kind == "file"
            if is_plain and isinstance(content, bytes) and info.size_bytes == len(content):
                return self.versions.cached(path, info, content)
        # Another mount was as fast. Keep the version from here; no file at the path equals it.
        now_ns = time.time_ns()
        inline = content if isinstance(content, bytes) else b""
        made = Manifest(mtime_ns=now_ns, segments=segments_of(content), inline=inline)
        info = FileInfo(
            name=name_of(path),
            kind="file",
            size_bytes=made.size_bytes,
            mtime_ns=now_ns,
            mode=made.mode,
            stored="manifest",
            # A version with a name that no store uses, so that every look finds another version at the path.
            entry=Entry(name_of(path), False, 0, 0, version=uuid.uuid4().hex),
        )
        return self.versions.striped(path, info, made)

    def comes_whole(self, info: FileInfo) -> bool:
        """Return whether a file is read when it is opened."""
        return info.stored == "plain" and info.size_bytes <= self._most_brought

    def _kept(self, file: OpenVersion) -> OpenVersion:
        """Return a plain version that was read at its open; its bytes stay if only they identify it."""
        size_bytes = file.reader.size_bytes
        data = None if file.is_known else file.reader.try_read(0, size_bytes)
        if data is None or len(data) != size_bytes:
            return file
        file.close()
        file.reader.cached.forget()
        return self.versions.cached(file.path, file.info, bytes(data))


def _bring(file: OpenVersion) -> bool:
    """Read the bytes of a plain file into memory; return False if another version is at its path now.

    A store reads whatever is at a path. The bytes belong to one version only if a look before and a look after agree.
    """
    is_there = False
    # An error although this version is there will occur again, and be reported, when the version is read.
    try:
        with stale_suppressed():
            if not file.reader.cached.is_complete():
                file.reader.read(0, file.reader.size_bytes)
                is_there = True
            else:
                is_there = not file.place.is_gone()
    except (OSError, OmniloadError):
        is_there = True
    if not is_there:
        file.reader.cached.forget()
    return is_there


def _is_known(entry: Entry) -> bool:
    return entry.version is not None or is_settled(entry, time.time_ns())


def _plain_piece(place: Place, entry: Entry) -> FileSegment:
    """Return a plain file as one piece, cached across opens only if its version has a name."""
    if entry.version is not None:
        version = f"{entry.version}-{entry.size_bytes}"
    elif is_settled(entry, time.time_ns()):
        version = f"{entry.mtime_ns}-{entry.size_bytes}"
    else:
        # Use a unique name for this opening: two versions may share so recent a time stamp.
        version = uuid.uuid4().hex
    return FileSegment(
        start=0,
        size_bytes=entry.size_bytes,
        layout=StripeLayout(_PLAIN_BLOCK, 1),
        key=f"{place.path}\0{version}",
        path_of=lambda _: place.path,
    )
