"""A small read-only tree in memory, as an implementer of the bindings' protocol writes one.

``python -m tests.support.fusefs.bridge.example READY_FD`` serves it as a daemon.
"""

import errno
import os
import stat
import tempfile
from typing import ClassVar

import orjson
from typing_extensions import override

from fusefs.bridge import server
from fusefs.bridge.api.blocking import BlockingFileSystem, Threaded
from fusefs.bridge.api.options import BridgeOptions
from fusefs.bridge.api.protocol import Entry, Named, Opened, Space
from fusefs.bridge.process.launch import run_daemon

BLOB = bytes(range(256)) * 4096 * 3
DEVICE = os.makedev(10, 229)
MTIME_NS = 1_234_567_891_234_567_890
ROOT, FOLDER, FILE, LINK, NODE, SLOW, COUNTS = 1, 2, 3, 4, 5, 6, 7
FOREVER = {"entry_timeout_s": 3600.0, "attr_timeout_s": 3600.0}


def entry_of(inode, mode, size_bytes=0, **changes):
    return Entry(
        inode=inode, mode=mode, size_bytes=size_bytes, mtime_ns=MTIME_NS, **{**FOREVER, **changes}
    )


ENTRIES = {
    ROOT: entry_of(ROOT, stat.S_IFDIR | 0o755, nlink=3),
    FOLDER: entry_of(FOLDER, stat.S_IFDIR | 0o750, nlink=2, uid=7, gid=8),
    FILE: entry_of(
        FILE, stat.S_IFREG | 0o4755, len(BLOB), nlink=2, uid=1000, gid=100, atime_ns=5, ctime_ns=7
    ),
    LINK: entry_of(LINK, stat.S_IFLNK | 0o777, 11),
    NODE: entry_of(NODE, stat.S_IFCHR | 0o666, rdev=DEVICE),
    SLOW: entry_of(SLOW, stat.S_IFREG | 0o644, 1 << 20, attr_timeout_s=0.0),
    COUNTS: entry_of(COUNTS, stat.S_IFREG | 0o444, attr_timeout_s=0.0),
}
FOLDERS = {
    ROOT: {b"folder": FOLDER, b"link": LINK, b"slow": SLOW, b"counts": COUNTS},
    FOLDER: {
        b"file": FILE,
        b"again": FILE,
        b"null": NODE,
        **{b"n%03d" % i: FILE for i in range(300)},
    },
}
XATTRS = {b"user.note": b"value", b"security.capability": bytes(20)}


class Example(BlockingFileSystem):
    """Counts its reads and lookups; ``user.counts`` of the root returns the counts."""

    inline: ClassVar = frozenset({"lookup", "getattr", "listing", "readlink", "xattrs"})

    never_changes: ClassVar = True

    def __init__(self, *, passed_through=False):
        self.counts = {"read": 0, "lookup": 0, "open": 0, "listing": 0}
        self._next = 10
        self._inodes = {}
        self._copy = None
        if passed_through:
            self._copy = tempfile.TemporaryFile(dir="/dev/shm")  # noqa: SIM115 -- for our life
            self._copy.write(BLOB)
            self._copy.flush()

    @override
    def lookup(self, parent, name):
        self.counts["lookup"] += 1
        inode = FOLDERS.get(parent, {}).get(name)
        if inode is None:
            return Entry(0, entry_timeout_s=3600.0)
        return ENTRIES[inode]

    @override
    def getattr(self, inode):
        return ENTRIES[inode]

    @override
    def listing(self, inode):
        self.counts["listing"] += 1
        return [Named(name, ENTRIES[found]) for name, found in FOLDERS[inode].items()]

    @override
    def readlink(self, inode):
        if inode != LINK:
            raise OSError(errno.EINVAL, "not a link")
        return b"folder/file"

    @override
    def open(self, inode, flags):
        self.counts["open"] += 1
        self._next += 1
        self._inodes[self._next] = inode
        copy = os.dup(self._copy.fileno()) if self._copy is not None and inode == FILE else None
        return Opened(self._next, direct_io=inode == COUNTS, local_fd=copy)

    @override
    def try_read(self, handle, offset, size_bytes):
        self.counts["read"] += 1
        if self._inodes[handle] == FILE:
            return memoryview(BLOB)[offset : offset + size_bytes]
        if self._inodes[handle] == COUNTS:
            return orjson.dumps(self.counts)[offset : offset + size_bytes]
        return None

    @override
    def read(self, handle, offset, size_bytes):
        if offset:
            raise ValueError("only the first bytes come")  # a defect, on purpose: EINVAL
        with open(os.environ["EXAMPLE_PIPE"], "rb") as pipe:  # noqa: PTH123 -- waits for the test to write
            pipe.read(1)
        return bytes(size_bytes)

    @override
    def release(self, handle):
        del self._inodes[handle]

    @override
    def xattrs(self, inode):
        return XATTRS

    @override
    def statfs(self):
        return Space(block_bytes=4096, blocks=1000, free_blocks=10, inodes=50, free_inodes=5)


def serve(settings, ready):
    told = orjson.loads(settings)
    shown = Threaded(Example(passed_through=told.pop("passed_through", False)))
    mountpoint = told.pop("mountpoint")
    try:
        server.serve(shown, mountpoint, BridgeOptions(**told), name="example", ready=ready)
    finally:
        shown.close()


if __name__ == "__main__":
    run_daemon(serve, role="example")
