"""Paths below one directory, resolved by the kernel so that no link leads out of it.

A user with write access to a store may put a symbolic link where a directory was, also between two calls
of ours. So no path is ever handed to the kernel from its root: every one is resolved from the
descriptor of the directory by ``openat2`` (Linux 5.6), which refuses links on the way, or
component by component where a kernel or a sandbox does not have that call. What is then done is
done to a name in the directory that was found, never to a path.

A path may be of any length: what the kernel takes at once, it is given at once.
"""

import ctypes
import errno
import os
import stat as stat_bits
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from omniload.base.errors import ConfigError

__all__ = ["Beneath", "syncfs", "umask"]

_OPENAT2 = 437
"""Number of the call; one of those that are the same on every architecture."""
_NO_MAGIC_LINKS, _NO_LINKS, _BENEATH = 0x02, 0x04, 0x08
_MOST_PATH_BYTES = 4095
"""Of one call; a longer path is resolved in several."""
_HOW = struct.Struct("=3Q")
"""Flags, mode and rules of resolving: ``struct open_how``."""
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_ABSENT = frozenset({errno.ENOSYS, errno.EPERM, errno.EINVAL})
"""Of a call that the kernel does not have, or that a sandbox forbids."""


class Beneath:
    """A directory, held open: it stays the one that was meant though its name leads elsewhere later.

    Args:
        root: The directory; links in this path are followed, since they were given on purpose.
        walks: Whether to go component by component; found out if not given.

    Raises:
        ConfigError: ``root`` is not a directory, or may not be searched.
    """

    def __init__(self, root: str | Path, *, walks: bool | None = None) -> None:
        self._fd = -1
        self.path = Path(root).resolve()
        try:
            self._fd = os.open(self.path, _DIRECTORY)
        except OSError as error:
            said = "is not a directory; make it first"
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                said = f"cannot be opened: {error.strerror}"
            raise ConfigError(f"store {str(root)!r} {said}") from error
        self.walks = _lacks_openat2(self._fd) if walks is None else walks

    def __del__(self) -> None:
        # Not in a call of its own: a thread that still used the number could find another
        # directory behind it.
        if self._fd >= 0:
            os.close(self._fd)

    def open(self, path: str, flags: int, mode: int = 0) -> int:
        """Open a path; the empty one is the directory itself.

        Args:
            path: Relative and plain, of any length.
            flags: Of open(2).
            mode: Of a file that is made.

        Returns:
            A descriptor, which the caller closes.

        Raises:
            OSError: ``ELOOP`` where a symbolic link stands on the way or at the end.
        """
        if not path:
            return os.open(".", flags | os.O_CLOEXEC, dir_fd=self._fd)
        if not self.walks and len(encoded := os.fsencode(path)) <= _MOST_PATH_BYTES:
            return _openat2(self._fd, encoded, flags, mode)
        with self.parent(path) as (above, name):
            return _step(above, name, flags, mode)

    @contextmanager
    def parent(self, path: str) -> Iterator[tuple[int, str]]:
        """Yield a descriptor of the directory above a path, and the name in it.

        Raises:
            OSError: ``ELOOP`` where a symbolic link stands on the way.
        """
        above, _, name = path.rpartition("/")
        if not above:
            yield self._fd, name or "."
            return
        found = self._directory(above)
        try:
            yield found, name
        finally:
            os.close(found)

    def stat(self, path: str) -> os.stat_result:
        """Describe a path; a link at its end is not followed."""
        with self.parent(path) as (above, name):
            return os.stat(name, dir_fd=above, follow_symlinks=False)

    def space(self) -> os.statvfs_result:
        """Describe the room of the file system below."""
        return os.statvfs(self._fd)

    def _directory(self, path: str) -> int:
        step = _step if self.walks else _openat2
        at = os.dup(self._fd)
        for part in self._parts(os.fsencode(path)):
            try:
                below = step(at, part, _DIRECTORY)
            finally:
                os.close(at)
            at = below
        return at

    def _parts(self, path: bytes) -> Iterator[bytes]:
        """Yield what is resolved in one call each."""
        if self.walks:
            yield from path.split(b"/")
            return
        while len(path) > _MOST_PATH_BYTES:
            cut = path.rindex(b"/", 0, _MOST_PATH_BYTES + 1)
            yield path[:cut]
            path = path[cut + 1 :]
        yield path


def syncfs(file: int) -> None:
    """Make everything durable on the file system of an open file.

    Raises:
        OSError: ``EIO``, ``ENOSPC``: something could not be written.
    """
    if _libc().syncfs(ctypes.c_int(file)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def umask() -> int:
    """Return the mask of this process, without setting it."""
    for line in (
        Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    ):
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _openat2(directory: int, path: bytes, flags: int, mode: int = 0) -> int:
    how = _HOW.pack(flags | os.O_CLOEXEC, mode, _BENEATH | _NO_LINKS | _NO_MAGIC_LINKS)
    size = ctypes.c_size_t(len(how))
    while True:
        found: int = _libc().syscall(
            ctypes.c_long(_OPENAT2), ctypes.c_int(directory), path, how, size
        )
        if found >= 0:
            return found
        # A call that a signal broke off is begun anew, as Python does with its own.
        if (number := ctypes.get_errno()) != errno.EINTR:
            raise OSError(number, os.strerror(number), os.fsdecode(path))


def _step(directory: int, name: str | bytes, flags: int, mode: int = 0) -> int:
    """Open a name in a directory; a link is not followed."""
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=directory)
    except NotADirectoryError:
        # Of a link that was to be a directory, too: both ways of resolving shall say the same.
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if not stat_bits.S_ISLNK(found.st_mode):
            raise
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fsdecode(name)) from None


def _lacks_openat2(directory: int) -> bool:
    try:
        os.close(_openat2(directory, b".", _DIRECTORY))
    except OSError as error:
        if error.errno in _ABSENT:
            return True
        raise
    return False
