"""The binding over libfuse as a whole: mount, answer, unmount or hand over.

pyfuse3's requests become calls of a ``FileSystem``. The loop waits for the futures of the handlers.
"""

import contextlib
import mmap
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from typing_extensions import override

from fusefs.bridge.api.errno_answers import errno_answered
from fusefs.bridge.api.options import BridgeOptions
from fusefs.bridge.api.protocol import Change, Entry, FileSystem
from fusefs.bridge.api.waiting import Handling, all_done
from fusefs.bridge.device.passthrough import NO_PASSTHROUGH
from fusefs.bridge.libfuse.loop import Loop
from fusefs.bridge.process.launch import why_not
from fusefs.bridge.process.serving import HandOver, ServedMount, ended_by_signals
from fusefs.bridge.process.tuning import tune_kernel
from omniload.base.concurrency.threads import DaemonPool
from omniload.base.errors import ConfigError, StateError
from omniload.base.extras import missing_extra

try:
    import pyfuse3
except ModuleNotFoundError as error:
    raise missing_extra("this mount (--bridge device does without)", error) from error
except ImportError as error:
    raise ConfigError(f"{error}; install the system package libfuse3") from error

__all__ = ["serve"]

Result = TypeVar("Result")
_LIBFUSE_PAGES = 256
_MAX_PAGES = Path("/proc/sys/fs/fuse/max_pages_limit")


