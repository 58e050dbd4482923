"""An adapter for a file system whose calls simply block.

Calls that never wait (a tree in memory) are named in ``inline`` and need no thread. Reads
are first tried on the mount's thread. All other calls run in worker threads.
"""

import errno
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from typing_extensions import override

from fusefs.base.thread_pools import CallPool
from fusefs.bridge.api.protocol import Data, Entry, FileSystem, Kernel, Named, Opened, Space
from fusefs.bridge.api.waiting import in_thread

__all__ = ["BlockingFileSystem", "Threaded"]

Result = TypeVar("Result")


class BlockingFileSystem(Protocol):
    """A read-only tree of files with blocking calls. Calls not in ``inline`` come from several threads at once.

    The calls raise the errors of ``FileSystem``.
    """

    inline: ClassVar[frozenset[str]] = frozenset()
    """Names of calls that never wait, and so run on the mount's own thread."""
    never_changes: ClassVar[bool] = False
    """Whether names and bytes never change, so that the kernel may keep listings and pages."""
    unasked: frozenset[str] = frozenset()
    """Same as ``FileSystem.unasked``."""

    def lookup(self, parent: int, name: bytes) -> Entry:
        """Find a name in a directory; an ``Entry`` of inode 0 lets the kernel remember that the name does not exist."""

    def getattr(self, inode: int) -> Entry:
        """Describe an inode."""

    def listing(self, inode: int) -> Sequence[Named]:
        """Describe the entries of a directory."""

    def readlink(self, inode: int) -> bytes:
        """Return the target of a symbolic link."""

    def open(self, inode: int, flags: int) -> Opened:
        """Open a file."""

    def try_read(self, handle: int, offset: int, size_bytes: int) -> Data | None:
        """Return a range that is in memory; None if ``read`` would have to wait. This call never waits."""

    def read(self, handle: int, offset: int, size_bytes: int) -> Data:
        """Return a range, cut at the end of the file and nowhere else."""

    def release(self, handle: int) -> None:
        """Close a file."""

    def xattrs(self, inode: int) -> Mapping[bytes, bytes]:
        """Return the extended attributes."""

    def statfs(self) -> Space:
        """Describe the space of the file system."""


class Threaded(FileSystem):
    """Runs a ``BlockingFileSystem`` for the bindings.

    Args:
        blocking: The tree.
        workers: Most calls that may wait at a time.
    """

    def __init__(self, blocking: BlockingFileSystem, workers: int = 16) -> None:
        self._blocking = blocking
        self.unasked = blocking.unasked
        self._pool = CallPool(workers, "bridge")
        self._listings: dict[int, Sequence[Named]] = {}
        self._next_listing = 1
        self.kernel: Kernel | None = None

    def close(self) -> None:
        """End the worker threads."""
        # The mount is gone, so nobody waits for calls that have not begun.
        self._pool.shutdown(cancel_futures=True)

    @override
    def connected(self, kernel: Kernel) -> None:
        self.kernel = kernel

    async def _call(self, call: Callable[..., Result], *arguments: Any) -> Result:  # noqa: ANN401 -- any call's
        # Compare names, because each access to a bound method makes a new object.
        if call.__name__ in self._blocking.inline:
            return call(*arguments)
        return await in_thread(self._pool, call, *arguments)

    @override
    async def lookup(self, parent: int, name: bytes) -> Entry:
        return await self._call(self._blocking.lookup, parent, name)

    @override
    async def getattr(self, inode: int) -> Entry:
        return await self._call(self._blocking.getattr, inode)

    @override
    async def readlink(self, inode: int) -> bytes:
        return await self._call(self._blocking.readlink, inode)

    @override
    async def opendir(self, inode: int) -> Opened:
        # Read the whole listing when it is opened: the kernel continues from an entry's number, which must keep its
        # name.
        listing = await self._call(self._blocking.listing, inode)
        self._next_listing += 1
        self._listings[self._next_listing] = listing
        return Opened(self._next_listing, keep_cache=self._blocking.never_changes)

    @override
    def readdir(self, handle: int, start: int) -> Iterable[Named]:
        listing = self._listings[handle]
        return (listing[line] for line in range(start, len(listing)))

    @override
    async def releasedir(self, handle: int) -> None:
        self._listings.pop(handle, None)

    @override
    async def open(self, inode: int, flags: int) -> Opened:
        opened = await self._call(self._blocking.open, inode, flags)
        return opened._replace(keep_cache=True) if self._blocking.never_changes else opened

    @override
    async def read(self, handle: int, offset: int, size_bytes: int) -> Data:
        data = self._blocking.try_read(handle, offset, size_bytes)
        if data is not None:
            return data
        return await self._call(self._blocking.read, handle, offset, size_bytes)

    @override
    async def release(self, handle: int) -> None:
        await self._call(self._blocking.release, handle)

    @override
    async def getxattr(self, inode: int, name: bytes) -> bytes:
        found = (await self._call(self._blocking.xattrs, inode)).get(name)
        if found is None:
            raise OSError(errno.ENODATA, "no such attribute")
        return found

    @override
    async def listxattr(self, inode: int) -> Sequence[bytes]:
        return list(await self._call(self._blocking.xattrs, inode))

    @override
    async def statfs(self) -> Space:
        return await self._call(self._blocking.statfs)
