"""A lock on a file that the kernel ends with its holder, however that ends."""

import fcntl
import os
import socket
from pathlib import Path

__all__ = ["FileLock"]

_LONGEST_HOLDER = 256


class FileLock:
    """Holds a file. The file stays; what counts is the lock on it."""

    def __init__(self, path: Path) -> None:
        """Take the file, which is made where it is missing.

        Raises:
            BlockingIOError: Somebody holds it; the error's text names the process and its host.
            OSError: The file cannot be made or locked.
        """
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._descriptor, _LONGEST_HOLDER, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise BlockingIOError(error.errno, holder or "a process unknown") from None
        except OSError:
            os.close(self._descriptor)
            raise
        os.ftruncate(self._descriptor, 0)
        os.pwrite(
            self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0
        )

    def close(self) -> None:
        """Let go of the file; once more does nothing."""
        if self._descriptor < 0:
            return
        # Said, not only closed: a process that was forked meanwhile holds the descriptor as well.
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)
        self._descriptor = -1
