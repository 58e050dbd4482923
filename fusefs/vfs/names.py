"""Requests about names: finding, listing, making, renaming and removing."""

import errno
import os
import stat as stat_bits
from collections.abc import Iterable

from typing_extensions import override

from fusefs.bridge.api.protocol import Entry, Named, Opened
from fusefs.format.attributes import Attributes
from fusefs.stores.protocol import RESERVED, parent_of
from fusefs.tree.catalog import FileInfo
from fusefs.tree.directory_attributes import NOT_KEPT
from fusefs.vfs.inode_table import ROOT, Node
from fusefs.vfs.lookup import Lookup
from fusefs.vfs.rename_open import remove_open, rename_open
from fusefs.vfs.session import STATS_DIRECTORY_INODE, STATS_INODE, Listed

__all__ = ["NameRequests"]

_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
"""Of renameat2."""


class NameRequests(Lookup):
    """Requests about names: finding, listing, making, renaming and removing."""

    @override
    async def lookup(self, parent: int, name: bytes) -> Entry:
        """Find a name in a directory."""
        if parent == ROOT and name == RESERVED.encode():
            return self._directory_entry(STATS_DIRECTORY_INODE)
        if parent == STATS_DIRECTORY_INODE:
            return self._stats_entry(name)
        self._check_name(name)
        above, text, before = self._tree.node(parent), os.fsdecode(name), self._num_changes
        try:
            node = await self._found(above, text)
        except FileNotFoundError:
            if self._num_changes == before and not self._is_open(above, text):
                self._miss(self._tree.child_path(above, text))
            raise
        node.lookups += 1
        try:
            return await self._entry(node)
        except BaseException:
            self._tree.forget(node.number, 1)
            raise

    @override
    def advertised(self, inode: int) -> None:
        if inode not in {STATS_INODE, STATS_DIRECTORY_INODE}:
            node = self._tree.node(inode)
            node.lookups += 1
            node.advertise(self._line_bytes)

    @override
    def forget(self, inode: int, lookups: int) -> None:
        self._tree.forget(inode, lookups)

    @override
    async def opendir(self, inode: int) -> Opened:
        """Take the listing now, so that readdir is one consistent view."""
        before, directory = self._num_changes, None
        if inode == STATS_DIRECTORY_INODE:
            listed: list[Listed] = [("stats.json", self._stats_entry(b"stats.json"), None)]
        else:
            node = self._tree.node(inode)
            path = self._tree.path(node)
            directory = node
            infos = await self._wait(self._files.listing, path)
            for info in infos:
                if (child := node.children.get(info.name)) is not None and child.body is not None:
                    await self._leads_here(child, info)
            listed = self._listed(node, path, infos, remembers=self._num_changes == before)
        handle = self._new_handle()
        self._listings[handle], self._listed_at[handle] = listed, before
        if directory is not None:
            self._directories[handle] = directory
        return Opened(handle)

    def _listed(
        self, node: Node, path: str, infos: list[FileInfo], *, remembers: bool
    ) -> list[Listed]:
        named: dict[str, FileInfo | None] = {}
        for info in infos:
            if remembers:
                self._remember(f"{path}/{info.name}" if path else info.name, info)
            named[info.name] = info
        for pending in self._tree.pending_below(node):
            named.setdefault(pending.name, None)
        listed: list[Listed] = []
        for name in sorted(named):
            described = named[name]
            child = self._child(node, name, described.kind if described is not None else "file")
            child.lookups += 1  # the listing's own, so that the numbers in it stay good
            if child.body is not None:
                listed.append((name, self._body_entry(child), child))
            elif described is not None:
                listed.append((name, self._described(child.number, described), child))
        return listed

    @override
    def readdir(self, handle: int, start: int) -> Iterable[Named]:
        listed, listed_at = self._listings[handle], self._listed_at.get(handle, 0)
        for line in range(start, len(listed)):
            name, entry, node = listed[line]
            if node is not None and node.body is not None:
                entry = self._body_entry(node)  # written to since the directory was opened
            elif node is not None and node.changed_at > listed_at:
                # And closed since: its size must not be answered with the one of before.
                entry = entry._replace(attr_timeout_s=0)
            if node is not None and node.would_resize(entry.size_bytes):
                entry = entry._replace(attr_timeout_s=0)
            if node is not None and not node.is_attached:
                entry = entry._replace(entry_timeout_s=0)  # its name leads elsewhere by now
            self._line_bytes = entry.size_bytes
            yield Named(os.fsencode(name), entry)

    @override
    async def releasedir(self, handle: int) -> None:
        """Drop the listing."""
        self._listed_at.pop(handle, None)
        self._directories.pop(handle, None)
        for _, _, node in self._listings.pop(handle, []):
            if node is not None:
                self._tree.forget(node.number, 1)

    @override
    async def mkdir(self, parent: int, name: bytes, mode: int) -> Entry:
        """Make a directory."""
        above, text = self._place_for(parent, name)
        path = self._tree.child_path(above, text)
        wanted = stat_bits.S_IMODE(mode)
        await self._wait(self._files.make_directory, path, wanted)
        self._forget_info(path)
        self._names_changed(parent_of(path))
        info = await self._info(path)
        if info.mode != wanted:
            # Its time is the store's own: what is made in it next moves it.
            made = Attributes(mode=wanted, mtime_ns=NOT_KEPT)
            await self._wait(self._files.set_attributes, path, made)
            self._forget_info(path)
        return await self._made_entry(above, text, "directory")

    @override
    async def symlink(self, parent: int, name: bytes, target: bytes) -> Entry:
        """Make a symbolic link."""
        above, text = self._place_for(parent, name)
        path = self._tree.child_path(above, text)
        await self._wait(self._files.make_link, path, os.fsdecode(target))
        self._forget_info(path)
        self._names_changed(parent_of(path))
        return await self._made_entry(above, text, "symlink")

    @override
    async def readlink(self, inode: int) -> bytes:
        """Return where a link points."""
        path = self._tree.path(self._tree.node(inode))
        return os.fsencode(await self._wait(self._files.read_link, path))

    @override
    async def unlink(self, parent: int, name: bytes) -> None:
        """Remove a file; its open handles keep it."""
        above, text = self._place_for(parent, name)
        path = self._tree.child_path(above, text)
        node = above.children.get(text)
        body = node.body if node is not None else None
        with self._changing_names(path):
            await self._wait(remove_open, self._files, path, body)
        self._forget_info(path)
        self._names_changed(parent_of(path))
        if node is not None and node.body is not None:
            node.body.path = None  # opened while it was removed
        self._tree.detach(above, text)

    @override
    async def rmdir(self, parent: int, name: bytes) -> None:
        """Remove an empty directory."""
        above, text = self._place_for(parent, name)
        path = self._tree.child_path(above, text)
        node = above.children.get(text)
        if node is not None and any(self._tree.pending_below(node)):
            raise OSError(errno.ENOTEMPTY, "a file is being written there", path)
        await self._wait(self._files.remove_directory, path)
        self._forget_info(path)
        self._names_changed(parent_of(path))
        self._tree.detach(above, text)

    @override
    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> None:
        """Rename over what is there."""
        if flags & _RENAME_EXCHANGE:
            raise OSError(errno.EINVAL, "no store exchanges two names")
        above, text = self._place_for(parent, name)
        new_above, new_text = self._place_for(new_parent, new_name)
        source = self._tree.child_path(above, text)
        target = self._tree.child_path(new_above, new_text)
        node, there = above.children.get(text), new_above.children.get(new_text)
        if flags & _RENAME_NOREPLACE and await self._has_name(new_above, new_text):
            raise FileExistsError(errno.EEXIST, "something is there", target)
        replacing = there is not None and there is not node
        if there is not None and replacing and any(self._tree.pending_below(there)):
            raise OSError(errno.ENOTEMPTY, "a file is being written there", target)
        if node is not None and node.is_pending:
            await self._check_target_of_pending(target)
        opened = self._tree.open_below(node) if node is not None else ()
        moving = [below.body for below in opened if below.body is not None]
        replaced = there.body if there is not None and replacing else None
        with self._changing_names(source, target):
            await self._wait(rename_open, self._files, source, target, moving, replaced)
            for below in self._tree.open_below(node) if node is not None else ():
                below.num_moves += 1
        if source != target:
            self._forget_infos(source, target)
            self._names_changed(parent_of(source))
            self._names_changed(parent_of(target))
            self._tree.move(above, text, new_above, new_text)
            # Opened while the store renamed them: no flush of these may land at the old path.
            if there is not None and replacing and there.body is not None:
                there.body.path = None
            for below in self._tree.open_below(node) if node is not None else ():
                if below.body is not None and below.body not in moving:
                    await self._wait(below.body.moved, self._tree.path(below))

    async def _check_target_of_pending(self, target: str) -> None:
        """Rename a file the store does not show yet: its flush will replace the target."""
        try:
            info = await self._info(target)
        except FileNotFoundError:
            return
        if info.kind == "directory":
            raise IsADirectoryError(errno.EISDIR, "a directory is there", target)
