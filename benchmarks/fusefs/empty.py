"""A file system in memory that only answers: the cost of a request in each binding itself.

python -m benchmarks.fusefs.empty --bridge pyfuse3 MOUNTPOINT      until it is unmounted
"""

import errno
import os
import stat
from collections.abc import Iterable

import click
from typing_extensions import override

from fusefs.bridge import server
from fusefs.bridge.api.options import BridgeOptions
from fusefs.bridge.api.protocol import (
    ROOT_INODE,
    Change,
    Data,
    Entry,
    FileSystem,
    Named,
    Opened,
    Space,
)

__all__ = ["Empty", "main"]


class Empty(FileSystem):
    """Directories, and files that keep their bytes; modes, times and owners are accepted and forgotten."""

    def __init__(self) -> None:
        self._names: dict[int, dict[bytes, int]] = {ROOT_INODE: {}}
        """Inodes by name, by directory."""
        self._bytes: dict[int, bytearray] = {}
        self._next = ROOT_INODE
        self._owner = {"uid": os.getuid(), "gid": os.getgid()}

    def _described(self, inode: int) -> Entry:
        if (held := self._bytes.get(inode)) is None:
            return Entry(inode, stat.S_IFDIR | 0o755, **self._owner)
        return Entry(inode, stat.S_IFREG | 0o644, len(held), **self._owner)

    def _made(self, parent: int, name: bytes) -> int:
        self._next += 1
        self._names[parent][name] = self._next
        return self._next

    @override
    async def lookup(self, parent: int, name: bytes) -> Entry:
        if (inode := self._names[parent].get(name)) is None:
            raise FileNotFoundError(errno.ENOENT, "no such name")
        return self._described(inode)

    @override
    async def getattr(self, inode: int) -> Entry:
        return self._described(inode)

    @override
    async def setattr(self, inode: int, change: Change, handle: int | None) -> Entry:
        return self._described(inode)

    @override
    async def getxattr(self, inode: int, name: bytes) -> bytes:
        raise OSError(errno.ENODATA, "no attributes")

    @override
    async def mkdir(self, parent: int, name: bytes, mode: int) -> Entry:
        inode = self._made(parent, name)
        self._names[inode] = {}
        return self._described(inode)

    @override
    async def create(self, parent: int, name: bytes, mode: int, flags: int) -> tuple[Opened, Entry]:
        inode = self._made(parent, name)
        self._bytes[inode] = bytearray()
        return Opened(inode), self._described(inode)

    @override
    async def write(self, handle: int, offset: int, data: Data) -> int:
        self._bytes[handle][offset : offset + len(data)] = data
        return len(data)

    @override
    async def flush(self, handle: int) -> None:
        """Answer."""

    @override
    async def release(self, handle: int) -> None:
        """Answer."""

    @override
    def forget(self, inode: int, lookups: int) -> None:
        """Answer."""

    @override
    async def unlink(self, parent: int, name: bytes) -> None:
        del self._bytes[self._names[parent].pop(name)]

    @override
    async def rmdir(self, parent: int, name: bytes) -> None:
        del self._names[self._names[parent].pop(name)]

    @override
    async def opendir(self, inode: int) -> Opened:
        return Opened(inode)

    @override
    def readdir(self, handle: int, start: int) -> Iterable[Named]:
        names = list(self._names[handle].items())[start:]
        return (Named(name, self._described(inode)) for name, inode in names)

    @override
    async def releasedir(self, handle: int) -> None:
        """Answer."""

    @override
    async def statfs(self) -> Space:
        return Space()


@click.command()
@click.option("--bridge", type=click.Choice(("device", "pyfuse3")), default="device")
@click.argument("mountpoint", type=click.Path(exists=True, file_okay=False))
def main(bridge: str, mountpoint: str) -> None:
    """Mount, and answer until it is unmounted."""
    options = BridgeOptions.model_validate({"bridge": bridge})
    server.serve(Empty(), mountpoint, options, name="empty", ready=lambda: None)


if __name__ == "__main__":
    main()