def _attributes(entry: Entry) -> pyfuse3.EntryAttributes:
    found = pyfuse3.EntryAttributes()
    found.st_ino, found.generation = entry.inode, entry.generation
    found.entry_timeout, found.attr_timeout = entry.entry_timeout_s, entry.attr_timeout_s
    found.st_mode, found.st_nlink, found.st_rdev = entry.mode, entry.nlink, entry.rdev
    found.st_uid, found.st_gid = entry.uid, entry.gid
    found.st_size, found.st_blksize = entry.size_bytes, entry.block_bytes
    found.st_blocks = -(-entry.size_bytes // 512)
    mtime_ns, atime_ns, ctime_ns = entry.mtime_ns, entry.atime_ns, entry.ctime_ns
    found.st_mtime_ns = mtime_ns
    found.st_atime_ns = mtime_ns if atime_ns is None else atime_ns
    found.st_ctime_ns = mtime_ns if ctime_ns is None else ctime_ns
    return found


def _change(attr: pyfuse3.EntryAttributes, fields: pyfuse3.SetattrFields) -> Change:
    return Change(
        size_bytes=attr.st_size if fields.update_size else None,
        mode=attr.st_mode if fields.update_mode else None,
        uid=attr.st_uid if fields.update_uid else None,
        gid=attr.st_gid if fields.update_gid else None,
        atime_ns=attr.st_atime_ns if fields.update_atime else None,
        mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
    )


class _Requests(pyfuse3.Operations):
    """pyfuse3's names for the calls of a ``FileSystem``."""

    # The agreement of INIT outlives this process, so it must equal the one of the device binding.
    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, filesystem: FileSystem) -> None:
        super().__init__()
        self._filesystem = filesystem

    async def _answer(self, request: str, handling: Handling[Result]) -> Result:
        """Run a handler until it answers; any exception becomes an errno."""
        try:
            return await handling
        except Exception as error:
            raise pyfuse3.FUSEError(errno_answered(request, error)) from error

    @override
    async def lookup(self, parent: int, name: bytes, ctx: object) -> pyfuse3.EntryAttributes:
        return _attributes(await self._answer("lookup", self._filesystem.lookup(parent, name)))

    @override
    async def forget(self, inodes: Sequence[tuple[int, int]]) -> None:
        for inode, lookups in inodes:
            self._filesystem.forget(inode, lookups)

    @override
    async def getattr(self, inode: int, ctx: object) -> pyfuse3.EntryAttributes:
        return _attributes(await self._answer("getattr", self._filesystem.getattr(inode)))

    @override
    async def setattr(
        self,
        inode: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: object,
    ) -> pyfuse3.EntryAttributes:
        changed = self._filesystem.setattr(inode, _change(attr, fields), fh)
        return _attributes(await self._answer("setattr", changed))

    @override
    async def readlink(self, inode: int, ctx: object) -> bytes:
        return await self._answer("readlink", self._filesystem.readlink(inode))

    @override
    async def mknod(
        self, parent: int, name: bytes, mode: int, rdev: int, ctx: object
    ) -> pyfuse3.EntryAttributes:
        return _attributes(
            await self._answer("mknod", self._filesystem.mknod(parent, name, mode, rdev))
        )

    @override
    async def mkdir(
        self, parent: int, name: bytes, mode: int, ctx: object
    ) -> pyfuse3.EntryAttributes:
        return _attributes(await self._answer("mkdir", self._filesystem.mkdir(parent, name, mode)))

    @override
    async def symlink(
        self, parent: int, name: bytes, target: bytes, ctx: object
    ) -> pyfuse3.EntryAttributes:
        return _attributes(
            await self._answer("symlink", self._filesystem.symlink(parent, name, target))
        )

    @override
    async def link(
        self, inode: int, parent: int, name: bytes, ctx: object
    ) -> pyfuse3.EntryAttributes:
        return _attributes(await self._answer("link", self._filesystem.link(inode, parent, name)))

    @override
    async def unlink(self, parent: int, name: bytes, ctx: object) -> None:
        await self._answer("unlink", self._filesystem.unlink(parent, name))

    @override
    async def rmdir(self, parent: int, name: bytes, ctx: object) -> None:
        await self._answer("rmdir", self._filesystem.rmdir(parent, name))

    @override
    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, ctx: object
    ) -> None:
        await self._answer(
            "rename", self._filesystem.rename(parent, name, new_parent, new_name, flags)
        )

    @override
    async def opendir(self, inode: int, ctx: object) -> int:
        return (await self._answer("opendir", self._filesystem.opendir(inode))).handle

    @override
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        try:
            for line, (name, entry) in enumerate(self._filesystem.readdir(fh, start_id), start_id):
                if not pyfuse3.readdir_reply(token, name, _attributes(entry), line + 1):
                    return
                # After the reply: a line that did not fit counts no look-up, and is asked for again.
                self._filesystem.advertised(entry.inode)
        # The outermost loop, because the mount must outlive a defect of ours.
        except Exception as error:
            raise pyfuse3.FUSEError(errno_answered("readdir", error)) from error

    @override
    async def releasedir(self, fh: int) -> None:
        await self._answer("releasedir", self._filesystem.releasedir(fh))

    @override
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        await self._answer("fsyncdir", self._filesystem.fsyncdir(fh))

    @override
    async def open(self, inode: int, flags: int, ctx: object) -> pyfuse3.FileInfo:
        opened = await self._answer("open", self._filesystem.open(inode, flags))
        return self._file_info(*opened)

    @override
    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, ctx: object
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        opened, entry = await self._answer(
            "create", self._filesystem.create(parent, name, mode, flags)
        )
        return self._file_info(*opened), _attributes(entry)

    @staticmethod
    def _file_info(
        handle: int, keep_cache: bool, direct_io: bool, local_fd: int | None
    ) -> pyfuse3.FileInfo:
        # libfuse before 3.17 cannot pass the descriptor to the kernel.
        if local_fd is not None:
            os.close(local_fd)
        return pyfuse3.FileInfo(fh=handle, keep_cache=keep_cache, direct_io=direct_io)

    @override
    async def read(self, fh: int, off: int, size: int) -> bytes:
        # pyfuse3 accepts any buffer as a reply.
        return cast("bytes", await self._answer("read", self._filesystem.read(fh, off, size)))

    @override
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        return await self._answer("write", self._filesystem.write(fh, off, buf))

    @override
    async def flush(self, fh: int) -> None:
        await self._answer("flush", self._filesystem.flush(fh))

    @override
    async def fsync(self, fh: int, datasync: bool) -> None:
        await self._answer("fsync", self._filesystem.fsync(fh))

    @override
    async def release(self, fh: int) -> None:
        await self._answer("release", self._filesystem.release(fh))

    @override
    async def getxattr(self, inode: int, name: bytes, ctx: object) -> bytes:
        return await self._answer("getxattr", self._filesystem.getxattr(inode, name))

    @override
    async def listxattr(self, inode: int, ctx: object) -> Sequence[bytes]:
        return await self._answer("listxattr", self._filesystem.listxattr(inode))

    @override
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: object) -> None:
        await self._answer("setxattr", self._filesystem.setxattr(inode, name, bytes(value)))

    @override
    async def removexattr(self, inode: int, name: bytes, ctx: object) -> None:
        await self._answer("removexattr", self._filesystem.removexattr(inode, name))

    @override
    async def access(self, inode: int, mode: int, ctx: object) -> bool:
        """Leave permissions to the kernel's default_permissions."""
        return True

    @override
    async def statfs(self, ctx: object) -> pyfuse3.StatvfsData:
        space = await self._answer("statfs", self._filesystem.statfs())
        found = pyfuse3.StatvfsData()
        found.f_bsize = found.f_frsize = space.block_bytes
        found.f_blocks = space.blocks
        found.f_bfree = found.f_bavail = space.free_blocks
        found.f_files = space.inodes
        found.f_ffree = found.f_favail = space.free_inodes
        found.f_namemax = space.name_max
        return found


