"""The content of one open file, shared by all handles on it.

::

    clean ----write at the end---> sequential ----flush---> clean
      |                                |
      +------- any other write --------+--> spooled ---flush (stays spooled)

*Clean*: a version of the store, read through the cache. *Sequential*: bytes appended go
straight to the objects. *Spooled*: what was written lies in a local temporary file, over
the version underneath; a flush writes what changed as a segment of its own and splices it
in, or the whole file where that is better. HDFS and object stores know no other writes
than sequential ones, and none into an object that is there.
"""

import errno
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from fusefs.attributes import Attributes, checked_xattrs
from fusefs.manifest import Manifest, Segment
from fusefs.namespace import OpenedFile, StripedFiles
from fusefs.patching import granule_bytes_of, written_from
from fusefs.splicing import MOST_RANGES, MOST_RANGES_CLOSED
from fusefs.spool import Spool, SpoolPlace
from fusefs.writing import Content, FileWriter

__all__ = ["Body", "SpoolPlace"]


class Body:
    """Content and pending attributes of one open file. Safe in threads; calls may wait for the store.

    Args:
        files: The namespace.
        place: Where random writes go.
        path: Where the file is published; None once it is unlinked.
        opened: The version that is there; None for a file that is created by this open.
    """

    def __init__(
        self, files: StripedFiles, place: SpoolPlace, path: str, opened: OpenedFile | None
    ) -> None:
        self._files = files
        self._place = place
        self.lock = threading.RLock()
        """Held by whoever changes or reads the content; the mount's loop only tries it."""
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
        """Whether there is content that is not published."""
        self.published = opened is not None
        """Whether the store shows something of this file at ``path``."""

    # Description

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
    def is_plain_version(self) -> bool:
        """Whether reads go to the plain file at ``path`` itself, and depend on its staying there."""
        in_store = self._spool is None or not self._spool.is_complete
        return (
            in_store
            and self._writer is None
            and self._opened is not None
            and self._opened.manifest is None
        )

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

    def reader_if_clean(self) -> OpenedFile | None:
        """Return the version whose reader may be asked without this body, if content is not being changed."""
        return self._opened if self._writer is None and self._spool is None else None

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
        """Tell whether a write would be taken without waiting for the store."""
        if self._spool is not None:
            return self._spool.writes_now(offset, size_bytes)
        if self._writer is None or offset != self._writer.size_bytes:
            return False
        return not self._writer.would_wait(size_bytes)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write anywhere; a gap behind the end becomes zeroes.

        Raises:
            OSError: ``EFBIG`` where a spool would exceed its limit; what the store raised.
        """
        with self.lock:
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
            if size_bytes == 0:
                self._drop_content()
                self._writer = self._files.writer(self.path or "")
            else:
                self._become_spooled().truncate(size_bytes)
            self._changed()

    def set_attributes(self, attributes: Attributes) -> None:
        """Note attributes that go out with the next flush.

        Raises:
            OSError: ``ENOSPC`` where extended attributes do not fit.
        """
        if attributes.xattrs is not None:
            checked_xattrs(attributes.xattrs, self.path)
        with self.lock:
            self._attributes = replace(self._attributes, **attributes.given)
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
        """
        with self.lock:
            if not self.dirty or self.path is None:
                return
            if self._spool is not None:
                self._publish(self._spooled_content(last))
            elif self._writer is not None:
                self._publish(self._writer.seal(last=last), self._writer.settle)
            elif self._opened is not None:
                self._files.set_attributes(self.path, self._attributes)
            else:
                self._publish(b"")
            self.dirty, self.published = False, True
            self._reopen(brings=False)
            if last:
                # Only now: until the version is open, the writer alone knows the size of the file.
                self._writer = None

    def refresh(self) -> None:
        """Take up a newer version, where another process published one (close-to-open)."""
        with self.lock:
            path, known = self.path, self._opened
            if self.dirty or path is None or known is None:
                return
        # Nearly always nothing is new. It is asked without the lock, which reads would wait for.
        with suppress(FileNotFoundError):
            if not self._lacks_bytes() and self._files.stat(path).entry == known.info.entry:
                return
        with self.lock:
            if self.dirty or self.path is None or self._opened is None:
                return
            is_new = self._files.stat(self.path).entry != self._opened.info.entry
            if is_new or self._lacks_bytes():
                self._close_spool()
                self._writer = None
                self._reopen()

    def _lacks_bytes(self) -> bool:
        """Tell whether bytes that an open brings are not here: those of what was published by this body."""
        version = self.reader_if_clean()
        return version is not None and self._files.lacks_bytes(version)

    def keep_content(self) -> None:
        """Copy a plain version aside before its path is taken away from it."""
        with self.lock:
            if self.is_plain_version:
                self._become_spooled().hold_all()

    def moved(self, path: str) -> None:
        """Note that the file was renamed."""
        with self.lock:
            self.path = path
            if self._opened is not None:
                self._opened.moved(path)

    def close(self) -> None:
        """Let everything go; what was not flushed is lost."""
        with self.lock:
            self._drop_content()
            if self._opened is not None:
                self._opened.close()
                self._opened = None

    # Inside

    def _changed(self) -> None:
        self._mtime_ns = time.time_ns()
        self._attributes = replace(self._attributes, mtime_ns=None)
        self.dirty = True

    def _outgoing(self) -> Attributes:
        """Return the attributes of the next version: those set here over those it had."""
        known = self.manifest
        if known is None:
            return self._attributes
        mode = self._attributes.mode
        return replace(
            self._attributes,
            mode=mode if mode is not None else (known.mode if known.mode != 0o644 else None),
            xattrs=self.xattrs() or None,
        )

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
            self._writer = None
            self._reopen()
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
        base = _spliceable(self.manifest) if content is None else _segments_of(content)
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
        """Tell whether another mount has left alone what the next version takes over from this one.

        A mount that replaces a file removes its objects; a manifest must not name them then.
        """
        shared = _ids(segments) & _ids(_spliceable(self.manifest))
        if not shared or self.path is None:
            return True
        try:
            there = self._files.manifest(self.path)
        except FileNotFoundError:
            return False
        return there is not None and shared <= _ids(there.segments)

    def _publish(self, content: Content, settle: Callable[[], None] = lambda: None) -> None:
        assert self.path is not None

        def ready() -> None:
            settle()
            # As late as can be: what another mount publishes from now on, it publishes over this.
            if not self._is_there(_segments_of(content)):
                raise OSError(errno.ESTALE, "another mount replaced what this builds on", self.path)

        # Whether a failed call did publish is not known: what it may name is left to fsck.
        loose, self._loose = self._loose, b""
        self._files.publish(self.path, content, self._outgoing(), ready=ready, moves_time=False)
        kept = Manifest(mtime_ns=0, segments=_segments_of(content))
        self._files.discard(loose, kept=kept)

    def _reopen(self, *, brings: bool = True) -> None:
        """Hold the version that was just published; the bytes written stay readable as a spool is."""
        assert self.path is not None
        opened = self._files.open(self.path, brings=brings)
        if self._opened is not None:
            self._opened.close()
        self._opened = opened
        self._attributes = Attributes()
        self._mtime_ns = opened.info.mtime_ns
        if self._spool is not None:
            self._base = _spliceable(opened.manifest)
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


def _segments_of(content: Content) -> tuple[Segment, ...]:
    return () if isinstance(content, bytes) else content


def _ids(segments: Iterable[Segment]) -> set[str]:
    return {segment.segment_id for segment in segments}


def _spliceable(manifest: Manifest | None) -> tuple[Segment, ...]:
    """Return the segments of a version that another one can share; bytes in a manifest are none."""
    return manifest.segments if manifest is not None and not manifest.inline else ()
