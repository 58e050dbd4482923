"""Requests about names: look-ups and listings; making, renaming and removing."""

import errno
import os
import stat as stat_bits
from collections.abc import Iterable

from fusefs.bridge.api.protocol import Entry, Named, Opened
from fusefs.format.attributes import PLAIN_MODE, Attributes
from fusefs.stores.protocol import RESERVED, parent_of
from fusefs.tree.catalog import FileInfo
from fusefs.tree.directory_attributes import NOT_KEPT
from fusefs.tree.file_attributes import set_attributes
from fusefs.vfs.attributes import Entries
from fusefs.vfs.closing import Closing
from fusefs.vfs.file.open_file import OpenFile
from fusefs.vfs.file.rename_open import moved, remove_open, rename_open
from fusefs.vfs.handle_table import Listed, Listing
from fusefs.vfs.inode_table import ROOT, Node, open_below
from fusefs.vfs.opening import Opening
from fusefs.vfs.session import STATS_DIRECTORY_INODE, STATS_INODE, Session, checked_name
from fusefs.vfs.shown_version import Lookup, is_open
from omniload.base.errors import OmniloadError

__all__ = ["CreationRequests", "ListingRequests", "NameRequests"]

_RENAME_NOREPLACE = 1
"""Flag of renameat2; its other flags exchange two names, or leave a whiteout."""


class ListingRequests:
    """Requests that look up one name, or list a directory."""

    def __init__(self, session: Session, entries: Entries, names: Lookup) -> None:
        self._session = session
        self._entries = entries
        self._names = names
        self._line_bytes = 0
        """Size in the listing's line that was read last."""

    async def lookup(self, parent: int, name: bytes) -> Entry:
        """Find a name in a directory."""
        if parent == ROOT and name == RESERVED.encode():
            return self._entries.of_own_directory(STATS_DIRECTORY_INODE)
        if parent == STATS_DIRECTORY_INODE:
            return self._entries.of_statistics(name)
        text, attributes = checked_name(name), self._session.attributes
        above, before = self._session.inodes.node(parent), attributes.num_changes
        try:
            node = await self._names.found(above, text)
        except FileNotFoundError:
            if attributes.num_changes == before and not is_open(above, text):
                # Skip this if something changed meanwhile: a creation that follows would replace the new file.
                attributes.miss(above.child_path(text))
            raise
        node.lookups += 1
        try:
            return await self._entries.of(node)
        except BaseException:
            self._session.inodes.forget(node.number, 1)
            raise

    def advertised(self, inode: int) -> None:
        """Count a look-up of the entry that was listed last."""
        if inode not in {STATS_INODE, STATS_DIRECTORY_INODE}:
            node = self._session.inodes.node(inode)
            node.lookups += 1
            node.advertise(self._line_bytes)

    async def opendir(self, inode: int) -> Opened:
        """Take the listing now, so that readdir shows one consistent view."""
        before, directory = self._session.attributes.num_changes, None
        if inode == STATS_DIRECTORY_INODE:
            lines: list[Listed] = [("stats.json", self._entries.of_statistics(b"stats.json"), None)]
        else:
            node = self._session.inodes.node(inode)
            path = node.path()
            directory = node
            infos = await self._session.wait(self._session.files.listing, path)
            for info in infos:
                if (child := node.children.get(info.name)) is not None and child.body is not None:
                    await self._names.leads_here(child, info)
            unchanged = self._session.attributes.num_changes == before
            lines = self._listed(node, path, infos, remembers=unchanged)
        return self._session.handles.list(Listing(lines, before, directory))

    def _listed(
        self, node: Node, path: str, infos: list[FileInfo], *, remembers: bool
    ) -> list[Listed]:
        named: dict[str, FileInfo | None] = {}
        for info in infos:
            if remembers:
                self._session.attributes.remember(
                    f"{path}/{info.name}" if path else info.name, info
                )
            named[info.name] = info
        for pending in node.pending_below():
            named.setdefault(pending.name, None)
        listed: list[Listed] = []
        for name in sorted(named):
            described = named[name]
            child = self._names.child(
                node, name, described.kind if described is not None else "file"
            )
            child.lookups += 1  # the listing holds a look-up, so that its numbers stay valid
            if child.body is not None:
                listed.append((name, self._entries.of_body(child), child))
            elif described is not None:
                listed.append((name, self._entries.of_info(child.number, described), child))
        return listed

    def readdir(self, handle: int, start: int) -> Iterable[Named]:
        """Yield the lines of a listing, updated for files that changed since."""
        listing = self._session.handles.listings[handle]
        for line in range(start, len(listing.lines)):
            name, entry, node = listing.lines[line]
            if node is not None and node.body is not None:
                entry = self._entries.of_body(node)  # written to since the directory was opened
            elif node is not None and node.changed_at > listing.num_changes:
                # The file was closed since, so the kernel must not keep the old size.
                entry = entry._replace(attr_timeout_s=0)
            if node is not None and node.would_resize(entry.size_bytes):
                entry = entry._replace(attr_timeout_s=0)
            if node is not None and not node.is_attached:
                entry = entry._replace(entry_timeout_s=0)  # its name now leads elsewhere
            self._line_bytes = entry.size_bytes
            yield Named(os.fsencode(name), entry)

    async def releasedir(self, handle: int) -> None:
        """Drop the listing."""
        listing = self._session.handles.listings.pop(handle, None)
        for _, _, node in listing.lines if listing is not None else ():
            if node is not None:
                self._session.inodes.forget(node.number, 1)


