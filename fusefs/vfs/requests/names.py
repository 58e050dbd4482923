"""Requests that change names: making, renaming and removing."""

import errno
import os
import stat as stat_bits

from fusefs.bridge.api.protocol import Entry
from fusefs.format.attributes import Attributes
from fusefs.stores.protocol import parent_of
from fusefs.tree.directory_attributes import NOT_KEPT
from fusefs.tree.file_attributes import set_attributes
from fusefs.vfs.entries import Entries
from fusefs.vfs.file.rename_open import moved, remove_open, rename_open
from fusefs.vfs.inode_table import Node
from fusefs.vfs.lookup import Lookup
from fusefs.vfs.session import Session

__all__ = ["NameRequests"]

_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
"""Of renameat2."""


class NameRequests:
    """How names are made, given to others and taken away, also of what is open here."""

    def __init__(self, session: Session, entries: Entries, names: Lookup) -> None:
        self._session = session
        self._entries = entries
        self._names = names

    async def mkdir(self, parent: int, name: bytes, mode: int) -> Entry:
        """Make a directory."""
        above, text = self._session.place_for(parent, name)
        path = above.child_path(text)
        wanted = stat_bits.S_IMODE(mode)
        await self._session.wait(self._session.files.names.make_directory, path, wanted)
        self._session.attributes.forget(path)
        self._session.attributes.names_changed(parent_of(path))
        info = await self._session.info(path)
        if info.mode != wanted:
            # Its time is the store's own: what is made in it next moves it.
            made = Attributes(mode=wanted, mtime_ns=NOT_KEPT)
            await self._session.wait(set_attributes, self._session.files, path, made)
            self._session.attributes.forget(path)
        return await self._made(above, text, "directory")

    async def symlink(self, parent: int, name: bytes, target: bytes) -> Entry:
        """Make a symbolic link."""
        above, text = self._session.place_for(parent, name)
        path = above.child_path(text)
        await self._session.wait(self._session.files.names.make_link, path, os.fsdecode(target))
        self._session.attributes.forget(path)
        self._session.attributes.names_changed(parent_of(path))
        return await self._made(above, text, "symlink")

    async def readlink(self, inode: int) -> bytes:
        """Return where a link points."""
        path = self._session.inodes.node(inode).path()
        return os.fsencode(await self._session.wait(self._session.files.names.read_link, path))

    async def unlink(self, parent: int, name: bytes) -> None:
        """Remove a file; its open handles keep it."""
        above, text = self._session.place_for(parent, name)
        path = above.child_path(text)
        node = above.children.get(text)
        body = node.body if node is not None else None
        with self._session.leaving.changing(path):
            await self._session.wait(remove_open, self._session.files, path, body)
        self._session.attributes.forget(path)
        self._session.attributes.names_changed(parent_of(path))
        if node is not None and node.body is not None:
            node.body.pending.unlinked()  # opened while it was removed
        self._session.inodes.detach(above, text)

    async def rmdir(self, parent: int, name: bytes) -> None:
        """Remove an empty directory."""
        above, text = self._session.place_for(parent, name)
        path = above.child_path(text)
        node = above.children.get(text)
        if node is not None and any(node.pending_below()):
            raise OSError(errno.ENOTEMPTY, "a file is being written there", path)
        await self._session.wait(self._session.files.names.remove_directory, path)
        self._session.attributes.forget(path)
        self._session.attributes.names_changed(parent_of(path))
        self._session.inodes.detach(above, text)

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> None:
        """Rename over what is there."""
        if flags & _RENAME_EXCHANGE:
            raise OSError(errno.EINVAL, "no store exchanges two names")
        above, text = self._session.place_for(parent, name)
        new_above, new_text = self._session.place_for(new_parent, new_name)
        source = above.child_path(text)
        target = new_above.child_path(new_text)
        node, there = above.children.get(text), new_above.children.get(new_text)
        if flags & _RENAME_NOREPLACE and await self._names.has_name(new_above, new_text):
            raise FileExistsError(errno.EEXIST, "something is there", target)
        replacing = there is not None and there is not node
        if there is not None and replacing and any(there.pending_below()):
            raise OSError(errno.ENOTEMPTY, "a file is being written there", target)
        if node is not None and node.is_pending:
            await self._check_target_of_pending(target)
        opened = node.open_below() if node is not None else ()
        moving = [below.body for below in opened if below.body is not None]
        replaced = there.body if there is not None and replacing else None
        with self._session.leaving.changing(source, target):
            await self._session.wait(
                rename_open, self._session.files, source, target, moving, replaced
            )
            for below in node.open_below() if node is not None else ():
                below.num_moves += 1
        if source != target:
            self._session.attributes.forget_below(source, target)
            self._session.attributes.names_changed(parent_of(source))
            self._session.attributes.names_changed(parent_of(target))
            self._session.inodes.move(above, text, new_above, new_text)
            # Opened while the store renamed them: no flush of these may land at the old path.
            if there is not None and replacing and there.body is not None:
                there.body.pending.unlinked()
            for below in node.open_below() if node is not None else ():
                if below.body is not None and below.body not in moving:
                    await self._session.wait(moved, below.body, below.path())

    async def _made(self, parent: Node, name: str, kind: str) -> Entry:
        """Describe something just made and count that the kernel knows it."""
        node = self._names.child(parent, name, kind)
        node.lookups += 1
        return await self._entries.of(node)

    async def _check_target_of_pending(self, target: str) -> None:
        """Rename a file the store does not show yet: its flush will replace the target."""
        try:
            info = await self._session.info(target)
        except FileNotFoundError:
            return
        if info.kind == "directory":
            raise IsADirectoryError(errno.EISDIR, "a directory is there", target)
