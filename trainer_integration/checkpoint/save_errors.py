"""Failures of a save or a load by all ranks, as errors of this project; above all, a full disk."""

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
"""Extra bytes of files in addition to their tensors: headers, names, the index."""

Room = Callable[[], int | None]
"""Returns the free bytes where checkpoints go; ``None`` if they are unknown."""


class NoRoomError(StateError):
    """A checkpoint does not fit. This is not retried, because a restart would train up to the same save."""


def require_room(
    where: str, tensor_bytes: int, room: Room, group: dist.ProcessGroup | None
) -> None:
    """Refuse a save that does not fit, on all ranks, before any byte of it is written.

    Args:
        where: The checkpoint, for messages.
        tensor_bytes: Bytes of all ranks together.
        room: Asked on one rank, so that all ranks decide alike.
        group: The ranks, which all call this; None for one process.

    Raises:
        NoRoomError: The message names the needed and the free bytes.
    """
    need = tensor_bytes + _MARGIN_BYTES
    # A tensor cannot contain None, and ranks with different sizes would decide differently.
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
    """Raise a rank's error as it was, because DCP wraps it in a ``BaseException`` of its own.

    Args:
        where: The checkpoint, for messages.
        remedy: Remedy for an error that is not one of this project.
        need: Bytes of a save, for messages.
        room: Returns the free bytes; given for a save.

    Raises:
        OmniloadError: The error that a rank raised.
        NoRoomError: The disk is full, the quota is reached or a file is too long.
        UnavailableError: Another error of the system.
        StateError: Any other error.
    """
    try:
        with warnings.catch_warnings():
            # DCP warns of a single rank, which was requested by ``no_dist``.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as failure:
        # Only one is raised, because ranks fail together, most of them as a consequence of another's error.
        rank, (error, _) = min(failure.failures.items(), key=_gravity)
        if isinstance(error, OmniloadError):
            error.add_note(f"on rank {rank}")
            raise error from failure
        said = f"rank {rank}: {type(error).__name__}: {error}"
        if room is not None and is_full(error):
            free: int | None = None
            with suppress(OSError, OmniloadError):
                # Used only for the message, so its own failure must not hide why the save failed.
                free = room()
            raise no_room(where, need, free, said) from failure
        if isinstance(error, OSError):
            raise UnavailableError(
                f"{where}: {said}; try again when the store answers"
            ) from failure
        raise StateError(f"{where}: {said}; {remedy}") from failure


def is_full(error: BaseException) -> bool:
    """Return whether an error means that there is no room; for an error of another language, its text decides."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    # Errors of Rust and C++ contain the system's words, but not its number.
    return any(os.strerror(number).lower() in str(error).lower() for number in _FULL)


def _gravity(failed: tuple[int, tuple[BaseException, object]]) -> tuple[bool, int]:
    """Return a sort key that puts errors of this project first, because others may follow from one of them."""
    rank, (error, _) = failed
    return not isinstance(error, OmniloadError), rank
