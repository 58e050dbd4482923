"""What can go wrong with a save or a load of all ranks, as errors of this project: a full disk above all."""

import errno
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from omniload.base.errors import OmniloadError, StateError, UnavailableError
from omniload.base.units import format_bytes

__all__ = ["NoRoomError", "Room", "is_full", "no_room", "own_errors", "require_room"]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_MARGIN_BYTES = 1 << 20
"""What files take beside their tensors: heads, names, the index."""

Room = Callable[[], int | None]
"""Bytes that are free where checkpoints go; ``None`` where nobody can tell."""


class NoRoomError(StateError):
    """A checkpoint does not fit. Not tried again: a restart would train up to the same save."""


def require_room(
    where: str, tensor_bytes: int, room: Room, group: dist.ProcessGroup | None
) -> None:
    """Refuse a save that does not fit, on all ranks, before any byte of it is written.

    Args:
        where: The checkpoint, for messages.
        tensor_bytes: Of all ranks together.
        room: Asked on one rank, so that all decide alike.
        group: The ranks, which all call this; None for one process.

    Raises:
        NoRoomError: Naming what is needed and what is free.
    """
    need = tensor_bytes + _MARGIN_BYTES
    # No tensor holds None, and ranks that know different sizes would decide differently.
    free = -1
    if group is None or dist.get_rank(group) == 0:
        found = room()
        free = -1 if found is None else found
    told = torch.tensor(free)
    if group is not None:
        dist.broadcast(told, group_src=0, group=group)
    free = int(told)
    if 0 <= free < need:
        raise no_room(where, need, free)


def no_room(where: str, need: int, free: int | None, cause: str = "") -> NoRoomError:
    """Return the error of a save that does not fit."""
    known = (
        "an unknown number of bytes is"
        if free is None
        else f"{free} bytes ({format_bytes(free)}) are"
    )
    return NoRoomError(
        f"{where} needs {need} bytes ({format_bytes(need)}), {known} free{cause and f': {cause}'}; make room, "
        "lower checkpoint.keep or name another checkpoint.folder, then go on with --resume latest"
    )


@contextmanager
def own_errors(
    where: str, remedy: str, *, need: int = 0, room: Room | None = None
) -> Iterator[None]:
    """Raise what went wrong on a rank as it was; DCP wraps it in a ``BaseException`` of its own.

    Args:
        where: The checkpoint, for messages.
        remedy: What to do about a fault that is no error of this project.
        need: Bytes of a save, for messages.
        room: Given for a save.

    Raises:
        OmniloadError: As a rank raised it.
        NoRoomError: The disk is full, the quota reached or a file too long.
        UnavailableError: Another error of the system.
        StateError: Anything else.
    """
    try:
        with warnings.catch_warnings():
            # DCP warns of a rank alone, which asked for that by ``no_dist``.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as failure:
        # One of them: ranks fail together, most of them as another did.
        rank, (error, _) = min(failure.failures.items(), key=_gravity)
        if isinstance(error, OmniloadError):
            error.add_note(f"on rank {rank}")
            raise error from failure
        said = f"rank {rank}: {type(error).__name__}: {error}"
        if room is not None and is_full(error):
            free: int | None = None
            with suppress(OSError, OmniloadError):
                # For the message alone: that it fails too must not hide why the save did.
                free = room()
            raise no_room(where, need, free, said) from failure
        if isinstance(error, OSError):
            raise UnavailableError(
                f"{where}: {said}; try again when the store answers"
            ) from failure
        raise StateError(f"{where}: {said}; {remedy}") from failure


def is_full(error: BaseException) -> bool:
    """Tell whether an error says that there is no room; one of another language says so by its words."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    # Rust's and C++'s errors bring the system's words and not its number.
    return any(os.strerror(number).lower() in str(error).lower() for number in _FULL)


def _gravity(failed: tuple[int, tuple[BaseException, object]]) -> tuple[bool, int]:
    """Sort errors of this project first: others may follow from one of them."""
    rank, (error, _) = failed
    return not isinstance(error, OmniloadError), rank
