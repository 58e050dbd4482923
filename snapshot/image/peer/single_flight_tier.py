"""One request for a block at a time in a node, for its own readers and for peers."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future

from typing_extensions import override

from snapshot.image.block.fetcher import BRIDGE_BYTES
from snapshot.image.block.loader import BlockTier
from snapshot.image.block.refs import BlockRef
from snapshot.image.block.store import BlockStore
from snapshot.image.layer.index import LayerIndex
from snapshot.image.peer.choice import regions, runs

__all__ = ["HeldBlocks", "SharedTier"]


class HeldBlocks:
    """Blocks that a node has: the last that came, and those on its disk.

    The few in memory bridge the time until a block is on disk, and a disk that is full.

    Args:
        disk: Kept blocks of this node.
        recent_bytes: Most bytes kept in memory.
    """

    def __init__(self, disk: BlockStore | None, recent_bytes: int = 64 << 20) -> None:
        self._disk = disk
        self._recent: OrderedDict[str, bytes] = OrderedDict()
        self._recent_bytes, self._room_bytes = 0, recent_bytes
        self._lock = threading.Lock()

    def recent(self, digest: str) -> bytes | None:
        """Return a block if it is in memory."""
        with self._lock:
            return self._recent.get(digest)

    def get(self, digest: str) -> bytes | None:
        """Return a block that is here and right, or None."""
        data = self.recent(digest)
        if data is None and self._disk is not None:
            data = self._disk.get(digest)
        return data

    def has(self, digest: str) -> bool:
        """Return whether a block is here; only ``get`` compares it with its digest."""
        if self.recent(digest) is not None:
            return True
        return self._disk is not None and self._disk.has(digest)

    def remember(self, digest: str, data: bytes) -> None:
        """Keep a block in memory for a while; it was compared with its digest."""
        with self._lock:
            if digest in self._recent or len(data) > self._room_bytes:
                return
            self._recent[digest] = data
            self._recent_bytes += len(data)
            while self._recent_bytes > self._room_bytes:
                _, dropped = self._recent.popitem(last=False)
                self._recent_bytes -= len(dropped)

    def store(self, digest: str, data: bytes) -> None:
        """Keep a block on disk; it was compared with its digest."""
        if self._disk is not None:
            self._disk.put(digest, data)


class SharedTier(BlockTier):
    """A tier that is asked for a block once, however many want it at that time.

    The second caller waits for the first, and counts no bytes as moved. No caller waits for
    another before its own requests have an answer, so no two of a node can wait for each other.
    And no two nodes, where the tier waits for other nodes: blocks are taken on region by region,
    since waits have an order in each region and none over all of them.

    Args:
        tier: Asked for what nobody is asking it for.
        held: Looked at before, and given what came.
        by_region: The tier may wait for other nodes.
    """

    def __init__(self, tier: BlockTier, held: HeldBlocks, *, by_region: bool = False) -> None:
        self._by_region = by_region
        self._tier = tier
        self._held = held
        self._lock = threading.Lock()
        self._flights: dict[str, Future[bytes | None]] = {}

    @override
    def fetch(self, index: LayerIndex, blocks: Sequence[BlockRef]) -> tuple[dict[str, bytes], int]:
        if not self._by_region:
            return self._fetch(index, blocks)
        found: dict[str, bytes] = {}
        moved = 0
        for _, refs in regions(blocks):
            came, size = self._fetch(index, refs)
            found |= came
            moved += size
        return found, moved

    def _fetch(self, index: LayerIndex, blocks: Sequence[BlockRef]) -> tuple[dict[str, bytes], int]:
        # A peer may have had it fetched since it was wanted here.
        here = {ref.digest: self._held.get(ref.digest) for ref in blocks}
        found = {digest: data for digest, data in here.items() if data is not None}
        mine: list[BlockRef] = []
        joined: dict[str, Future[bytes | None]] = {}
        with self._lock:
            for ref in blocks:
                if ref.digest in found:
                    continue
                if (data := self._held.recent(ref.digest)) is not None:
                    found[ref.digest] = data
                elif (flight := self._flights.get(ref.digest)) is not None:
                    joined[ref.digest] = flight
                else:
                    self._flights[ref.digest] = Future()
                    mine.append(ref)
        came, moved = self._fetch_and_resolve(index, mine)
        found |= came
        for digest, flight in joined.items():
            if (data := came.get(digest) or flight.result()) is not None:
                found[digest] = data
        return found, moved

    def _fetch_and_resolve(
        self, index: LayerIndex, mine: Sequence[BlockRef]
    ) -> tuple[dict[str, bytes], int]:
        """Ask the tier, and resolve every call that joined meanwhile, also where it fails."""
        found: dict[str, bytes] = {}
        moved = 0
        try:
            for run in runs(mine, BRIDGE_BYTES):
                came, size = self._tier.fetch(index, run)
                moved += size
                found |= came
                self._land(run, came)
        finally:
            self._land(mine, {})
        return found, moved

    def _land(self, blocks: Sequence[BlockRef], came: dict[str, bytes]) -> None:
        for digest, data in came.items():
            self._held.remember(digest, data)
        with self._lock:
            landed = {ref.digest: self._flights.pop(ref.digest, None) for ref in blocks}
        for digest, flight in landed.items():
            if flight is not None:
                flight.set_result(came.get(digest))
