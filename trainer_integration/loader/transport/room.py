"""The memory that a loader and its workers share, and how long a tensor in it is held.

A worker owns a region of the memory: a page of states, with one byte per block, and the blocks. The worker sets a state
to held. The consumer sets it to free when the last tensor over the block is gone. Both sides write nothing else in
common, so no lock is needed, and a process that is killed leaves none held. Only the worker knows which bytes of its
region are free, as extents.
"""

import mmap
import os
import weakref
from bisect import bisect_left
from collections.abc import Iterable
from multiprocessing.reduction import DupFd
from typing import Any

import torch
from typing_extensions import override

__all__ = [
    "ALIGNMENT",
    "LIMIT_BYTES",
    "STATES",
    "Block",
    "Extents",
    "Room",
    "WorkersRoom",
    "block_of",
]

ALIGNMENT = 64
"""Alignment in bytes: a cache line, and more than any dtype needs."""
LIMIT_BYTES = 1 << 30
"""Size of one worker's region; pages that were never used take no memory."""
STATES = mmap.PAGESIZE
"""Bytes before a region's blocks, which limits the number of its blocks."""
_FREE, _HELD = 0, 1
_ROOMS: "weakref.WeakValueDictionary[int, Room]" = weakref.WeakValueDictionary()
_keys = iter(range(1 << 62))


class Extents:
    """Free extents by address; the lowest that fits is taken, so that few pages are touched."""

    def __init__(self, size_bytes: int) -> None:
        """Begin with one free extent."""
        self._starts, self._sizes = [0], [size_bytes]

    def take(self, size_bytes: int) -> int | None:
        """Return the start of ``size_bytes`` free bytes, or ``None`` if no extent is large enough."""
        wanted = _rounded(size_bytes)
        for place, free in enumerate(self._sizes):
            if free >= wanted:
                start = self._starts[place]
                if free == wanted:
                    del self._starts[place], self._sizes[place]
                else:
                    self._starts[place], self._sizes[place] = start + wanted, free - wanted
                return start
        return None

    def give(self, start: int, size_bytes: int) -> None:
        """Free the result of ``take`` for ``size_bytes``; neighbours are merged into one extent."""
        size, place = _rounded(size_bytes), bisect_left(self._starts, start)
        if place < len(self._starts) and start + size == self._starts[place]:
            size += self._sizes[place]
            del self._starts[place], self._sizes[place]
        before = place - 1
        if before >= 0 and self._starts[before] + self._sizes[before] == start:
            self._sizes[before] += size
            return
        self._starts.insert(place, start)
        self._sizes.insert(place, size)


