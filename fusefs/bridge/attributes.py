"""Requests about attributes: size, mode, times, extended attributes, space."""
# ruff: noqa: ARG002 -- the kernel's signatures, whole

import errno
import os
import stat as stat_bits

import pyfuse3
import trio

from fusefs.attributes import Attributes
from fusefs.bridge.answering import answered
from fusefs.bridge.session import STATS_DIRECTORY_INODE, STATS_INODE, Session
from fusefs.manifest import Manifest
from fusefs.statistics import layout_json
from fusefs.tree import Node

LAYOUT_XATTR = "user.omnifs.layout"


__all__ = ["AttributeRequests"]


class AttributeRequests(Session):
    """Requests about attributes: size, mode, times, extended attributes, space."""

    @answered
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        """Describe an inode."""
        if inode == STATS_DIRECTORY_INODE:
            return self._directory_entry(inode)
        if inode == STATS_INODE:
            return self._stats_entry(b"stats.json")
        return await self._entry(self._tree.node(inode))

    @answered
    async def setattr(
        self,
        inode: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        """Change size, mode or time. Owners are not kept: changing them is refused."""
        node = self._tree.node(inode)
        if fields.update_uid or fields.update_gid:
            self._check_owner(attr, fields)
        if fields.update_size:
            await self._truncate(node, fh, attr.st_size)
        changes = Attributes(
            mode=stat_bits.S_IMODE(attr.st_mode) if fields.update_mode else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
        )
        if not changes.are_default:
            await self._set_attributes(node, changes)
        return await self._entry(node)

    @answered
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        """Return an extended attribute; ``user.omnifs.layout`` tells how a file is stored."""
        node, text = self._tree.node(inode), os.fsdecode(name)
        if not text.startswith("user."):
            # Asked for at every write (security.capability): answered without the store.
            raise OSError(errno.ENODATA, "only user attributes are kept")
        if text == LAYOUT_XATTR:
            return await trio.to_thread.run_sync(layout_json, self._files, self._tree.path(node))
        found = (await self._xattrs(node)).get(text)
        if found is None:
            raise OSError(errno.ENODATA, "no such attribute", text)
        return found

    @answered
    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> list[bytes]:
        """Name the extended attributes."""
        return [os.fsencode(name) for name in await self._xattrs(self._tree.node(inode))]

    @answered
    async def setxattr(
        self, inode: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext
    ) -> None:
        """Set an extended attribute of a file."""
        node, text = self._tree.node(inode), os.fsdecode(name)
        if not text.startswith("user.") or text == LAYOUT_XATTR:
            raise OSError(errno.EOPNOTSUPP, "only user attributes are kept", text)
        known = await self._xattrs(node)
        await self._set_attributes(node, Attributes(xattrs={**known, text: bytes(value)}))

    @answered
    async def removexattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        """Remove an extended attribute."""
        node, text = self._tree.node(inode), os.fsdecode(name)
        known = await self._xattrs(node)
        if known.pop(text, None) is None:
            raise OSError(errno.ENODATA, "no such attribute", text)
        await self._set_attributes(node, Attributes(xattrs=known))

    @answered
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """Refuse: no store here has hard links."""
        raise PermissionError(errno.EPERM, "hard links are not supported")

    @answered
    async def access(self, inode: int, mode: int, ctx: pyfuse3.RequestContext) -> bool:
        """Leave permissions to the kernel's default_permissions."""
        return True

    @answered
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        """Describe the space of the store, or a petabyte where it cannot tell."""
        usage = await trio.to_thread.run_sync(self._files.usage)
        total = usage.total_bytes if usage is not None else 1 << 50
        free = usage.free_bytes if usage is not None else 1 << 50
        found = pyfuse3.StatvfsData()
        found.f_bsize = found.f_frsize = 4096
        found.f_blocks, found.f_bfree, found.f_bavail = total >> 12, free >> 12, free >> 12
        found.f_files = found.f_ffree = found.f_favail = 1 << 40
        found.f_namemax = 255
        return found

    async def _truncate(self, node: Node, fh: int | None, size_bytes: int) -> None:
        if fh is not None and fh in self._handles:
            await trio.to_thread.run_sync(self._handles[fh].body.truncate, size_bytes)
            return
        file_info = await self._open(node, os.O_RDWR)
        try:
            body = self._handles[file_info.fh].body
            await trio.to_thread.run_sync(body.truncate, size_bytes)
            await self._flush(self._handles[file_info.fh], last=True)
        finally:
            await self._release(file_info.fh)

    async def _set_attributes(self, node: Node, changes: Attributes) -> None:
        body = node.body
        if body is not None:
            await trio.to_thread.run_sync(body.set_attributes, changes)
            return
        path = self._tree.path(node)
        info = await self._info(path)
        if info.kind == "directory":
            if changes.xattrs is not None:
                raise OSError(errno.EOPNOTSUPP, "a directory keeps no attributes", path)
            return  # mode and times of directories are the store's: accepted and not kept
        await trio.to_thread.run_sync(self._files.set_attributes, path, changes)
        self._infos.pop(path, None)

    async def _xattrs(self, node: Node) -> dict[str, bytes]:
        if node.body is not None:
            return node.body.xattrs()
        path = self._tree.path(node)
        info = await self._info(path)
        if info.stored != "manifest":
            return {}
        manifest: Manifest | None = await trio.to_thread.run_sync(self._files.manifest, path)
        return dict(manifest.xattrs) if manifest is not None else {}

    def _check_owner(self, attr: pyfuse3.EntryAttributes, fields: pyfuse3.SetattrFields) -> None:
        wanted = (
            attr.st_uid if fields.update_uid else self._owner[0],
            attr.st_gid if fields.update_gid else self._owner[1],
        )
        if wanted != self._owner:
            raise PermissionError(errno.EPERM, "a store keeps no owners")
