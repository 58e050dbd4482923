"""The kernel's FUSE protocol as numbers and structs: sizes, encoding, decoding, nothing else.

Everything is little-endian, as on all supported machines. A request or reply is a header,
a struct by its opcode, and names that end in a zero byte, or data.

Source:
    include/uapi/linux/fuse.h of Linux 6.9 (protocol 7.40). A test compiles a program
    against the installed header and compares every size.
"""

import stat as stat_bits
import struct
from collections.abc import Iterator
from enum import IntEnum, IntFlag

from fusefs.bridge.api.protocol import Change, Entry, Space

__all__ = [
    "ENTRY_BYTES",
    "IN_HEADER",
    "MAJOR",
    "MINOR",
    "OLDEST_MINOR",
    "OUT_HEADER",
    "STRUCTS",
    "Init",
    "Opcode",
    "OpenReply",
    "attr_reply",
    "batch_forgets",
    "change_of",
    "directory_line",
    "entry_reply",
    "init_reply",
    "names_of",
    "open_reply",
    "outdated_notice",
    "space_reply",
]

MAJOR, MINOR = 7, 40
OLDEST_MINOR = 31
"""Minor version of Linux 5.4, which has requests of more than 128 KiB (7.28) and other needed features."""

IN_HEADER = struct.Struct("<IIQQIIIHH")
"""len, opcode, unique, nodeid, uid, gid, pid, total_extlen, padding."""
OUT_HEADER = struct.Struct("<IiQ")
"""len, minus errno, unique."""
_ATTR = struct.Struct("<3Q3q10I")
_ENTRY = struct.Struct("<4Q2I")
_ATTR_OUT = struct.Struct("<Q2I")
_DIRENT = struct.Struct("<2Q2I")
_INIT_OUT = struct.Struct("<4I2H2I2H2I24x")
_OPEN_OUT = struct.Struct("<QIi")
_STATFS_OUT = struct.Struct("<5Q3I28x")
_SETATTR_IN = struct.Struct("<2I3Q3q8I")
_FORGET_ONE = struct.Struct("<2Q")
_INVAL_INODE = struct.Struct("<Q2q")
_NOTIFY_INVAL_INODE = 2
ENTRY_BYTES = _ENTRY.size + _ATTR.size

STRUCTS = {
    "fuse_in_header": IN_HEADER.size,
    "fuse_out_header": OUT_HEADER.size,
    "fuse_attr": _ATTR.size,
    "fuse_entry_out": ENTRY_BYTES,
    "fuse_attr_out": _ATTR_OUT.size + _ATTR.size,
    "fuse_dirent": _DIRENT.size,
    "fuse_init_out": _INIT_OUT.size,
    "fuse_open_out": _OPEN_OUT.size,
    "fuse_statfs_out": _STATFS_OUT.size,
    "fuse_setattr_in": _SETATTR_IN.size,
    "fuse_forget_one": _FORGET_ONE.size,
    "fuse_notify_inval_inode_out": _INVAL_INODE.size,
}
"""Size in bytes of each struct, by its name in the kernel's header."""


class Opcode(IntEnum):
    """Requests that are answered; any other gets ENOSYS, which the kernel remembers."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    READDIRPLUS = 44
    RENAME2 = 45


class Init(IntFlag):
    """Features that kernel and daemon agree on; bits from 32 on travel in ``flags2``."""

    ASYNC_READ = 1 << 0
    ATOMIC_O_TRUNC = 1 << 3
    BIG_WRITES = 1 << 5
    AUTO_INVAL_DATA = 1 << 12
    DO_READDIRPLUS = 1 << 13
    ASYNC_DIO = 1 << 15
    PARALLEL_DIROPS = 1 << 18
    MAX_PAGES = 1 << 22
    HANDLE_KILLPRIV_V2 = 1 << 28
    INIT_EXT = 1 << 30
    DIRECT_IO_ALLOW_MMAP = 1 << 36
    PASSTHROUGH = 1 << 37


class OpenReply(IntFlag):
    """Flags that say how an open file is read."""

    DIRECT_IO = 1 << 0
    KEEP_CACHE = 1 << 1
    CACHE_DIR = 1 << 3
    NOFLUSH = 1 << 5
    PASSTHROUGH = 1 << 7


class _Valid:
    """Bits of the valid fields of ``fuse_setattr_in``. Plain numbers, because an enum's ``&`` would be far slower."""

    MODE = 1 << 0
    UID = 1 << 1
    GID = 1 << 2
    SIZE = 1 << 3
    ATIME = 1 << 4
    MTIME = 1 << 5
    FH = 1 << 6
    ATIME_NOW = 1 << 7
    MTIME_NOW = 1 << 8
    KILL_SUIDGID = 1 << 11


_NS = 1_000_000_000


