"""One open file, shared by all its handles: the lock and the order of its changes.

::

    OpenFile --- FileContent   the bytes                   (``states`` says which state each use needs)
       `------ Unpublished   changes that the store does not show yet, and what a flush publishes
"""

import threading
import time
from collections.abc import Callable, Iterable

from fusefs.format.attributes import PLAIN_MODE, Attributes, checked_xattrs
from fusefs.format.content import Content
from fusefs.format.manifest import Manifest
from fusefs.tree.freshness import with_attributes
from fusefs.tree.namespace import OpenVersion, StripedFiles
from fusefs.tree.publish import Published
from fusefs.tree.version_identity import segments_of
from fusefs.vfs.file.file_content import FileContent
from fusefs.vfs.file.states import (
    ContentState,
    Flush,
    Unpublished,
    to_be_flushed,
    to_be_read,
    to_be_resized,
    to_be_written,
)
from fusefs.write.spool import SpoolPlace
from omniload.base.errors import OmniloadError
from omniload.base.log import get_logger

__all__ = ["OpenFile", "SpoolPlace", "flush_all", "mode_of", "xattrs_of"]

_LOG = get_logger(__name__)
_AT_ONCE = 16


class OpenFile:
    """Content and pending attributes of one open file. Safe in threads; calls may wait for the store.

    Args:
        files: The namespace.
        place: Place of random writes.
        path: Where the file is published; None once it is unlinked.
        opened: The existing version; None for a file that is created by this open.
    """

    def __init__(
        self, files: StripedFiles, place: SpoolPlace, path: str, opened: OpenVersion | None
    ) -> None:
        self._files = files
        # Reentrant: a rename holds the lock from before the store's call until the body knows, and calls that take it.
        self.lock = threading.RLock()
        """Lock held by each change and read of the content; the mount's loop only tries it."""
        self.content = FileContent(files, place, opened)
        self.pending = Unpublished(
            path=path,
            change_ns=opened.info.mtime_ns if opened is not None else time.time_ns(),
            dirty=opened is None,
            published=opened is not None,
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of the file as its readers see it now."""
        return self.content.bytes.size_bytes

    @property
    def version(self) -> OpenVersion | None:
        """The store's version of this file; None while the file is being changed here, or has no path."""
        return self.content.opened if self.pending.is_shown else None

    def read(self, offset: int, size_bytes: int, process: int) -> bytes | memoryview:
        """Return a range, cut at the end of the file."""
        with self.lock:
            content = self.content
            if (
                to_be_read(content.bytes.state, is_shown=self.pending.is_shown)
                is ContentState.SPOOLED
            ):
                return content.spooled(self.pending.path or "").read(offset, size_bytes)
            content.clean()
            if content.opened is None:
                return b""
            return content.opened.reader.read(offset, size_bytes, process=process)

    def write(self, offset: int | None, data: bytes | memoryview) -> None:
        """Write at any place; a gap past the end becomes zeroes.

        Args:
            offset: First byte; None for the end at the time when the lock is taken.
            data: The bytes.

        Raises:
            OSError: ``EFBIG``: a spool would exceed its limit; ``ESTALE``: another mount
                replaced the file; or the error of the store.
        """
        with self.lock:
            self.pending.check_changes()
            content, path = self.content, self.pending.path or ""
            # Read the size under the lock, or two concurrent appends could use the same end.
            offset = self.size_bytes if offset is None else offset
            state = to_be_written(content.bytes.state, at_end=offset == self.size_bytes)
            if state is ContentState.SEQUENTIAL:
                content.sequential(path).write(data)
            else:
                content.spooled(path).write(offset, data)
            self.pending.content_changed(time.time_ns())

    def truncate(self, size_bytes: int) -> None:
        """Truncate the file, or extend it with zeroes."""
        with self.lock:
            if size_bytes == self.size_bytes:
                return
            self.pending.check_changes()
            if to_be_resized(size_bytes) is ContentState.SEQUENTIAL:
                self.content.emptied(self.pending.path or "")
            else:
                self.content.spooled(self.pending.path or "").truncate(size_bytes)
            self.pending.content_changed(time.time_ns())

    def set_attributes(self, attributes: Attributes) -> None:
        """Note attributes, which the next flush publishes.

        Raises:
            OSError: ``ENOSPC``: the extended attributes do not fit; ``ESTALE``: as for ``write``.
        """
        if attributes.xattrs is not None:
            checked_xattrs(attributes.xattrs, self.pending.path)
        with self.lock:
            self.pending.check_changes()
            self.pending.attributes_changed(attributes)

    def flush(self, *, last: bool = True) -> None:
        """Make everything durable and visible; with ``last`` false, writing will probably continue.

        An unlinked file is not published.

        Raises:
            OSError: ``ESTALE``: another mount replaced the file that was changed here.
        """
        with self.lock:
            what, path = self.pending.flush(), self.pending.path
            if path is None or what is Flush.NOTHING:
                return
            if what is Flush.ATTRIBUTES:
                _publish_attributes(self._files, self, path)
                return
            content = self.content.bytes.seal(path, self.content.manifest, last=last)
            done = _publish(self._files, self, path, content)
            self.pending.flushed()
            _hold(self, self._files.opener.open_published(path, content, done))
            if to_be_flushed(self.content.bytes.state, last=last) is ContentState.CLEAN:
                # Not earlier: until the version is open, only the writer knows the size of the file.
                self.content.clean()

    def take_up(self) -> None:
        """Become the version that the path shows now. Only for a body without readers, whose bytes would change."""
        with self.lock:
            # Check again under the lock: the file may have been changed, or unlinked, since the decision.
            if self.version is not None and self.pending.path is not None:
                opened = self._files.open(self.pending.path)
                self.content.clean()
                _hold(self, opened)

    def close(self) -> None:
        """Release everything; unflushed content is lost."""
        with self.lock:
            self.content.close()


def mode_of(body: OpenFile) -> int:
    """Return the present permission bits of an open file."""
    if body.pending.attributes.mode is not None:
        return body.pending.attributes.mode
    opened = body.content.opened
    return opened.info.mode if opened is not None else PLAIN_MODE


def xattrs_of(body: OpenFile) -> dict[str, bytes]:
    """Return the present extended attributes of an open file."""
    pending, manifest = body.pending.attributes.xattrs, body.content.manifest
    if pending is not None:
        return dict(pending)
    return dict(manifest.xattrs) if manifest is not None else {}


def _publish_attributes(files: StripedFiles, body: OpenFile, path: str) -> None:
    """Publish attributes for the version that is open here; another version at its path gets none."""
    opened = body.content.opened
    assert opened is not None, "a file without content yet is published whole"
    now = with_attributes(files, path, opened, body.pending.attributes)
    body.pending.flushed()
    if now is None:
        body.pending.attributes = Attributes()
        body.pending.replaced_elsewhere()
        body.pending.check_changes()
    else:
        _hold(body, now)


def _publish(files: StripedFiles, body: OpenFile, path: str, content: Content) -> Published:
    # A failed call may have published, so objects that it may name are left to fsck.
    loose = body.content.bytes.take_loose()
    now = body.pending.attributes.over(body.content.manifest)

    def ready() -> None:
        body.content.settle(path, content)

    # The time of the directory changed when the file was created, here or elsewhere.
    done = files.publish(path, content, now, ready=ready, moves_time=False)
    files.references.discard(loose, kept=Manifest(mtime_ns=0, segments=segments_of(content)))
    return done


def _hold(body: OpenFile, opened: OpenVersion) -> None:
    body.content.hold(opened)
    body.pending.opened(opened.info.mtime_ns)


def flush_all(bodies: Iterable[OpenFile], *, within_s: float) -> list[str]:
    """Publish the present content of files that are still open for writing.

    A mount that is asked to end keeps what was written, as any filesystem does at its unmount.
    Call this when no request is under way any more.

    Args:
        bodies: Open files, in any order; the same file may occur twice.
        within_s: Seconds after which the remaining files are given up; a store call that is then under way
            ends by its own limits.

    Returns:
        Paths of the files whose last bytes are lost; each is logged with its reason.
    """
    left = list(
        {
            id(body): body
            for body in bodies
            if body.pending.dirty and body.pending.path is not None
        }.values()
    )
    end = time.monotonic() + within_s
    waiting = iter(left)
    lock = threading.Lock()
    done: set[int] = set()

    def publish() -> None:
        while time.monotonic() < end:
            with lock:
                body = next(waiting, None)
            if body is None:
                return
            try:
                body.flush()
            # Catch every error, because this thread has other files to publish.
            except Exception as error:  # noqa: BLE001 -- said, and the file is counted as lost
                defect = None if isinstance(error, OSError | OmniloadError) else error
                lost_path = body.pending.path
                _LOG.error(
                    "%s: what was written last is lost: %s", lost_path, error, exc_info=defect
                )
            else:
                done.add(id(body))

    threads = _begun(publish, min(_AT_ONCE, len(left)))
    if not threads:
        publish()  # in this thread, one after the other, so that a lack of threads loses nothing
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    lost = sorted(body.pending.path or "" for body in left if id(body) not in done)
    if left:
        _LOG.info("published %d of %d files left open", len(done), len(left))
    if lost and any(thread.is_alive() for thread in threads):
        _LOG.error("gave up after %.0f s; what was written last is lost: %s", within_s, lost)
    return lost


def _begun(run: Callable[[], None], most: int) -> list[threading.Thread]:
    """Return threads that run a function, as many as the system allows."""
    threads: list[threading.Thread] = []
    while len(threads) < most:
        # A daemon thread: a file that is given up must not keep the process from ending.
        thread = threading.Thread(target=run, name="fusefs-flush-all", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            _LOG.warning("%d threads publish what was left open: %s", len(threads), error)
            break
        threads.append(thread)
    return threads
