"""The file system of a store for the kernel bindings: passes requests on, and hands the mount to the next process.

Suspension: every handler runs on the mount's one thread. A request that memory can answer
(attributes known for under a second, blocks in the cache, a write that fits the window) is
answered without suspending. Every other request awaits the store in a worker thread, or the
futures of the blocks it needs, which other requests may share. Nodes are touched only on
the mount's thread, never in a worker, and never assumed unchanged across an await.
"""

import errno
import os
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from typing_extensions import override

from fusefs.bridge.api.protocol import (
    Change,
    Data,
    Entry,
    FileSystem,
    Kernel,
    Named,
    Opened,
    Space,
)
from fusefs.tree.freshness import Shown, shown_at
from fusefs.tree.namespace import OpenVersion, StripedFiles
from fusefs.tree.version_identity import identity_of
from fusefs.vfs.attributes import AttributeRequests, Entries, ExtendedAttributeRequests
from fusefs.vfs.closing import Closing
from fusefs.vfs.file.open_file import OpenFile, SpoolPlace
from fusefs.vfs.handle_table import Handle, Listing
from fusefs.vfs.inode_table import InodeTable, Node, as_text, from_text
from fusefs.vfs.names import CreationRequests, ListingRequests, NameRequests
from fusefs.vfs.opening import ContentRequests, Opening
from fusefs.vfs.session import Session
from fusefs.vfs.shown_version import Lookup
from omniload.base.errors import OmniloadError, StateError

__all__ = ["StoreFileSystem"]

_STATE_VERSION = 1
"""Version of the state that one process sends to the next."""


class StoreFileSystem(FileSystem):
    """One mount of a store. Calls return the coroutine of the handler itself, which saves a frame per request.

    Args:
        files: The store's files.
        place: Place of random writes.
    """

    hands_over_copies = True

    def __init__(self, files: StripedFiles, place: SpoolPlace) -> None:
        self.session = session = Session(files, place)
        entries, names = Entries(session), Lookup(session)
        closing = Closing(session, names)
        opening = Opening(session, names, closing)
        self._listings = ListingRequests(session, entries, names)
        self._names = NameRequests(session, entries, names)
        self._creation = CreationRequests(session, entries, names, opening, closing)
        self._content = ContentRequests(session, opening, closing)
        self._attributes = AttributeRequests(session, entries, opening, closing)
        self._xattrs = ExtendedAttributeRequests(session, opening, self._attributes)
        self._transfer = _StateTransfer(session)

    def close(self) -> list[str]:
        """Publish files that are still open and end the threads; see ``Session.close``."""
        return self.session.close()

    @override
    def connected(self, kernel: Kernel) -> None:
        self.session.kernel = kernel

    # Names

    @override
    def lookup(self, parent: int, name: bytes) -> Coroutine[Any, Any, Entry]:
        return self._listings.lookup(parent, name)

    @override
    def advertised(self, inode: int) -> None:
        self._listings.advertised(inode)

    @override
    def forget(self, inode: int, lookups: int) -> None:
        self.session.inodes.forget(inode, lookups)

    @override
    def opendir(self, inode: int) -> Coroutine[Any, Any, Opened]:
        return self._listings.opendir(inode)

    @override
    def readdir(self, handle: int, start: int) -> Iterable[Named]:
        return self._listings.readdir(handle, start)

    @override
    def releasedir(self, handle: int) -> Coroutine[Any, Any, None]:
        return self._listings.releasedir(handle)

    @override
    def readlink(self, inode: int) -> Coroutine[Any, Any, bytes]:
        return self._names.readlink(inode)

    @override
    def mkdir(self, parent: int, name: bytes, mode: int) -> Coroutine[Any, Any, Entry]:
        return self._names.mkdir(parent, name, mode)

    @override
    def mknod(self, parent: int, name: bytes, mode: int, rdev: int) -> Coroutine[Any, Any, Entry]:
        return self._creation.mknod(parent, name, mode)

    @override
    def symlink(self, parent: int, name: bytes, target: bytes) -> Coroutine[Any, Any, Entry]:
        return self._names.symlink(parent, name, target)

    @override
    async def link(self, inode: int, parent: int, name: bytes) -> Entry:
        raise PermissionError(errno.EPERM, "hard links are not supported")

    @override
    def unlink(self, parent: int, name: bytes) -> Coroutine[Any, Any, None]:
        return self._names.unlink(parent, name)

    @override
    def rmdir(self, parent: int, name: bytes) -> Coroutine[Any, Any, None]:
        return self._names.rmdir(parent, name)

    @override
    def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> Coroutine[Any, Any, None]:
        return self._names.rename(parent, name, new_parent, new_name, flags)

    # Attributes

    @override
    def getattr(self, inode: int) -> Coroutine[Any, Any, Entry]:
        return self._attributes.getattr(inode)

    @override
    def setattr(self, inode: int, change: Change, handle: int | None) -> Coroutine[Any, Any, Entry]:
        return self._attributes.setattr(inode, change, handle)

    @override
    def getxattr(self, inode: int, name: bytes) -> Coroutine[Any, Any, bytes]:
        return self._xattrs.getxattr(inode, name)

    @override
    def listxattr(self, inode: int) -> Coroutine[Any, Any, Sequence[bytes]]:
        return self._xattrs.listxattr(inode)

    @override
    def setxattr(self, inode: int, name: bytes, value: bytes) -> Coroutine[Any, Any, None]:
        return self._xattrs.setxattr(inode, name, value)

    @override
    def removexattr(self, inode: int, name: bytes) -> Coroutine[Any, Any, None]:
        return self._xattrs.removexattr(inode, name)

    @override
    def statfs(self) -> Coroutine[Any, Any, Space]:
        return self._attributes.statfs()

    # Content

    @override
    def open(self, inode: int, flags: int) -> Coroutine[Any, Any, Opened]:
        return self._content.open(inode, flags)

    @override
    def create(
        self, parent: int, name: bytes, mode: int, flags: int
    ) -> Coroutine[Any, Any, tuple[Opened, Entry]]:
        return self._creation.create(parent, name, mode, flags)

    @override
    def read(self, handle: int, offset: int, size_bytes: int) -> Coroutine[Any, Any, Data]:
        return self._content.read(handle, offset, size_bytes)

    @override
    def write(self, handle: int, offset: int, data: Data) -> Coroutine[Any, Any, int]:
        return self._content.write(handle, offset, data)

    @override
    def flush(self, handle: int) -> Coroutine[Any, Any, None]:
        return self._content.flush(handle)

    @override
    def fsync(self, handle: int) -> Coroutine[Any, Any, None]:
        return self._content.fsync(handle)

    @override
    def fsyncdir(self, handle: int) -> Coroutine[Any, Any, None]:
        return self._content.fsyncdir(handle)

    @override
    def release(self, handle: int) -> Coroutine[Any, Any, None]:
        return self._content.release(handle)

    # Hand-over to another process

    @override
    def handed_over(self) -> Coroutine[Any, Any, dict[str, Any]]:
        return self._transfer.handed_over()

    @override
    def taken_over(self, state: dict[str, Any]) -> Coroutine[Any, Any, None]:
        return self._transfer.taken_over(state)


