"""What the kernel says of a directory of this machine, in the words of ``fusefs.stores.protocol``."""

import errno
import os
import stat as stat_bits
from collections.abc import Iterator
from contextlib import contextmanager

from fusefs.stores.protocol import Entry, name_of
from omniload.base.errors import UnavailableError

__all__ = ["check_shown", "entry_of", "errors_of", "is_shown"]

_OUTAGE = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EAGAIN})
"""What a kernel file system says when what is behind it does not answer."""


def is_shown(found: os.stat_result) -> bool:
    """Return whether a store shows what is there: files and directories alone."""
    return stat_bits.S_ISREG(found.st_mode) or stat_bits.S_ISDIR(found.st_mode)


def check_shown(path: str, found: os.stat_result) -> None:
    """Check that a store shows what is there.

    Raises:
        OSError: ``ELOOP`` of a symbolic link.
        PermissionError: It is a pipe, a socket or a device.
    """
    if stat_bits.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    if not is_shown(found):
        raise PermissionError(
            errno.EPERM, "is neither file nor directory; remove it from the store itself", path
        )


def entry_of(path: str, found: os.stat_result) -> Entry:
    """Describe what is at a path, as ``check_shown``."""
    check_shown(path, found)
    is_directory = stat_bits.S_ISDIR(found.st_mode)
    size = 0 if is_directory else found.st_size
    mode = stat_bits.S_IMODE(found.st_mode)
    return Entry(name_of(path), is_directory, size, found.st_mtime_ns, mode)


@contextmanager
def errors_of(path: str) -> Iterator[None]:
    """Have errors of the kernel be those of the protocol, with the path of the store in them."""
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
            # Else it names the last component, or none.
            raise OSError(error.errno, error.strerror, path) from error
        raise
