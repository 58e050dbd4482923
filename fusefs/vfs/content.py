"""Requests about content: open, read, write, flush, fsync, close."""

import errno
import os
import stat as stat_bits
from contextlib import suppress

from typing_extensions import override

from fusefs.bridge.api.protocol import Data, Entry, Opened
from fusefs.bridge.api.waiting import all_done
from fusefs.format.attributes import Attributes
from fusefs.stores.protocol import parent_of
from fusefs.tree.namespace import OpenVersion
from fusefs.vfs.open_file import OpenFile
from fusefs.vfs.opening import Opening
from fusefs.vfs.session import STATS_INODE
from omniload.base.errors import OmniloadError

__all__ = ["ContentRequests"]


class ContentRequests(Opening):
    """Requests about content: open, read, write, flush, fsync, close."""

    @override
    async def create(self, parent: int, name: bytes, mode: int, flags: int) -> tuple[Opened, Entry]:
        """Create a file: nothing is in the store before its first flush."""
        above, text = self._place_for(parent, name)
        path = self._tree.child_path(above, text)
        was_missed = self._was_just_missed(path) and not self._is_open(above, text)
        if not was_missed and await self._has_name(above, text):
            if flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, "something is there", path)
            node = self._tree.child(above, text)
            node.lookups += 1
            try:
                opened = await self._open(node, flags)
                return opened, await self._entry(node)
            except BaseException:
                self._tree.forget(node.number, 1)
                raise
        node = self._child(above, text, "file")
        node.lookups += 1
        path = self._tree.child_path(above, text)  # a directory above may be renamed by now
        node.body = OpenFile(self._files, self._place, path, None)
        permissions = stat_bits.S_IMODE(mode)
        if permissions != 0o644:
            node.body.set_attributes(Attributes(mode=permissions))
        entry = self._body_entry(node)
        node.advertise(entry.size_bytes)
        if node.resizes:
            entry = entry._replace(attr_timeout_s=0)
        opened = self._handle(node, flags)
        await self._name_made_here(parent_of(path))
        return opened, entry

    async def _name_made_here(self, path: str) -> None:
        """Let the time of a directory move, though the store does not show the new name yet."""
        try:
            above = await self._info(path)
        except (OSError, OmniloadError):
            return  # the file is made: its close says what is wrong with the store
        if above.mtime_ns != above.entry.mtime_ns:  # it is one that was set
            await self._wait(self._files.directories.names_changed, path)
        self._names_changed(path)

    @override
    async def mknod(self, parent: int, name: bytes, mode: int, rdev: int) -> Entry:
        """Make an empty regular file; devices, pipes and sockets have no place in a store."""
        if not stat_bits.S_ISREG(mode):
            raise PermissionError(errno.EPERM, "only regular files")
        opened, entry = await self.create(parent, name, mode, os.O_EXCL)
        try:
            await self.flush(opened.handle)
        except Exception:
            await self._give_up(opened.handle, entry.inode)
            raise
        await self.release(opened.handle)
        return entry

    async def _give_up(self, handle: int, inode: int) -> None:
        """Drop a file that was made and cannot be published: the kernel does not know it."""
        self._handles[handle].body.path = None
        await self._release(handle)
        self._tree.forget(inode, 1)

    @override
    async def open(self, inode: int, flags: int) -> Opened:
        """Open a file as it is now in the store, or as it is being written here."""
        if inode == STATS_INODE:
            if flags & (os.O_ACCMODE | os.O_TRUNC) != os.O_RDONLY:
                raise PermissionError(errno.EPERM, "statistics are only read")
            return Opened(self._new_stats_handle(), direct_io=True)
        return await self._open(self._tree.node(inode), flags)

    @override
    async def read(self, handle: int, offset: int, size_bytes: int) -> Data:
        """Read: inline from memory, else once the blocks are here."""
        if (text := self.statistics.open_views.get(handle)) is not None:
            return text[offset : offset + size_bytes]
        opened = self._handles[handle]
        body = opened.body
        if body.lock.acquire(blocking=False):
            try:
                data = body.try_read(offset, size_bytes, handle)
                version = body.reader_if_clean()
            finally:
                body.lock.release()
            if data is None and version is not None:
                data = await self._read_when_here(version, offset, size_bytes, handle)
            if data is not None:
                if version is not None and opened.kept:
                    version.reader.served(offset, len(data))
                return data
        return await self._wait(body.read, offset, size_bytes, handle)

    @staticmethod
    async def _read_when_here(
        version: OpenVersion, offset: int, size_bytes: int, handle: int
    ) -> Data:
        waiting = version.reader.start(offset, size_bytes, process=handle)
        await all_done(waiting)
        return version.reader.finish(offset, size_bytes, waiting)

    @override
    async def write(self, handle: int, offset: int, data: Data) -> int:
        """Write: inline where the window has room, else in a thread that waits for it."""
        opened = self._handles[handle]
        body = opened.body
        opened.node.written()
        if body.lock.acquire(blocking=False):
            try:
                # Under the lock: a flush under way for another handle moves the end's description.
                offset = body.size_bytes if opened.appends else offset
                if body.writes_now(offset, len(data)):
                    body.write(offset, data)
                    opened.node.kernel_size = body.size_bytes
                    return len(data)
            finally:
                body.lock.release()
        if opened.appends:
            await self._wait(body.append, bytes(data))
        else:
            await self._wait(body.write, offset, bytes(data))
        opened.node.kernel_size = body.size_bytes
        return len(data)

    @override
    async def flush(self, handle: int) -> None:
        """Publish at close, so that the next open of the file sees all of it."""
        if (opened := self._handles.get(handle)) is not None:
            await self._flush(opened, last=True)

    @override
    async def fsync(self, handle: int) -> None:
        """Make durable and visible what is written so far."""
        if (opened := self._handles.get(handle)) is not None:
            await self._flush(opened, last=False)
            # Also what was published before, and need not be durable yet.
            if (path := opened.body.path) is not None and opened.body.published:
                with suppress(FileNotFoundError):  # removed or renamed meanwhile
                    await self._wait(self._files.store.sync, path)

    @override
    async def fsyncdir(self, handle: int) -> None:
        """Make durable the names in a directory."""
        node = self._directories.get(handle)
        if node is not None and node.is_attached:
            await self._wait(self._files.store.sync, self._tree.path(node))

    @override
    async def release(self, handle: int) -> None:
        """Drop a handle; flush has published already, unless it failed and said so."""
        if self.statistics.open_views.pop(handle, None) is not None:
            return
        await self._release(handle)