class _StateTransfer:
    """Both sides of a hand-over: inodes, handles and listings as JSON values, and back.

    Written bytes are published first, so the next process finds every open file in the store
    at its path. An open file that has lost its path, or whose path shows a newer
    version, exists only in the old process. Then the hand-over is refused, and the error names the file.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    async def handed_over(self) -> dict[str, Any]:
        """Return the state; see ``FileSystem.handed_over``."""
        session, handles = self._session, self._session.handles.files
        for node in {handle.node.number: handle.node for handle in handles.values()}.values():
            # Publish before anything else, because the next process opens the versions that the store shows.
            await session.wait(_publish, node)
            await session.wait(self._check_reopens, node)
        return {
            "version": _STATE_VERSION,
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
        """Continue from a state; see ``FileSystem.taken_over``."""
        if state.get("version") != _STATE_VERSION:
            raise StateError(
                f"the mount comes with a state of version {state.get('version')}, this release reads "
                f"{_STATE_VERSION}; unmount and mount it anew"
            )
        session = self._session
        mine = session.files.store.location
        location = from_text(state.get("store", as_text(mine)))  # older releases did not send it
        if location != mine:
            raise StateError(f"the mount shows {location!r}, not {mine!r}; give the same store")
        session.owner = (state["owner"][0], state["owner"][1])
        session.inodes = InodeTable.resumed(state["nodes"])
        # The kernel releases the old handles by their numbers, so none of these may be given again.
        session.handles.newest = state["next_handle"]
        # Older releases did not send these: all opens of a path showed one version, and every close published.
        write_only, read_only = (set(state.get(n, ())) for n in ("write_only", "read_only"))
        versions = dict(state.get("versions", ()))
        for number, inode, appends in state["handles"]:
            node = session.inodes.node(inode)
            if node.body is None:
                path = node.path()
                try:
                    # Do not fetch the bytes at the open, because the whole mount waits for this.
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
            # The state does not say which handles bypass the page cache, so bytes read through these stay in memory,
            # too.
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
            opened.close()  # so young a version differs from another only by its bytes
            opened = self._session.files.open(path)
        return opened

    def _check_reopens(self, node: Node) -> None:
        """Check that an open of the path finds the version that is open here.

        Raises:
            StateError: The file has no path, or another version is there.
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
