"""Calls of Linux that Python 3.11 does not offer. Each raises ``OSError`` with the kernel's error number.

This is the only module that loads the C library, except for the two that are run as files.
"""

import ctypes
import errno
import os
import struct
import sys
from functools import cache

__all__ = [
    "MS_BIND",
    "MS_NODEV",
    "MS_NOSUID",
    "MS_PRIVATE",
    "MS_RDONLY",
    "MS_REC",
    "MS_REMOUNT",
    "MS_SLAVE",
    "M_MMAP_THRESHOLD",
    "M_TRIM_THRESHOLD",
    "forgo_huge_pages",
    "kind_of_filesystem",
    "mallopt",
    "mount",
    "openat2",
    "syncfs",
    "umount",
    "unshare",
]

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 0x1, 0x2, 0x4, 0x20
MS_BIND, MS_REC, MS_PRIVATE, MS_SLAVE = 0x1000, 0x4000, 0x40000, 0x80000
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
_MNT_DETACH = 2
_PR_SET_THP_DISABLE = 41
_OPENAT2 = 437
"""Number of the call, which is the same on every architecture."""
_BENEATH = 0x02 | 0x04 | 0x08
"""Rules for resolving paths: no link of ``/proc``, no other link, nothing above the directory."""
_HOW = struct.Struct("=3Q")
"""``struct open_how``: flags, mode and rules for resolving."""

_STATFS_BYTES = 256
"""Larger than ``struct statfs`` on any architecture."""


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount a file system at ``target``; empty texts are passed as null."""
    # None for an empty text, because the kernel distinguishes a null pointer from an empty text.
    texts = [os.fsencode(text) or None for text in (source, target, kind)]
    data = os.fsencode(options) or None
    _checked(_libc().mount(*texts, ctypes.c_ulong(flags), data), target)


def umount(target: str, *, lazily: bool = False) -> None:
    """Unmount the topmost mount; with ``lazily`` it is removed once nobody uses it any more."""
    _checked(_libc().umount2(os.fsencode(target), _MNT_DETACH if lazily else 0), target)


def unshare(flags: int) -> None:
    """Give this process its own namespaces."""
    _checked(_libc().unshare(ctypes.c_int(flags)))


def forgo_huge_pages() -> None:
    """Disable huge pages from now on for this process and those that it starts."""
    numbers = [ctypes.c_ulong(each) for each in (1, 0, 0, 0)]
    _checked(_libc().prctl(ctypes.c_int(_PR_SET_THP_DISABLE), *numbers))


def mallopt(option: int, value: int) -> None:
    """Set how the C library manages the memory of this process.

    Raises:
        OSError: ``ENOSYS`` if the library has no such call, as musl; ``EINVAL`` if it refuses the value.
    """
    call = getattr(_libc(), "mallopt", None)
    # 0 means failure for this call.
    if call is None or not call(ctypes.c_int(option), ctypes.c_int(value)):
        number = errno.ENOSYS if call is None else errno.EINVAL
        raise OSError(number, os.strerror(number))


def syncfs(file: int) -> None:
    """Make everything on the file system of an open file durable.

    Raises:
        OSError: Something could not be written, such as ``EIO`` or ``ENOSPC``.
    """
    _checked(_libc().syncfs(ctypes.c_int(file)))


def kind_of_filesystem(file: int) -> int:
    """Return the number by which statfs(2) identifies the file system of an open file; 0 if it does not."""
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc().fstatfs(ctypes.c_int(file), found) != 0:
        return 0
    # The first field has 4 or 8 bytes, but no number of the kernel has more than 4.
    return int.from_bytes(found.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) & 0xFFFFFFFF


def openat2(directory: int, path: bytes, flags: int, mode: int = 0) -> int:
    """Open a path below a directory, following no link and nothing above it; return the descriptor.

    Raises:
        OSError: ``ENOSYS`` or ``EPERM`` if the kernel (before Linux 5.6) or the sandbox lacks the call.
    """
    # Closed by exec, like Python's own descriptors, because no child is to inherit the file.
    how = _HOW.pack(flags | os.O_CLOEXEC, mode, _BENEATH)
    size = ctypes.c_size_t(len(how))
    while True:
        found: int = _libc().syscall(
            ctypes.c_long(_OPENAT2), ctypes.c_int(directory), path, how, size
        )
        # A call that a signal interrupted is repeated, as Python does with its own calls.
        if found >= 0 or ctypes.get_errno() != errno.EINTR:
            return _checked(found, os.fsdecode(path))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, path: str | None = None) -> int:
    if result >= 0:
        return result
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), path)
