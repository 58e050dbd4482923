"""The interface of a file system to the kernel bindings: the seam between handlers and FUSE.

A file system is a class with the calls below. It knows neither pyfuse3 nor /dev/fuse nor
an event loop; ``fusefs.bridge.server.serve`` shows it at a mount point through either
binding. The file system chooses the numbers of its inodes and handles. Inode 1 is the root;
every other inode may have any number above 1.

*Waiting.* Calls without ``async`` answer at once. The others may await
``waiting.result_of(future)``, ``waiting.all_done(futures)`` and ``waiting.in_thread(...)``,
and nothing else, because a binding can wait for nothing else. A call that awaits nothing costs no task.
``blocking.Threaded`` adapts a file system whose calls block.

*Errors.* An ``OSError`` reaches the caller with its errno. ``OmniloadError`` and
``ValueError`` become an errno by the table of ``fusefs.bridge.api.errno_answers``. Anything else is
logged as a defect and becomes ``EIO``. No error ends the mount.

*One at a time.* All calls of one mount run on one thread. While one call awaits, another may run.
"""

# ruff: noqa: ARG002 -- the signatures are the point
import errno
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from omniload.base.errors import StateError

__all__ = [
    "ROOT_INODE",
    "Change",
    "Data",
    "Entry",
    "FileSystem",
    "Kernel",
    "Named",
    "Opened",
    "Space",
    "only_reads",
]

# The kernel's own number of the root (FUSE_ROOT_ID).
ROOT_INODE = 1
Data = bytes | memoryview


class Entry(NamedTuple):
    """An inode in the form that the kernel gets.

    ``inode`` 0 as the answer of ``lookup`` means that the name does not exist, and that the
    kernel may remember this for ``entry_timeout_s``. After ``FileNotFoundError`` the kernel remembers nothing.
    """

    inode: int
    mode: int = 0
    """Kind and permission bits, as in ``st_mode``."""
    size_bytes: int = 0
    nlink: int = 1
    uid: int = 0
    gid: int = 0
    rdev: int = 0
    """Number of a device node, as ``os.makedev`` makes it."""
    mtime_ns: int = 0
    atime_ns: int | None = None
    """Access time in nanoseconds; None: the same as ``mtime_ns``."""
    ctime_ns: int | None = None
    """Change time in nanoseconds; None: the same as ``mtime_ns``."""
    block_bytes: int = 4096
    """Block size that ``st_blksize`` recommends to readers."""
    entry_timeout_s: float = 1.0
    """Seconds in which the kernel may assume that the name leads to this inode."""
    attr_timeout_s: float = 1.0
    """Seconds in which the kernel may keep the attributes."""
    generation: int = 0


class Opened(NamedTuple):
    """An open file or directory."""

    handle: int
    """Number of the open file or directory; no other one that is open has the same number."""
    keep_cache: bool = False
    """Whether the kernel's page cache of the inode is still valid."""
    direct_io: bool = False
    """Whether every read comes here, bypassing the page cache."""
    local_fd: int | None = None
    """Open descriptor of a local file with exactly these bytes, for a read-only open.

    A kernel with passthrough reads the file without further requests. The binding owns the descriptor from now on.
    """


class Named(NamedTuple):
    """One line of a directory."""

    name: bytes
    entry: Entry


class Change(NamedTuple):
    """Changes that ``setattr`` makes; None leaves a field unchanged."""

    size_bytes: int | None = None
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


class Space(NamedTuple):
    """Space of a file system, in the fields of ``statvfs``."""

    block_bytes: int = 4096
    blocks: int = 0
    free_blocks: int = 0
    inodes: int = 0
    free_inodes: int = 0
    name_max: int = 255


class Kernel(Protocol):
    """The calls that a binding offers to its file system."""

    @property
    def can_pass_through(self) -> bool:
        """Whether the kernel can use a ``local_fd``, which it then reads by itself."""

    def passes_through(self, inode: int) -> bool:
        """Return whether the kernel reads an open inode from its local copy now.

        Every further open of the inode uses the same copy until the last handle is closed.
        """

    def outdated(self, inode: int) -> None:
        """Make the kernel ask again for the attributes of an inode when it next needs them."""


