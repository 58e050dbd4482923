"""One launcher at a time on a run's folder."""

from pathlib import Path
from typing import Self

from omniload.base.errors import StateError, system_refusals
from omniload.base.linux.file_lock import FileLock

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
        try:
            self._lock = FileLock(run_dir / LOCK_NAME)
        # Not waited for: a launcher holds its run for hours.
        except BlockingIOError as error:
            raise StateError(
                f"{run_dir} is in use by a launcher, {error.strerror}; "
                "wait for its end or stop it, or give another run_dir"
            ) from None

    def close(self) -> None:
        """Let go of the folder."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
