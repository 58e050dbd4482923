"""Locks of a node's trees and environments, over the kernel's, which end with their holder."""

import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from omniload.base.linux.file_lock import locked

__all__ = ["exclusively", "locked_now", "together"]


@contextmanager
def exclusively(path: Path) -> Iterator[None]:
    """Hold the lock file at ``path``; folders above are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path):
        yield


@contextmanager
def locked_now(path: Path) -> Iterator[bool]:
    """Hold the lock file at ``path`` as ``exclusively`` does if nobody holds it; say whether it is held."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(path, waits=False))
        except BlockingIOError:
            yield False
            return
        yield True


@contextmanager
def together(path: Path) -> Iterator[None]:
    """Keep holders of ``exclusively`` out while others may come in.

    Nothing is held where this user may not make the file: in a cache of root's.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(path, shared=True))
        except OSError as error:
            if error.errno not in {errno.EACCES, errno.EROFS}:
                raise
        yield
