"""One request for a block at a time in a node, for its own readers and for peers."""

from collections.abc import Iterable, Mapping, Sequence

from typing_extensions import override

from omniload.base.concurrency.single_flight import SingleFlight
from omniload.base.lru import Lru
from snapshot.image.block.fetcher import BRIDGE_BYTES
from snapshot.image.block.loader import BlockTier
from snapshot.image.block.store import BlockStore
from snapshot.image.layer.index import BlockRef, LayerIndex
from snapshot.image.peer.choice import regions, runs

__all__ = ["HeldBlocks", "SharedTier"]


class HeldBlocks:
    """Blocks that a node has: the last that came, and those on its disk.

    The few in memory bridge the time until a block is on disk, and a disk that is full.
    """

    def __init__(self, disk: BlockStore | None, recent_bytes: int = 64 << 20) -> None:
        self._disk = disk
        self._recent: Lru[str, bytes] = Lru(recent_bytes)

    def recent(self, digest: str) -> bytes | None:
        """Return a block if it is in memory; no sign of use: the first that came goes first."""
        return self._recent.peek(digest)

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
        self._recent.put(digest, data, len(data))

    def store(self, blocks: Mapping[str, bytes]) -> None:
        """Keep blocks on disk; they were compared with their digests."""
        if self._disk is not None:
            self._disk.put_all(blocks)


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
        self._flights: SingleFlight[str, bytes | None] = SingleFlight()

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
        mine, joined = self._flights.claim(
            dict.fromkeys(ref.digest for ref in blocks if ref.digest not in found)
        )
        came, moved = self._fetch_and_resolve(index, blocks, set(mine))
        found |= came
        for digest, flight in joined.items():
            if (data := came.get(digest) or flight.result()) is not None:
                found[digest] = data
        return found, moved

    def _fetch_and_resolve(
        self, index: LayerIndex, blocks: Sequence[BlockRef], left: set[str]
    ) -> tuple[dict[str, bytes], int]:
        """Ask the tier for what is left, and resolve every call that joined meanwhile, also where it fails."""
        # What came since it was looked for, another call has just resolved.
        recent = {digest: self._held.recent(digest) for digest in left}
        found = {digest: data for digest, data in recent.items() if data is not None}
        moved = 0
        try:
            self._resolve(left, found, found)
            for run in runs([ref for ref in blocks if ref.digest in left], BRIDGE_BYTES):
                came, size = self._tier.fetch(index, run)
                moved += size
                found |= came
                self._resolve(left, (ref.digest for ref in run), came)
        finally:
            self._resolve(left, tuple(left), {})
        return found, moved

    def _resolve(self, left: set[str], digests: Iterable[str], came: Mapping[str, bytes]) -> None:
        for digest, data in came.items():
            self._held.remember(digest, data)
        for digest in left.intersection(digests):
            left.discard(digest)
            self._flights.resolve(digest, came.get(digest))
