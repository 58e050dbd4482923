"""Flush and release: the time of publishing, and the handles whose flush fails."""

from contextlib import suppress
from functools import partial

from fusefs.vfs.file.open_file import OpenFile
from fusefs.vfs.handle_table import Handle
from fusefs.vfs.session import Session
from fusefs.vfs.shown_version import Lookup
from omniload.base.errors import UnavailableError

__all__ = ["Closing"]


class Closing:
    """Flushes and closes files."""

    def __init__(self, session: Session, names: Lookup) -> None:
        self._session = session
        self._names = names

    async def flush(self, handle: Handle, *, last: bool) -> None:
        """Publish the written bytes, so that the next open of the file sees all of them.

        Args:
            handle: Handle of the file.
            last: False if writing will probably continue.

        Raises:
            OSError: Same as ``OpenFile.flush``.
        """
        body = handle.body
        if body.pending.dirty and (body.pending.path is not None or body.pending.replaced):
            try:
                # Publish while nobody looks at the path, because the new version would be taken for another mount's.
                publish = partial(self._publish, body, last=last)
                await self._session.rounds.exclusive(handle.node, publish)
            finally:
                # A flush of attributes may have found a newer version, to which the name leads from now on.
                if body.pending.replaced and handle.node.body is body:
                    self._names.part(handle.node, body)
            if body.pending.path is not None:
                self._session.file_changed(handle.node, body.pending.path)

    async def release(self, number: int) -> None:
        """Drop a handle. The last handle that writes a file, and the last of all, publish unflushed content.

        Raises:
            OSError: Same as for ``flush``; the handle is dropped all the same.
        """
        handles = self._session.handles.files
        handle = handles.pop(number)
        if (version := handle.body.content.bytes.version) is not None:
            version.reader.ahead.closed(number)
        try:
            # Writes through a mapping after the last close arrive with the release of its handle. Nobody is told of an
            # error here, so the very last release tries once more.
            if handle.node.opens == 1 or (handle.writes and handle.node.writers == 1):
                await self.flush(handle, last=True)
        except GeneratorExit:
            handles[number] = handle  # the mount ends, and publishes files that are still open
            raise
        except BaseException:
            # Drop the handle even after an error, because the kernel never asks for it again.
            await self._closed(handle)
            raise
        await self._closed(handle)

    async def _publish(self, body: OpenFile, *, last: bool) -> None:
        if not self._published_now(body, last=last):
            await self._session.wait(body.flush, last=last)

    def _published_now(self, body: OpenFile, *, last: bool) -> bool:
        """Publish a small new file if the store takes it at once; return whether it was published."""
        inline = self._session.inline
        # Only try the lock: a thread may hold it during a store call, and the loop must answer other requests.
        if not inline.may_run or not body.lock.acquire(blocking=False):
            return False
        try:
            # A flush creates one small file where this mount has shown none.
            if body.content.bytes.is_small and not body.pending.published:
                with suppress(UnavailableError):
                    inline.run(partial(body.flush, last=last))
                    return True
        finally:
            body.lock.release()
        return False

    async def _closed(self, handle: Handle) -> None:
        self._session.inodes.closed(handle.node, reads=handle.reads, writes=handle.writes)
        if handle.node.body is not handle.body and not _closed_now(handle.body):
            await self._session.wait(handle.body.close)


def _closed_now(body: OpenFile) -> bool:
    """Close a body whose close needs no store call; return whether it was closed."""
    if not body.lock.acquire(blocking=False):
        return False
    try:
        version = body.content.bytes.version
        if version is not None and version.closes_now:
            body.close()
            return True
        return False
    finally:
        body.lock.release()
