"""Every handler ends in an answer or an errno: any other exception would end the mount."""

import errno

from fusefs.base.errnos import errno_of
from omniload.base.errors import OmniloadError
from omniload.base.log import get_logger

__all__ = ["errno_answered"]

_LOG = get_logger(__name__)


def errno_answered(request: str, error: BaseException) -> int:
    """Return the errno that answers a request whose handler raised, and log what a user should know.

    Args:
        request: Name of the request, for the log.
        error: What the handler raised.
    """
    if isinstance(error, OSError | OmniloadError | ValueError):
        number = (
            errno_of(error) or errno.EIO
        )  # 0 would be an answer: of a read, the end of the file
        level = _LOG.error if isinstance(error, OmniloadError) else _LOG.debug
        level("%s: %s (%s)", request, error, errno.errorcode.get(number, number))
        return number
    _LOG.error("%s met a defect", request, exc_info=error)
    return errno.EIO
