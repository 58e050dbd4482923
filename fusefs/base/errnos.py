"""One table from exceptions to the errno a filesystem call reports."""

import errno

from omniload.base.errors import IntegrityError, StateError, UnavailableError

__all__ = ["errno_of"]

_ERRNO_OF: tuple[tuple[type[BaseException], int], ...] = (
    (FileNotFoundError, errno.ENOENT),
    (FileExistsError, errno.EEXIST),
    (NotADirectoryError, errno.ENOTDIR),
    (IsADirectoryError, errno.EISDIR),
    (PermissionError, errno.EPERM),
    (UnavailableError, errno.ETIMEDOUT),
    (IntegrityError, errno.EIO),
    (StateError, errno.EIO),
    (ValueError, errno.EINVAL),
    (MemoryError, errno.ENOMEM),
)


def errno_of(error: BaseException) -> int:
    """Return the errno a filesystem call reports for ``error``; EIO when unknown."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    return next((code for kind, code in _ERRNO_OF if isinstance(error, kind)), errno.EIO)
