"""Requests that make files."""

import errno
import os
import stat as stat_bits

from fusefs.bridge.api.protocol import Entry, Opened
from fusefs.format.attributes import Attributes
from fusefs.stores.protocol import parent_of
from fusefs.vfs.closing import Closing
from fusefs.vfs.entries import Entries
from fusefs.vfs.file.open_file import OpenFile
from fusefs.vfs.lookup import Lookup, is_open
from fusefs.vfs.opening import Opening
from fusefs.vfs.session import Session
from omniload.base.errors import OmniloadError

__all__ = ["CreationRequests"]


class CreationRequests:
    """How files are made, and opened where they are there."""

    def __init__(
        self,
        session: Session,
        entries: Entries,
        names: Lookup,
        opening: Opening,
        closing: Closing,
    ) -> None:
        self._session = session
        self._entries = entries
        self._names = names
        self._opening = opening
        self._closing = closing

    async def create(self, parent: int, name: bytes, mode: int, flags: int) -> tuple[Opened, Entry]:
        """Create a file: nothing is in the store before its first flush."""
        above, text = self._session.place_for(parent, name)
        inodes = self._session.inodes
        path = above.child_path(text)
        was_missed = self._session.attributes.was_just_missed(path) and not is_open(above, text)
        if not was_missed and await self._names.has_name(above, text):
            if flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, "something is there", path)
            node = inodes.child(above, text)
            node.lookups += 1
            try:
                opened = await self._opening.open(node, flags)
                return opened, await self._entries.of(node)
            except BaseException:
                inodes.forget(node.number, 1)
                raise
        node = self._names.child(above, text, "file")
        node.lookups += 1
        path = above.child_path(text)  # a directory above may be renamed by now
        node.body = OpenFile(self._session.files, self._session.place, path, None)
        permissions = stat_bits.S_IMODE(mode)
        if permissions != 0o644:
            node.body.set_attributes(Attributes(mode=permissions))
        entry = self._entries.of_body(node)
        node.advertise(entry.size_bytes)
        if node.resizes:
            entry = entry._replace(attr_timeout_s=0)
        opened = self._session.handles.open(node, flags)
        await self._name_made_here(parent_of(path))
        return opened, entry

    async def _name_made_here(self, path: str) -> None:
        """Let the time of a directory move, though the store does not show the new name yet."""
        try:
            above = await self._session.info(path)
        except (OSError, OmniloadError):
            return  # the file is made: its close says what is wrong with the store
        if above.mtime_ns != above.entry.mtime_ns:  # it is one that was set
            await self._session.wait(self._session.files.directories.names_changed, path)
        self._session.attributes.names_changed(path)

    async def mknod(self, parent: int, name: bytes, mode: int) -> Entry:
        """Make an empty regular file; devices, pipes and sockets have no place in a store."""
        if not stat_bits.S_ISREG(mode):
            raise PermissionError(errno.EPERM, "only regular files")
        opened, entry = await self.create(parent, name, mode, os.O_EXCL)
        try:
            handle = self._session.handles.files[opened.handle]
            await self._closing.flush(handle, last=True)
        except Exception:
            await self._give_up(opened.handle, entry.inode)
            raise
        await self._closing.release(opened.handle)
        return entry

    async def _give_up(self, handle: int, inode: int) -> None:
        """Drop a file that was made and cannot be published: the kernel does not know it."""
        self._session.handles.files[handle].body.pending.unlinked()
        await self._closing.release(handle)
        self._session.inodes.forget(inode, 1)
