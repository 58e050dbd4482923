"""Requests of the kernel as calls of a ``FileSystem``: decoded, called, encoded.

Every request is a coroutine that returns the body of its reply. It decodes all
arguments before it first waits, because they are in the loop's buffer, which the
next request overwrites.
"""

import errno
import stat as stat_bits
import struct
import time
from collections.abc import Callable
from typing import Any

from fusefs.bridge.api.protocol import Change, Data, FileSystem, Opened, only_reads
from fusefs.bridge.api.waiting import Handling
from fusefs.bridge.device.passthrough import Passthrough
from fusefs.bridge.device.wire import (
    Opcode,
    OpenReply,
    attr_reply,
    change_of,
    directory_line,
    entry_reply,
    names_of,
    open_reply,
    space_reply,
)

__all__ = ["Answering", "Handler", "Requests"]

Answering = Handling[Data]
Handler = Callable[[int, memoryview], Answering]
"""Handler of a request: takes the inode and the body; returns the body of the reply."""
_HANDLE = struct.Struct("<Q")
_HANDLE_RANGE = struct.Struct("<2QI")
_HANDLE_RANGE_FLAGS = struct.Struct("<2Q2I")
_WORD = struct.Struct("<I")
_XATTR_CREATE, _XATTR_REPLACE = 1, 2
_WRITE_KILL_SUIDGID, _OPEN_KILL_SUIDGID = 1 << 2, 1 << 0
_XATTR_LIMIT = 64 << 10


class Requests:
    """One file system behind one connection."""

    def __init__(self, filesystem: FileSystem, passthrough: Passthrough) -> None:
        self.of_opcode: dict[int, Handler] = {
            **_Content(filesystem, passthrough).of_opcode,
            **_Places(filesystem).of_opcode,
            **_Names(filesystem).of_opcode,
            **_Attributes(filesystem).of_opcode,
        }
        # The kernel sends an unanswered kind of request once, and then never again. It still releases the files that a
        # former process opened.
        if "open" in filesystem.unasked:
            del self.of_opcode[Opcode.OPEN], self.of_opcode[Opcode.FLUSH]
        if "getxattr" in filesystem.unasked:
            del self.of_opcode[Opcode.GETXATTR]


class _Content:
    """Requests about content: open, read, write, flush, fsync, close."""

    def __init__(self, filesystem: FileSystem, passthrough: Passthrough) -> None:
        self._filesystem = filesystem
        self._passthrough = passthrough
        self.of_opcode: dict[int, Handler] = {
            Opcode.OPEN: self._open,
            Opcode.CREATE: self._create,
            Opcode.READ: self._read_unopened if "open" in filesystem.unasked else self._read,
            Opcode.WRITE: self._write,
            Opcode.FLUSH: self._flush,
            Opcode.FSYNC: self._fsync,
            Opcode.RELEASE: self._release,
        }

    async def _open(self, inode: int, body: memoryview) -> Data:
        flags, more = struct.unpack_from("<2I", body)
        if more & _OPEN_KILL_SUIDGID:
            await _drop_privileges(self._filesystem, inode, None)
        opened = await self._filesystem.open(inode, flags)
        return _opened(self._passthrough, inode, opened, flushes=not only_reads(flags))

    async def _create(self, inode: int, body: memoryview) -> Data:
        # The umask follows these fields; it is already applied, because FUSE_DONT_MASK is not agreed on.
        flags, mode = struct.unpack_from("<2I", body)
        name = names_of(body, 16, 1)[0]
        opened, entry = await self._filesystem.create(inode, name, mode, flags)
        # Whatever the descriptor may do, its close publishes the file that it created.
        return entry_reply(entry) + _opened(self._passthrough, entry.inode, opened, flushes=True)

    async def _read(self, _: int, body: memoryview) -> Data:
        handle, offset, size_bytes = _HANDLE_RANGE.unpack_from(body)
        return await self._filesystem.read(handle, offset, size_bytes)

    async def _read_unopened(self, inode: int, body: memoryview) -> Data:
        _, offset, size_bytes = _HANDLE_RANGE.unpack_from(body)
        return await self._filesystem.read(inode, offset, size_bytes)

    async def _write(self, inode: int, body: memoryview) -> Data:
        handle, offset, size_bytes, flags = _HANDLE_RANGE_FLAGS.unpack_from(body)
        if flags & _WRITE_KILL_SUIDGID:
            # Rare, and the call waits, so the bytes must not stay in the loop's buffer.
            data = bytes(body[40 : 40 + size_bytes])
            await _drop_privileges(self._filesystem, inode, handle)
            taken = await self._filesystem.write(handle, offset, data)
            return struct.pack("<2I", taken, 0)
        # A view of the loop's buffer: a handler that waits, or keeps the bytes, copies them first.
        taken = await self._filesystem.write(handle, offset, body[40 : 40 + size_bytes])
        return struct.pack("<2I", taken, 0)

    async def _flush(self, _: int, body: memoryview) -> Data:
        await self._filesystem.flush(*_HANDLE.unpack_from(body))
        return b""

    async def _fsync(self, _: int, body: memoryview) -> Data:
        await self._filesystem.fsync(*_HANDLE.unpack_from(body))
        return b""

    async def _release(self, _: int, body: memoryview) -> Data:
        (handle,) = _HANDLE.unpack_from(body)
        self._passthrough.closed(handle)
        await self._filesystem.release(handle)
        return b""


