"""The memory of a group: the regions that its workers write, and who holds what in them.

Each rank has a row of holds, a byte for every block of every region. The server sets a byte before
it sends the batch, the rank clears it when the last tensor over the block is gone, and a block is
the worker's again when its column is clear. The row of a rank that dies is cleared by the server.
"""

import mmap
import os
import secrets
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trainer_integration.loader.transport.room import LIMIT_BYTES, STATES, Room

__all__ = ["ROWS", "Holds", "RanksRoom", "group_room"]

ROWS = 256
"""Ranks that a group can have at a time."""


def group_room(regions: int) -> Room:
    """Return memory of ``regions`` regions, under a key that no room of a rank has."""
    room = Room(regions, LIMIT_BYTES)
    room.key = secrets.randbits(62) | 1 << 62
    return room


class Holds:
    """Which rank holds which block."""

    def __init__(self, regions: int, handle: int | None = None) -> None:
        """Make the rows, or map those of ``handle``, which stays the caller's."""
        # Without a name: the memory goes with the last process that has it, however that ends.
        own = os.memfd_create("omniload-holds", os.MFD_CLOEXEC) if handle is None else handle
        shape = (ROWS, regions * STATES)
        if handle is None:
            os.ftruncate(own, shape[0] * shape[1])
        self.handle = own
        memory = mmap.mmap(own, shape[0] * shape[1])
        self.held_RK: NDArray[np.uint8] = np.frombuffer(memory, np.uint8).reshape(shape)
        """Row of a rank, and slot counted over all regions."""

    def hold(self, row: int, slots: tuple[int, ...]) -> None:
        """Note that a rank is sent blocks."""
        # No lock between processes: it is set before the rank hears of the block, and cleared by nobody before that.
        self.held_RK[row, list(slots)] = 1

    def clear(self, row: int, slots: tuple[int, ...] | None = None) -> None:
        """Note that a rank holds ``slots`` no more, or nothing."""
        if slots is None:
            self.held_RK[row] = 0
        else:
            self.held_RK[row, list(slots)] = 0

    def is_held(self, slots: tuple[int, ...], rows: int) -> bool:
        """Whether one of the first ``rows`` ranks holds one of ``slots``."""
        # Of the rows that were ever in use: after each message all 256 would be looked at for a few ranks.
        return bool(self.held_RK[:rows, list(slots)].any())


class RanksRoom(Room):
    """A group's memory as a rank maps it."""

    def __init__(self, handle: int, holds: Holds, row: int, key: int) -> None:
        """Map the room of ``handle``; blocks are let go in ``row`` of ``holds``."""
        self._holds, self._row = holds, row
        self._adopt(handle, LIMIT_BYTES, key)

    @override
    def _release(self, state: int) -> None:
        self._holds.held_RK[self._row, self.slot_of(state)] = 0

    def slot_of(self, state: int) -> int:
        """Return the slot of a state, counted over all regions."""
        region, slot = divmod(state, STATES + self.limit_bytes)
        return region * STATES + slot

    @override
    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a rank's room of a group belongs to its process")
