"""Hot blocks fetched to a node: all at once before a start, or while it runs."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from snapshot.image.block.loader import BlockLoader, BlockTier
from snapshot.image.block.store import BlockStore
from snapshot.image.layer.index import BlockRef, LayerIndex

__all__ = ["Outstanding", "Prefetched", "prefetch_blocks", "want_blocks"]


class Outstanding:
    """Blocks that are being fetched, and a wait for the last of them."""

    def __init__(self, digests: Iterable[str] = ()) -> None:
        self._left = set(digests)
        self.failed = 0
        """Number of blocks that no tier had."""
        self._changed = threading.Condition()
        self._closed = False

    def expect(self, digests: Iterable[str]) -> None:
        """Wait for these blocks; call it before they are wanted, or they may settle too early."""
        with self._changed:
            self._left.update(digests)

    def keep_only(self, digests: Iterable[str]) -> None:
        """Forget all blocks but these, because the others were here already."""
        with self._changed:
            self._left.intersection_update(digests)
            self._changed.notify_all()

    def settled(self, digest: str, came: bool) -> None:
        """Note that a block arrived, or will not arrive."""
        with self._changed:
            if digest in self._left:
                self._left.discard(digest)
                self.failed += not came
                self._changed.notify_all()

    def close(self) -> None:
        """End all waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self, report: Callable[[int], None] = lambda *_: None) -> bool:
        """Wait until all blocks have settled; return False if closed before. Report the number left at each look."""
        with self._changed:
            while True:
                report(len(self._left))
                if not self._left or self._closed:
                    return not self._left
                self._changed.wait()


@dataclass(frozen=True, slots=True)
class Prefetched:
    """The result of a prefetch."""

    blocks: int
    """Blocks asked for."""
    here: int
    """Number of these blocks that were on the disk before."""
    failed: int
    """Number of these blocks that no tier has."""
    unkept: int
    """Number of blocks that arrived, but are not on the disk, because it is full, or the cap too low."""
    bytes_of: dict[str, int]
    """Bytes moved, by tier."""


def want_blocks(
    loader: BlockLoader, indexes: Sequence[LayerIndex], refs: Sequence[BlockRef]
) -> list[BlockRef]:
    """Request blocks in order, with one call for each run of one layer; return the blocks that are not here."""
    by_digest = {index.blob_digest: index for index in indexes}
    absent: list[BlockRef] = []
    for blob, run in groupby(refs, key=attrgetter("blob")):
        absent += loader.prefetch(by_digest[blob], list(run))
    return absent


def prefetch_blocks(
    tiers: dict[str, BlockTier],
    disk: BlockStore,
    indexes: Sequence[LayerIndex],
    refs: Sequence[BlockRef],
    *,
    report: Callable[[int, int], None] = lambda *_: None,
) -> Prefetched:
    """Fetch blocks to the disk, in order; return when no block is being fetched.

    ``report`` is called with the number of settled blocks, and the number of all blocks.
    """
    outstanding = Outstanding(ref.digest for ref in refs)
    # Use no memory, because blocks go to the disk, and nobody reads them in this process.
    loader = BlockLoader(tiers, disk, memory_bytes=0, on_settled=outstanding.settled)
    try:
        absent = {ref.digest for ref in want_blocks(loader, indexes, refs)}
        outstanding.keep_only(absent)
        outstanding.wait(lambda left: report(len(refs) - left, len(refs)))
    finally:
        loader.close()  # waits for blocks that are being written to the disk
    kept = sum(disk.has(digest) for digest in absent)
    moved = {tier: loader.bytes_of[tier] for tier in tiers}
    unkept = len(absent) - kept - outstanding.failed
    return Prefetched(len(refs), len(refs) - len(absent), outstanding.failed, unkept, moved)