class _Places:
    """Requests about the entry of a name, and the entries of a directory."""

    def __init__(self, filesystem: FileSystem) -> None:
        self._filesystem = filesystem
        self.of_opcode: dict[int, Handler] = {
            Opcode.LOOKUP: self._lookup,
            Opcode.READLINK: self._readlink,
            Opcode.OPENDIR: self._opendir,
            Opcode.READDIR: self._readdir,
            Opcode.READDIRPLUS: self._readdirplus,
            Opcode.RELEASEDIR: self._releasedir,
            Opcode.FSYNCDIR: self._fsyncdir,
        }

    async def _lookup(self, inode: int, body: memoryview) -> Data:
        return entry_reply(await self._filesystem.lookup(inode, bytes(body[:-1])))

    async def _readlink(self, inode: int, _: memoryview) -> Data:
        return await self._filesystem.readlink(inode)

    async def _opendir(self, inode: int, _: memoryview) -> Data:
        opened = await self._filesystem.opendir(inode)
        keeps = OpenReply.KEEP_CACHE | OpenReply.CACHE_DIR
        return open_reply(opened.handle, keeps if opened.keep_cache else 0)

    async def _readdir(self, _: int, body: memoryview) -> Data:
        return _lines(self._filesystem, body, plus=False)

    async def _readdirplus(self, _: int, body: memoryview) -> Data:
        return _lines(self._filesystem, body, plus=True)

    async def _releasedir(self, _: int, body: memoryview) -> Data:
        await self._filesystem.releasedir(*_HANDLE.unpack_from(body))
        return b""

    async def _fsyncdir(self, _: int, body: memoryview) -> Data:
        await self._filesystem.fsyncdir(*_HANDLE.unpack_from(body))
        return b""


class _Names:
    """Requests that make, rename and remove names."""

    def __init__(self, filesystem: FileSystem) -> None:
        self._filesystem = filesystem
        self.of_opcode: dict[int, Handler] = {
            Opcode.SYMLINK: self._symlink,
            Opcode.MKNOD: self._mknod,
            Opcode.MKDIR: self._mkdir,
            Opcode.LINK: self._link,
            Opcode.UNLINK: self._unlink,
            Opcode.RMDIR: self._rmdir,
            Opcode.RENAME: self._rename,
            Opcode.RENAME2: self._rename2,
        }

    async def _symlink(self, inode: int, body: memoryview) -> Data:
        name, target, _ = names_of(body, 0, 2)
        return entry_reply(await self._filesystem.symlink(inode, name, target))

    async def _mknod(self, inode: int, body: memoryview) -> Data:
        mode, rdev = struct.unpack_from("<2I", body)
        name = names_of(body, 16, 1)[0]
        return entry_reply(await self._filesystem.mknod(inode, name, mode, rdev))

    async def _mkdir(self, inode: int, body: memoryview) -> Data:
        (mode,) = _WORD.unpack_from(body)
        name = names_of(body, 8, 1)[0]
        return entry_reply(await self._filesystem.mkdir(inode, name, mode))

    async def _link(self, inode: int, body: memoryview) -> Data:
        (linked,) = _HANDLE.unpack_from(body)
        name = names_of(body, 8, 1)[0]
        return entry_reply(await self._filesystem.link(linked, inode, name))

    async def _unlink(self, inode: int, body: memoryview) -> Data:
        await self._filesystem.unlink(inode, names_of(body, 0, 1)[0])
        return b""

    async def _rmdir(self, inode: int, body: memoryview) -> Data:
        await self._filesystem.rmdir(inode, names_of(body, 0, 1)[0])
        return b""

    async def _rename(self, inode: int, body: memoryview) -> Data:
        (new_parent,) = _HANDLE.unpack_from(body)
        name, new_name, _ = names_of(body, 8, 2)
        await self._filesystem.rename(inode, name, new_parent, new_name, 0)
        return b""

    async def _rename2(self, inode: int, body: memoryview) -> Data:
        new_parent, flags = struct.unpack_from("<QI", body)
        name, new_name, _ = names_of(body, 16, 2)
        await self._filesystem.rename(inode, name, new_parent, new_name, flags)
        return b""


