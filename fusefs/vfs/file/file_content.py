"""The content of an open file, in the states of ``states``: the version, writer or spool that holds its bytes.

::

    FileContent --- opened   the newest version of the store
         `--------- bytes    CleanContent | SequentialContent | SpooledContent, one for each state

This module takes no locks and makes no decisions; ``OpenFile`` does both.
"""

import errno
from collections.abc import Iterator, Sequence

from fusefs.format.content import Content
from fusefs.format.manifest import Manifest, Segment
from fusefs.read.file_reader import FileReader
from fusefs.tree.freshness import names_segments
from fusefs.tree.namespace import OpenVersion, StripedFiles
from fusefs.tree.version_identity import ids_of, segments_of, spliceable
from fusefs.vfs.file.states import ContentState
from fusefs.write.file_writer import FileWriter
from fusefs.write.spool import (
    MOST_RANGES,
    MOST_RANGES_CLOSED,
    Spool,
    SpoolPlace,
    filled,
    is_worn,
    splice,
)

__all__ = [
    "CleanContent",
    "FileContent",
    "SequentialContent",
    "SpooledContent",
    "granule_bytes_of",
    "is_there",
    "written_from",
]

_COPY_BYTES = 8 << 20
_GRANULE_BYTES = 64 << 10
"""Most bytes that are fetched and published for a write of one byte."""


def granule_bytes_of(files: StripedFiles, path: str) -> int:
    """Return the granule of a spool for the file at a path."""
    return min(_GRANULE_BYTES, files.config.striping_of(path).unit)


def written_from(
    spool: Spool, base: Sequence[Segment], files: StripedFiles, path: str, *, most_ranges: int
) -> Content:
    """Make the content of a spool durable and return the content to publish.

    Args:
        spool: The file.
        base: Segments below the spool, which the content may keep; none if they
            are gone, so that the whole file is written.
        files: The namespace to write to.
        path: Decides the striping.
        most_ranges: Same as for ``is_worn``.

    Raises:
        OSError: ``ESTALE``: bytes must be rewritten that only a version holds which another
            mount has replaced; or the error of the store.
    """
    if base:
        changed = spool.granules.changed()
        plan = splice(base, spool.granules.size_bytes, changed)
        if not is_worn(plan, most_ranges=most_ranges):
            if not changed:
                return filled(plan, None)
            size, unit = sum(map(len, changed)), files.config.striping_of(path).unit
            # Use small units for small ranges, because a reader of one fetches, and compares, whole units.
            scattered = size < unit * len(changed)
            patch = files.writers.patch(
                path,
                _bytes_of(spool, changed),
                unit_bytes=min(_GRANULE_BYTES, unit) if scattered else unit,
                size_bytes=size,
            )
            return filled(plan, patch)
    writer = files.writers.file(path)
    try:
        for data in _bytes_of(spool, [range(spool.granules.size_bytes)]):
            writer.write(data)
        return writer.finish()
    except BaseException:
        writer.abandon()
        raise


def _bytes_of(spool: Spool, ranges: Sequence[range]) -> Iterator[bytes]:
    for span in ranges:
        for at in range(span.start, span.stop, _COPY_BYTES):
            yield spool.read(at, min(_COPY_BYTES, span.stop - at))


