"""Requests about names: finding, listing, making, renaming and removing."""
# ruff: noqa: ARG002 -- the kernel's signatures, whole

import errno
import os
from collections.abc import Sequence

import pyfuse3
import trio

from fusefs.bridge.answering import answered
from fusefs.bridge.session import STATS_DIRECTORY_INODE, Listed, Session
from fusefs.catalog import FileInfo
from fusefs.moves import remove_open, rename_open
from fusefs.stores.protocol import RESERVED
from fusefs.tree import ROOT, Node

__all__ = ["NameRequests"]


class NameRequests(Session):
    """Requests about names: finding, listing, making, renaming and removing."""

    @answered
    async def lookup(
        self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """Find a name in a directory."""
        if parent_inode == ROOT and name == RESERVED.encode():
            return self._directory_entry(STATS_DIRECTORY_INODE)
        if parent_inode == STATS_DIRECTORY_INODE:
            return self._stats_entry(name)
        self._check_name(name)
        parent, text = self._tree.node(parent_inode), os.fsdecode(name)
        known = parent.children.get(text)
        if known is None or known.body is None:
            await self._info(self._tree.child_path(parent, text))
        node = self._tree.child(parent, text)
        node.lookups += 1
        try:
            return await self._entry(node)
        except BaseException:
            self._tree.forget(node.number, 1)
            raise

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """Give up references."""
        for number, lookups in inode_list:
            self._tree.forget(number, lookups)

    @answered
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        """Take the listing now, so that readdir is one consistent view."""
        if inode == STATS_DIRECTORY_INODE:
            listed: list[Listed] = [("stats.json", self._stats_entry(b"stats.json"), None)]
        else:
            node = self._tree.node(inode)
            path = self._tree.path(node)
            infos = await trio.to_thread.run_sync(self._files.listing, path)
            listed = self._listed(node, path, infos)
        handle = self._new_handle()
        self._listings[handle] = listed
        return handle

    def _listed(self, node: Node, path: str, infos: list[FileInfo]) -> list[Listed]:
        named: dict[str, FileInfo | None] = {}
        for info in infos:
            self._remember(f"{path}/{info.name}" if path else info.name, info)
            named[info.name] = info
        for pending in self._tree.pending_below(node):
            named.setdefault(pending.name, None)
        listed: list[Listed] = []
        for name in sorted(named):
            child, described = self._tree.child(node, name), named[name]
            if child.body is not None:
                listed.append((name, self._body_entry(child), child))
            elif described is not None:
                listed.append((name, self._described(child.number, described), child))
        return listed

    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        """Hand out the listing from ``start_id`` on."""
        listed = self._listings[fh]
        for position in range(start_id, len(listed)):
            name, entry, node = listed[position]
            if not pyfuse3.readdir_reply(token, os.fsencode(name), entry, position + 1):
                return
            if node is not None:
                node.lookups += 1

    async def releasedir(self, fh: int) -> None:
        """Drop the listing."""
        for _, _, node in self._listings.pop(fh, []):
            if node is not None:
                self._tree.forget(node.number, 0)

    @answered
    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """Make a directory."""
        parent, text = self._place_for(parent_inode, name)
        path = self._tree.child_path(parent, text)
        await trio.to_thread.run_sync(self._files.make_directory, path)
        self._infos.pop(path, None)
        return await self._told(parent, text)

    @answered
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """Make a symbolic link."""
        parent, text = self._place_for(parent_inode, name)
        path = self._tree.child_path(parent, text)
        await trio.to_thread.run_sync(self._files.make_link, path, os.fsdecode(target))
        self._infos.pop(path, None)
        return await self._told(parent, text)

    @answered
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        """Return where a link points."""
        path = self._tree.path(self._tree.node(inode))
        return os.fsencode(await trio.to_thread.run_sync(self._files.read_link, path))

    @answered
    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        """Remove a file; those who have it open keep it."""
        parent, text = self._place_for(parent_inode, name)
        path = self._tree.child_path(parent, text)
        node = parent.children.get(text)
        body = node.body if node is not None else None
        await trio.to_thread.run_sync(remove_open, self._files, path, body)
        self._infos.pop(path, None)
        self._tree.detach(parent, text)

    @answered
    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        """Remove an empty directory."""
        parent, text = self._place_for(parent_inode, name)
        path = self._tree.child_path(parent, text)
        node = parent.children.get(text)
        if node is not None and any(self._tree.pending_below(node)):
            raise OSError(errno.ENOTEMPTY, "a file is being written there", path)
        await trio.to_thread.run_sync(self._files.remove_directory, path)
        self._infos.pop(path, None)
        self._tree.detach(parent, text)

    @answered
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        """Rename over what is there."""
        if flags & pyfuse3.RENAME_EXCHANGE:
            raise OSError(errno.EINVAL, "no store exchanges two names")
        parent, name = self._place_for(parent_inode_old, name_old)
        new_parent, new_name = self._place_for(parent_inode_new, name_new)
        source = self._tree.child_path(parent, name)
        target = self._tree.child_path(new_parent, new_name)
        node, there = parent.children.get(name), new_parent.children.get(new_name)
        if flags & pyfuse3.RENAME_NOREPLACE and await self._is_there(new_parent, new_name):
            raise FileExistsError(errno.EEXIST, "something is there", target)
        replacing = there is not None and there is not node
        if there is not None and replacing and any(self._tree.pending_below(there)):
            raise OSError(errno.ENOTEMPTY, "a file is being written there", target)
        if node is not None and node.is_pending:
            await self._check_target_of_pending(target)
        opened = self._tree.open_below(node) if node is not None else ()
        moving = [below.body for below in opened if below.body is not None]
        replaced = there.body if there is not None and replacing else None
        await trio.to_thread.run_sync(rename_open, self._files, source, target, moving, replaced)
        if source != target:
            self._forget_infos(source, target)
            self._tree.move(parent, name, new_parent, new_name)

    async def _check_target_of_pending(self, target: str) -> None:
        """Rename a file the store does not show yet: its flush will replace the target."""
        try:
            info = await self._info(target)
        except FileNotFoundError:
            return
        if info.kind == "directory":
            raise IsADirectoryError(errno.EISDIR, "a directory is there", target)
