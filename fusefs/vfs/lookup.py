"""Which inode a name leads to now, where its file may be open as a version that its path shows no more."""

import errno
from functools import partial

from fusefs.tree.catalog import FileInfo
from fusefs.tree.freshness import Shown, shown_at
from fusefs.vfs.file.open_file import OpenFile
from fusefs.vfs.inode_table import Node
from fusefs.vfs.name_table import Leads, Seen, after, before
from fusefs.vfs.session import Session, stale

__all__ = ["Lookup", "is_open"]


class Lookup:
    """How names are followed to inodes. Carries the questions of ``name_table`` to the store."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def found(self, parent: Node, name: str) -> Node:
        """Return the inode that a name leads to, made if need be.

        Raises:
            FileNotFoundError: Nothing has that name.
        """
        node = parent.children.get(name)
        if node is not None and node.body is not None and await self.leads_here(node):
            return node
        info = await self._session.info(parent.child_path(name))
        return self.child(parent, name, info.kind)

    def child(self, parent: Node, name: str, kind: str) -> Node:
        """Return the inode of something that has a name; a new one where the name was of another kind."""
        inodes, node = self._session.inodes, parent.children.get(name)
        # The kernel holds one kind for an inode.
        if node is not None and node.body is None and node.kind not in {None, kind}:
            inodes.detach(parent, name)
        node = inodes.child(parent, name)
        node.kind = kind if node.body is None else "file"
        return node

    async def has_name(self, parent: Node, name: str) -> bool:
        """Return whether a name leads to anything."""
        try:
            await self.found(parent, name)
        except FileNotFoundError:
            return False
        return True

    async def leads_here(self, node: Node, known: FileInfo | None = None) -> bool:
        """Return whether the name of an open file still leads to it, by what is ``known`` or has been for ``TTL_S``."""
        body = node.body
        version = body.version if body is not None else None
        if version is not None and body is not None and body.pending.path is not None:
            # What is known for a second settles it without the store, as long as it says the same as at the open.
            known = known or self._session.attributes.known(body.pending.path)
            if known is not None and known.entry == version.info.entry:
                return True
        try:
            await self._session.rounds.call(node, partial(self.look, node))
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            return False
        return node.is_attached

    async def look(self, node: Node) -> None:
        """Have the name of an open file lead elsewhere where its path shows another version. Opens nothing.

        Raises:
            OSError: ``ESTALE``: it leads elsewhere from now on; the kernel looks it up again.
        """
        session = self._session
        while (body := node.body) is not None:
            asked = self._seen(node, body)
            where, shown = before(asked), None
            if where is None:
                assert asked.path is not None
                assert asked.version is not None
                shown = await session.wait(shown_at, session.files, asked.path, asked.version)
                where = after(asked, self._seen(node, node.body), shown)
            if where is None:
                continue
            if where is Leads.HERE:
                if shown is Shown.SAME and asked.path is not None and asked.version is not None:
                    # The store has just said so: the look-up behind this one need not ask again.
                    session.attributes.remember(asked.path, asked.version.info)
                return
            if where is Leads.ANEW and await self._took_up(node, body):
                return
            self.part(node, body)
            raise stale()

    def part(self, node: Node, body: OpenFile | None) -> None:
        """Leave a version to its open handles: its name leads elsewhere from now on."""
        if body is not None:
            body.pending.replaced_elsewhere()
        if node.parent is not None:
            inodes = self._session.inodes
            self._session.attributes.forget(node.parent.child_path(node.name))
            inodes.detach(node.parent, node.name)

    def _seen(self, node: Node, body: OpenFile | None) -> Seen:
        if body is None:
            return Seen(None)
        path = body.pending.path
        return Seen(
            body,
            path,
            body.version,
            node.num_moves,
            is_changed=body.pending.dirty,
            is_replaced=body.pending.replaced,
            is_leaving=path is not None and path in self._session.leaving,
            num_readers=node.readers,
            passes_through=self._session.passes_through(node),
        )

    async def _took_up(self, node: Node, body: OpenFile) -> bool:
        """Have an open file become what its path shows; False where that is no file any more."""
        try:
            await self._session.wait(body.take_up)
        except (FileNotFoundError, IsADirectoryError):
            return False
        # The kernel's pages are of what it was before.
        node.cached_version = None
        return True


def is_open(parent: Node, name: str) -> bool:
    """Return whether a name is that of a file that is open here."""
    node = parent.children.get(name)
    return node is not None and node.body is not None
