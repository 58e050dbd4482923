"""Errors of clients in terms of ``fusefs.stores.protocol``: one table for all clients."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from omniload.base.errors import OmniloadError, UnavailableError

__all__ = ["translated"]

_SAME_MEANING = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    NotADirectoryError,
    IsADirectoryError,
    OmniloadError,
)
_SAME_NUMBER = frozenset({errno.ENOSPC, errno.ENOTEMPTY})


@contextmanager
def translated(path: str, foreign: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Raise an error of a client inside the block as the error with that meaning in the protocol.

    An unknown failure is an outage: it may be retried, and is never taken for "nothing there".

    Args:
        path: Path that the call is about.
        foreign: Error classes of the client, in addition to ``OSError``; anything else is a defect
            and passes.

    Raises:
        OSError: The error with the same meaning in the protocol.
        UnavailableError: Every other ``OSError``, and every foreign error.
    """
    # The root has an empty path, and the caller names the store.
    at = f"{path!r}: " if path else ""
    try:
        yield
    except _SAME_MEANING:
        raise
    except OSError as error:
        # A retry would not change these.
        if error.errno in _SAME_NUMBER:
            raise
        raise UnavailableError(f"{at}the store answers: {error}") from error
    except foreign as error:
        raise UnavailableError(f"{at}the store answers: {type(error).__name__}: {error}") from error
