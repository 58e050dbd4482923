"""What a node gives its peers: the blocks it has, and those it gets on their behalf."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from omniload.base.errors import OmniloadError
from omniload.base.log import get_logger
from snapshot.image.block.loader import BlockTier
from snapshot.image.layer.index import BlockRef, LayerIndex, block_refs
from snapshot.image.peer.single_flight_tier import HeldBlocks
from snapshot.image.peer.wire import BlocksAsked

__all__ = ["BlockShare", "Promise"]

_log = get_logger(__name__)

Promise = Future[dict[str, bytes]]
"""Of the blocks that could be had, by digest."""


class BlockShare:
    """Looks for blocks, and has absent ones fetched through the node's own tiers.

    A fetch begins at once or not at all: were it queued, nodes that wait for each other's
    threads could wait for ever.

    Each tier is a ``SharedTier``, so that what a reader of this node is already waiting for is not
    asked for again.
    """

    def __init__(
        self,
        held: HeldBlocks,
        tiers: Mapping[str, BlockTier],
        indexes: Iterable[LayerIndex],
        *,
        fetches: int = 128,
    ) -> None:
        self.held = held
        self._tiers = tiers
        self._index_of = {index.blob_digest: index for index in indexes}
        self._free = threading.BoundedSemaphore(fetches)
        self._pool = ThreadPoolExecutor(fetches, "omniload-peer-fetch")
        self._lock = threading.Lock()
        self.bytes_of: dict[str, int] = dict.fromkeys(tiers, 0)
        """Bytes moved for peers, by tier."""

    def promise(self, asked: BlocksAsked) -> Promise | None:
        """Begin to fetch what is asked for and absent; None if it is not to be had.

        It is not, where the peer does not wait, the layer is unknown or indexed otherwise,
        or as many fetches as are allowed are on their way.
        """
        index = self._index_of.get(asked.blob)
        if not asked.waits or index is None:
            return None
        numbers = [
            number
            for number, digest in asked.blocks
            if number < len(index.blocks_B)
            and index.digest(number) == digest
            and not self.held.has(digest)
        ]
        # Not waited for: nodes that wait for each other's threads could wait for ever.
        if not numbers or not self._free.acquire(blocking=False):
            return None
        try:
            return self._pool.submit(self._fetch, index, list(block_refs(index, numbers)))
        except RuntimeError:  # closed meanwhile
            self._free.release()
            return None

    def close(self) -> None:
        """End the threads, when their requests have ended."""
        self._pool.shutdown(cancel_futures=True)

    def _fetch(self, index: LayerIndex, refs: Sequence[BlockRef]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        try:
            for name, tier in self._tiers.items():
                absent = [ref for ref in refs if ref.digest not in found]
                if not absent:
                    break
                came, moved = tier.fetch(index, absent)
                found |= came
                with self._lock:
                    self.bytes_of[name] += moved
        except (OmniloadError, FileNotFoundError) as error:
            _log.warning("for a peer: %s", error)
        except BaseException:
            _log.exception("defect while fetching for a peer")
            raise
        finally:
            self._free.release()
        self.held.store(found)
        return found
