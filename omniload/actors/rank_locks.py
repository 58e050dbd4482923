"""Lock files next to the heartbeats that show which ranks are taken on a host; each rank's process holds its own."""

import threading
from contextlib import closing, suppress
from itertools import groupby
from pathlib import Path

from omniload.base.errors import ConfigError
from omniload.base.linux.file_lock import FileLock, is_locked

__all__ = ["forget_generations", "guest_of", "lock_of", "name_in", "rank_has_ended", "take"]

_MOMENT_S, _TRIES = 0.01, 6_000
_KEPT = 2
"""Generations whose files stay: the present one, and the one before, some of whose ranks may still exist."""


def name_in(generation: int, name: str) -> str:
    """Return the name under which a rank of a generation is taken."""
    return f"{name} of {generation}" if generation else name


def lock_of(folder: Path, name: str) -> Path:
    """Return the lock file of a rank, by its name or by its name in its generation."""
    return folder / f"{name.replace(' ', '-')}.lock"


def guest_of(folder: Path, name: str) -> Path:
    """Return the file that names the process of a rank on another host, which cannot hold a lock here."""
    return lock_of(folder, name).with_suffix(".guest")


def take(path: Path) -> FileLock:
    """Lock the file of a rank.

    Raises:
        BlockingIOError: Another process holds it; names the process.
        OSError: The folder cannot be used.
    """
    for _ in range(_TRIES):
        with suppress(BlockingIOError):
            lock = FileLock(path)
            if lock.is_at(path):
                return lock
            lock.close()  # the file was removed before it was locked, so others would not find the lock
            continue
        with suppress(FileNotFoundError):  # removed meanwhile
            if is_locked(path):  # by a rank, and not just shared by a process that looks
                break
        threading.Event().wait(_MOMENT_S)
    return FileLock(path)


def rank_has_ended(folder: Path, name: str) -> bool:
    """Return whether a rank was taken by a process of this host, and is not held any more in any of its generations.

    The kernel releases the lock with the process, however it ended; a stopped process keeps it. Nothing is known here
    about a rank on another host, unless a process of this host has taken it in a later generation.
    """
    own = lock_of(folder, name)
    taken = {own: 0} if own.exists() else {}
    taken |= {lock: _generation_of(lock) for lock in folder.glob(f"{own.stem}-of-*{own.suffix}")}
    if not taken:
        return False
    is_guest = max(taken, key=taken.__getitem__).with_suffix(".guest").exists()
    try:
        return not is_guest and not any(map(is_locked, taken))
    except OSError:
        return False  # the plane is being closed


def _generation_of(lock: Path) -> int:
    of, _, number = lock.stem.rpartition("-of-")
    return int(number) if of else 0


def forget_generations(folder: Path) -> None:
    """Remove the lock files of generations before the last two, except those that are held.

    Otherwise a job whose ranks come and go for weeks would leave a file of each rank for each change.
    """
    locks = sorted(folder.glob("rank-*.lock"), key=_generation_of)
    generations = [list(of_one) for _, of_one in groupby(locks, _generation_of)]
    for lock in (lock for of_one in generations[:-_KEPT] for lock in of_one):
        # Held during the removal: a process that takes the rank at this moment finds the file gone, and takes it anew.
        # If the rank lives, or files or locks fail, both files stay.
        with suppress(OSError, ConfigError), closing(FileLock(lock)) as held:
            if held.is_at(lock):  # otherwise a rank has taken it anew
                lock.with_suffix(".guest").unlink(missing_ok=True)
                lock.unlink()
