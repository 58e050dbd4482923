"""The files beside the heartbeats that say which ranks are taken on a host: a rank's process holds its own."""

import threading
from contextlib import closing, suppress
from itertools import groupby
from pathlib import Path

from omniload.base.errors import ConfigError
from omniload.base.linux.file_lock import FileLock, is_locked

__all__ = ["forget_generations", "guest_of", "lock_of", "name_in", "rank_has_ended", "take"]

_MOMENT_S, _TRIES = 0.01, 6_000
_KEPT = 2
"""Generations whose files stay: that of the ranks of now, and the one before, of which some may be yet."""


def name_in(generation: int, name: str) -> str:
    """Return the name that a rank of a generation is taken by."""
    return f"{name} of {generation}" if generation else name


def lock_of(folder: Path, name: str) -> Path:
    """Return the file beside the heartbeats that a rank holds, by its name, or by that in its generation."""
    return folder / f"{name.replace(' ', '-')}.lock"


def guest_of(folder: Path, name: str) -> Path:
    """Return the file that says of which process of another host a rank is; of that nothing is held here."""
    return lock_of(folder, name).with_suffix(".guest")


def take(path: Path) -> FileLock:
    """Hold the file of a rank.

    Raises:
        BlockingIOError: Somebody holds it; names the process.
        OSError: The folder cannot be used.
    """
    for _ in range(_TRIES):
        with suppress(BlockingIOError):
            lock = FileLock(path)
            if lock.is_at(path):
                return lock
            lock.close()  # the file was removed before it was held: nobody else would find it held
            continue
        with suppress(FileNotFoundError):  # removed meanwhile
            if is_locked(path):  # not only looked at: that shares it, on a busy machine for long
                break
        threading.Event().wait(_MOMENT_S)
    return FileLock(path)


def rank_has_ended(folder: Path, name: str) -> bool:
    """Tell whether a rank was taken by a process of this host, and is held no more in any of its generations.

    The kernel lets go with the process, whatever ended that; a stopped one goes on holding it. Of one on another host
    it tells nothing, unless a process of this host has taken the rank in a generation since.
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
    """Remove the files of generations before the last two, which no rank is taken in any more; none that is held.

    A job whose ranks come and go for weeks would leave one of each rank for each change.
    """
    locks = sorted(folder.glob("rank-*.lock"), key=_generation_of)
    generations = [list(of_one) for _, of_one in groupby(locks, _generation_of)]
    for lock in (lock for of_one in generations[:-_KEPT] for lock in of_one):
        # Held meanwhile: whoever takes it in this moment finds that it is gone, and takes it anew. Of a rank that
        # lives, or where locks or files cannot be had, both stay.
        with suppress(OSError, ConfigError), closing(FileLock(lock)) as held:
            if held.is_at(lock):  # else a planner before has removed it, a rank taken it anew
                lock.with_suffix(".guest").unlink(missing_ok=True)
                lock.unlink()
