"""A mount handed to another process: its inodes, handles and listings as JSON values, and back.

What was written is published first, so the next process finds every open file in the store
at its path. A file that is open and has no path any more, or whose path shows a newer
version, lives in the old process alone: the hand-over is refused, and says which file.
"""

import os
from typing import Any

from fusefs.bridge.api.protocol import Entry
from fusefs.tree.freshness import Shown, shown_at
from fusefs.tree.namespace import OpenVersion
from fusefs.tree.version_identity import identity_of
from fusefs.vfs.file.open_file import OpenFile
from fusefs.vfs.handle_table import Handle, Listing
from fusefs.vfs.inode_table import InodeTable, Node, as_text, from_text
from fusefs.vfs.session import Session
from omniload.base.errors import OmniloadError, StateError

__all__ = ["StateTransfer"]

_VERSION = 1


class StateTransfer:
    """Both sides of a hand-over."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def handed_over(self) -> dict[str, Any]:
        """Return the state, as ``FileSystem.handed_over``."""
        session, handles = self._session, self._session.handles.files
        for node in {handle.node.number: handle.node for handle in handles.values()}.values():
            # First of all: what the next process opens is what the store shows.
            await session.wait(_publish, node)
            await session.wait(self._check_reopens, node)
        return {
            "version": _VERSION,
            "store": as_text(session.files.store.location),
            "owner": list(session.owner),
            "nodes": session.inodes.state(),
            "next_handle": session.handles.newest,
            "handles": [[n, h.node.number, h.appends] for n, h in handles.items()],
            "write_only": [n for n, h in handles.items() if not h.reads],
            "read_only": [n for n, h in handles.items() if not h.writes],
            "versions": [
                [node.number, _identity(node.body.version)]
                for node in {h.node.number: h.node for h in handles.values()}.values()
                if node.body is not None and node.body.version is not None
            ],
            "listings": [
                [
                    number,
                    [
                        [as_text(name), list(entry), node.number if node else 0]
                        for name, entry, node in listing.lines
                    ],
                ]
                for number, listing in session.handles.listings.items()
            ],
            "views": [[n, view.decode()] for n, view in session.statistics.open_views.items()],
        }

    async def taken_over(self, state: dict[str, Any]) -> None:
        """Continue from a state, as ``FileSystem.taken_over``."""
        if state.get("version") != _VERSION:
            raise StateError(
                f"the mount comes with a state of version {state.get('version')}, this release reads "
                f"{_VERSION}; unmount and mount it anew"
            )
        session = self._session
        mine = session.files.store.location
        location = from_text(state.get("store", as_text(mine)))  # older releases did not say
        if location != mine:
            raise StateError(f"the mount shows {location!r}, not {mine!r}; give the same store")
        session.owner = (state["owner"][0], state["owner"][1])
        session.inodes = InodeTable.resumed(state["nodes"])
        # The kernel releases the old handles by their numbers: none of those may be given again.
        session.handles.newest = state["next_handle"]
        # Older releases sent none of these; they showed all opens of a path one version, and published at
        # every close.
        write_only, read_only = (set(state.get(n, ())) for n in ("write_only", "read_only"))
        versions = dict(state.get("versions", ()))
        for number, inode, appends in state["handles"]:
            node = session.inodes.node(inode)
            if node.body is None:
                path = node.path()
                try:
                    # Its bytes come when they are read: the whole mount waits for this.
                    opened = await session.wait(self._opened_again, path)
                except OSError as error:
                    raise StateError(
                        f"{path!r} is open and cannot be opened again: {error}"
                    ) from error
                if versions.get(inode, found := _identity(opened)) != found:
                    opened.close()
                    raise StateError(
                        f"{path!r} is open and was replaced meanwhile; have it closed, then take over"
                    )
                node.body = OpenFile(session.files, session.place, path, opened)
            reads, writes = number not in write_only, number not in read_only
            node.opened(reads=reads, writes=writes)
            # Whether past the page cache is not sent: what is read through it stays in memory as well.
            session.handles.files[number] = Handle(
                node, node.body, appends, reads=reads, writes=writes, kept=False
            )
        for number, lines in state["listings"]:
            session.handles.listings[number] = Listing(
                [
                    (from_text(name), Entry(*entry), session.inodes.node(inode) if inode else None)
                    for name, entry, inode in lines
                ]
            )
        session.statistics.open_views = {number: view.encode() for number, view in state["views"]}

    def _opened_again(self, path: str) -> OpenVersion:
        opened = self._session.files.open(path, brings=False)
        if (
            opened.reads_path
            and not opened.is_known
            and self._session.files.opener.comes_whole(opened.info)
        ):
            opened.close()  # a version so young is distinct from another by its bytes alone
            opened = self._session.files.open(path)
        return opened

    def _check_reopens(self, node: Node) -> None:
        """Check that an open of the path finds the version that is open here.

        Raises:
            StateError: It has no path, or another version is there.
        """
        body = node.body
        assert body is not None, "it is open"
        if body.pending.path is None or not node.is_attached:
            raise StateError(
                f"{node.name!r} is open and was removed or replaced; have it closed, then take over"
            )
        version = body.version
        if (
            version is not None
            and shown_at(self._session.files, body.pending.path, version) is not Shown.SAME
        ):
            raise StateError(
                f"{os.fspath(body.pending.path)!r} is open and was replaced since; have it closed, then take over"
            )


def _identity(version: OpenVersion) -> str:
    return identity_of(version.manifest, version.info.entry)


def _publish(node: Node) -> None:
    body = node.body
    assert body is not None, "it is open"
    try:
        body.flush(last=False)
    except (OSError, OmniloadError) as error:
        raise StateError(
            f"{body.pending.path!r} is being written and cannot be published: {error}"
        ) from error
