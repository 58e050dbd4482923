"""Fanotify's pre-content events and file-backed mounts, by system calls: no C of ours. Root only.

Source:
    fanotify(7), fanotify_init(2), fanotify_mark(2); Linux 6.14, ``FAN_PRE_ACCESS``.
"""

import ctypes
import errno
import fcntl
import os
import signal
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from omniload.base.errors import StateError
from omniload.base.log import get_logger

__all__ = [
    "Access",
    "PreContent",
    "answer",
    "is_unused",
    "mount_erofs",
    "open_erofs",
    "unmount",
]

_log = get_logger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_CLASS_PRE_CONTENT = 0x8
_CLOEXEC, _UNLIMITED_QUEUE, _UNLIMITED_MARKS = 0x1, 0x10, 0x20
_MARK_ADD, _MARK_REMOVE = 1, 2
_PRE_ACCESS = 0x00100000
_RANGE = 6
_ALLOW, _DENY = 1, 2
_HEAD = struct.Struct("=IBBHQii")
_ANSWER = struct.Struct("=iI")
_SYS_MOVE_MOUNT, _SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 429, 430, 431, 432
_SET_FLAG, _SET_STRING, _CREATE = 0, 1, 6
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_MOVE_EMPTY_PATH = 4
_MNT_DETACH = 2


@dataclass(frozen=True, slots=True)
class Access:
    """A read that the kernel holds."""

    descriptor: int
    """Of the file, ours to close once it is answered; it is also the name of the event."""
    file: tuple[int, int]
    """Device and inode."""
    offset: int
    size_bytes: int


class PreContent:
    """A group of marks: the kernel holds every read of a marked file until it is answered.

    A file must be marked before whoever is to be held opens it. The queue has no limit:
    an event that does not fit into it would be *allowed*.

    Raises:
        OSError: The kernel is too old, or the caller not root.
    """

    def __init__(self) -> None:
        flags = _CLASS_PRE_CONTENT | _CLOEXEC | _UNLIMITED_QUEUE | _UNLIMITED_MARKS
        self.descriptor = _checked(
            _libc.fanotify_init(flags, os.O_RDWR | os.O_CLOEXEC | os.O_LARGEFILE)
        )

    def mark(self, path: str) -> None:
        """Be asked about a file.

        Raises:
            OSError: Its file system knows no pre-content events.
        """
        self._mark(_MARK_ADD, path)

    def unmark(self, path: str) -> None:
        """Be asked no more about a file."""
        self._mark(_MARK_REMOVE, path)

    def accesses(self) -> Iterator[Access]:
        """Yield the reads that are waiting; wait for one if there is none.

        A read for whose file this process has no descriptor to spare is denied by the kernel.
        """
        try:
            data = os.read(self.descriptor, 1 << 16)
        except OSError as error:
            if error.errno not in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}:
                raise
            _log.warning("a read was denied: %s; raise the limit of open files", error.strerror)
            return
        at = 0
        while at < len(data):
            size, _, _, head, _, descriptor, _ = _HEAD.unpack_from(data, at)
            if descriptor >= 0:
                offset, count = _range_of(data[at + head : at + size])
                found = os.fstat(descriptor)
                yield Access(descriptor, (found.st_dev, found.st_ino), offset, count)
            at += size

    def close(self) -> None:
        """Leave the group; the kernel *allows* what waits once nobody is left in it."""
        os.close(self.descriptor)

    def _mark(self, how: int, path: str) -> None:
        mask = ctypes.c_uint64(_PRE_ACCESS)
        _checked(_libc.fanotify_mark(self.descriptor, how, mask, _AT_FDCWD, os.fsencode(path)))


def answer(group: int, descriptor: int, *, allow: bool) -> bool:
    """Let a held read go on, or end it with ``EIO``; tell whether there was one of that name."""
    verdict = _ALLOW if allow else _DENY | errno.EIO << 24
    try:
        os.write(group, _ANSWER.pack(descriptor, verdict))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return False
        raise
    return True


