"""Paths below one directory, resolved by the kernel so that no link can lead out of it.

A user with write access to a store may replace a directory by a symbolic link, even between two calls
of fusefs. So the kernel never resolves a whole path from the root. Every path is resolved from the
descriptor of the directory by ``openat2`` (Linux 5.6), which refuses links on the way, or
component by component if a kernel or a sandbox does not have that call. Operations then use
a name in the resolved directory, never a path.

Paths may have any length: a path that is too long for one call of the kernel is resolved in several.
"""

import errno
import os
import stat as stat_bits
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fusefs.stores.protocol import RESERVED, TEMPORARY, Entry, is_at_or_below, name_of
from omniload.base.errors import ConfigError, UnavailableError
from omniload.base.linux.calls import kind_of_filesystem, openat2

__all__ = [
    "OBJECTS",
    "Beneath",
    "check_shown",
    "entry_of",
    "errors_of",
    "hidden_mode",
    "is_shown",
    "mode_of_new",
    "umask",
]

_MOST_PATH_BYTES = 4095
"""Most bytes of a path in one call; a longer path is resolved in several calls."""
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
# Only file systems that are known to answer in microseconds: on any other, a call may wait for a network.
_LOCAL_DISKS = frozenset(
    {0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x794C7630, 0x2FC12FC1, 0xF2F52010}
)
"""ext4, XFS, Btrfs, tmpfs, overlay, ZFS, F2FS, by their numbers in statfs(2). NFS, Lustre and FUSE are left out."""
_ABSENT = frozenset({errno.ENOSYS, errno.EPERM, errno.EINVAL})
"""Errnos of a call that the kernel does not have, or that a sandbox forbids."""
OBJECTS = f"{RESERVED}/objects"
"""Folder of the objects."""
_TO_LIST, _TO_CHANGE = 0o004, 0o002
_OUTAGE = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EAGAIN})
"""Errnos of a file system of the kernel whose server or device does not answer."""