class SpooledContent:
    """Bytes in a local spool, over a version in the store.

    Args:
        files: The namespace.
        place: Place of the spool.
        path: Decides the granule.
        opened: The version below the spool.
        loose: Durable content that no manifest names, used instead of the version: the bytes appended so far.
    """

    state = ContentState.SPOOLED
    version = None
    is_small = False

    def __init__(
        self,
        files: StripedFiles,
        place: SpoolPlace,
        path: str,
        opened: OpenVersion | None,
        loose: Content | None,
    ) -> None:
        self._files = files
        self._base: tuple[Segment, ...]
        """Segments below the spool, which a splice may keep."""
        reader: FileReader | None
        if loose is None:
            self._base = spliceable(opened.manifest) if opened is not None else ()
            reader = opened.reader if opened is not None else None
        else:
            self._base, reader = segments_of(loose), files.opener.versions.reader_of(loose)
        self.spool = Spool(place, granule_bytes_of(files, path), reader)
        try:
            # If the next version cannot share bytes with its base, fetch them all while the base is there.
            if not self._base:
                self.spool.hold_all()
        except BaseException:
            self.spool.close()
            raise
        self._loose: Content = loose if loose is not None else b""

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return self.spool.granules.size_bytes

    @property
    def needs_version(self) -> bool:
        """Whether some bytes are read from the version below the spool."""
        return self.spool.granules.num_missing() > 0

    def try_read(self, offset: int, size_bytes: int, process: int) -> bytes | None:
        """Return bytes that are in memory; None if reading would have to wait. Never waits."""
        del process
        return self.spool.try_read(offset, size_bytes)

    def writes_now(self, path: str, offset: int, size_bytes: int) -> bool:
        """Return whether a write would be accepted without waiting for the store."""
        del path
        return self.spool.writes_now(offset, size_bytes)

    def seal(self, path: str, shown: Manifest | None, *, last: bool) -> Content:
        """Make the content durable and return it for publishing.

        Args:
            path: Path to publish at.
            shown: The manifest of the open version.
            last: Whether the file is closed; then more bytes may be written, to leave it with fewer ranges.
        """
        base = self._base if is_there(self._files, path, shown, self._base) else ()
        most_ranges = MOST_RANGES_CLOSED if last else MOST_RANGES
        return written_from(self.spool, base, self._files, path, most_ranges=most_ranges)

    def take_loose(self) -> Content:
        """Return the content that no manifest names, and forget it: a publish that fails may have named it."""
        loose, self._loose = self._loose, b""
        return loose

    def lies_over(self, opened: OpenVersion) -> None:
        """Note that a version now holds every byte of the spool."""
        self._base = spliceable(opened.manifest)
        self.spool.published(opened.reader)

    def close(self, kept: Manifest | None) -> None:
        """Release the bytes, and the objects that no manifest but ``kept`` names."""
        self.spool.close()
        self._files.references.discard(self._loose, kept=kept)

    abandon = close


def is_there(
    files: StripedFiles, path: str | None, shown: Manifest | None, segments: Sequence[Segment]
) -> bool:
    """Return whether another mount has left intact the segments that the next version takes from the open one.

    Args:
        files: The namespace.
        path: Path at which the file is published, if it is.
        shown: The manifest of the open version.
        segments: Segments of the next version.
    """
    shared = ids_of(segments) & ids_of(spliceable(shown))
    return not shared or path is None or names_segments(files, path, shared)


