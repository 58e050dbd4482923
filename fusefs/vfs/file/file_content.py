"""Carries the states of ``content_state`` out: the version, writer or spool that holds a file's bytes.

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

__all__ = ["FileContent"]


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
        self.writer: FileWriter | None = None
        self.spool: Spool | None = None
        """The spool of ``_spooled``: asked at every read and write."""
        self._spooled: SpooledContent | None = None

    @property
    def state(self) -> ContentState:
        """Where the bytes are."""
        if self.spool is not None:
            return ContentState.SPOOLED
        return ContentState.SEQUENTIAL if self.writer is not None else ContentState.CLEAN

    @property
    def manifest(self) -> Manifest | None:
        """Of the version that is open."""
        return self.opened.manifest if self.opened is not None else None

    def sequential(self, path: str) -> FileWriter:
        """Have bytes at the end go straight to objects, from *clean*."""
        if self.writer is None:
            if self.opened is None or self.opened.reader.size_bytes == 0:
                self.writer = self._files.writers.file(path)
            else:
                manifest, reader = self.opened.manifest, self.opened.reader
                self.writer = self._files.writers.appending(path, manifest, reader)
        return self.writer

    def emptied(self, path: str) -> None:
        """Begin anew without a byte, *sequential*, from any state."""
        self.drop()
        self.writer = self._files.writers.file(path)

    def spooled(self, path: str) -> Spool:
        """Have bytes anywhere go to a spool, from any state: what was appended becomes durable first."""
        if self._spooled is None:
            appended = self.writer.sync() if self.writer is not None else None
            self._spooled = SpooledContent(self._files, self._place, path, self.opened, appended)
            self.spool, self.writer = self._spooled.spool, None
        return self._spooled.spool

    def clean(self) -> None:
        """Read the version that is open: it holds what was written."""
        self._close_spool()
        self.writer = None

    def sealed(self, path: str, *, last: bool) -> Content:
        """Begin to make everything durable and return the content to publish; ``settle`` waits for it."""
        if self._spooled is not None:
            return self._spooled.written_to(path, self.manifest, last=last)
        return self.writer.seal(last=last) if self.writer is not None else b""

    def settle(self, path: str, content: Content) -> None:
        """Wait until what ``sealed`` returned is durable, and check that it may be published.

        Raises:
            OSError: ``ESTALE`` where another mount replaced what it builds on.
        """
        if self.writer is not None:
            self.writer.settle()
        # As late as can be: what another mount publishes from now on, it publishes over this.
        if not is_there(self._files, path, self.manifest, segments_of(content)):
            raise OSError(errno.ESTALE, "another mount replaced what this builds on", path)

    def take_loose(self) -> Content:
        """Return durable content under the spool that no manifest names yet, once."""
        return self._spooled.take_loose() if self._spooled is not None else b""

    def hold(self, opened: OpenVersion) -> None:
        """Hold another version in place of what was open; bytes in a spool are its own."""
        if self.opened is not None:
            self.opened.close()
        self.opened = opened
        if self._spooled is not None:
            self._spooled.lies_over(opened)

    def drop(self) -> None:
        """Let go what was written and not flushed."""
        if self.writer is not None:
            self.writer.abandon()
            self.writer = None
        self._close_spool()

    def close(self) -> None:
        """Let everything go."""
        self.drop()
        if self.opened is not None:
            self.opened.close()
            self.opened = None

    def _close_spool(self) -> None:
        if self._spooled is not None:
            spooled, self._spooled, self.spool = self._spooled, None, None
            spooled.close(self.manifest)
