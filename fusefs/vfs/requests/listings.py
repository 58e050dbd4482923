"""Requests that find names: look-ups and listings."""

import os
from collections.abc import Iterable

from fusefs.bridge.api.protocol import Entry, Named, Opened
from fusefs.stores.protocol import RESERVED
from fusefs.tree.catalog import FileInfo
from fusefs.vfs.entries import Entries
from fusefs.vfs.handle_table import Listed, Listing
from fusefs.vfs.inode_table import ROOT, Node
from fusefs.vfs.lookup import Lookup, is_open
from fusefs.vfs.session import STATS_DIRECTORY_INODE, STATS_INODE, Session, checked_name

__all__ = ["ListingRequests"]


class ListingRequests:
    """How names are found, one by one and all of a directory."""

    def __init__(self, session: Session, entries: Entries, names: Lookup) -> None:
        self._session = session
        self._entries = entries
        self._names = names
        self._line_bytes = 0
        """Size in the line of a listing that was read last."""

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
                attributes.miss(above.child_path(text))
            raise
        node.lookups += 1
        try:
            return await self._entries.of(node)
        except BaseException:
            self._session.inodes.forget(node.number, 1)
            raise

    def advertised(self, inode: int) -> None:
        """Count a lookup of what was listed last."""
        if inode not in {STATS_INODE, STATS_DIRECTORY_INODE}:
            node = self._session.inodes.node(inode)
            node.lookups += 1
            node.advertise(self._line_bytes)

    async def opendir(self, inode: int) -> Opened:
        """Take the listing now, so that readdir is one consistent view."""
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
            child.lookups += 1  # the listing's own, so that the numbers in it stay good
            if child.body is not None:
                listed.append((name, self._entries.of_body(child), child))
            elif described is not None:
                listed.append((name, self._entries.of_info(child.number, described), child))
        return listed

    def readdir(self, handle: int, start: int) -> Iterable[Named]:
        """Yield the lines of a listing, as far as they hold still."""
        listing = self._session.handles.listings[handle]
        for line in range(start, len(listing.lines)):
            name, entry, node = listing.lines[line]
            if node is not None and node.body is not None:
                entry = self._entries.of_body(node)  # written to since the directory was opened
            elif node is not None and node.changed_at > listing.num_changes:
                # And closed since: its size must not be answered with the one of before.
                entry = entry._replace(attr_timeout_s=0)
            if node is not None and node.would_resize(entry.size_bytes):
                entry = entry._replace(attr_timeout_s=0)
            if node is not None and not node.is_attached:
                entry = entry._replace(entry_timeout_s=0)  # its name leads elsewhere by now
            self._line_bytes = entry.size_bytes
            yield Named(os.fsencode(name), entry)

    async def releasedir(self, handle: int) -> None:
        """Drop the listing."""
        listing = self._session.handles.listings.pop(handle, None)
        for _, _, node in listing.lines if listing is not None else ():
            if node is not None:
                self._session.inodes.forget(node.number, 1)