def _attr(entry: Entry) -> bytes:
    mtime_s, mtime_ns = divmod(entry.mtime_ns, _NS)
    if entry.atime_ns is None and entry.ctime_ns is None:
        times_s, times_ns = (mtime_s, mtime_s, mtime_s), (mtime_ns, mtime_ns, mtime_ns)
    else:
        atime_ns = entry.mtime_ns if entry.atime_ns is None else entry.atime_ns
        ctime_ns = entry.mtime_ns if entry.ctime_ns is None else entry.ctime_ns
        times_s = (atime_ns // _NS, mtime_s, ctime_ns // _NS)
        times_ns = (atime_ns % _NS, mtime_ns, ctime_ns % _NS)
    return _ATTR.pack(
        entry.inode,
        entry.size_bytes,
        # In units of 512 bytes, whatever block size is recommended (stat(2)).
        (entry.size_bytes + 511) >> 9,
        *times_s,
        *times_ns,
        entry.mode,
        entry.nlink,
        entry.uid,
        entry.gid,
        entry.rdev & 0xFFFFFFFF,  # os.makedev gives 12 bits to the major number and 20 to the minor
        entry.block_bytes,
        0,
    )


def _timeout(timeout_s: float) -> tuple[int, int]:
    whole = int(timeout_s)
    return whole, int((timeout_s - whole) * _NS)


def entry_reply(entry: Entry) -> bytes:
    """Return ``fuse_entry_out``."""
    entry_s, entry_ns = _timeout(entry.entry_timeout_s)
    attr_s, attr_ns = _timeout(entry.attr_timeout_s)
    head = _ENTRY.pack(entry.inode, entry.generation, entry_s, attr_s, entry_ns, attr_ns)
    return head + _attr(entry)


def attr_reply(entry: Entry) -> bytes:
    """Return ``fuse_attr_out``."""
    return _ATTR_OUT.pack(*_timeout(entry.attr_timeout_s), 0) + _attr(entry)


def open_reply(handle: int, flags: int, backing_id: int = 0) -> bytes:
    """Return ``fuse_open_out``."""
    return _OPEN_OUT.pack(handle, flags, backing_id)


def outdated_notice(inode: int) -> bytes:
    """Return a whole message that no request asked for: the attributes of an inode are outdated, its pages not."""
    head = OUT_HEADER.pack(OUT_HEADER.size + _INVAL_INODE.size, _NOTIFY_INVAL_INODE, 0)
    # An offset below zero means attributes alone: the pages stay.
    return head + _INVAL_INODE.pack(inode, -1, 0)


def space_reply(space: Space) -> bytes:
    """Return ``fuse_statfs_out``."""
    return _STATFS_OUT.pack(
        space.blocks,
        space.free_blocks,
        space.free_blocks,  # free to users as well: no store reserves blocks for root
        space.inodes,
        space.free_inodes,
        space.block_bytes,
        space.name_max,
        space.block_bytes,
    )


def directory_line(name: bytes, entry: Entry, next_line: int, *, plus: bool) -> bytes:
    """Return ``fuse_dirent``, or ``fuse_direntplus`` with the attributes, filled up to 8 bytes."""
    kind = stat_bits.S_IFMT(entry.mode) >> 12
    line = _DIRENT.pack(entry.inode, next_line, len(name), kind) + name
    if plus:
        line = entry_reply(entry) + line
    # FUSE_DIRENT_ALIGN: the kernel looks for the next line at a multiple of 8.
    return line + bytes(-len(line) % 8)


def init_reply(
    *, minor: int, max_readahead: int, agreed: Init, max_background: int, max_pages: int
) -> bytes:
    """Return ``fuse_init_out``."""
    return _INIT_OUT.pack(
        MAJOR,
        # The kernel uses the smaller of both minor versions.
        min(minor, MINOR),
        max_readahead,
        agreed & 0xFFFFFFFF,
        max_background,
        # Number of requests from which a mount counts as congested: the share that the kernel itself uses.
        max(1, max_background * 3 // 4),
        max_pages << 12,
        1,  # times are whole nanoseconds
        max_pages,
        0,
        agreed >> 32,
        1 if Init.PASSTHROUGH in agreed else 0,  # levels of file systems below a local copy
    )


def change_of(body: memoryview, now_ns: int) -> tuple[Change, int | None, bool]:
    """Decode ``fuse_setattr_in``.

    Returns:
        What shall change, the handle it came through, if any, and whether set-uid bits shall go.
    """
    fields = _SETATTR_IN.unpack_from(body)
    valid, _, handle, size_bytes, _, atime_s, mtime_s, _ = fields[:8]
    atime_ns, mtime_ns, _, mode, _, uid, gid, _ = fields[8:]
    change = Change(
        size_bytes=size_bytes if valid & _Valid.SIZE else None,
        mode=mode if valid & _Valid.MODE else None,
        uid=uid if valid & _Valid.UID else None,
        gid=gid if valid & _Valid.GID else None,
        atime_ns=_time(valid, _Valid.ATIME, _Valid.ATIME_NOW, atime_s * _NS + atime_ns, now_ns),
        mtime_ns=_time(valid, _Valid.MTIME, _Valid.MTIME_NOW, mtime_s * _NS + mtime_ns, now_ns),
    )
    return change, handle if valid & _Valid.FH else None, bool(valid & _Valid.KILL_SUIDGID)


def _time(valid: int, given: int, now: int, time_ns: int, now_ns: int) -> int | None:
    if valid & now:
        return now_ns
    return time_ns if valid & given else None


def names_of(body: memoryview, start: int, count: int) -> list[bytes]:
    """Return ``count`` zero-ended names, and as one more item what follows them."""
    return bytes(body[start:]).split(b"\0", count)


def batch_forgets(body: memoryview) -> Iterator[tuple[int, int]]:
    """Yield inode and lookups of ``fuse_batch_forget_in``."""
    (count,) = struct.unpack_from("<I", body)
    for number in range(count):
        inode, lookups = _FORGET_ONE.unpack_from(body, 8 + number * _FORGET_ONE.size)
        yield inode, lookups
