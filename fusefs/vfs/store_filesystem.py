"""A store as the kernel bindings show it: one class that hands each request on to those that answer it.

Suspension: every handler runs on the mount's one thread. What memory answers
(attributes known for under a second, blocks in the cache, a write that fits the window) is
answered without suspending. Everything else awaits the store in a worker thread, or the
futures of the blocks it needs, which other requests may share. Nodes are touched only on
the mount's thread, never in a worker, and never assumed unchanged across an await.
"""

import errno
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
from fusefs.tree.namespace import StripedFiles
from fusefs.vfs.closing import Closing
from fusefs.vfs.entries import Entries
from fusefs.vfs.file.open_file import SpoolPlace
from fusefs.vfs.lookup import Lookup
from fusefs.vfs.opening import Opening
from fusefs.vfs.requests.files import AttributeRequests, ContentRequests, ExtendedAttributeRequests
from fusefs.vfs.requests.names import CreationRequests, ListingRequests, NameRequests
from fusefs.vfs.requests.state_transfer import StateTransfer
from fusefs.vfs.session import Session

__all__ = ["StoreFileSystem"]


class StoreFileSystem(FileSystem):
    """One mount of a store. A handler is returned as it is: handing it on costs no frame of its own.

    Args:
        files: The store's files.
        place: Where random writes go.
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
        self._transfer = StateTransfer(session)

    def close(self) -> list[str]:
        """Publish what was left open and end the threads, as ``Session.close``."""
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
