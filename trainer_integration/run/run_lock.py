"""One launcher at a time on a run's folder."""

import socket
from pathlib import Path
from typing import Self

from omniload.base.errors import StateError, system_refusals
from omniload.base.linux.file_lock import FileLock, is_locked

__all__ = ["LOCK_NAME", "RUNNING_OR_CUT_OFF", "RunLock", "running_or_cut_off"]

LOCK_NAME = ".lock"
"""File in the run's folder. The file stays; the lock on it counts, which the kernel releases with its holder's end."""

RUNNING_OR_CUT_OFF = "running or cut off"
"""Description of a run whose log has no end, if nothing more is known."""


def running_or_cut_off(run_dir: Path) -> str:
    """Return whether a run whose log has no end is running or cut off, from the lock on its folder if possible."""
    place = run_dir / LOCK_NAME
    try:
        # Read first, because a later holder of the folder overwrites the name of one that is gone.
        is_held, holder = is_locked(place), place.read_text(errors="replace").strip()
    except OSError:  # a folder that was copied without the file, or whose file system has no locks
        return RUNNING_OR_CUT_OFF
    if is_held:
        return f"running, in {holder}" if holder else "running"
    if holder.endswith(f" on {socket.gethostname()}"):
        return f"cut off: {holder} is gone"
    # Locks of another host may be invisible here.
    return f"{RUNNING_OR_CUT_OFF}, in {holder}" if holder else RUNNING_OR_CUT_OFF


class RunLock:
    """Holds the folder of a run; use it in a ``with``."""

    @system_refusals("the run's folder")
    def __init__(self, run_dir: Path) -> None:
        """Take the folder.

        Raises:
            StateError: Another process holds it; names its process id.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = FileLock(run_dir / LOCK_NAME)
        # It does not wait, because a launcher holds its run for hours.
        except BlockingIOError as error:
            raise StateError(
                f"{run_dir} is in use by a launcher, {error.strerror}; "
                "wait for its end or stop it, or give another run_dir"
            ) from None

    def close(self) -> None:
        """Release the folder."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