def is_unused(descriptor: int) -> bool:
    """Tell whether nobody but ``descriptor`` has its file open, mounts in any namespace included."""
    # Who opens the file in this moment breaks the lease, and SIGIO would kill this process.
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        if error.errno in {errno.EAGAIN, errno.EBUSY}:
            return False
        raise
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def mount_erofs(image: str, blobs: Sequence[str], mountpoint: str, *, trusted: bool) -> None:
    """Mount an image of metadata with its blobs, from files, without loop devices.

    Args:
        image: The metadata.
        blobs: In the order of its devices.
        mountpoint: A directory.
        trusted: Honour set-uid bits and device nodes.

    Raises:
        StateError: The kernel refuses; its own words are in the message.
    """
    mounted = open_erofs(image, blobs, trusted=trusted)
    try:
        place = os.fsencode(mountpoint)
        _syscall(_SYS_MOVE_MOUNT, mounted, b"", _AT_FDCWD, place, _MOVE_EMPTY_PATH)
    except OSError as error:
        raise StateError(
            f"nothing can be mounted at {mountpoint!r}: {error}; give an empty directory"
        ) from error
    finally:
        os.close(mounted)


def open_erofs(image: str, blobs: Sequence[str], *, trusted: bool) -> int:
    """Return a descriptor of a mount that is nowhere yet; closed, it is gone.

    Raises:
        StateError: The kernel refuses; its own words are in the message.
    """
    context = -1
    try:
        context = _syscall(_SYS_FSOPEN, b"erofs", 1)
        _configure(context, _SET_STRING, b"source", os.fsencode(image))
        for blob in blobs:
            _configure(context, _SET_STRING, b"device", os.fsencode(blob))
        _configure(context, _SET_FLAG, b"ro", None)
        _configure(context, _CREATE, None, None)
        attributes = _ATTR_RDONLY | (0 if trusted else _ATTR_NOSUID | _ATTR_NODEV)
        return _syscall(_SYS_FSMOUNT, context, 1, attributes)
    except OSError as error:
        said = _said(context) or f"{error.strerror}, dmesg may say more"
        raise StateError(
            f"{image!r} cannot be mounted as EROFS: {said}; mount the image through FUSE"
        ) from error
    finally:
        if context >= 0:
            os.close(context)


def unmount(mountpoint: str, *, lazily: bool) -> None:
    """Unmount what is at a place.

    Raises:
        OSError: It is in use, or no mount.
    """
    _checked(_libc.umount2(os.fsencode(mountpoint), _MNT_DETACH if lazily else 0))


def _range_of(infos: bytes) -> tuple[int, int]:
    """Return offset and bytes of the range that is about to be read."""
    at = 0
    while at + 4 <= len(infos):
        kind, _, size = struct.unpack_from("=BBH", infos, at)
        if kind == _RANGE:
            _, offset, count = struct.unpack_from("=IQQ", infos, at + 4)
            return offset, count
        at += max(size, 4)
    return 0, 1 << 62  # nothing is said, so all of it


def _configure(context: int, command: int, key: bytes | None, value: bytes | None) -> None:
    _syscall(_SYS_FSCONFIG, context, command, key, value, 0)


def _said(context: int) -> str:
    """Return what the kernel wrote about a mount that it refused."""
    lines: list[str] = []
    try:
        while len(lines) < 16:
            lines.append(os.read(context, 4096).decode(errors="replace").strip())
    except OSError as error:
        if error.errno not in {errno.ENODATA, errno.EBADF}:
            lines.append(str(error))
    return "; ".join(lines)


def _syscall(number: int, *words: int | bytes | None) -> int:
    passed = [ctypes.c_long(word) if isinstance(word, int) else word for word in words]
    return _checked(_libc.syscall(ctypes.c_long(number), *passed))


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
