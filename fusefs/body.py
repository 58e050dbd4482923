"""The content of one open file, shared by all handles on it.

::

    clean ----write at the end---> sequential ----flush---> clean
      |                                |
      +------- any other write --------+--> spooled ---flush (stays spooled)

*Clean*: a version of the store, read through the cache. *Sequential*: bytes appended go
straight to the objects. *Spooled*: the whole file in a local temporary file, which takes
writes anywhere; a flush writes it to the store anew. HDFS and object stores know no other
writes than the sequential ones, so a random write costs the file.
"""

import errno
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from fusefs.attributes import Attributes
from fusefs.manifest import Manifest
from fusefs.namespace import OpenedFile, StripedFiles
from fusefs.writing import FileWriter

__all__ = ["Body", "SpoolPlace"]

_COPY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class SpoolPlace:
    """Where spools lie and how large one may get."""

    directory: str | None = None
    """None: the system's directory for temporary files."""
    limit_bytes: int = 64 << 30


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
        self._spool: int | None = None
        self._spool_size = 0
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
            return self._spool_size
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
        in_store = self._spool is None and self._writer is None
        return in_store and self._opened is not None and self._opened.manifest is None

    # Reading

    def try_read(self, offset: int, size_bytes: int, process: int) -> bytes | memoryview | None:
        """Return bytes that are at hand; None where reading would wait. Never waits."""
        if self._spool is not None:
            return os.pread(self._spool, size_bytes, offset)
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
                return os.pread(self._spool, size_bytes, offset)
            if self._opened is None:
                return b""
            return self._opened.reader.read(offset, size_bytes, process=process)

    # Writing

    def writes_now(self, offset: int, size_bytes: int) -> bool:
        """Tell whether a write would be taken without waiting for the store."""
        if self._spool is not None:
            return True
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
                spool = self._become_spooled()
                self._check_limit(offset + len(data))
                view = memoryview(data)
                while view:
                    done = os.pwrite(spool, view, offset)
                    view, offset = view[done:], offset + done
                self._spool_size = max(self._spool_size, offset)
            self._changed()

    def truncate(self, size_bytes: int) -> None:
        """Cut the file, or extend it with zeroes."""
        with self.lock:
            if size_bytes == self.size_bytes:
                return
            if size_bytes == 0:
                self._drop_content()
                self._writer = self._files.writer(self.path or "")
            else:
                self._check_limit(size_bytes)
                os.ftruncate(self._become_spooled(), size_bytes)
                self._spool_size = size_bytes
            self._changed()

    def set_attributes(self, attributes: Attributes) -> None:
        """Note attributes that go out with the next flush."""
        changes = {
            name: value
            for name in ("mode", "mtime_ns", "xattrs")
            if (value := getattr(attributes, name)) is not None
        }
        with self.lock:
            self._attributes = replace(self._attributes, **changes)
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
                self._publish_spool()
            elif self._writer is not None:
                content = self._writer.finish() if last else self._writer.sync()
                self._files.publish(self.path, content, self._outgoing())
                if last:
                    self._writer = None
            elif self._opened is not None:
                self._files.set_attributes(self.path, self._attributes)
            else:
                self._files.publish(self.path, b"", self._outgoing())
            self.dirty, self.published = False, True
            self._reopen()

    def refresh(self) -> None:
        """Take up a newer version, where another process published one (close-to-open)."""
        with self.lock:
            if self.dirty or self.path is None or self._opened is None:
                return
            if self._files.stat(self.path).entry != self._opened.info.entry:
                self._close_spool()
                self._writer = None
                self._reopen()

    def keep_content(self) -> None:
        """Copy a plain version aside before its path is taken away from it."""
        with self.lock:
            if self.is_plain_version:
                self._become_spooled()

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

    def _become_spooled(self) -> int:
        if self._spool is not None:
            return self._spool
        self._check_limit(self.size_bytes)
        spool, name = tempfile.mkstemp(prefix="omnifs-spool-", dir=self._place.directory)
        os.unlink(name)  # noqa: PTH108 -- nobody else needs its name, and a crash leaves nothing
        try:
            if self._writer is not None:
                content = self._writer.sync()
                self._copy(self._files.reader_of(content).read, self._writer.size_bytes, spool)
                self._files.discard(content, kept=self.manifest)
                self._writer = None
            elif self._opened is not None:
                reader = self._opened.reader
                self._copy(reader.read, reader.size_bytes, spool)
        except BaseException:
            os.close(spool)
            raise
        self._spool = spool
        self._spool_size = os.fstat(spool).st_size
        return spool

    @staticmethod
    def _copy(read: Callable[[int, int], bytes | memoryview], size_bytes: int, spool: int) -> None:
        at = 0
        while at < size_bytes:
            data = read(at, min(_COPY_BYTES, size_bytes - at))
            at += os.pwrite(spool, data, at)

    def _publish_spool(self) -> None:
        assert self._spool is not None
        assert self.path is not None
        writer = self._files.writer(self.path)
        try:
            for at in range(0, self._spool_size, _COPY_BYTES):
                size = min(_COPY_BYTES, self._spool_size - at)
                writer.write(os.pread(self._spool, size, at))
            content = writer.finish()
        except BaseException:
            writer.abandon()
            raise
        self._files.publish(self.path, content, self._outgoing())

    def _reopen(self) -> None:
        """Hold the version that was just published; the bytes written stay readable as a spool is."""
        assert self.path is not None
        opened = self._files.open(self.path)
        if self._opened is not None:
            self._opened.close()
        self._opened = opened
        self._attributes = Attributes()
        self._mtime_ns = opened.info.mtime_ns

    def _drop_content(self) -> None:
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None
        self._close_spool()

    def _close_spool(self) -> None:
        if self._spool is not None:
            os.close(self._spool)
            self._spool, self._spool_size = None, 0

    def _check_limit(self, size_bytes: int) -> None:
        if size_bytes > self._place.limit_bytes:
            raise OSError(
                errno.EFBIG,
                f"a random write to a file of {size_bytes} bytes needs a spool larger than "
                f"{self._place.limit_bytes}; raise spool_limit or write it front to back",
                self.path,
            )