class _Libfuse:
    """The limits of libfuse 3 before 3.17: no passthrough."""

    can_pass_through = False

    def passes_through(self, _: int) -> bool:
        return False

    def outdated(self, inode: int) -> None:
        # ENOENT: the kernel has forgotten it.
        with contextlib.suppress(OSError):
            pyfuse3.invalidate_inode(pyfuse3.InodeT(inode), attr_only=True)


class _Service:
    """One mount, for the requests that this process answers.

    Args:
        filesystem: The file system to show.
        options: The kernel's side.
        target: Real path of the mount point.
        loop: Runs pyfuse3.
    """

    def __init__(
        self, filesystem: FileSystem, options: BridgeOptions, target: str, loop: Loop
    ) -> None:
        self._filesystem = filesystem
        self._options = options
        self._target = target
        self._loop = loop
        self._request_bytes = _largest_request()
        self._hand_over: HandOver | None = None

    @property
    def handed(self) -> bool:
        """Whether the mount continues in another process."""
        return self._hand_over is not None and self._hand_over.handed

    def run(self, ready: Callable[[], None], let_go: Callable[[], None]) -> None:
        """Answer until unmounted, asked to end, or handed over."""
        main = pyfuse3.main()
        self._loop.start(main)
        # Dropped if the end comes first: its thread may wait inside the mount until the mount is gone.
        self._loop.start(self._begin(ready, let_go))
        try:
            with ended_by_signals(self._loop.end, self._target):
                self._loop.run(main)
        finally:
            if self._hand_over is not None:
                self._hand_over.close()
            self._loop.close()

    async def _begin(self, ready: Callable[[], None], let_go: Callable[[], None]) -> None:
        # A thread makes this call, so that the loop can answer it. The answer comes after INIT, which would reset
        # read-ahead to the value that libfuse asks for. The content of the answer does not matter. The thread is a
        # daemon: if the mount ends before the answer, the process must not wait for the thread.
        asking = DaemonPool(1, "bridge-statvfs")
        await all_done((asking.submit(partial(os.statvfs, self._target)),))
        asking.close(0)
        tune_kernel(self._options, self._target)
        if (device := self._loop.reader.device) is not None:
            mount = ServedMount(self._target, device, self._filesystem, self._loop)
            self._hand_over = HandOver(mount, self._state, pyfuse3.terminate, let_go)
        ready()

    def _state(self) -> dict[str, Any]:
        return {"passthrough": NO_PASSTHROUGH, "request_bytes": self._request_bytes}


def _loop_in_use() -> Loop:
    """Return the loop that ``serve`` put in place of trio."""
    loop: Loop = pyfuse3.trio.lowlevel.current_trio_token()  # type: ignore[attr-defined]
    return loop


def _largest_request() -> int:
    """Return the size in bytes of the largest request that libfuse may have agreed to.

    libfuse offers a buffer of 256 pages (from 3.17 on, as many as the kernel allows) and one page
    or 4 KiB for the headers. The kernel rejects reads with a smaller buffer than the agreed size.
    """
    try:
        allowed = int(_MAX_PAGES.read_text(encoding="ascii"))
    except (OSError, ValueError):
        allowed = 0  # Linux before 6.13
    return (max(_LIBFUSE_PAGES, allowed) + 1) * mmap.PAGESIZE


def serve(
    filesystem: FileSystem,
    mountpoint: str,
    options: BridgeOptions,
    *,
    name: str,
    ready: Callable[[], None],
    let_go: Callable[[], None],
) -> None:
    """Mount, answer until unmounted or asked to end, unmount; see ``fusefs.bridge.server.serve``."""
    target = os.path.realpath(mountpoint)
    asked = set(pyfuse3.default_options) | {
        f"fsname={name}",
        f"subtype={name}",
        "default_permissions",
    }
    asked |= {"ro"} if options.read_only else set()
    asked |= {"allow_other"} if options.allow_other else set()
    asked |= {"suid", "dev"} if options.trusted else set()
    loop = Loop(pyfuse3.terminate, _loop_in_use)
    service = _Service(filesystem, options, target, loop)
    trio = pyfuse3.trio  # type: ignore[attr-defined]  # a name of its own, see ``Loop``
    try:
        pyfuse3.init(_Requests(filesystem), mountpoint, asked)
    except RuntimeError as error:
        reason = why_not(target, options) or f"{error}; see the log"
        raise StateError(f"{mountpoint!r} cannot be mounted: {reason}") from error
    # From here on every exit, also by a signal, must remove the mount, or a dead mount would remain.
    try:
        filesystem.connected(_Libfuse())
        pyfuse3.trio = loop.as_trio  # type: ignore[attr-defined]
        service.run(ready, let_go)
    finally:
        pyfuse3.trio = trio  # type: ignore[attr-defined]
        # Without ``unmount``, libfuse closes its descriptor, and the mount continues on the other one.
        pyfuse3.close(unmount=not service.handed)
