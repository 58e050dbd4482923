"""A file system in memory that answers, and does nothing else: what pyfuse3 itself costs for each request.

python -m benchmarks.fusefs.empty MOUNTPOINT      until it is unmounted
"""

import errno
import os
import stat
from collections.abc import Sequence

import click
import pyfuse3
import trio
from typing_extensions import override

__all__ = ["Empty", "main"]

_ROOT = 1


class Empty(pyfuse3.Operations):
    """Directories, and files that keep their bytes; modes, times and owners are taken and forgotten."""

    supports_dot_lookup = False
    enable_writeback_cache = False

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, dict[bytes, int]] = {_ROOT: {}}
        """By directory."""
        self._bytes: dict[int, bytearray] = {}
        self._next = _ROOT

    def _described(self, inode: int) -> pyfuse3.EntryAttributes:
        found = pyfuse3.EntryAttributes()
        found.st_ino, found.st_nlink = inode, 1
        found.entry_timeout = found.attr_timeout = 1.0
        found.st_uid, found.st_gid = os.getuid(), os.getgid()
        if (held := self._bytes.get(inode)) is None:
            found.st_mode = stat.S_IFDIR | 0o755
        else:
            found.st_mode, found.st_size = stat.S_IFREG | 0o644, len(held)
        return found

    def _made(self, parent: int, name: bytes) -> int:
        self._next += 1
        self._names[parent][name] = self._next
        return self._next

    @override
    async def lookup(self, parent: int, name: bytes, ctx: object) -> pyfuse3.EntryAttributes:
        if (inode := self._names[parent].get(name)) is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self._described(inode)

    @override
    async def getattr(self, inode: int, ctx: object) -> pyfuse3.EntryAttributes:
        return self._described(inode)

    @override
    async def setattr(
        self,
        inode: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: object,
    ) -> pyfuse3.EntryAttributes:
        return self._described(inode)

    @override
    async def getxattr(self, inode: int, name: bytes, ctx: object) -> bytes:
        raise pyfuse3.FUSEError(errno.ENODATA)

    @override
    async def mkdir(
        self, parent: int, name: bytes, mode: int, ctx: object
    ) -> pyfuse3.EntryAttributes:
        inode = self._made(parent, name)
        self._names[inode] = {}
        return self._described(inode)

    @override
    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, ctx: object
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        inode = self._made(parent, name)
        self._bytes[inode] = bytearray()
        return pyfuse3.FileInfo(fh=inode), self._described(inode)

    @override
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        self._bytes[fh][off : off + len(buf)] = buf
        return len(buf)

    @override
    async def flush(self, fh: int) -> None:
        """Answer."""

    @override
    async def release(self, fh: int) -> None:
        """Answer."""

    @override
    async def forget(self, inodes: Sequence[tuple[int, int]]) -> None:
        """Answer."""

    @override
    async def unlink(self, parent: int, name: bytes, ctx: object) -> None:
        del self._bytes[self._names[parent].pop(name)]

    @override
    async def rmdir(self, parent: int, name: bytes, ctx: object) -> None:
        del self._names[self._names[parent].pop(name)]

    @override
    async def opendir(self, inode: int, ctx: object) -> int:
        return inode

    @override
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        # By number: what is removed meanwhile moves no other line.
        lines = sorted((inode, name) for name, inode in self._names[fh].items())
        for inode, name in lines:
            if inode > start_id and not pyfuse3.readdir_reply(
                token, name, self._described(inode), inode
            ):
                return

    @override
    async def releasedir(self, fh: int) -> None:
        """Answer."""


@click.command()
@click.argument("mountpoint")
def main(mountpoint: str) -> None:
    """Serve until unmounted."""
    pyfuse3.init(
        Empty(), mountpoint, {*pyfuse3.default_options, "fsname=empty", "default_permissions"}
    )
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main()
