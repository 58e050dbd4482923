"""Locks of a node: files that the kernel lets go of when their holder dies."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

__all__ = ["exclusively", "locked_now", "together"]


@contextmanager
def exclusively(path: Path) -> Iterator[None]:
    """Hold the lock file at ``path``; the kernel lets go of it when the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path, fcntl.LOCK_EX):
        yield


@contextmanager
def locked_now(path: Path) -> Iterator[bool]:
    """Hold the lock file at ``path`` as ``exclusively`` does if nobody holds it; say whether it is held."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(_locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB))
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
            stack.enter_context(_locked(path, fcntl.LOCK_SH))
        except OSError as error:
            if error.errno not in {errno.EACCES, errno.EROFS}:
                raise
        yield


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    file = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, how)
        yield
    finally:
        os.close(file)
