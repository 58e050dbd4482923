"""One open file, shared by all handles on it: the lock, the time and the order of what is done to it.

::

    OpenFile --- FileContent   where the bytes are      (which state each use needs: content_state)
         `------ Unpublished   what the store does not show yet, and what a flush publishes
"""

import threading
import time

from fusefs.format.attributes import Attributes, checked_xattrs
from fusefs.format.content import Content
from fusefs.format.manifest import Manifest
from fusefs.tree.freshness import with_attributes
from fusefs.tree.namespace import OpenVersion, StripedFiles
from fusefs.tree.publish import Published
from fusefs.tree.version_identity import segments_of
from fusefs.tree.version_location import stale_suppressed
from fusefs.vfs.file.content_state import (
    ContentState,
    to_be_flushed,
    to_be_read,
    to_be_resized,
    to_be_written,
)
from fusefs.vfs.file.file_content import FileContent
from fusefs.vfs.file.unpublished import Flush, Unpublished
from fusefs.write.spool import SpoolPlace

__all__ = ["OpenFile", "SpoolPlace"]


class OpenFile:
    """Content and pending attributes of one open file. Safe in threads; calls may wait for the store.

    Args:
        files: The namespace.
        place: Where random writes go.
        path: Where the file is published; None once it is unlinked.
        opened: The version that is there; None for a file that is created by this open.
    """

    def __init__(
        self, files: StripedFiles, place: SpoolPlace, path: str, opened: OpenVersion | None
    ) -> None:
        self._files = files
        self.lock = threading.RLock()
        """Held by each change and read of the content; the mount's loop only tries it."""
        self._content = FileContent(files, place, opened)
        self.pending = Unpublished(
            path=path,
            change_ns=opened.info.mtime_ns if opened is not None else time.time_ns(),
            dirty=opened is None,
            published=opened is not None,
        )

    @property
    def path(self) -> str | None:
        """Where the file is published; None once it is unlinked, or replaced."""
        return self.pending.path

    @property
    def size_bytes(self) -> int:
        """Bytes of the file as its readers see it now."""
        content = self._content
        if (spool := content.spool) is not None:
            return spool.granules.size_bytes
        if content.writer is not None:
            return content.writer.size_bytes
        return content.opened.reader.size_bytes if content.opened is not None else 0

    @property
    def mode(self) -> int:
        """Permission bits."""
        if self.pending.attributes.mode is not None:
            return self.pending.attributes.mode
        opened = self._content.opened
        return opened.info.mode if opened is not None else 0o644

    @property
    def version(self) -> OpenVersion | None:
        """The version of the store that this is; None while it is being changed here, and of one without a path."""
        return self._content.opened if self.pending.is_shown else None

    @property
    def flushes_briefly(self) -> bool:
        """Whether a flush makes one small file where this mount has shown none. Asked under the lock."""
        content = self._content
        is_small = content.writer is None or content.writer.is_small
        return is_small and content.spool is None and not self.pending.published

    # Reading

    def try_read(self, offset: int, size_bytes: int, process: int) -> bytes | memoryview | None:
        """Return bytes that are at hand; None where reading would wait. Never waits."""
        content = self._content
        if (spool := content.spool) is not None:
            return spool.try_read(offset, size_bytes)
        if content.writer is None and content.opened is not None:
            reader = content.opened.reader
            data = reader.try_read(offset, size_bytes)
            if data is not None:
                reader.note(offset, size_bytes, process=process)
            return data
        return None

    def reader_if_clean(self) -> OpenVersion | None:
        """Return the version whose reader may be asked without this body, if content is not being changed."""
        return self._content.opened if self._content.state is ContentState.CLEAN else None

    def read(self, offset: int, size_bytes: int, process: int) -> bytes | memoryview:
        """Return a range, cut at the end of the file."""
        with self.lock:
            content = self._content
            if to_be_read(content.state, is_shown=self.pending.is_shown) is ContentState.SPOOLED:
                return content.spooled(self.path or "").read(offset, size_bytes)
            content.clean()
            if content.opened is None:
                return b""
            return content.opened.reader.read(offset, size_bytes, process=process)

    def xattrs(self) -> dict[str, bytes]:
        """Return the extended attributes as of now."""
        pending, manifest = self.pending.attributes.xattrs, self._content.manifest
        if pending is not None:
            return dict(pending)
        return dict(manifest.xattrs) if manifest is not None else {}

    # Writing

    def writes_now(self, offset: int, size_bytes: int) -> bool:
        """Return whether a write would be taken without waiting for the store."""
        content = self._content
        if (spool := content.spool) is not None:
            return spool.writes_now(offset, size_bytes)
        if content.writer is None and content.opened is None and offset == 0:
            # Of a file made here: nothing is asked of the store before a unit is full.
            unit = self._files.config.striping_of(self.path or "").unit
            return not self.pending.replaced and size_bytes < unit
        if content.writer is None or offset != content.writer.size_bytes:
            return False
        return not content.writer.would_wait(size_bytes)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write anywhere; a gap behind the end becomes zeroes.

        Raises:
            OSError: ``EFBIG`` where a spool would exceed its limit; ``ESTALE`` where another mount
                replaced the file; what the store raised.
        """
        with self.lock:
            self.pending.check_changes()
            content, path = self._content, self.path or ""
            state = to_be_written(content.state, at_end=offset == self.size_bytes)
            if state is ContentState.SEQUENTIAL:
                content.sequential(path).write(data)
            else:
                content.spooled(path).write(offset, data)
            self.pending.content_changed(time.time_ns())

    def append(self, data: bytes | memoryview) -> None:
        """Write at the end, wherever it is by the time the body is free."""
        with self.lock:
            self.write(self.size_bytes, data)

    def truncate(self, size_bytes: int) -> None:
        """Cut the file, or extend it with zeroes."""
        with self.lock:
            if size_bytes == self.size_bytes:
                return
            self.pending.check_changes()
            if to_be_resized(size_bytes) is ContentState.SEQUENTIAL:
                self._content.emptied(self.path or "")
            else:
                self._content.spooled(self.path or "").truncate(size_bytes)
            self.pending.content_changed(time.time_ns())

    def set_attributes(self, attributes: Attributes) -> None:
        """Note attributes that go out with the next flush.

        Raises:
            OSError: ``ENOSPC`` where extended attributes do not fit; ``ESTALE`` as ``write``.
        """
        if attributes.xattrs is not None:
            checked_xattrs(attributes.xattrs, self.path)
        with self.lock:
            self.pending.check_changes()
            self.pending.attributes_changed(attributes)

    def flush(self, *, last: bool = True) -> None:
        """Make everything durable and visible; with ``last`` false, writing likely goes on.

        An unlinked file is published nowhere.

        Raises:
            OSError: ``ESTALE`` where another mount replaced what was changed here.
        """
        with self.lock:
            what, path = self.pending.flush(), self.path
            if path is None or what is Flush.NOTHING:
                return
            if what is Flush.ATTRIBUTES:
                self._publish_attributes(path)
                return
            content = self._content.sealed(path, last=last)
            done = self._publish(path, content)
            self.pending.content_published()
            self._hold(self._files.opener.open_published(path, content, done))
            if to_be_flushed(self._content.state, last=last) is ContentState.CLEAN:
                # Only now: until the version is open, the writer alone knows the size of the file.
                self._content.clean()

    # What happens to its path

    def take_up(self) -> None:
        """Become what the path shows now. For a body that nobody reads: what they read would change."""
        with self.lock:
            if self.version is not None and self.path is not None:
                opened = self._files.open(self.path)
                self._content.clean()
                self._hold(opened)

    def keep_content(self) -> None:
        """Copy a plain version aside before its path is taken away from it, unless it is gone from there."""
        with self.lock, stale_suppressed():
            if self._reads_path:
                self._content.spooled(self.path or "").hold_all()

    def check_place(self) -> None:
        """Before a rename, leave a path that shows another version: that one is renamed. May ask the store."""
        opened = self._content.opened
        if self._reads_path and opened is not None and opened.place.is_gone():
            self.pending.replaced_elsewhere()

    def moved(self, path: str) -> None:
        """Note that the file was renamed. May ask the store."""
        with self.lock:
            self.pending.path = path
            if self._content.opened is not None:
                self._content.opened.moved(path, was_there=True)

    def close(self) -> None:
        """Let everything go; what was not flushed is lost."""
        with self.lock:
            self._content.close()

    # Inside

    @property
    def _reads_path(self) -> bool:
        """Whether reads go to the plain file at ``path`` itself, and depend on its staying there."""
        content = self._content
        in_store = content.spool is None or content.spool.granules.num_missing() > 0
        return (
            in_store
            and content.writer is None
            and content.opened is not None
            and content.opened.reads_path
        )

    def _publish_attributes(self, path: str) -> None:
        """Give the version that is open here its attributes; another one at its path gets none."""
        opened = self._content.opened
        assert opened is not None, "a file without content yet is published whole"
        now = with_attributes(self._files, path, opened, self.pending.attributes)
        self.pending.attributes_published()
        if now is None:
            self.pending.attributes = Attributes()
            self.pending.replaced_elsewhere()
            self.pending.check_changes()
        else:
            self._hold(now)

    def _publish(self, path: str, content: Content) -> Published:
        # A failed call may have published: what that may name is left to fsck.
        loose, files = self._content.take_loose(), self._files
        now = self.pending.attributes.over(self._content.manifest)

        def ready() -> None:
            self._content.settle(path, content)

        done = files.publish(path, content, now, ready=ready, moves_time=False)
        files.references.discard(loose, kept=Manifest(mtime_ns=0, segments=segments_of(content)))
        return done

    def _hold(self, opened: OpenVersion) -> None:
        self._content.hold(opened)
        self.pending.opened(opened.info.mtime_ns)