class FileSystem(Protocol):
    """A tree of files. Inherit to get the defaults: read-only, no links, no attributes."""

    hands_over_copies: bool = False
    """Whether the kernel may be given local copies to read by itself. The kernel then allows one overlay less to be
    stacked on the mount."""

    unasked: frozenset[str] = frozenset()
    """Requests that the kernel need not send, if the binding can tell it so. ``open``: each inode is the handle of
    its file, an open file has no state, and the kernel's cache of it stays valid. ``getxattr``: nothing has an
    attribute."""

    def connected(self, kernel: Kernel) -> None:
        """Take note of the binding's abilities; called once before the first request."""

    # Names

    async def lookup(self, parent: int, name: bytes) -> Entry:
        """Find a name in a directory; an answer counts as one lookup of its inode."""
        raise NotImplementedError

    def advertised(self, inode: int) -> None:
        """Count a look-up: a listing gave the kernel this inode. Do nothing if look-ups are not counted."""
        del inode

    def forget(self, inode: int, lookups: int) -> None:
        """Forget look-ups; after the last, the kernel does not mention the inode again before a new look-up."""
        del inode, lookups

    async def opendir(self, inode: int) -> Opened:
        """Open a directory. ``keep_cache``: the kernel may keep the listing."""
        raise NotImplementedError

    def readdir(self, handle: int, start: int) -> Iterable[Named]:
        """Yield an open directory from line ``start`` on, without ``.`` and ``..``."""
        raise NotImplementedError

    async def releasedir(self, handle: int) -> None:
        """Close a directory."""

    async def readlink(self, inode: int) -> bytes:
        """Return the target of a symbolic link."""
        raise OSError(errno.EINVAL, "not a symbolic link")

    async def mkdir(self, parent: int, name: bytes, mode: int) -> Entry:
        """Make a directory."""
        raise _read_only()

    async def mknod(self, parent: int, name: bytes, mode: int, rdev: int) -> Entry:
        """Create a file, pipe, socket or device node."""
        raise _read_only()

    async def symlink(self, parent: int, name: bytes, target: bytes) -> Entry:
        """Make a symbolic link."""
        raise _read_only()

    async def link(self, inode: int, parent: int, name: bytes) -> Entry:
        """Give an inode another name."""
        raise _read_only()

    async def unlink(self, parent: int, name: bytes) -> None:
        """Remove the name of anything but a directory."""
        raise _read_only()

    async def rmdir(self, parent: int, name: bytes) -> None:
        """Remove an empty directory."""
        raise _read_only()

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> None:
        """Rename; ``flags`` are those of ``renameat2``."""
        raise _read_only()

    # Attributes

    async def getattr(self, inode: int) -> Entry:
        """Describe an inode."""
        raise NotImplementedError

    async def setattr(self, inode: int, change: Change, handle: int | None) -> Entry:
        """Change attributes; ``handle`` is set if the caller used a handle."""
        raise _read_only()

    async def getxattr(self, inode: int, name: bytes) -> bytes:
        """Return an extended attribute."""
        raise OSError(errno.ENODATA, "no such attribute")

    async def listxattr(self, inode: int) -> Sequence[bytes]:
        """Name the extended attributes."""
        return ()

    async def setxattr(self, inode: int, name: bytes, value: bytes) -> None:
        """Set an extended attribute."""
        raise _read_only()

    async def removexattr(self, inode: int, name: bytes) -> None:
        """Remove an extended attribute."""
        raise _read_only()

    async def statfs(self) -> Space:
        """Describe the space of the file system."""
        return Space()

    # Content

    async def open(self, inode: int, flags: int) -> Opened:
        """Open a file; ``flags`` are those of ``open``, including ``O_TRUNC``."""
        raise NotImplementedError

    async def create(self, parent: int, name: bytes, mode: int, flags: int) -> tuple[Opened, Entry]:
        """Create and open a file; counts as a look-up of its inode."""
        raise _read_only()

    async def read(self, handle: int, offset: int, size_bytes: int) -> Data:
        """Return a range, cut at the end of the file and nowhere else.

        The buffer is written to the kernel as it is: a view of cached memory is not copied.
        It must keep its bytes until the answer is sent.
        """
        raise NotImplementedError

    async def write(self, handle: int, offset: int, data: Data) -> int:
        """Write bytes and return how many were accepted.

        ``data`` is in the binding's buffer, so a call that awaits, or keeps the bytes, must copy them first.
        """
        raise _read_only()

    async def flush(self, handle: int) -> None:
        """Act on the close of one descriptor of the handle; an error becomes the result of ``close``.

        The kernel skips this call, where it can, for a handle whose open ``only_reads`` and created nothing.
        """
        del handle

    async def fsync(self, handle: int) -> None:
        """Make the written bytes durable."""
        del handle

    async def fsyncdir(self, handle: int) -> None:
        """Make the names in an open directory durable; do nothing in a file system that changes none."""
        del handle

    async def release(self, handle: int) -> None:
        """Act on the close of the handle's last descriptor."""

    # Hand-over to another process

    async def handed_over(self) -> dict[str, Any]:
        """Return the state that another process needs to answer for the open inodes and handles, as JSON values.

        Raises:
            StateError: The state cannot be handed over now; this process keeps the mount.
        """
        raise StateError(f"{type(self).__name__} cannot be handed over; unmount and mount it anew")

    async def taken_over(self, state: dict[str, Any]) -> None:
        """Continue from the state that another process handed over.

        Raises:
            StateError: The state is of another version or does not fit.
        """
        raise StateError(f"{type(self).__name__} cannot be taken over; unmount and mount it anew")


def only_reads(flags: int) -> bool:
    """Return whether an open with these ``flags`` of ``open`` changes nothing of an existing file."""
    # O_RDONLY with O_TRUNC truncates the file, though its descriptor may not write.
    return flags & (os.O_ACCMODE | os.O_TRUNC) == os.O_RDONLY


def _read_only() -> OSError:
    return OSError(errno.EROFS, "this file system does not change")
