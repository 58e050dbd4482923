"""Requests about attributes: size, mode, times, extended attributes, space."""

import errno
import os
import stat as stat_bits
from functools import partial

from typing_extensions import override

from fusefs.bridge.api.protocol import Change, Entry, Space
from fusefs.format.attributes import Attributes
from fusefs.tools.statistics import drop_json, layout_json
from fusefs.vfs.inode_table import Node
from fusefs.vfs.open_file import OpenFile
from fusefs.vfs.opening import Opening
from fusefs.vfs.session import STATS_DIRECTORY_INODE, STATS_INODE

LAYOUT_XATTR = "user.omnifs.layout"
DROP_XATTR = "user.omnifs.drop"
"""Reading it forgets what is cached of a path: no other call of a path reaches a read-only mount."""


__all__ = ["AttributeRequests"]


class AttributeRequests(Opening):
    """Requests about attributes: size, mode, times, extended attributes, space."""

    @override
    async def getattr(self, inode: int) -> Entry:
        """Describe an inode."""
        if inode == STATS_DIRECTORY_INODE:
            return self._directory_entry(inode)
        if inode == STATS_INODE:
            return self._stats_entry(b"stats.json")
        return await self._entry(self._tree.node(inode))

    @override
    async def setattr(self, inode: int, change: Change, handle: int | None) -> Entry:
        """Change size, mode or time. Owners are not kept: changing them is refused."""
        node = self._changeable(inode)
        wanted = (change.uid, change.gid)
        if any(w not in {None, mine} for w, mine in zip(wanted, self._owner, strict=True)):
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
            await self._set_attributes(node, changes)
        return await self._entry(node)

    @override
    async def getxattr(self, inode: int, name: bytes) -> bytes:
        """Return an extended attribute; ``user.omnifs.layout`` shows how a file is stored."""
        text = os.fsdecode(name)
        if not text.startswith("user.") or inode in {STATS_INODE, STATS_DIRECTORY_INODE}:
            # Asked for at every write (security.capability): answered without the store.
            raise OSError(errno.ENODATA, "only user attributes are kept")
        node = self._tree.node(inode)
        if text == LAYOUT_XATTR:
            return await self._wait(layout_json, self._files, self._tree.path(node))
        if text == DROP_XATTR:
            return await self._drop(node)
        found = (await self._xattrs(node)).get(text)
        if found is None:
            raise OSError(errno.ENODATA, "no such attribute", text)
        return found

    async def _drop(self, node: Node) -> bytes:
        path = self._tree.path(node)
        self._num_changes += 1
        self._infos.clear()
        below = [node]
        while below:
            known = below.pop()
            known.cached_version = None
            below += known.children.values()
        return await self._wait(drop_json, self._files, path)

    @override
    async def listxattr(self, inode: int) -> list[bytes]:
        """Name the extended attributes."""
        if inode in {STATS_INODE, STATS_DIRECTORY_INODE}:
            return []
        return [os.fsencode(name) for name in await self._xattrs(self._tree.node(inode))]

    @override
    async def setxattr(self, inode: int, name: bytes, value: bytes) -> None:
        """Set an extended attribute of a file or directory."""
        node, text = self._changeable(inode), os.fsdecode(name)
        if not text.startswith("user.") or text in {LAYOUT_XATTR, DROP_XATTR}:
            raise OSError(errno.EOPNOTSUPP, "only user attributes are kept", text)
        known = await self._xattrs(node)
        await self._set_attributes(node, Attributes(xattrs={**known, text: value}))

    @override
    async def removexattr(self, inode: int, name: bytes) -> None:
        """Remove an extended attribute."""
        node, text = self._changeable(inode), os.fsdecode(name)
        known = await self._xattrs(node)
        if known.pop(text, None) is None:
            raise OSError(errno.ENODATA, "no such attribute", text)
        await self._set_attributes(node, Attributes(xattrs=known))

    @override
    async def link(self, inode: int, parent: int, name: bytes) -> Entry:
        """Refuse: no store here has hard links."""
        raise PermissionError(errno.EPERM, "hard links are not supported")

    @override
    async def statfs(self) -> Space:
        """Describe the space of the store, or a petabyte where it is not known."""
        usage = await self._wait(self._files.usage)
        total = usage.total_bytes if usage is not None else 1 << 50
        free = usage.free_bytes if usage is not None else 1 << 50
        return Space(
            blocks=total >> 12, free_blocks=free >> 12, inodes=1 << 40, free_inodes=1 << 40
        )

    def _changeable(self, inode: int) -> Node:
        if inode in {STATS_INODE, STATS_DIRECTORY_INODE}:
            raise PermissionError(errno.EPERM, "the store's own files do not change")
        return self._tree.node(inode)

    async def _truncate(self, node: Node, handle: int | None, size_bytes: int) -> None:
        if handle is not None and handle in self._handles:
            await self._wait(self._handles[handle].body.truncate, size_bytes)
            return
        opened = await self._open(node, os.O_WRONLY)
        try:
            body = self._handles[opened.handle].body
            await self._wait(body.truncate, size_bytes)
            await self._flush(self._handles[opened.handle], last=True)
        except Exception:
            await self._release(opened.handle)
            raise
        await self._release(opened.handle)

    async def _set_attributes(self, node: Node, changes: Attributes) -> None:
        # An open meanwhile would write over the change what the file was before.
        while node.body is None:
            if await self._asked.exclusive(node, partial(self._set_if_closed, node, changes)):
                return
        if node.body.dirty and self._set_now(node.body, changes):
            return
        # A handle of our own: the release of the last one meanwhile would publish without the change.
        opened = self._handle(node, os.O_WRONLY)
        handle = self._handles[opened.handle]
        was_published = not handle.body.dirty
        try:
            await self._wait(handle.body.set_attributes, changes)
            if was_published:
                await self._flush(handle, last=False)
        except Exception:
            await self._release(opened.handle)
            raise
        await self._release(opened.handle)

    @staticmethod
    def _set_now(body: OpenFile, changes: Attributes) -> bool:
        """Note attributes of an open file, unless its content is in use; return whether it was done."""
        if not body.lock.acquire(blocking=False):
            return False
        try:
            body.set_attributes(changes)
        finally:
            body.lock.release()
        return True

    async def _set_if_closed(self, node: Node, changes: Attributes) -> bool:
        if node.body is not None:
            return False
        path = self._path_of_named(node)
        await self._wait(self._files.set_attributes, path, changes)
        self._file_changed(node, path)
        return True

    async def _xattrs(self, node: Node) -> dict[str, bytes]:
        if node.body is not None:
            return node.body.xattrs()
        path = self._path_of_named(node)
        info = await self._info(path)
        if info.stored == "plain":
            return {}
        return await self._wait(self._files.xattrs, path)
