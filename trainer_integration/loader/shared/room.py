"""The memory of a group: the regions that its workers write, and which rank holds which blocks.

Each rank has a row of holds, with a byte for every block of every region. The server sets a byte before it sends the
batch. The rank clears the byte when the last tensor over the block is gone. A block belongs to its worker again when
its column is clear. The server clears the row of a rank that dies.
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
    """Return memory of ``regions`` regions, under a key that no rank's room has."""
    room = Room(regions, LIMIT_BYTES)
    room.key = secrets.randbits(62) | 1 << 62
    return room


class Holds:
    """Which rank holds which block."""

    def __init__(self, regions: int, handle: int | None = None) -> None:
        """Make the rows, or map those of ``handle``, which the caller keeps."""
        # Memory without a name goes away with the last process that maps it, however the process ends.
        own = os.memfd_create("omniload-holds", os.MFD_CLOEXEC) if handle is None else handle
        shape = (ROWS, regions * STATES)
        if handle is None:
            os.ftruncate(own, shape[0] * shape[1])
        self.handle = own
        memory = mmap.mmap(own, shape[0] * shape[1])
        self.held_RK: NDArray[np.uint8] = np.frombuffer(memory, np.uint8).reshape(shape)
        """Holds by row of a rank, and by slot counted over all regions."""

    def hold(self, row: int, slots: tuple[int, ...]) -> None:
        """Note that blocks are sent to a rank."""
        # No lock between processes is needed: the byte is set before the rank hears of the block, and cleared after.
        self.held_RK[row, list(slots)] = 1

    def clear(self, row: int, slots: tuple[int, ...] | None = None) -> None:
        """Note that a rank does not hold ``slots`` any more, or nothing at all."""
        if slots is None:
            self.held_RK[row] = 0
        else:
            self.held_RK[row, list(slots)] = 0

    def is_held(self, slots: tuple[int, ...], rows: int) -> bool:
        """Whether one of the first ``rows`` ranks holds one of ``slots``."""
        # Only rows that were ever in use. Otherwise each message would scan all 256 for a few ranks.
        return bool(self.held_RK[:rows, list(slots)].any())


class RanksRoom(Room):
    """A group's memory as a rank maps it."""

    def __init__(self, handle: int, holds: Holds, row: int, key: int) -> None:
        """Map the room of ``handle``; blocks are released in ``row`` of ``holds``."""
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