class CleanContent:
    """Bytes of a version without changes, or the empty content of a new file."""

    state = ContentState.CLEAN
    needs_version = True
    is_small = True

    def __init__(self, files: StripedFiles, opened: OpenVersion | None) -> None:
        self._files = files
        self.version = opened
        """Version whose reader may be used without this file, while the content is not being changed."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return self.version.reader.size_bytes if self.version is not None else 0

    def try_read(self, offset: int, size_bytes: int, process: int) -> bytes | memoryview | None:
        """Return bytes that are in memory; None if reading would have to wait. Never waits."""
        if self.version is None:
            return None
        reader = self.version.reader
        data = reader.try_read(offset, size_bytes)
        if data is not None:
            reader.note(offset, size_bytes, process=process)
        return data

    def writes_now(self, path: str, offset: int, size_bytes: int) -> bool:
        """Return whether a write would be accepted without waiting for the store."""
        # A new file makes no request to the store before a unit is full.
        is_new = self.version is None and offset == 0
        return is_new and size_bytes < self._files.config.striping_of(path).unit

    def seal(self, path: str, shown: Manifest | None, *, last: bool) -> Content:
        """Return the content to publish: as nothing was written, it is that of a new file."""
        del path, shown, last
        return b""

    def take_loose(self) -> Content:
        """Return no loose content, because nothing was written."""
        return b""

    def lies_over(self, opened: OpenVersion) -> None:
        """Use the bytes of another version from now on."""
        self.version = opened

    def close(self, kept: Manifest | None) -> None:
        """Do nothing, because only the version is held."""

    abandon = close


class SequentialContent:
    """Appended bytes, on their way to objects."""

    state = ContentState.SEQUENTIAL
    version = None
    needs_version = False

    def __init__(self, writer: FileWriter) -> None:
        self.writer = writer

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return self.writer.size_bytes

    @property
    def is_small(self) -> bool:
        """Whether publishing it creates one small file."""
        return self.writer.is_small

    def try_read(self, offset: int, size_bytes: int, process: int) -> None:
        """Return None: no byte is in memory, because appended bytes were sent."""
        del offset, size_bytes, process

    def writes_now(self, path: str, offset: int, size_bytes: int) -> bool:
        """Return whether a write would be accepted without waiting for the store."""
        del path
        return offset == self.writer.size_bytes and not self.writer.would_wait(size_bytes)

    def seal(self, path: str, shown: Manifest | None, *, last: bool) -> Content:
        """Begin to make everything durable and return the content to publish."""
        del path, shown
        return self.writer.seal(last=last)

    def take_loose(self) -> Content:
        """Return no loose content, because only published bytes are durable."""
        return b""

    def lies_over(self, opened: OpenVersion) -> None:
        """Do nothing, because the writer itself knows the written bytes."""

    def close(self, kept: Manifest | None) -> None:
        """End after the written bytes were published."""

    def abandon(self, kept: Manifest | None) -> None:
        """Discard bytes that were written and not flushed."""
        del kept
        self.writer.abandon()


class FileContent:
    """The bytes of one open file, in one of three states.

    Args:
        files: The namespace.
        place: Place of spools.
        opened: The existing version; None for a file that is created by this open.
    """

    def __init__(self, files: StripedFiles, place: SpoolPlace, opened: OpenVersion | None) -> None:
        self._files = files
        self._place = place
        self.opened = opened
        """Newest version of the store that is open, in every state."""
        self.bytes: CleanContent | SequentialContent | SpooledContent
        self.bytes = CleanContent(files, opened)
        """Present content; it answers every read and write."""

    @property
    def manifest(self) -> Manifest | None:
        """Manifest of the open version."""
        return self.opened.manifest if self.opened is not None else None

    def sequential(self, path: str) -> FileWriter:
        """Send bytes appended at the end directly to objects; only from *clean*."""
        if not isinstance(self.bytes, SequentialContent):
            if self.opened is None or self.opened.reader.size_bytes == 0:
                writer = self._files.writers.file(path)
            else:
                reader = self.opened.reader
                writer = self._files.writers.appending(path, self.opened.manifest, reader)
            self.bytes = SequentialContent(writer)
        return self.bytes.writer

    def emptied(self, path: str) -> None:
        """Start over as an empty file, *sequential*, from any state."""
        self._drop()
        self.bytes = SequentialContent(self._files.writers.file(path))

    def spooled(self, path: str) -> Spool:
        """Send writes at any place to a spool, from any state; appended bytes become durable first."""
        held = self.bytes
        if isinstance(held, SpooledContent):
            return held.spool
        # Make them durable, so that they can be read back: objects are the only place of bytes that were sent.
        appended = held.writer.sync() if isinstance(held, SequentialContent) else None
        self.bytes = SpooledContent(self._files, self._place, path, self.opened, appended)
        return self.bytes.spool

    def clean(self) -> None:
        """Read from the open version, which holds the written bytes."""
        if self.bytes.state is ContentState.CLEAN:
            return
        held, self.bytes = self.bytes, CleanContent(self._files, self.opened)
        held.close(self.manifest)

    def settle(self, path: str, content: Content) -> None:
        """Wait until sealed content is durable, and check that it may be published.

        Raises:
            OSError: ``ESTALE``: another mount replaced the version that the content builds on.
        """
        if isinstance(self.bytes, SequentialContent):
            self.bytes.writer.settle()
        # Check as late as possible: a version that another mount publishes from now on replaces this one.
        if not is_there(self._files, path, self.manifest, segments_of(content)):
            raise OSError(errno.ESTALE, "another mount replaced what this builds on", path)

    def hold(self, opened: OpenVersion) -> None:
        """Replace the open version by another one; bytes in a spool are not affected."""
        # The new version is open before the old one closes, so segments of both always have a holder.
        if self.opened is not None:
            self.opened.close()
        self.opened = opened
        self.bytes.lies_over(opened)

    def close(self) -> None:
        """Release everything; unflushed bytes are lost."""
        self._drop()
        if self.opened is not None:
            self.opened.close()
            self.opened = None
            self.bytes = CleanContent(self._files, None)

    def _drop(self) -> None:
        held, self.bytes = self.bytes, CleanContent(self._files, self.opened)
        held.abandon(self.manifest)
