"""Locks on files and folders that the kernel ends with their holder, however that ends."""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omniload.base.errors import ConfigError

__all__ = ["FileLock", "is_held_here", "is_locked", "locked"]

_LONGEST_HOLDER = 256
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


@contextmanager
def locked(
    path: Path, *, shared: bool = False, waits: bool = True, writable: bool = False
) -> Iterator[int]:
    """Hold the lock of a folder, or of a file, which is made where it is missing; yield its descriptor.

    Args:
        path: What is locked. Nothing is read or written there.
        shared: Others that share may hold it as well.
        waits: For a holder that does not share.
        writable: Whether the caller writes through the descriptor.

    Raises:
        BlockingIOError: Another process holds it, and ``waits`` is off.
        ConfigError: Its file system gives no locks.
        OSError: The file cannot be made or locked.
    """
    # A folder is opened, not made: O_CREAT on one is refused.
    flags = os.O_DIRECTORY if path.is_dir() else os.O_CREAT
    descriptor = os.open(
        path, flags | (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC, 0o644
    )
    try:
        how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        _lock(descriptor, how if waits else how | fcntl.LOCK_NB, path)
    except BaseException:
        os.close(descriptor)  # and no more: to let go of it would be refused as well
        raise
    try:
        yield descriptor
    finally:
        _release(descriptor)


def _lock(descriptor: int, how: int, path: Path) -> None:
    """Lock a file that is open; ``path`` is told of.

    Raises:
        ConfigError: Its file system gives no locks.
        OSError: It cannot be locked; ``BlockingIOError`` where it is held.
    """
    try:
        fcntl.flock(descriptor, how)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise ConfigError(
            f"{path} cannot be locked ({error.strerror}), which would keep a second process from what it stands for: "
            "its file system gives no locks; mount it with them (Lustre: -o flock, NFS 3: its lock service), or name a "
            "folder of another file system"
        ) from None


def _release(descriptor: int) -> None:
    # Said, not only closed: a process that was forked meanwhile holds the descriptor as well.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Tell whether a process that runs has locked a file alone.

    Raises:
        OSError: The file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Shared: of several that ask at once none takes another's question for a holder.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        _release(descriptor)
    return False


_held: "set[FileLock]" = set()
"""Those of this process."""


class FileLock:
    """Holds a file. The file stays; what counts is the lock on it.

    Of this process alone: one that is forked has no part in it, and does not keep it where this one is killed.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        """Take the file, which is made where it is missing.

        Args:
            path: The file.
            shared: Keep it from whoever wants it alone, and from nobody else: to ``is_locked`` nobody holds it.

        Raises:
            BlockingIOError: Somebody holds it; the error's text names the process and its host.
            ConfigError: Its file system gives no locks.
            OSError: The file cannot be made or locked.
        """
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._file = os.fstat(self._descriptor)
        _held.add(self)
        try:
            how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            _lock(self._descriptor, how | fcntl.LOCK_NB, path)
        except BlockingIOError as error:
            # Written behind the lock: whoever has only just taken it may not have said so yet.
            holder = os.pread(self._descriptor, _LONGEST_HOLDER, 0).decode(errors="replace").strip()
            self._leave()
            raise BlockingIOError(error.errno, holder or "a process unknown") from None
        except (OSError, ConfigError):
            self._leave()
            raise
        if shared:
            return
        # Only now: before the lock was taken these words were another's.
        os.ftruncate(self._descriptor, 0)
        os.pwrite(
            self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0
        )

    def is_at(self, path: Path) -> bool:
        """Tell whether a file is the one that it has: another has its place where that one was removed."""
        try:
            return os.path.samestat(self._file, path.stat())
        except OSError:
            return False

    def close(self) -> None:
        """Let go of the file; once more does nothing."""
        if self._descriptor < 0:
            return
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._leave()

    def _leave(self) -> None:
        """Have the file open no more; a process that has it open yet goes on holding it."""
        _held.discard(self)
        os.close(self._descriptor)
        self._descriptor = -1


def is_held_here(path: Path) -> bool:
    """Tell whether a ``FileLock`` of this process has a file."""
    return any(lock.is_at(path) for lock in list(_held))


def _leave_to_parent() -> None:
    for lock in list(_held):
        lock._leave()


# A worker of somebody's DataLoader outlives a rank that was killed: others would take that for alive.
os.register_at_fork(after_in_child=_leave_to_parent)
