"""Which inode a name leads to now, where its file may be open as a version that its path shows no more."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from fusefs.bridge.api.protocol import Entry
from fusefs.tree.catalog import FileInfo
from fusefs.tree.freshness import Shown, shown_at
from fusefs.tree.namespace import StripedFiles
from fusefs.vfs.inode_table import Node
from fusefs.vfs.name_table import Leads, leads
from fusefs.vfs.open_file import OpenFile, SpoolPlace
from fusefs.vfs.session import Session

__all__ = ["Lookup", "stale"]


class Lookup(Session):
    """How names are followed to inodes."""

    def __init__(self, files: StripedFiles, place: SpoolPlace) -> None:
        super().__init__(files, place)
        self._leaving: list[str] = []
        """Paths that are being renamed, removed or replaced from here just now."""

    async def _found(self, parent: Node, name: str) -> Node:
        """Return the inode that a name leads to, made if need be.

        Raises:
            FileNotFoundError: Nothing has that name.
        """
        node = parent.children.get(name)
        if node is not None and node.body is not None and await self._leads_here(node):
            return node
        info = await self._info(self._tree.child_path(parent, name))
        return self._child(parent, name, info.kind)

    def _child(self, parent: Node, name: str, kind: str) -> Node:
        """Return the inode of something that has a name; a new one where the name was of another kind."""
        node = parent.children.get(name)
        if node is not None and node.body is None and node.kind not in {None, kind}:
            self._tree.detach(parent, name)
        node = self._tree.child(parent, name)
        node.kind = kind if node.body is None else "file"
        return node

    async def _has_name(self, parent: Node, name: str) -> bool:
        try:
            await self._found(parent, name)
        except FileNotFoundError:
            return False
        return True

    async def _made_entry(self, parent: Node, name: str, kind: str) -> Entry:
        """Describe something just made and count that the kernel knows it."""
        node = self._child(parent, name, kind)
        node.lookups += 1
        return await self._entry(node)

    async def _leads_here(self, node: Node, known: FileInfo | None = None) -> bool:
        """Return whether the name of an open file still leads to it, by what is ``known`` or has been for ``TTL_S``."""
        body = node.body
        version = body.version if body is not None else None
        if version is not None and body is not None and body.path is not None:
            known = known or self._known_info(body.path)
            if known is not None and known.entry == version.info.entry:
                return True
        try:
            await self._asked.call(node, partial(self._look, node))
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            return False
        return node.is_attached

    async def _look(self, node: Node) -> None:
        """Have the name of an open file lead elsewhere where its path shows another version. Opens nothing.

        Raises:
            OSError: ``ESTALE``: it leads elsewhere from now on; the kernel looks it up again.
        """
        while (body := node.body) is not None:
            if body.replaced:
                self._part(node, body)
                raise stale()
            version, path, num_moves = body.version, body.path, node.num_moves
            if version is None or path is None or self._is_leaving(path):
                return
            shown = await self._wait(shown_at, self._files, path, version)
            if (node.body, body.path, node.num_moves) != (body, path, num_moves):
                continue
            if not body.dirty and (body.version is not version or self._is_leaving(path)):
                continue
            where = leads(
                shown,
                is_changed=body.dirty,
                num_readers=node.readers,
                passes_through=self._passes_through(node),
            )
            if where is Leads.HERE:
                if shown is Shown.SAME:
                    self._remember(path, version.info)
                return
            if where is Leads.ANEW and await self._took_up(node, body):
                return
            self._part(node, body)
            raise stale()

    async def _took_up(self, node: Node, body: OpenFile) -> bool:
        """Have an open file become what its path shows; False where that is no file any more."""
        try:
            await self._wait(body.take_up)
        except (FileNotFoundError, IsADirectoryError):
            return False
        node.cached_version = None
        return True

    def _part(self, node: Node, body: OpenFile | None) -> None:
        """Leave a version to its open handles: its name leads elsewhere from now on."""
        if body is not None:
            body.replaced_elsewhere()
        if node.parent is not None:
            self._forget_info(self._tree.child_path(node.parent, node.name))
            self._tree.detach(node.parent, node.name)

    def _passes_through(self, node: Node) -> bool:
        return self._kernel is not None and self._kernel.passes_through(node.number)

    @contextmanager
    def _changing_names(self, *paths: str) -> Iterator[None]:
        """While paths change hands here, use no look that finds another mount's file at them."""
        self._leaving += paths
        try:
            yield
        finally:
            for path in paths:
                self._leaving.remove(path)

    def _is_leaving(self, path: str) -> bool:
        return any(path == left or path.startswith(f"{left}/") for left in self._leaving)


def stale() -> OSError:
    """Return the error that has the kernel look a name up again."""
    return OSError(errno.ESTALE, "another inode has this name now, or none")