def _rounded(size_bytes: int) -> int:
    """Return a size rounded up to whole cache lines."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


class Room:
    """Memory without a name, one region per worker; the kernel frees it with the last process and tensor."""

    def __init__(self, workers: int, limit_bytes: int = LIMIT_BYTES) -> None:
        """Make room for ``workers`` workers.

        Raises:
            OSError: The limit of this process's address space or files is too low.
        """
        handle = os.memfd_create("omniload-loader", os.MFD_CLOEXEC)
        try:
            # Nothing is allocated yet: the kernel provides a page when it is first written.
            os.ftruncate(handle, workers * (STATES + limit_bytes))
            self._adopt(handle, limit_bytes, _next_key())
        except BaseException:
            os.close(handle)
            raise

    def _adopt(self, handle: int, limit_bytes: int, key: int) -> None:
        """Map the memory of this room, as its consumer."""
        self._map(handle)
        # Kept open for workers that are started later, by another way than a fork.
        self._closing = weakref.finalize(self, os.close, handle)
        self.handle, self.limit_bytes, self.key = handle, limit_bytes, key
        self._owner = os.getpid()
        self._held: dict[int, weakref.ref[memoryview]] = {}
        self._kept: set[int] = set()
        _ROOMS[self.key] = self

    def _map(self, handle: int) -> None:
        self.memory = memoryview(mmap.mmap(handle, 0))

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Pickle for a worker that is being started by another way than a fork."""
        return {
            "handle": DupFd(self.handle),
            "limit_bytes": self.limit_bytes,
            "key": self.key,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the memory in a worker."""
        handle = state["handle"].detach()
        try:
            self._map(handle)
        finally:
            # The mapping keeps the memory.
            os.close(handle)
        # Owner 0 is no process: the consumer frees the blocks that a worker drops.
        self.limit_bytes, self.key, self._owner = state["limit_bytes"], state["key"], 0

    def region_of(self, worker: int) -> int:
        """Return where a worker's states begin."""
        return worker * (STATES + self.limit_bytes)

    def free(self, region: int, slot: int) -> None:
        """Let a worker reuse a block, at the request of a process other than the consumer."""
        self.memory[self.region_of(region) + slot] = _FREE

    def tensor(self, state: int, start: int, size_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a block as a flat tensor; the block is free again when its last view is gone."""
        view = self.memory[start : start + size_bytes]
        # On the view, which torch keeps as long as any tensor over the block; the first tensor may go earlier.
        self._held[state] = weakref.ref(view, _Release(self, state))
        return torch.frombuffer(view, dtype=dtype)

    def _dropped(self, state: int) -> None:
        # A forked child's copy of a tensor goes with the child, while the parent still has its own.
        if os.getpid() == self._owner:
            self._held.pop(state, None)
            if state not in self._kept:
                self._release(state)

    def _release(self, state: int) -> None:
        # One byte, which the processor writes at once: the worker sees the old state or the new.
        self.memory[state] = _FREE

    def keep_held(self) -> None:
        """Never free the blocks held now, because a process is being forked that will see them."""
        if os.getpid() == self._owner:
            self._kept.update(tuple(self._held))

    @property
    def held(self) -> int:
        """Number of blocks that the consumer holds."""
        return len(self._held)


class _Release:
    """Called when the last tensor over a block is gone, in whichever thread drops it."""

    __slots__ = ("_room", "_state")

    def __init__(self, room: Room, state: int) -> None:
        # A weak reference: tensors may outlive the room, and keep its memory by themselves.
        self._room, self._state = weakref.ref(room), state

    def __call__(self, _: object) -> None:
        room = self._room()
        if room is not None:
            room._dropped(self._state)


def _next_key() -> int:
    return next(_keys)


def _before_fork() -> None:
    # The child sees the same pages, and no process learns when the child is done with them.
    for room in list(_ROOMS.values()):
        room.keep_held()


os.register_at_fork(before=_before_fork)


def block_of(key: int, state: int, start: int, size_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a block of a room of this process, as ``Room.tensor`` does; a worker's message calls this."""
    return _ROOMS[key].tensor(state, start, size_bytes, dtype)


class WorkersRoom:
    """A worker's region as the worker writes it."""

    def __init__(self, room: Room, worker: int) -> None:
        """Take the region of ``worker``; all of it is free."""
        self.key, self._memory = room.key, room.memory
        self._states = room.region_of(worker)
        self._base = self._states + STATES
        self._extents = Extents(room.limit_bytes)
        # In falling order: slots are taken from the end, so the first page of states fills from its beginning.
        self._spare = list(range(STATES - 1, -1, -1))
        self._live: dict[int, tuple[int, int]] = {}

    def collect(self) -> None:
        """Take back the blocks that the consumer has released."""
        memory, states = self._memory, self._states
        for slot in [slot for slot in self._live if memory[states + slot] == _FREE]:
            self._extents.give(*self._live.pop(slot))
            self._spare.append(slot)

    def take(self, size_bytes: int) -> "Block | None":
        """Return a block of ``size_bytes``, held; ``None`` if that much is not free."""
        if not self._spare or (start := self._extents.take(size_bytes)) is None:
            return None
        slot = self._spare.pop()
        self._live[slot] = start, size_bytes
        # Set before the message is sent: setting it later could undo the consumer's change.
        self._memory[self._states + slot] = _HELD
        return Block(self, slot, self._base + start, size_bytes)

    def release(self, blocks: Iterable["Block"]) -> None:
        """Free blocks that were never sent, at the next ``collect``."""
        for block in blocks:
            self._memory[self._states + block.slot] = _FREE

    def message(self, block: "Block", dtype: torch.dtype) -> tuple[Any, ...]:
        """Return the arguments of ``block_of`` for a block."""
        return self.key, self._states + block.slot, block.start, block.size_bytes, dtype


class Block:
    """A range of a worker's region."""

    __slots__ = ("room", "size_bytes", "slot", "start")

    def __init__(self, room: WorkersRoom, slot: int, start: int, size_bytes: int) -> None:
        self.room, self.slot, self.start, self.size_bytes = room, slot, start, size_bytes

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the block as a flat tensor, to be filled."""
        count = self.size_bytes // dtype.itemsize
        return torch.frombuffer(self.room._memory, dtype=dtype, count=count, offset=self.start)
