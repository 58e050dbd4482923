"""The content of one open file, shared by all handles on it.

::

    clean ----write at the end---> sequential ----flush---> clean
      |                                |
      +------- any other write --------+--> spooled ---flush (stays spooled)

*Clean*: a version of the store, read through the cache. *Sequential*: bytes appended go
straight to the objects. *Spooled*: what was written lies in a local temporary file, over
the version underneath; a flush writes what changed as a segment of its own and splices it
in, or the whole file where that is better: HDFS and object stores only write front to back.
"""

import errno
import threading
import time
from dataclasses import replace

from fusefs.format.attributes import Attributes, checked_xattrs
from fusefs.format.content import Content
from fusefs.format.manifest import Manifest, Segment
from fusefs.tree.freshness import names_segments, with_attributes
from fusefs.tree.namespace import OpenVersion, StripedFiles
from fusefs.tree.publish import Published
from fusefs.tree.version_identity import ids_of, segments_of, spliceable
from fusefs.tree.version_location import stale_suppressed
from fusefs.vfs.write_back import granule_bytes_of, written_from
from fusefs.write.file_writer import FileWriter
from fusefs.write.splice import MOST_RANGES, MOST_RANGES_CLOSED
from fusefs.write.spool import Spool, SpoolPlace

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
        self._place = place
        self.lock = threading.RLock()
        """Held by each change and read of the content; the mount's loop only tries it."""
        self.path: str | None = path
        self._opened = opened
        self._writer: FileWriter | None = None
        self._spool: Spool | None = None
        self._base: tuple[Segment, ...] = ()
        """What the spool lies over and a splice may keep."""
        self._loose: Content = b""
        """Durable content under the spool that no manifest names yet."""
        self._attributes = Attributes()
        self._mtime_ns = opened.info.mtime_ns if opened is not None else time.time_ns()
        self.dirty = opened is None
        """Whether there is content, or attributes, that is not published."""
        self._only_attributes = False
        """Whether it is attributes alone."""
        self.replaced = False
        """Whether its path shows a version of another mount: this one is read, and changes no more."""
        self.published = opened is not None
        """Whether the store shows something of this file at ``path``."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the file as its readers see it now."""
        if self._spool is not None:
            return self._spool.size_bytes
        if self._writer is not None:
            return self._writer.size_bytes
        return self._opened.reader.size_bytes if self._opened is not None else 0

    @property
    def mtime_ns(self) -> int:
        """Time of the last change of content, or what was set since."""
        set_to = self._attributes.mtime_ns
        return set_to if set_to is not None else self._mtime_ns

    @property
    def mode(self) -> int:
        """Permission bits."""
        if self._attributes.mode is not None:
            return self._attributes.mode
        return self._opened.info.mode if self._opened is not None else 0o644

    @property
    def manifest(self) -> Manifest | None:
        """Manifest of the version that was opened."""
        return self._opened.manifest if self._opened is not None else None

    @property
    def version(self) -> OpenVersion | None:
        """The version of the store that this is; None while it is being changed here, and of one without a path."""
        return self._opened if not self.dirty and self.path is not None else None

    @property
    def _reads_path(self) -> bool:
        """Whether reads go to the plain file at ``path`` itself, and depend on its staying there."""
        in_store = self._spool is None or not self._spool.is_complete
        return (
            in_store
            and self._writer is None
            and self._opened is not None
            and self._opened.reads_path
        )

    @property
    def flushes_briefly(self) -> bool:
        """Whether a flush makes one small file where this mount has shown none. Asked under the lock."""
        is_small = self._writer is None or self._writer.is_small
        return is_small and self._spool is None and not self.published

    # Reading

    def try_read(self, offset: int, size_bytes: int, process: int) -> bytes | memoryview | None:
        """Return bytes that are at hand; None where reading would wait. Never waits."""
        if self._spool is not None:
            return self._spool.try_read(offset, size_bytes)
        if self._writer is None and self._opened is not None:
            reader = self._opened.reader
            data = reader.try_read(offset, size_bytes)
            if data is not None:
                reader.note(offset, size_bytes, process=process)
            return data
        return None

    def reader_if_clean(self) -> OpenVersion | None:
        """Return the version whose reader may be asked without this body, if content is not being changed."""
        return None if self._writer or self._spool else self._opened

    def read(self, offset: int, size_bytes: int, process: int) -> bytes | memoryview:
        """Return a range, cut at the end of the file."""
        with self.lock:
            if self._writer is not None:
                self._leave_sequential()
            if self._spool is not None:
                return self._spool.read(offset, size_bytes)
            if self._opened is None:
                return b""
            return self._opened.reader.read(offset, size_bytes, process=process)

    # Writing

    def writes_now(self, offset: int, size_bytes: int) -> bool:
        """Return whether a write would be taken without waiting for the store."""
        if self._spool is not None:
            return self._spool.writes_now(offset, size_bytes)
        if self._writer is None and self._opened is None and offset == 0:
            # Of a file made here: nothing is asked of the store before a unit is full.
            unit = self._files.config.striping_of(self.path or "").unit
            return not self.replaced and size_bytes < unit
        if self._writer is None or offset != self._writer.size_bytes:
            return False
        return not self._writer.would_wait(size_bytes)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write anywhere; a gap behind the end becomes zeroes.

        Raises:
            OSError: ``EFBIG`` where a spool would exceed its limit; ``ESTALE`` where another mount
                replaced the file; what the store raised.
        """
        with self.lock:
            self._check_changes()
            if self._spool is None and offset == self.size_bytes:
                self._become_sequential().write(data)
            else:
                self._become_spooled().write(offset, data)
            self._changed()

    def append(self, data: bytes | memoryview) -> None:
        """Write at the end, wherever it is by the time the body is free."""
        with self.lock:
            self.write(self.size_bytes, data)

    def truncate(self, size_bytes: int) -> None:
        """Cut the file, or extend it with zeroes."""
        with self.lock:
            if size_bytes == self.size_bytes:
                return
            self._check_changes()
            if size_bytes == 0:
                self._drop_content()
                self._writer = self._files.writer(self.path or "")
            else:
                self._become_spooled().truncate(size_bytes)
            self._changed()

    def set_attributes(self, attributes: Attributes) -> None:
        """Note attributes that go out with the next flush.

        Raises:
            OSError: ``ENOSPC`` where extended attributes do not fit; ``ESTALE`` as ``write``.
        """
        if attributes.xattrs is not None:
            checked_xattrs(attributes.xattrs, self.path)
        with self.lock:
            self._check_changes()
            self._attributes = replace(self._attributes, **attributes.given)
            self._only_attributes = self._only_attributes or not self.dirty
            self.dirty = True

    def xattrs(self) -> dict[str, bytes]:
        """Return the extended attributes as of now."""
        pending = self._attributes.xattrs
        if pending is not None:
            return dict(pending)
        return dict(self.manifest.xattrs) if self.manifest is not None else {}

    def flush(self, *, last: bool = True) -> None:
        """Make everything durable and visible; with ``last`` false, writing likely goes on.

        An unlinked file is published nowhere.

        Raises:
            OSError: ``ESTALE`` where another mount replaced what was changed here.
        """
        with self.lock:
            if self.dirty and self.path is not None and self._only_attributes:
                self._publish_attributes()
                return
            if self.dirty:
                self._check_changes()
            if not self.dirty or self.path is None:
                return
            if self._spool is not None:
                content = self._spooled_content(last)
            else:
                content = self._writer.seal(last=last) if self._writer is not None else b""
            done = self._publish(content)
            self.dirty, self.published = False, True
            self._hold(self._files.open_published(self.path, content, done))
            if last:
                # Only now: until the version is open, the writer alone knows the size of the file.
                self._writer = None

    def take_up(self) -> None:
        """Become what the path shows now. For a body that nobody reads: what they read would change."""
        with self.lock:
            if self.version is not None and self.path is not None:
                opened = self._files.open(self.path)
                self._close_spool()
                self._writer = None
                self._hold(opened)

    def replaced_elsewhere(self) -> None:
        """Leave the path to another version; this one stays to be read, as far as its objects do."""
        self.path, self.replaced = None, True

    def keep_content(self) -> None:
        """Copy a plain version aside before its path is taken away from it, unless it is gone from there."""
        with self.lock, stale_suppressed():
            if self._reads_path:
                self._become_spooled().hold_all()

    def check_place(self) -> None:
        """Before a rename, leave a path that shows another version: that one is renamed. May ask the store."""
        if self._reads_path and self._opened is not None and self._opened.is_gone():
            self.replaced_elsewhere()

    def moved(self, path: str) -> None:
        """Note that the file was renamed. May ask the store."""
        with self.lock:
            self.path = path
            if self._opened is not None:
                self._opened.moved(path, was_there=True)

    def close(self) -> None:
        """Let everything go; what was not flushed is lost."""
        with self.lock:
            self._drop_content()
            if self._opened is not None:
                self._opened.close()
                self._opened = None

    # Inside

    def _check_changes(self) -> None:
        if self.replaced:
            raise OSError(errno.ESTALE, "another mount replaced the file; open it again")

    def _publish_attributes(self) -> None:
        """Give the version that is open here its attributes; another one at its path gets none."""
        assert self.path is not None
        assert self._opened is not None, "a file without content yet is published whole"
        now = with_attributes(self._files, self.path, self._opened, self._attributes)
        self._only_attributes = self.dirty = False
        if now is None:
            self._attributes = Attributes()
            self.replaced_elsewhere()
            self._check_changes()
        else:
            self._hold(now)

    def _changed(self) -> None:
        self._only_attributes = False
        self._mtime_ns = time.time_ns()
        self._attributes = replace(self._attributes, mtime_ns=None)
        self.dirty = True

    def _become_sequential(self) -> FileWriter:
        if self._writer is None:
            path = self.path or ""
            if self._opened is None or self._opened.reader.size_bytes == 0:
                self._writer = self._files.writer(path)
            else:
                self._writer = self._files.appender_to(path, self._opened)
        return self._writer

    def _leave_sequential(self) -> None:
        """Stop appending: by reading the published version where it is all there, else by a spool."""
        if not self.dirty and self.path is not None:
            self._writer = None  # what it wrote is open as it was published
        else:
            self._become_spooled()

    def _become_spooled(self) -> Spool:
        if self._spool is not None:
            return self._spool
        granule = granule_bytes_of(self._files, self.path or "")
        content: Content | None = None
        reader = self._opened.reader if self._opened is not None else None
        if self._writer is not None:
            content = self._writer.sync()
            reader = self._files.reader_of(content)
        base = spliceable(self.manifest) if content is None else segments_of(content)
        spool = Spool(self._place, granule, reader)
        try:
            if not base:
                spool.hold_all()
        except BaseException:
            spool.close()
            raise
        self._spool, self._base = spool, base
        if content is not None:
            self._loose, self._writer = content, None
        return spool

    def _spooled_content(self, last: bool) -> Content:
        assert self._spool is not None
        base = self._base if self._is_there(self._base) else ()
        most_ranges = MOST_RANGES_CLOSED if last else MOST_RANGES
        return written_from(
            self._spool, base, self._files, self.path or "", most_ranges=most_ranges
        )

    def _is_there(self, segments: tuple[Segment, ...]) -> bool:
        """Return whether another mount has left alone what the next version takes over from this one."""
        shared = ids_of(segments) & ids_of(spliceable(self.manifest))
        return not shared or self.path is None or names_segments(self._files, self.path, shared)

    def _publish(self, content: Content) -> Published:
        assert self.path is not None

        def ready() -> None:
            if self._writer is not None:
                self._writer.settle()
            # As late as can be: what another mount publishes from now on, it publishes over this.
            if not self._is_there(segments_of(content)):
                raise OSError(errno.ESTALE, "another mount replaced what this builds on", self.path)

        # A failed call may have published: what that may name is left to fsck.
        loose, self._loose, files = self._loose, b"", self._files
        now = self._attributes.over(self.manifest)
        done = files.publish(self.path, content, now, ready=ready, moves_time=False)
        files.discard(loose, kept=Manifest(mtime_ns=0, segments=segments_of(content)))
        return done

    def _hold(self, opened: OpenVersion) -> None:
        """Hold another version in place of what was open; bytes in a spool are its own."""
        if self._opened is not None:
            self._opened.close()
        self._opened = opened
        self._attributes = Attributes()
        self._mtime_ns = opened.info.mtime_ns
        if self._spool is not None:
            self._base = spliceable(opened.manifest)
            self._spool.published(opened.reader)

    def _drop_content(self) -> None:
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None
        self._close_spool()

    def _close_spool(self) -> None:
        if self._spool is not None:
            self._spool.close()
            self._spool, self._base = None, ()
            self._files.discard(self._loose, kept=self.manifest)
            self._loose = b""
