"""One launcher at a time on a run's folder."""

import fcntl
import os
from pathlib import Path
from typing import Self

from omniload.base.errors import StateError, system_refusals

__all__ = ["LOCK_NAME", "RunLock"]

LOCK_NAME = ".lock"
"""File in the run's folder. It stays; what counts is the lock on it, which the kernel ends with its holder."""


class RunLock:
    """Holds the folder of a run; use it in a ``with``."""

    @system_refusals("the run's folder")
    def __init__(self, run_dir: Path) -> None:
        """Take the folder.

        Raises:
            StateError: Another process holds it; named with its process id.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(run_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise StateError(
                f"{run_dir} is in use by the launcher with process id {holder or 'unknown'}; "
                "wait for its end or stop it, or give another run_dir"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
