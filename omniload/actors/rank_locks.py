"""The files beside the heartbeats that say which ranks are taken on a host: a rank's process holds its own."""

from pathlib import Path

from omniload.base.linux.file_lock import is_locked

__all__ = ["guest_of", "lock_of", "name_in", "rank_has_ended"]


def name_in(generation: int, name: str) -> str:
    """Return the name that a rank of a generation is taken by."""
    return f"{name} of {generation}" if generation else name


def lock_of(folder: Path, name: str) -> Path:
    """Return the file beside the heartbeats that a rank holds, by its name, or by that in its generation."""
    return folder / f"{name.replace(' ', '-')}.lock"


def guest_of(folder: Path, name: str) -> Path:
    """Return the file that says of which process of another host a rank is; of that nothing is held here."""
    return lock_of(folder, name).with_suffix(".guest")


def rank_has_ended(folder: Path, name: str) -> bool:
    """Tell whether a rank was taken by a process of this host, and is held no more in any of its generations.

    The kernel lets go with the process, whatever ended that; a stopped one goes on holding it. Of one on another host
    it tells nothing, unless a process of this host has taken the rank in a generation since.
    """
    own = lock_of(folder, name)
    taken = {own: 0} if own.exists() else {}
    for lock in folder.glob(f"{own.stem}-of-*{own.suffix}"):
        taken[lock] = int(lock.stem.rpartition("-")[2])
    if not taken:
        return False
    is_guest = max(taken, key=taken.__getitem__).with_suffix(".guest").exists()
    try:
        return not is_guest and not any(map(is_locked, taken))
    except OSError:
        return False  # the plane is being closed
