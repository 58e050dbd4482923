"""The inode that a name leads to now, if its file is open as a version that its path no longer shows.

The kernel keeps one page cache and one size for each inode, shared by all its handles. So while an inode
is being read, it shows one version, and the changes that this mount makes to it. This table decides::

    the path shows       changed here   read by somebody   written only    passed through
    the same version     HERE           HERE               HERE            HERE
    another version      HERE           ELSEWHERE          ANEW            ELSEWHERE
    nothing              HERE           ELSEWHERE          ELSEWHERE       ELSEWHERE

An inode that nobody has open is in no row. It takes up whatever its path shows, and the next
open makes the kernel drop its pages.

A look asks the store, which takes a while, and its result may be outdated when it arrives::

    Seen --before--> HERE | ELSEWHERE, or the store is asked
    Seen again, and what its path shows --after--> a place of the table, or None: look again

``Lookup`` carries these questions to the store; this module decides what follows from the answers.
"""

import errno
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from fusefs.tree.catalog import FileInfo
from fusefs.tree.freshness import Shown, shown_at
from fusefs.tree.open_versions import OpenVersion
from fusefs.vfs.file.open_file import OpenFile
from fusefs.vfs.inode_table import Node
from fusefs.vfs.session import Session, stale

__all__ = ["Leads", "Lookup", "Seen", "after", "before", "is_open", "leads"]


class Leads(Enum):
    """The inode to which a name leads from now on."""

    HERE = auto()
    """The present inode, unchanged."""
    ANEW = auto()
    """The same inode, which takes over the version that the path shows."""
    ELSEWHERE = auto()
    """Another inode, or none: the present one keeps its version for its open handles."""


def leads(shown: Shown, *, is_changed: bool, num_readers: int, passes_through: bool) -> Leads:
    """Decide where the name of an open file leads.

    Args:
        shown: The content of its path.
        is_changed: Whether it is being changed here. Then the last close wins, as POSIX demands within one mount.
        num_readers: Open handles that may read.
        passes_through: Whether the kernel reads it from its local copy.
    """
    if is_changed or shown is Shown.SAME:
        return Leads.HERE
    if shown is Shown.ANOTHER and not num_readers and not passes_through:
        return Leads.ANEW
    return Leads.ELSEWHERE


@dataclass(frozen=True, slots=True)
class Seen:
    """The facts about an inode that a look needs, at one moment."""

    body: OpenFile | None
    """Open file; None if the inode is not open."""
    path: str | None = None
    """Path of the inode; None once it has lost it."""
    version: OpenVersion | None = None
    """Version that the inode shows; None while it is changed here."""
    num_moves: int = 0
    """Number of renames."""
    is_changed: bool = False
    """Whether content or attributes are unpublished."""
    is_replaced: bool = False
    """Whether its name leads elsewhere already."""
    is_leaving: bool = False
    """Whether this mount is renaming, removing or replacing its path."""
    num_readers: int = 0
    passes_through: bool = False


def before(seen: Seen) -> Leads | None:
    """Decide where a name leads without asking the store; return None if the store has to be asked.

    A look is useless while this mount changes the file, or the entry at its path.
    """
    if seen.is_replaced:
        return Leads.ELSEWHERE
    if seen.version is None or seen.path is None or seen.is_leaving:
        return Leads.HERE
    return None


def after(asked: Seen, now: Seen, shown: Shown) -> Leads | None:
    """Decide where a name leads by the content of its path; return None if the state changed since the question.

    Args:
        asked: The inode when the store was asked.
        now: The inode when the store had answered.
        shown: The answer.
    """
    if (now.body, now.path, now.num_moves) != (asked.body, asked.path, asked.num_moves):
        return None
    if not now.is_changed and (now.version is not asked.version or now.is_leaving):
        return None
    return leads(
        shown,
        is_changed=now.is_changed,
        num_readers=now.num_readers,
        passes_through=now.passes_through,
    )


class Lookup:
    """Follows names to inodes."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def found(self, parent: Node, name: str) -> Node:
        """Return the inode that a name leads to; create it if there is none.

        Raises:
            FileNotFoundError: Nothing has that name.
        """
        node = parent.children.get(name)
        if node is not None and node.body is not None and await self.leads_here(node):
            return node
        info = await self._session.info(parent.child_path(name))
        return self.child(parent, name, info.kind)

    def child(self, parent: Node, name: str, kind: str) -> Node:
        """Return the inode of an existing name; a new inode if the name was of another kind."""
        inodes, node = self._session.inodes, parent.children.get(name)
        # The kernel keeps one kind for an inode.
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
        """Return whether an open file's name still leads to it, by ``known`` or an answer younger than ``TTL_S``."""
        body = node.body
        version = body.version if body is not None else None
        if version is not None and body is not None and body.pending.path is not None:
            # An answer of the last second decides without the store, if it still equals the entry at the open.
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
        """Make the name of an open file lead elsewhere if its path shows another version. Opens nothing.

        Raises:
            OSError: ``ESTALE``: the name leads elsewhere from now on; the kernel looks it up again.
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
            # The state has changed since, and the process that changed it may have published now.
            if where is None:
                continue
            if where is Leads.HERE:
                if shown is Shown.SAME and asked.path is not None and asked.version is not None:
                    # Remember the store's answer, so that the look-up after this one need not ask again.
                    session.attributes.remember(asked.path, asked.version.info)
                return
            if where is Leads.ANEW and await self._took_up(node, body):
                return
            self.part(node, body)
            raise stale()

    def part(self, node: Node, body: OpenFile | None) -> None:
        """Leave a version to its open handles; its name leads elsewhere from now on."""
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
        """Make an open file the version that its path shows; return False if that is no file any more."""
        try:
            await self._session.wait(body.take_up)
        except (FileNotFoundError, IsADirectoryError):
            return False
        # The kernel's pages belong to the former version.
        node.cached_version = None
        return True


def is_open(parent: Node, name: str) -> bool:
    """Return whether a name is that of a file that is open here."""
    node = parent.children.get(name)
    return node is not None and node.body is not None
