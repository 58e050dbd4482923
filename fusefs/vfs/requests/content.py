"""Requests about content: open, read, write, flush, fsync, close."""

import errno
import os
from contextlib import suppress

from fusefs.bridge.api.protocol import Data, Opened
from fusefs.bridge.api.waiting import all_done
from fusefs.tree.namespace import OpenVersion
from fusefs.vfs.closing import Closing
from fusefs.vfs.opening import Opening
from fusefs.vfs.session import STATS_INODE, Session

__all__ = ["ContentRequests"]


class ContentRequests:
    """How files are opened, read, written and let go."""

    def __init__(self, session: Session, opening: Opening, closing: Closing) -> None:
        self._session = session
        self._opening = opening
        self._closing = closing

    async def open(self, inode: int, flags: int) -> Opened:
        """Open a file as it is now in the store, or as it is being written here."""
        if inode == STATS_INODE:
            if flags & (os.O_ACCMODE | os.O_TRUNC) != os.O_RDONLY:
                raise PermissionError(errno.EPERM, "statistics are only read")
            return Opened(self._open_statistics(), direct_io=True)
        return await self._opening.open(self._session.inodes.node(inode), flags)

    def _open_statistics(self) -> int:
        handle, statistics = self._session.handles.new_number(), self._session.statistics
        statistics.open_views[handle] = statistics.as_json()
        return handle

    async def read(self, handle: int, offset: int, size_bytes: int) -> Data:
        """Read: inline from memory, else once the blocks are here."""
        if (text := self._session.statistics.open_views.get(handle)) is not None:
            return text[offset : offset + size_bytes]
        opened = self._session.handles.files[handle]
        body = opened.body
        if body.lock.acquire(blocking=False):
            try:
                data = body.content.bytes.try_read(offset, size_bytes, handle)
                version = body.content.bytes.version
            finally:
                body.lock.release()
            if data is None and version is not None:
                data = await _read_when_here(version, offset, size_bytes, handle)
            if data is not None:
                if version is not None and opened.kept:
                    version.reader.served(offset, len(data))
                return data
        return await self._session.wait(body.read, offset, size_bytes, handle)

    async def write(self, handle: int, offset: int, data: Data) -> int:
        """Write: inline where the window has room, else in a thread that waits for it."""
        opened = self._session.handles.files[handle]
        body = opened.body
        opened.node.written()
        if body.lock.acquire(blocking=False):
            try:
                # Under the lock: a flush under way for another handle moves the end's description.
                offset = body.size_bytes if opened.appends else offset
                path = body.pending.path or ""
                if body.content.bytes.writes_now(path, offset, len(data)):
                    body.write(offset, data)
                    opened.node.kernel_size = body.size_bytes
                    return len(data)
            finally:
                body.lock.release()
        await self._session.wait(body.write, None if opened.appends else offset, bytes(data))
        opened.node.kernel_size = body.size_bytes
        return len(data)

    async def flush(self, handle: int) -> None:
        """Publish at close, so that the next open of the file sees all of it."""
        if (opened := self._session.handles.files.get(handle)) is not None:
            await self._closing.flush(opened, last=True)

    async def fsync(self, handle: int) -> None:
        """Make durable and visible what is written so far."""
        if (opened := self._session.handles.files.get(handle)) is not None:
            await self._closing.flush(opened, last=False)
            # Also what was published before, and need not be durable yet.
            if (path := opened.body.pending.path) is not None and opened.body.pending.published:
                with suppress(FileNotFoundError):  # removed or renamed meanwhile
                    await self._session.wait(self._session.files.store.sync, path)

    async def fsyncdir(self, handle: int) -> None:
        """Make durable the names in a directory."""
        listing = self._session.handles.listings.get(handle)
        node = listing.directory if listing is not None else None
        if node is not None and node.is_attached:
            await self._session.wait(self._session.files.store.sync, node.path())

    async def release(self, handle: int) -> None:
        """Drop a handle; flush has published already, unless it failed and said so."""
        if self._session.statistics.open_views.pop(handle, None) is not None:
            return
        await self._closing.release(handle)


async def _read_when_here(version: OpenVersion, offset: int, size_bytes: int, handle: int) -> Data:
    waiting = version.reader.start(offset, size_bytes, process=handle)
    await all_done(waiting)
    return version.reader.finish(offset, size_bytes, waiting)
