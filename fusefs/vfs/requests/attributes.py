"""Requests about attributes: size, mode, times, space."""

import errno
import os
import stat as stat_bits
from functools import partial

from fusefs.bridge.api.protocol import Change, Entry, Space
from fusefs.format.attributes import Attributes
from fusefs.tree.file_attributes import set_attributes
from fusefs.vfs.closing import Closing
from fusefs.vfs.entries import Entries
from fusefs.vfs.file.open_file import OpenFile
from fusefs.vfs.inode_table import Node
from fusefs.vfs.opening import Opening
from fusefs.vfs.session import STATS_DIRECTORY_INODE, STATS_INODE, Session

__all__ = ["AttributeRequests"]


class AttributeRequests:
    """How attributes are read and set, of files that are open here and of others."""

    def __init__(
        self, session: Session, entries: Entries, opening: Opening, closing: Closing
    ) -> None:
        self._session = session
        self._entries = entries
        self._opening = opening
        self._closing = closing

    async def getattr(self, inode: int) -> Entry:
        """Describe an inode."""
        if inode == STATS_DIRECTORY_INODE:
            return self._entries.of_own_directory(inode)
        if inode == STATS_INODE:
            return self._entries.of_statistics(b"stats.json")
        return await self._entries.of(self._session.inodes.node(inode))

    async def setattr(self, inode: int, change: Change, handle: int | None) -> Entry:
        """Change size, mode or time. Owners are not kept: changing them is refused."""
        node = self._session.changeable(inode)
        wanted, owner = (change.uid, change.gid), self._session.owner
        if any(w not in {None, mine} for w, mine in zip(wanted, owner, strict=True)):
            raise PermissionError(errno.EPERM, "a store keeps no owners")
        if change.size_bytes is not None:
            node.written()
            await self._truncate(node, handle, change.size_bytes)
            node.kernel_size = change.size_bytes
        changes = Attributes(
            mode=stat_bits.S_IMODE(change.mode) if change.mode is not None else None,
            mtime_ns=change.mtime_ns,
        )
        if not changes.are_default:
            await self.set(node, changes)
        return await self._entries.of(node)

    async def statfs(self) -> Space:
        """Describe the space of the store, or a petabyte where it is not known."""
        usage = await self._session.wait(self._session.files.store.usage)
        total = usage.total_bytes if usage is not None else 1 << 50
        free = usage.free_bytes if usage is not None else 1 << 50
        return Space(
            blocks=total >> 12, free_blocks=free >> 12, inodes=1 << 40, free_inodes=1 << 40
        )

    async def set(self, node: Node, changes: Attributes) -> None:
        """Set attributes, in the store at once unless the file has content that is not published."""
        # An open meanwhile would write over the change what the file was before.
        while node.body is None:
            set_if_closed = partial(self._set_if_closed, node, changes)
            if await self._session.rounds.exclusive(node, set_if_closed):
                return
        if node.body.pending.dirty and _set_now(node.body, changes):
            return
        # A handle of our own: the release of the last one meanwhile would publish without the change.
        opened = self._session.handles.open(node, os.O_WRONLY)
        handle = self._session.handles.files[opened.handle]
        was_published = not handle.body.pending.dirty
        try:
            await self._session.wait(handle.body.set_attributes, changes)
            if was_published:
                await self._closing.flush(handle, last=False)
        except Exception:
            await self._closing.release(opened.handle)
            raise
        await self._closing.release(opened.handle)

    async def _set_if_closed(self, node: Node, changes: Attributes) -> bool:
        if node.body is not None:
            return False
        path = self._opening.path_of_named(node)
        await self._session.wait(set_attributes, self._session.files, path, changes)
        self._session.file_changed(node, path)
        return True

    async def _truncate(self, node: Node, handle: int | None, size_bytes: int) -> None:
        handles = self._session.handles.files
        if handle is not None and handle in handles:
            await self._session.wait(handles[handle].body.truncate, size_bytes)
            return
        opened = await self._opening.open(node, os.O_WRONLY)
        try:
            await self._session.wait(handles[opened.handle].body.truncate, size_bytes)
            await self._closing.flush(handles[opened.handle], last=True)
        except Exception:
            await self._closing.release(opened.handle)
            raise
        await self._closing.release(opened.handle)


def _set_now(body: OpenFile, changes: Attributes) -> bool:
    """Note attributes of an open file, unless its content is in use; return whether it was done."""
    if not body.lock.acquire(blocking=False):
        return False
    try:
        body.set_attributes(changes)
    finally:
        body.lock.release()
    return True