class _Attributes:
    """Requests about size, mode, times, extended attributes, space."""

    def __init__(self, filesystem: FileSystem) -> None:
        self._filesystem = filesystem
        self.of_opcode: dict[int, Handler] = {
            Opcode.GETATTR: self._getattr,
            Opcode.SETATTR: self._setattr,
            Opcode.GETXATTR: self._getxattr,
            Opcode.LISTXATTR: self._listxattr,
            Opcode.SETXATTR: self._setxattr,
            Opcode.REMOVEXATTR: self._removexattr,
            Opcode.STATFS: self._statfs,
        }

    async def _getattr(self, inode: int, _: memoryview) -> Data:
        return attr_reply(await self._filesystem.getattr(inode))

    async def _setattr(self, inode: int, body: memoryview) -> Data:
        change, handle, drops = change_of(body, time.time_ns())
        if drops:
            await _drop_privileges(self._filesystem, inode, handle)
        return attr_reply(await self._filesystem.setattr(inode, change, handle))

    async def _getxattr(self, inode: int, body: memoryview) -> Data:
        (room,) = _WORD.unpack_from(body)
        value = await self._filesystem.getxattr(inode, names_of(body, 8, 1)[0])
        return _within(value, room)

    async def _listxattr(self, inode: int, body: memoryview) -> Data:
        (room,) = _WORD.unpack_from(body)
        names = await self._filesystem.listxattr(inode)
        return _within(b"".join(name + b"\0" for name in names), room)

    async def _setxattr(self, inode: int, body: memoryview) -> Data:
        # The short form of the struct, because FUSE_SETXATTR_EXT is not agreed on.
        size_bytes, flags = struct.unpack_from("<2I", body)
        name, rest = names_of(body, 8, 1)
        value = rest[:size_bytes]
        if flags:
            # No other call can run between these two: the kernel holds the inode's lock during all of setxattr.
            await _check_presence(self._filesystem, inode, name, flags)
        await self._filesystem.setxattr(inode, name, value)
        return b""

    async def _removexattr(self, inode: int, body: memoryview) -> Data:
        await self._filesystem.removexattr(inode, names_of(body, 0, 1)[0])
        return b""

    async def _statfs(self, *_: Any) -> Data:  # noqa: ANN401 -- of the whole file system
        return space_reply(await self._filesystem.statfs())


def _opened(passthrough: Passthrough, inode: int, opened: Opened, *, flushes: bool) -> bytes:
    backing = passthrough.opened(inode, opened.handle, opened.local_fd)
    # A close that changed nothing needs no flush.
    reply = 0 if flushes else OpenReply.NOFLUSH
    if backing is not None:
        return open_reply(opened.handle, reply | OpenReply.PASSTHROUGH, backing)
    reply |= OpenReply.DIRECT_IO if opened.direct_io else 0
    reply |= OpenReply.KEEP_CACHE if opened.keep_cache else 0
    return open_reply(opened.handle, reply)


def _lines(filesystem: FileSystem, body: memoryview, *, plus: bool) -> bytes:
    handle, start, size_bytes = _HANDLE_RANGE.unpack_from(body)
    lines: list[bytes] = []
    for line, (name, entry) in enumerate(filesystem.readdir(handle, start), start + 1):
        packed = directory_line(name, entry, line, plus=plus)
        size_bytes -= len(packed)
        if size_bytes < 0:
            break
        lines.append(packed)
        # A line that did not fit counts no look-up, because the kernel never gets it.
        if plus and entry.inode:
            filesystem.advertised(entry.inode)
    return b"".join(lines)


async def _drop_privileges(filesystem: FileSystem, inode: int, handle: int | None) -> None:
    """Remove set-uid and set-gid bits from a changed file, as every file system does.

    The kernel leaves this to us, and so need not ask for ``security.capability`` before
    every write.
    """
    mode = (await filesystem.getattr(inode)).mode
    kept = mode & ~stat_bits.S_ISUID
    # Set-gid on a file that its group may not execute marks mandatory locks, and stays.
    if mode & stat_bits.S_IXGRP:
        kept &= ~stat_bits.S_ISGID
    if kept != mode:
        await filesystem.setattr(inode, Change(mode=kept), handle)


async def _check_presence(filesystem: FileSystem, inode: int, name: bytes, flags: int) -> None:
    try:
        await filesystem.getxattr(inode, name)
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise
        if flags & _XATTR_REPLACE:
            raise
    else:
        if flags & _XATTR_CREATE:
            raise FileExistsError(errno.EEXIST, "the attribute is there")


def _within(value: bytes, room: int) -> bytes:
    """Return an attribute, or only its size if the caller's buffer has no room."""
    if room == 0:
        return struct.pack("<2I", len(value), 0)
    if len(value) > min(room, _XATTR_LIMIT):
        raise OSError(errno.ERANGE, f"{len(value)} bytes do not fit in {room}")
    return value