class Beneath:
    """A directory, held open: it stays the same directory even if its name leads elsewhere later.

    Args:
        root: The directory; links in this path are followed, because the user gave them on purpose.
        walks: Whether to resolve component by component; found out if not given.

    Raises:
        ConfigError: ``root`` is not a directory, or may not be searched.
    """

    def __init__(self, root: str | Path, *, walks: bool | None = None) -> None:
        # Set it before anything can fail, because ``__del__`` also runs for an object whose construction failed.
        self._fd = -1
        # Not ``resolve``, which raises another error for links in a circle.
        self.path = Path(os.path.realpath(root))
        try:
            self._fd = os.open(self.path, _DIRECTORY)
        except OSError as error:
            said = "is not a directory; make it first"
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                said = f"cannot be opened: {error.strerror}"
            raise ConfigError(f"store {str(root)!r} {said}") from error
        self.is_local_disk = kind_of_filesystem(self._fd) in _LOCAL_DISKS
        """Whether the directory is on a disk, or in the memory, of this machine, as far as the kernel says."""
        self.walks = _lacks_openat2(self._fd) if walks is None else walks

    def __del__(self) -> None:
        # There is no close call: a thread that still used the number could find another directory under it.
        if self._fd >= 0:
            os.close(self._fd)

    def open(self, path: str, flags: int, mode: int = 0) -> int:
        """Open a path; the empty path is the directory itself.

        Args:
            path: Relative and plain, of any length.
            flags: Flags of open(2).
            mode: Mode of a file that is created.

        Returns:
            A descriptor, which the caller closes.

        Raises:
            OSError: ``ELOOP``: a component of the path is a symbolic link.
        """
        if not path:
            # Open it again, because a descriptor with O_PATH can be neither read nor synced.
            return os.open(".", flags | os.O_CLOEXEC, dir_fd=self._fd)
        if not self.walks and len(encoded := os.fsencode(path)) <= _MOST_PATH_BYTES:
            return openat2(self._fd, encoded, flags, mode)
        with self.parent(path) as (above, name):
            return _step(above, name, flags, mode)

    @contextmanager
    def parent(self, path: str) -> Iterator[tuple[int, str]]:
        """Yield a descriptor of the directory above a path, and the name in it.

        Raises:
            OSError: ``ELOOP``: a directory on the way is a symbolic link.
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
        """Describe the space of the file system."""
        return os.statvfs(self._fd)

    def _directory(self, path: str) -> int:
        step = _step if self.walks else openat2
        at = self._fd
        for part in self._parts(os.fsencode(path)):
            try:
                below = step(at, part, _DIRECTORY)
            finally:
                if at != self._fd:
                    os.close(at)
            at = below
        return at

    def _parts(self, path: bytes) -> Iterator[bytes]:
        """Yield the parts of a path that are resolved in one call each."""
        if self.walks:
            yield from path.split(b"/")
            return
        while len(path) > _MOST_PATH_BYTES:
            # Cut at a slash; there is one, because a component has at most 255 bytes.
            cut = path.rindex(b"/", 0, _MOST_PATH_BYTES + 1)
            yield path[:cut]
            path = path[cut + 1 :]
        yield path


def umask() -> int:
    """Return the umask of this process, without setting it."""
    # umask(2) returns it only by setting it, and other threads would create files under the new one.
    for line in (
        Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    ):
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022


def _step(directory: int, name: str | bytes, flags: int, mode: int = 0) -> int:
    """Open a name in a directory; a link is not followed."""
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=directory)
    except NotADirectoryError:
        # A link in place of a directory, too, must give ELOOP, so that both ways of resolving raise the same error.
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if not stat_bits.S_ISLNK(found.st_mode):
            raise
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fsdecode(name)) from None


def _lacks_openat2(directory: int) -> bool:
    try:
        os.close(openat2(directory, b".", _DIRECTORY))
    except OSError as error:
        if error.errno in _ABSENT:
            return True
        raise
    return False


def mode_of_new(path: str) -> int:
    """Return the mode for creating a folder, before the umask is applied."""
    return _most(path, 0o777 & ~umask()) if is_at_or_below(path, RESERVED) else 0o777


def hidden_mode(path: str, mode: int) -> int:
    """Return the mode of a folder of fusefs itself, reduced so that other users cannot list it."""
    return mode & _most(path, mode)


def _most(path: str, allowed: int) -> int:
    """Return the largest mode of a folder of fusefs itself.

    If a group may write, because the store is shared that way, it may list as well, as its daemons need to.
    """
    if not (is_at_or_below(path, OBJECTS) or is_at_or_below(path, TEMPORARY)):
        return 0o777 & ~_TO_CHANGE
    of_group = 0 if allowed & 0o020 else 0o040
    return 0o777 & ~(_TO_CHANGE | _TO_LIST | of_group)


def is_shown(found: os.stat_result) -> bool:
    """Return whether a store shows an entry: only files and directories are shown."""
    return stat_bits.S_ISREG(found.st_mode) or stat_bits.S_ISDIR(found.st_mode)


def check_shown(path: str, found: os.stat_result) -> None:
    """Check that a store shows an entry.

    Raises:
        OSError: ``ELOOP``: it is a symbolic link.
        PermissionError: It is a pipe, a socket or a device.
    """
    if stat_bits.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    if not is_shown(found):
        raise PermissionError(
            errno.EPERM, "is neither file nor directory; remove it from the store itself", path
        )


def entry_of(path: str, found: os.stat_result) -> Entry:
    """Describe the entry at a path, after ``check_shown``."""
    check_shown(path, found)
    is_directory = stat_bits.S_ISDIR(found.st_mode)
    size = 0 if is_directory else found.st_size
    mode = stat_bits.S_IMODE(found.st_mode)
    return Entry(name_of(path), is_directory, size, found.st_mtime_ns, mode)


@contextmanager
def errors_of(path: str) -> Iterator[None]:
    """Raise errors of the kernel as errors of the protocol, with the store's path in them."""
    try:
        yield
    except OSError as error:
        if error.errno in _OUTAGE:
            raise UnavailableError(f"{path!r}: the file system below answers: {error}") from error
        if error.errno == errno.ELOOP:
            raise OSError(
                errno.ELOOP,
                "a symbolic link of the store itself stands there or above, and is never followed; "
                "mount --bind shows a directory in two places",
                path,
            ) from error
        if error.errno is not None and error.filename != path:
            # Otherwise the error names the last component, or nothing.
            raise OSError(error.errno, error.strerror, path) from error
        raise
