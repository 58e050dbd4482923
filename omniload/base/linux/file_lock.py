"""Locks on files and folders that the kernel releases when their holder ends, however it ends."""

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
    """Hold the lock of a folder, or of a file, which is created if it is missing; yield its descriptor.

    Args:
        path: File or folder to lock. Nothing is read or written there.
        shared: Whether others that share may hold the lock as well.
        waits: Whether to wait for a holder that does not share.
        writable: Whether the caller writes through the descriptor.

    Raises:
        BlockingIOError: Another process holds it, and ``waits`` is off.
        ConfigError: The file system does not support locks.
        OSError: The file cannot be created or locked.
    """
    # A folder is opened without O_CREAT, which is refused for folders.
    flags = os.O_DIRECTORY if path.is_dir() else os.O_CREAT
    descriptor = os.open(
        path, flags | (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC, 0o644
    )
    try:
        how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        _lock(descriptor, how if waits else how | fcntl.LOCK_NB, path)
    except BaseException:
        os.close(descriptor)  # without unlocking, which would be refused as well
        raise
    try:
        yield descriptor
    finally:
        _release(descriptor)


def _lock(descriptor: int, how: int, path: Path) -> None:
    """Lock an open file; ``path`` is its name for messages.

    Raises:
        ConfigError: The file system does not support locks.
        OSError: The file cannot be locked; ``BlockingIOError`` if another process holds the lock.
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
    # Unlocked explicitly, because a process that was forked meanwhile has the descriptor as well.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Return whether a running process holds the exclusive lock of a file.

    Raises:
        OSError: The file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Shared, so that several simultaneous checks do not take each other for a holder.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        _release(descriptor)
    return False


_held: "set[FileLock]" = set()
"""Locks of this process."""


class FileLock:
    """Holds a file. The file stays; only the lock on it counts.

    The lock belongs to this process only. A forked process has no part in it, and does not keep it if this process is
    killed.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        """Lock the file, which is created if it is missing.

        Args:
            path: The file.
            shared: Only prevent exclusive locks; other shared locks are possible, and ``is_locked`` does not see this
                lock.

        Raises:
            BlockingIOError: Another process holds it; the error's text names the process and its host.
            ConfigError: The file system does not support locks.
            OSError: The file cannot be created or locked.
        """
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._file = os.fstat(self._descriptor)
        _held.add(self)
        try:
            how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            _lock(self._descriptor, how | fcntl.LOCK_NB, path)
        except BlockingIOError as error:
            # The holder writes its name after it has the lock, so a new holder may not have written it yet.
            holder = os.pread(self._descriptor, _LONGEST_HOLDER, 0).decode(errors="replace").strip()
            self._leave()
            raise BlockingIOError(error.errno, holder or "a process unknown") from None
        except (OSError, ConfigError):
            self._leave()
            raise
        if shared:
            return
        # Only now, because before the lock was taken the text belonged to another process.
        os.ftruncate(self._descriptor, 0)
        os.pwrite(
            self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0
        )

    def is_at(self, path: Path) -> bool:
        """Return whether the file at a path is the locked one; it is another one if the locked file was removed."""
        try:
            return os.path.samestat(self._file, path.stat())
        except OSError:
            return False

    def close(self) -> None:
        """Release the file; a second call does nothing."""
        if self._descriptor < 0:
            return
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._leave()

    def _leave(self) -> None:
        """Close the file without unlocking; another process that has it open keeps the lock."""
        _held.discard(self)
        os.close(self._descriptor)
        self._descriptor = -1


def is_held_here(path: Path) -> bool:
    """Return whether a ``FileLock`` of this process holds a file."""
    return any(lock.is_at(path) for lock in list(_held))


def _leave_to_parent() -> None:
    for lock in list(_held):
        lock._leave()


# A DataLoader worker may outlive a killed rank, and others would take this for a living rank.
os.register_at_fork(after_in_child=_leave_to_parent)
