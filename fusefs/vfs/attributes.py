"""Attributes: the answers about an inode, and the changes to its attributes."""

import errno
import os
import stat as stat_bits
import time
from functools import partial

from fusefs.bridge.api.protocol import Change, Entry, Space
from fusefs.format.attributes import Attributes
from fusefs.tools.statistics import DROP_XATTR, LAYOUT_XATTR, drop_json, layout_json
from fusefs.tree.catalog import FileInfo
from fusefs.tree.file_attributes import set_attributes, xattrs_at
from fusefs.vfs.attribute_cache import TTL_S
from fusefs.vfs.closing import Closing
from fusefs.vfs.file.open_file import OpenFile, mode_of, xattrs_of
from fusefs.vfs.inode_table import ROOT, Node, body_of
from fusefs.vfs.opening import Opening
from fusefs.vfs.session import STATS_DIRECTORY_INODE, STATS_INODE, Session, stale

__all__ = ["AttributeRequests", "Entries", "ExtendedAttributeRequests"]

_TYPES = {
    "file": stat_bits.S_IFREG,
    "directory": stat_bits.S_IFDIR,
    "symlink": stat_bits.S_IFLNK,
}


class Entries:
    """Describes inodes: open ones by their state here, others by the store."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def of(self, node: Node) -> Entry:
        """Describe an inode, and count its size as one that the kernel was sent.

        Raises:
            OSError: ``ESTALE``: its name does not lead to it any more.
        """
        entry = await self._described_now(node)
        node.advertise(entry.size_bytes)
        return entry._replace(attr_timeout_s=0) if node.resizes else entry

    def of_body(self, node: Node) -> Entry:
        """Describe an open file by its state here."""
        body = node.body
        assert body is not None
        mode = stat_bits.S_IFREG | mode_of(body)
        entry = self._attributes(node.number, mode, body.size_bytes, body.pending.mtime_ns)
        # Any file system's fstat reports a removed or replaced file with no links.
        return entry if node.is_attached else entry._replace(nlink=0)

    def of_info(self, number: int, info: FileInfo) -> Entry:
        """Describe an inode by the store's entry."""
        mode = _TYPES[info.kind] | info.mode
        return self._attributes(number, mode, info.size_bytes, info.mtime_ns)

    def of_own_directory(self, number: int) -> Entry:
        """Describe the folder that shows the mount's own numbers."""
        return self._attributes(number, stat_bits.S_IFDIR | 0o555, 0, 0)

    def of_statistics(self, name: bytes) -> Entry:
        """Describe the file that shows the mount's own numbers."""
        if name != b"stats.json":
            raise FileNotFoundError(errno.ENOENT, "only stats.json is here")
        size = len(self._session.statistics.as_json())
        entry = self._attributes(STATS_INODE, stat_bits.S_IFREG | 0o444, size, time.time_ns())
        return entry._replace(attr_timeout_s=0)

    async def _described_now(self, node: Node) -> Entry:
        session = self._session
        if node.body is not None:
            return self.of_body(node)
        if node.number == ROOT:
            return self.of_info(ROOT, await session.info(""))
        try:
            info = await session.info(node.path())
        except FileNotFoundError as error:
            # Another mount removed the file: O_CREAT must learn that from a look-up, and not fail here.
            raise stale() from error
        if body_of(node) is not None:
            return self.of_body(node)  # opened meanwhile, and perhaps as another version
        # The kernel considers an inode that changes its kind broken, and answers EIO from then on.
        if node.kind not in {None, info.kind}:
            raise OSError(errno.ESTALE, f"a {info.kind} is there by now")
        node.kind = info.kind
        return self.of_info(node.number, info)

    def _attributes(self, number: int, mode: int, size_bytes: int, mtime_ns: int) -> Entry:
        uid, gid = self._session.owner
        return Entry(
            inode=number,
            mode=mode,
            size_bytes=size_bytes,
            nlink=2 if stat_bits.S_ISDIR(mode) else 1,
            uid=uid,
            gid=gid,
            # The kernel's seconds are unsigned, so a time before 1970 would become one far in the future.
            mtime_ns=max(0, mtime_ns),
            block_bytes=self._session.files.config.striping.unit,
            entry_timeout_s=TTL_S,
            attr_timeout_s=TTL_S,
        )


class AttributeRequests:
    """Requests that read and set attributes, of files that are open here and of others."""

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
        # A request for the present owner changes nothing: cp -p makes one.
        if any(w not in {None, mine} for w, mine in zip(wanted, owner, strict=True)):
            raise PermissionError(errno.EPERM, "a store keeps no owners")
        if change.size_bytes is not None:
            node.written()
            # Truncate before the attributes are set, because a change of content drops a time that was set.
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
        """Describe the space of the store; a petabyte if the space is not known."""
        usage = await self._session.wait(self._session.files.store.usage)
        total = usage.total_bytes if usage is not None else 1 << 50
        free = usage.free_bytes if usage is not None else 1 << 50
        return Space(
            blocks=total >> 12, free_blocks=free >> 12, inodes=1 << 40, free_inodes=1 << 40
        )

    async def set(self, node: Node, changes: Attributes) -> None:
        """Set attributes. The store changes at once, unless the file has unpublished content."""
        # An open in the meantime would overwrite the change with the former attributes.
        while node.body is None:
            set_if_closed = partial(self._set_if_closed, node, changes)
            if await self._session.rounds.exclusive(node, set_if_closed):
                return
        if node.body.pending.dirty and _set_now(node.body, changes):
            return
        # Open a handle here: otherwise the release of the last handle could publish without the change.
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
        # Use the handle if there is one, because the file may have lost its name.
        if handle is not None and handle in handles:
            await self._session.wait(handles[handle].body.truncate, size_bytes)
            return
        opened = await self._opening.open(node, os.O_WRONLY)
        try:
            await self._session.wait(handles[opened.handle].body.truncate, size_bytes)
            # Flush now, because truncate(2) has no close that would publish the change.
            await self._closing.flush(handles[opened.handle], last=True)
        except Exception:
            await self._closing.release(opened.handle)
            raise
        await self._closing.release(opened.handle)


def _set_now(body: OpenFile, changes: Attributes) -> bool:
    """Note attributes of an open file, unless its content is in use; return whether they were noted."""
    if not body.lock.acquire(blocking=False):
        return False
    try:
        body.set_attributes(changes)
    finally:
        body.lock.release()
    return True


class ExtendedAttributeRequests:
    """Requests that read and set extended attributes."""

    def __init__(self, session: Session, opening: Opening, attributes: AttributeRequests) -> None:
        self._session = session
        self._opening = opening
        self._attributes = attributes

    async def getxattr(self, inode: int, name: bytes) -> bytes:
        """Return an extended attribute; ``user.omnifs.layout`` shows how a file is stored."""
        text = os.fsdecode(name)
        if not text.startswith("user.") or inode in {STATS_INODE, STATS_DIRECTORY_INODE}:
            # The kernel asks for security.capability at every write, so this is answered without the store.
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
            # Forget the cached version, so that the next open makes the kernel drop its pages, too.
            known.cached_version = None
            below += known.children.values()
        return await self._session.wait(drop_json, self._session.files, path)

    async def _xattrs(self, node: Node) -> dict[str, bytes]:
        if node.body is not None:
            return xattrs_of(node.body)
        path = self._opening.path_of_named(node)
        info = await self._session.info(path)
        # The size shows that a file has no manifest, so nothing is read.
        if info.stored == "plain":
            return {}
        return await self._session.wait(xattrs_at, self._session.files, path)
