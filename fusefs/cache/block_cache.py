"""Blocks of objects in memory, under a hard cap, each fetched once for any number of readers.

A block in the kernel's page cache need not be in this memory as well. The content of the page cache is estimated:
a block is there if the kernel took it, and has not asked for it again.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from fusefs.metrics.counters import Traffic
from omniload.base.lru import Lru

__all__ = ["Block", "BlockCache", "Data", "PageCacheEstimate"]

Data = bytes | memoryview
"""Bytes of a block; a view if one read fetched several blocks."""
# Only keys are kept, a few MiB of memory: with blocks of 1 MiB they cover 64 GiB of the kernel's page cache.
_MOST_KNOWN = 1 << 16
# Number of blocks that stay here after a first loss; each further loss doubles it (docs/design/fusefs/0011).
_FIRST_CAUTION = 16
_MOST_CAUTION = 1024


@dataclass(slots=True, eq=False)
class Block:
    """One stripe unit, which is being fetched or in memory."""

    size_bytes: int
    data: Future[Data] = field(default_factory=Future)
    memory: "_Memory | None" = None
    """Memory that holds the block, once it has arrived."""
    unserved_bytes: int = 0
    """Bytes of the block in memory that were not yet passed to the page cache."""


@dataclass(slots=True, eq=False)
class _Memory:
    """Memory that one read filled. Its blocks come and go together, because they are views of the same memory."""

    keys: tuple[Hashable, ...]
    unserved_bytes: float
    """Unserved bytes of all its blocks; infinite if the blocks stay here after they were taken."""


class BlockCache:
    """Blocks in memory. The least recently used go first; a block that is being fetched is never dropped.

    A block that the kernel has taken whole into its page cache is dropped at once. So it is not in
    memory twice, and the next read finds memory that is warm. If the kernel is known
    not to keep the blocks it takes, because it asked for one a second time, blocks stay like any other.

    Keys name bytes that never change (a unit of a write-once object), so a block is
    never stale. Only plain files have names whose bytes may change, hence ``drop``.
    """

    def __init__(self, capacity_bytes: int, traffic: Traffic | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self._traffic = traffic or Traffic()
        self._lock = threading.Lock()
        self._blocks: Lru[Hashable, Block] = Lru(capacity_bytes)
        """Blocks by key; blocks that are being fetched are pinned."""
        self.kernel = PageCacheEstimate(_MOST_KNOWN)
        """Blocks that the kernel was served; only this cache changes it. Others may read its ``num_invalidations``."""

    @property
    def used_bytes(self) -> int:
        """Bytes of all blocks, including blocks that are being fetched; never above the capacity."""
        return self._blocks.used

    def get(self, key: Hashable) -> Data | None:
        """Return a cached block, or None."""
        # Without the lock, which a fetch holds while it wakes readers: the future itself knows whether it is done.
        block = self._blocks.get(key)
        return block.data.result() if block is not None and block.data.done() else None

    def claim(
        self, key: Hashable, size_bytes: int, *, needed: bool = True
    ) -> tuple[Block | None, bool]:
        """Return the block of ``key`` and whether the caller must now fetch it.

        Returns:
            ``(block, True)`` to the one caller that has to ``fill`` or ``fail`` it,
            ``(block, False)`` to all others. ``(None, False)`` if blocks that are being fetched
            leave no room (then fetch without the cache, or not at all), or if the block is not needed
            and the kernel probably has it.
        """
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                return block, False
            # Ask under the lock: another reader may just have taken the block, which is not a loss.
            if not needed and self.kernel.has(key):
                return None, False
            # The block is not here although it was taken before, so the kernel has dropped it.
            self.kernel.asked(key)
            # Take the room before the bytes arrive: without counting blocks that are being fetched there would be no
            # cap.
            fits, num_dropped = _make_room(self._blocks, self.capacity_bytes, size_bytes)
            if num_dropped:
                self._traffic.evicted("memory", num_dropped)
            if not fits:
                return None, False
            block = Block(size_bytes)
            self._blocks.put(key, block, size_bytes)
            self._blocks.pin(key)
            return block, True

    def fill(self, filled: Mapping[Hashable, Data]) -> None:
        """Pass the bytes of claimed blocks to everyone that waits for them.

        Blocks that are filled together may be views of the same memory. They are also dropped
        together, so that no view keeps memory that is no longer counted.
        """
        with self._lock:
            keys, size_bytes = tuple(filled), sum(map(len, filled.values()))
            # Infinite, so that blocks which the kernel does not keep are not dropped when it takes them.
            memory = _Memory(keys, size_bytes if self.kernel.will_keep(keys) else math.inf)
            for key, data in filled.items():
                block = self._blocks.peek(key)
                assert block is not None
                block.memory, block.unserved_bytes = memory, len(data)
                self._blocks.unpin(key)
                block.data.set_result(data)

    def served(self, parts: Iterable[tuple[Hashable, int]]) -> None:
        """Note that bytes of blocks went to the page cache, which keeps them."""
        with self._lock:
            for key, size_bytes in parts:
                block = self._blocks.peek(key)
                if block is None or block.memory is None:
                    continue
                # A second read of this block says nothing about its neighbours.
                new_bytes = min(size_bytes, block.unserved_bytes)
                block.unserved_bytes -= new_bytes
                block.memory.unserved_bytes -= new_bytes
                if block.memory.unserved_bytes <= 0:
                    self.kernel.took(block.memory.keys)
                    _drop_with_siblings(self._blocks, key)

    def is_served(self, key: Hashable) -> bool:
        """Return whether a block is probably not here because it was served to the page cache."""
        with self._lock:
            return self.kernel.has(key)

    def fail(self, key: Hashable, error: BaseException) -> None:
        """Give up a claimed block: waiting readers get ``error``, and the next read tries again."""
        with self._lock:
            block = self._blocks.pop(key)
            assert block is not None
        block.data.set_exception(error)

    def holds(self, key: Hashable) -> bool:
        """Return whether a block is cached; unlike ``get``, this is no sign of use."""
        block = self._blocks.peek(key)
        return block is not None and block.data.done()

    def drop(self, keys: Iterable[Hashable]) -> int:
        """Forget cached blocks, and the blocks that share their memory; return their bytes.

        Blocks that are being fetched stay, because somebody waits for them.
        """
        dropped = 0
        with self._lock:
            for key in keys:
                block = self._blocks.peek(key)
                # Somebody waits for a block that is being fetched, and a thread will fill it.
                if block is not None and block.data.done():
                    dropped += _drop_with_siblings(self._blocks, key)[1]
        return dropped


def _make_room(
    blocks: Lru[Hashable, Block], capacity_bytes: int, size_bytes: int
) -> tuple[bool, int]:
    """Drop blocks to make room for ``size_bytes``; return whether it fits now, and how many blocks were dropped."""
    num_dropped = 0
    while blocks.used + size_bytes > capacity_bytes:
        # Few blocks are being fetched, and those are recent, so the first finished one is found at once.
        oldest = blocks.oldest()
        if oldest is None:
            return False, num_dropped
        num_dropped += _drop_with_siblings(blocks, oldest)[0]
    return True, num_dropped


def _drop_with_siblings(blocks: Lru[Hashable, Block], key: Hashable) -> tuple[int, int]:
    """Drop a block and the blocks that share its memory; return their number and their bytes."""
    block = blocks.peek(key)
    assert block is not None
    assert block.memory is not None
    keys, before = block.memory.keys, blocks.used
    for sibling in keys:
        blocks.pop(sibling)
    return len(keys), before - blocks.used


class PageCacheEstimate:
    """Blocks that need not be in our memory, because the kernel took them: no I/O. Not safe in threads.

    The kernel does not report what it drops. But when it asks for a block that it took, it has
    dropped this block, and probably others before it. Then all taken blocks count as dropped,
    and are known as blocks that the kernel does not keep.

    After such a loss the kernel is also not trusted with the next blocks: at first with a few, after each further
    loss with twice as many, until it has kept that many. So for a reader whose memory has no room
    for a page cache, few blocks are fetched twice instead of each of them.

    Args:
        most: Most blocks remembered of either kind; the oldest are forgotten first.
        first_caution: Blocks that the kernel is not trusted with after its first loss.
    """

    def __init__(self, most: int, first_caution: int = _FIRST_CAUTION) -> None:
        self.num_invalidations = 0
        """Number of times that the estimate was given up."""
        self._most = most
        self._taken: OrderedDict[Hashable, None] = OrderedDict()
        self._lost: OrderedDict[Hashable, None] = OrderedDict()
        self._first_caution = self._caution = first_caution
        self._num_withheld = self._num_kept = 0
        """Blocks still to be kept here, and blocks taken since the kernel last lost one."""

    def will_keep(self, keys: Collection[Hashable]) -> bool:
        """Return whether the kernel is trusted with blocks that were just fetched together.

        Call this once for each fetch, because it counts the blocks that are withheld.
        """
        if self._num_withheld:
            self._num_withheld = max(0, self._num_withheld - len(keys))
            return False
        return not any(key in self._lost for key in keys)

    def took(self, keys: Collection[Hashable]) -> None:
        """Note that the kernel took whole blocks."""
        self._taken |= dict.fromkeys(keys)
        self._trim(self._taken)
        self._num_kept += len(keys)
        if self._num_kept >= self._caution:
            self._caution = self._first_caution

    def asked(self, key: Hashable) -> None:
        """Note that the kernel asks for a block."""
        if key not in self._taken:
            return
        # Count all as lost: the kernel does not report the others, and has probably dropped older blocks, too.
        self._lost |= self._taken
        self._taken.clear()
        self._trim(self._lost)
        self.num_invalidations += 1
        self._num_withheld, self._num_kept = self._caution, 0
        # Double it at each loss, so that for a reader without room for a page cache few blocks are fetched twice.
        self._caution = min(2 * self._caution, _MOST_CAUTION)

    def has(self, key: Hashable) -> bool:
        """Return whether the kernel probably has a block."""
        return key in self._taken

    def lost(self, key: Hashable) -> bool:
        """Return whether the kernel took a block earlier and probably did not keep it."""
        return key in self._lost

    def _trim(self, keys: OrderedDict[Hashable, None]) -> None:
        while len(keys) > self._most:
            keys.popitem(last=False)
