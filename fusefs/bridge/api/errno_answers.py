"""Errnos for exceptions. Every handler ends in an answer or an errno, because any exception would end the mount."""

import errno

from omniload.base.errors import IntegrityError, OmniloadError, StateError, UnavailableError
from omniload.base.log import get_logger

__all__ = ["errno_answered", "errno_of"]

_LOG = get_logger(__name__)
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


def errno_answered(request: str, error: BaseException) -> int:
    """Return the errno for a request whose handler raised, and log errors that a user should know.

    Args:
        request: Name of the request, for the log.
        error: The exception of the handler.
    """
    if isinstance(error, OSError | OmniloadError | ValueError):
        # Errno 0 would be a valid answer: for a read, the end of the file.
        number = errno_of(error) or errno.EIO
        # A missing name is normal; only errors that a user should act on are worth a line of the log.
        level = _LOG.error if isinstance(error, OmniloadError) else _LOG.debug
        level("%s: %s (%s)", request, error, errno.errorcode.get(number, number))
        return number
    _LOG.error("%s met a defect", request, exc_info=error)
    return errno.EIO
