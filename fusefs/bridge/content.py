"""Requests about content: open, read, write, flush, fsync, close."""
# ruff: noqa: ARG002 -- the kernel's signatures, whole

import errno
import os
import stat as stat_bits
from typing import cast

import pyfuse3
import trio

from fusefs.attributes import Attributes
from fusefs.body import Body
from fusefs.bridge.answering import all_done, answered
from fusefs.bridge.session import STATS_INODE, Session
from fusefs.namespace import OpenedFile

__all__ = ["ContentRequests"]


class ContentRequests(Session):
    """Requests about content: open, read, write, flush, fsync, close."""

    @answered
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        """Create a file: nothing is in the store before its first flush."""
        parent, text = self._place_for(parent_inode, name)
        path = self._tree.child_path(parent, text)
        if await self._is_there(parent, text):
            if flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, "something is there", path)
            node = self._tree.child(parent, text)
            node.lookups += 1
            file_info = await self._open(node, flags)
            return file_info, await self._entry(node)
        node = self._tree.child(parent, text)
        node.lookups += 1
        node.body = Body(self._files, self._place, path, None)
        permissions = stat_bits.S_IMODE(mode)
        if permissions != 0o644:
            node.body.set_attributes(Attributes(mode=permissions))
        return self._handle(node, flags), self._body_entry(node)

    @answered
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """Make an empty regular file; devices, pipes and sockets have no place in a store."""
        if not stat_bits.S_ISREG(mode):
            raise PermissionError(errno.EPERM, "only regular files")
        file_info, entry = await self.create(parent_inode, name, mode, os.O_EXCL, ctx)
        await self.flush(file_info.fh)
        await self.release(file_info.fh)
        return entry

    @answered
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        """Open a file as it is now in the store, or as it is being written here."""
        if inode == STATS_INODE:
            return pyfuse3.FileInfo(fh=self._new_stats_handle(), direct_io=True)
        return await self._open(self._tree.node(inode), flags)

    @answered
    async def read(self, fh: int, off: int, size: int) -> bytes:
        """Read: inline from memory, else once the blocks are here."""
        if (text := self.statistics.open_views.get(fh)) is not None:
            return text[off : off + size]
        handle = self._handles[fh]
        body, process = handle.body, fh
        if body.lock.acquire(blocking=False):
            try:
                data = body.try_read(off, size, process)
                version = body.reader_if_clean()
            finally:
                body.lock.release()
            if data is not None:
                return cast("bytes", data)  # pyfuse3 replies with any buffer
            if version is not None:
                return await self._read_when_here(version, off, size, process)
        return cast("bytes", await trio.to_thread.run_sync(body.read, off, size, process))

    @staticmethod
    async def _read_when_here(version: OpenedFile, off: int, size: int, process: int) -> bytes:
        waiting = version.reader.start(off, size, process=process)
        await all_done(waiting)
        return cast("bytes", version.reader.finish(off, size, waiting))

    @answered
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        """Write: inline where the window has room, else in a thread that waits for it."""
        handle = self._handles[fh]
        body = handle.body
        if handle.appends:
            off = body.size_bytes
        if body.lock.acquire(blocking=False):
            try:
                if body.writes_now(off, len(buf)):
                    body.write(off, buf)
                    return len(buf)
            finally:
                body.lock.release()
        await trio.to_thread.run_sync(body.write, off, buf)
        return len(buf)

    @answered
    async def flush(self, fh: int) -> None:
        """Publish at close, so that whoever opens the file next sees all of it."""
        if (handle := self._handles.get(fh)) is not None:
            await self._flush(handle, last=True)

    @answered
    async def fsync(self, fh: int, datasync: bool) -> None:
        """Make durable and visible what is written so far."""
        if (handle := self._handles.get(fh)) is not None:
            await self._flush(handle, last=False)

    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        """Return at once: names are durable when their call returns."""

    @answered
    async def release(self, fh: int) -> None:
        """Drop a handle; flush has published already, unless it failed and said so."""
        if self.statistics.open_views.pop(fh, None) is not None:
            return
        await self._release(fh)
