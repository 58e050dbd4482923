"""Requests about one file: its size, mode and times, its extended attributes, its content."""

import errno
import os
import stat as stat_bits
from contextlib import suppress
from functools import partial

from fusefs.bridge.api.protocol import Change, Data, Entry, Opened, Space, only_reads
from fusefs.bridge.api.waiting import all_done
from fusefs.format.attributes import Attributes
from fusefs.tools.statistics import drop_json, layout_json
from fusefs.tree.file_attributes import set_attributes, xattrs_at
from fusefs.tree.namespace import OpenVersion
from fusefs.vfs.closing import Closing
from fusefs.vfs.entries import Entries
from fusefs.vfs.file.open_file import OpenFile, xattrs_of
from fusefs.vfs.inode_table import Node
from fusefs.vfs.opening import Opening
from fusefs.vfs.session import STATS_DIRECTORY_INODE, STATS_INODE, Session

__all__ = ["AttributeRequests", "ContentRequests", "ExtendedAttributeRequests"]

LAYOUT_XATTR = "user.omnifs.layout"
DROP_XATTR = "user.omnifs.drop"
"""Reading it forgets what is cached of a path: no other call of a path reaches a read-only mount."""


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
        # To ask for the owner that it has already changes nothing: cp -p does.
        if any(w not in {None, mine} for w, mine in zip(wanted, owner, strict=True)):
            raise PermissionError(errno.EPERM, "a store keeps no owners")
        if change.size_bytes is not None:
            node.written()
            # Ahead of the attributes: a cut is a change of content, which drops a time that was set.
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


class ExtendedAttributeRequests:
    """How extended attributes are read and set."""

    def __init__(self, session: Session, opening: Opening, attributes: AttributeRequests) -> None:
        self._session = session
        self._opening = opening
        self._attributes = attributes

    async def getxattr(self, inode: int, name: bytes) -> bytes:
        """Return an extended attribute; ``user.omnifs.layout`` shows how a file is stored."""
        text = os.fsdecode(name)
        if not text.startswith("user.") or inode in {STATS_INODE, STATS_DIRECTORY_INODE}:
            # Asked for at every write (security.capability): answered without the store.
            raise OSError(errno.ENODATA, "only user attributes are kept")
        node = self._session.inodes.node(inode)
        if text == LAYOUT_XATTR:
            path = node.path()
            return await self._session.wait(layout_json, self._session.files, path)
        if text == DROP_XATTR:
            return await self._drop(node)
        found = (await self._xattrs(node)).get(text)
        if found is None:
            raise OSError(errno.ENODATA, "no such attribute", text)
        return found

    async def listxattr(self, inode: int) -> list[bytes]:
        """Name the extended attributes."""
        if inode in {STATS_INODE, STATS_DIRECTORY_INODE}:
            return []
        found = await self._xattrs(self._session.inodes.node(inode))
        return [os.fsencode(name) for name in found]

    async def setxattr(self, inode: int, name: bytes, value: bytes) -> None:
        """Set an extended attribute of a file or directory."""
        node, text = self._session.changeable(inode), os.fsdecode(name)
        if not text.startswith("user.") or text in {LAYOUT_XATTR, DROP_XATTR}:
            raise OSError(errno.EOPNOTSUPP, "only user attributes are kept", text)
        known = await self._xattrs(node)
        await self._attributes.set(node, Attributes(xattrs={**known, text: value}))

    async def removexattr(self, inode: int, name: bytes) -> None:
        """Remove an extended attribute."""
        node, text = self._session.changeable(inode), os.fsdecode(name)
        known = await self._xattrs(node)
        if known.pop(text, None) is None:
            raise OSError(errno.ENODATA, "no such attribute", text)
        await self._attributes.set(node, Attributes(xattrs=known))

    async def _drop(self, node: Node) -> bytes:
        path = node.path()
        self._session.attributes.forget_all()
        below = [node]
        while below:
            known = below.pop()
            known.cached_version = None
            below += known.children.values()
        return await self._session.wait(drop_json, self._session.files, path)

    async def _xattrs(self, node: Node) -> dict[str, bytes]:
        if node.body is not None:
            return xattrs_of(node.body)
        path = self._opening.path_of_named(node)
        info = await self._session.info(path)
        if info.stored == "plain":
            return {}
        return await self._session.wait(xattrs_at, self._session.files, path)


class ContentRequests:
    """How files are opened, read, written and let go."""

    def __init__(self, session: Session, opening: Opening, closing: Closing) -> None:
        self._session = session
        self._opening = opening
        self._closing = closing

    async def open(self, inode: int, flags: int) -> Opened:
        """Open a file as it is now in the store, or as it is being written here."""
        if inode == STATS_INODE:
            if not only_reads(flags):
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
                    # Only what goes through the page cache stays with the kernel: O_DIRECT leaves nothing there.
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
        # Copied: the next request overwrites the buffer that these bytes lie in.
        await self._session.wait(body.write, None if opened.appends else offset, bytes(data))
        opened.node.kernel_size = body.size_bytes
        return len(data)

    async def flush(self, handle: int) -> None:
        """Publish at the close of a handle that writes, so that the next open of the file sees all of it."""
        opened = self._session.handles.files.get(handle)
        # FLUSH bears no mode. What another handle wrote is not a reader's to show, nor its error one to hear.
        if opened is not None and opened.writes:
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