class NameRequests:
    """Requests that make, rename and remove names, also of files that are open here."""

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
        # Set a mode only if the store shows another, because attributes of a folder are a file in it.
        if info.mode != wanted:
            # Keep the store's own time, which the next entry in the folder will change.
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
        """Return the target of a link."""
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
            node.body.pending.unlinked()  # it was opened while it was removed
        self._session.inodes.detach(above, text)

    async def rmdir(self, parent: int, name: bytes) -> None:
        """Remove an empty directory."""
        above, text = self._session.place_for(parent, name)
        path = above.child_path(text)
        node = above.children.get(text)
        # The store does not show the pending file, and would remove the folder under it.
        if node is not None and any(node.pending_below()):
            raise OSError(errno.ENOTEMPTY, "a file is being written there", path)
        await self._session.wait(self._session.files.names.remove_directory, path)
        self._session.attributes.forget(path)
        self._session.attributes.names_changed(parent_of(path))
        self._session.inodes.detach(above, text)

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> None:
        """Rename, replacing the target."""
        if flags & ~_RENAME_NOREPLACE:
            # Refuse unknown flags, or a caller would assume an effect that did not happen: overlayfs tries a whiteout.
            raise OSError(errno.EINVAL, f"no store knows the flags {flags} of a rename")
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
        opened = open_below(node) if node is not None else ()
        moving = [below.body for below in opened if below.body is not None]
        replaced = there.body if there is not None and replacing else None
        with self._session.leaving.changing(source, target):
            await self._session.wait(
                rename_open, self._session.files, source, target, moving, replaced
            )
            for below in open_below(node) if node is not None else ():
                # A look under way for one of these nodes began at its former path.
                below.num_moves += 1
        if source != target:
            self._session.attributes.forget_below(source, target)
            self._session.attributes.names_changed(parent_of(source))
            self._session.attributes.names_changed(parent_of(target))
            self._session.inodes.move(above, text, new_above, new_text)
            # These were opened while the store renamed them: no flush of them may publish at the old path.
            if there is not None and replacing and there.body is not None:
                there.body.pending.unlinked()
            for below in open_below(node) if node is not None else ():
                if below.body is not None and below.body not in moving:
                    await self._session.wait(moved, below.body, below.path())

    async def _made(self, parent: Node, name: str, kind: str) -> Entry:
        """Describe a new entry, and count that the kernel knows it."""
        node = self._names.child(parent, name, kind)
        node.lookups += 1
        return await self._entries.of(node)

    async def _check_target_of_pending(self, target: str) -> None:
        """Check the target of a file that the store does not show yet, and whose flush will replace the target."""
        try:
            info = await self._session.info(target)
        except FileNotFoundError:
            return
        if info.kind == "directory":
            raise IsADirectoryError(errno.EISDIR, "a directory is there", target)


class CreationRequests:
    """Requests that create files, or open existing ones."""

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
        """Create a file; the store holds nothing of it before its first flush."""
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
        path = above.child_path(text)  # a directory above may have been renamed in the meantime
        node.body = OpenFile(self._session.files, self._session.place, path, None)
        permissions = stat_bits.S_IMODE(mode)
        # The usual mode of a plain file needs no manifest.
        if permissions != PLAIN_MODE:
            node.body.set_attributes(Attributes(mode=permissions))
        entry = self._entries.of_body(node)
        node.advertise(entry.size_bytes)
        if node.resizes:
            entry = entry._replace(attr_timeout_s=0)
        opened = self._session.handles.open(node, flags, is_new=True)
        await self._name_made_here(parent_of(path))
        return opened, entry

    async def _name_made_here(self, path: str) -> None:
        """Update the time of a directory, though the store does not show the new name yet."""
        try:
            above = await self._session.info(path)
            if above.mtime_ns != above.entry.mtime_ns:  # the time was set by a user
                await self._session.wait(self._session.files.directories.names_changed, path)
        except (OSError, OmniloadError):
            # The file was created, and only this answer gives the kernel its handle, so its close will report the
            # error.
            return
        self._session.attributes.names_changed(path)

    async def mknod(self, parent: int, name: bytes, mode: int) -> Entry:
        """Create an empty regular file; a store cannot hold devices, pipes and sockets."""
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
        """Drop a new file that cannot be published: the kernel does not know it."""
        self._session.handles.files[handle].body.pending.unlinked()
        await self._closing.release(handle)
        self._session.inodes.forget(inode, 1)
