"""Carries the states of ``content_state`` out: the version, writer or spool that holds a file's bytes.

::

    FileContent --- opened   the newest version of the store
         `--------- bytes    CleanContent | SequentialContent | SpooledContent: each knows how it is used

Nothing is locked and nothing is decided here; ``OpenFile`` does both.
"""

import errno

from fusefs.format.content import Content
from fusefs.format.manifest import Manifest
from fusefs.tree.namespace import OpenVersion, StripedFiles
from fusefs.tree.version_identity import segments_of
from fusefs.vfs.file.content_state import ContentState
from fusefs.vfs.file.spooled_content import SpooledContent, is_there
from fusefs.write.file_writer import FileWriter
from fusefs.write.spool import Spool, SpoolPlace

__all__ = ["CleanContent", "FileContent", "SequentialContent"]


class CleanContent:
    """Bytes that are those of a version, or none of a file that is new."""

    state = ContentState.CLEAN
    needs_version = True
    is_small = True

    def __init__(self, files: StripedFiles, opened: OpenVersion | None) -> None:
        self._files = files
        self.version = opened
        """Its reader may be asked without this file: content is not being changed."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return self.version.reader.size_bytes if self.version is not None else 0

    def try_read(self, offset: int, size_bytes: int, process: int) -> bytes | memoryview | None:
        """Return bytes that are at hand; None where reading would wait. Never waits."""
        if self.version is None:
            return None
        reader = self.version.reader
        data = reader.try_read(offset, size_bytes)
        if data is not None:
            reader.note(offset, size_bytes, process=process)
        return data

    def writes_now(self, path: str, offset: int, size_bytes: int) -> bool:
        """Return whether a write would be taken without waiting for the store."""
        # Of a file made here: nothing is asked of the store before a unit is full.
        is_new = self.version is None and offset == 0
        return is_new and size_bytes < self._files.config.striping_of(path).unit

    def seal(self, path: str, shown: Manifest | None, *, last: bool) -> Content:
        """Return the content to publish: none was written, so it is that of a new file."""
        del path, shown, last
        return b""

    def take_loose(self) -> Content:
        """Nothing lies beside the version."""
        return b""

    def lies_over(self, opened: OpenVersion) -> None:
        """Be the bytes of another version from now on."""
        self.version = opened

    def close(self, kept: Manifest | None) -> None:
        """Nothing is held but the version."""

    abandon = close


class SequentialContent:
    """Bytes appended, on their way to objects."""

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
        """Whether publishing it makes one small file."""
        return self.writer.is_small

    def try_read(self, offset: int, size_bytes: int, process: int) -> None:
        """Nothing is at hand: what was appended was sent."""
        del offset, size_bytes, process

    def writes_now(self, path: str, offset: int, size_bytes: int) -> bool:
        """Return whether a write would be taken without waiting for the store."""
        del path
        return offset == self.writer.size_bytes and not self.writer.would_wait(size_bytes)

    def seal(self, path: str, shown: Manifest | None, *, last: bool) -> Content:
        """Begin to make everything durable and return the content to publish."""
        del path, shown
        return self.writer.seal(last=last)

    def take_loose(self) -> Content:
        """Nothing is durable beside what is published."""
        return b""

    def lies_over(self, opened: OpenVersion) -> None:
        """The writer knows by itself what it wrote."""

    def close(self, kept: Manifest | None) -> None:
        """What was written is published."""

    def abandon(self, kept: Manifest | None) -> None:
        """Let go what was written and not flushed."""
        del kept
        self.writer.abandon()


class FileContent:
    """Bytes of one open file, in one of three states.

    Args:
        files: The namespace.
        place: Where spools lie.
        opened: The version that is there; None for a file that is created by this open.
    """

    def __init__(self, files: StripedFiles, place: SpoolPlace, opened: OpenVersion | None) -> None:
        self._files = files
        self._place = place
        self.opened = opened
        """The newest version of the store that is open, in every state."""
        self.bytes: CleanContent | SequentialContent | SpooledContent
        self.bytes = CleanContent(files, opened)
        """Where the bytes are: asked at every read and write."""

    @property
    def manifest(self) -> Manifest | None:
        """Of the version that is open."""
        return self.opened.manifest if self.opened is not None else None

    def sequential(self, path: str) -> FileWriter:
        """Have bytes at the end go straight to objects, from *clean*."""
        if not isinstance(self.bytes, SequentialContent):
            if self.opened is None or self.opened.reader.size_bytes == 0:
                writer = self._files.writers.file(path)
            else:
                reader = self.opened.reader
                writer = self._files.writers.appending(path, self.opened.manifest, reader)
            self.bytes = SequentialContent(writer)
        return self.bytes.writer

    def emptied(self, path: str) -> None:
        """Begin anew without a byte, *sequential*, from any state."""
        self._drop()
        self.bytes = SequentialContent(self._files.writers.file(path))

    def spooled(self, path: str) -> Spool:
        """Have bytes anywhere go to a spool, from any state: what was appended becomes durable first."""
        held = self.bytes
        if isinstance(held, SpooledContent):
            return held.spool
        appended = held.writer.sync() if isinstance(held, SequentialContent) else None
        self.bytes = SpooledContent(self._files, self._place, path, self.opened, appended)
        return self.bytes.spool

    def clean(self) -> None:
        """Read the version that is open: it holds what was written."""
        if self.bytes.state is ContentState.CLEAN:
            return
        held, self.bytes = self.bytes, CleanContent(self._files, self.opened)
        held.close(self.manifest)

    def settle(self, path: str, content: Content) -> None:
        """Wait until content that was sealed is durable, and check that it may be published.

        Raises:
            OSError: ``ESTALE`` where another mount replaced what it builds on.
        """
        if isinstance(self.bytes, SequentialContent):
            self.bytes.writer.settle()
        # As late as can be: what another mount publishes from now on, it publishes over this.
        if not is_there(self._files, path, self.manifest, segments_of(content)):
            raise OSError(errno.ESTALE, "another mount replaced what this builds on", path)

    def hold(self, opened: OpenVersion) -> None:
        """Hold another version in place of what was open; bytes in a spool are its own."""
        if self.opened is not None:
            self.opened.close()
        self.opened = opened
        self.bytes.lies_over(opened)

    def close(self) -> None:
        """Let everything go; what was not flushed is lost."""
        self._drop()
        if self.opened is not None:
            self.opened.close()
            self.opened = None
            self.bytes = CleanContent(self._files, None)

    def _drop(self) -> None:
        held, self.bytes = self.bytes, CleanContent(self._files, self.opened)
        held.abandon(self.manifest)
