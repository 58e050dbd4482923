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
    """How files are flushed and closed."""

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
                # A flush of attributes may have found out: the name leads to the newer version from now on.
                if body.pending.replaced and handle.node.body is body:
                    self._names.part(handle.node, body)
            if body.pending.path is not None:
                self._session.file_changed(handle.node, body.pending.path)

    async def release(self, number: int) -> None:
        """Drop a handle; the last one that writes a file, and the last one of all, publish what no flush has.

        Raises:
            OSError: As ``flush``; the handle is gone all the same.
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
            handles[number] = handle  # the mount ends: what is left open is published then
            raise
        except BaseException:
            # Whatever the flush said: the kernel never asks for this handle again.
            await self._closed(handle)
            raise
        await self._closed(handle)

    async def _publish(self, body: OpenFile, *, last: bool) -> None:
        if not self._published_now(body, last=last):
            await self._session.wait(body.flush, last=last)

    def _published_now(self, body: OpenFile, *, last: bool) -> bool:
        """Publish a small new file where the store takes it at once; return whether it was done."""
        inline = self._session.inline
        # Only tried: a thread may hold it for as long as the store takes, and the loop answers everybody.
        if not inline.may_run or not body.lock.acquire(blocking=False):
            return False
        try:
            # A flush makes one small file where this mount has shown none.
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
    """Close a body that asks nothing of the store for it; return whether it was done."""
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
