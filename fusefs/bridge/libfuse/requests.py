"""pyfuse3's requests as calls of a ``FileSystem``. What a handler waits for, the loop waits for."""

import os
from collections.abc import Sequence
from typing import TypeVar, cast

import pyfuse3
from typing_extensions import override

from fusefs.bridge.api.errno_answers import errno_answered
from fusefs.bridge.api.protocol import Change, Entry, FileSystem
from fusefs.bridge.api.waiting import Handling

__all__ = ["Requests"]

Result = TypeVar("Result")


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


class Requests(pyfuse3.Operations):
    """pyfuse3's names for the calls of a ``FileSystem``."""

    # What INIT agrees to outlives this process: none of it may differ from what the device binding does.
    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, filesystem: FileSystem) -> None:
        super().__init__()
        self._filesystem = filesystem

    async def _answer(self, request: str, handling: Handling[Result]) -> Result:
        """Run a handler to its answer; whatever it raises becomes an errno."""
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
                # Behind the reply: a line that did not fit is no look-up, and is asked for again.
                self._filesystem.advertised(entry.inode)
        # The outermost loop: the mount must outlive a defect of ours.
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
        # libfuse before 3.17 cannot pass it on.
        if local_fd is not None:
            os.close(local_fd)
        return pyfuse3.FileInfo(fh=handle, keep_cache=keep_cache, direct_io=direct_io)

    @override
    async def read(self, fh: int, off: int, size: int) -> bytes:
        # pyfuse3 replies with any buffer.
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
