"""Blocks of a node and of its peers: one request for a block at a time, and every answer compared."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from typing_extensions import override
from urllib3.exceptions import HTTPError, ProtocolError
from urllib3.response import BaseHTTPResponse

from omniload.base.clock import Clock, SystemClock
from omniload.base.concurrency.single_flight import SingleFlight
from omniload.base.errors import IntegrityError
from omniload.base.log import get_logger
from omniload.base.lru import Lru
from snapshot.image.block.fetcher import BRIDGE_BYTES
from snapshot.image.block.loader import BlockTier
from snapshot.image.block.store import BlockStore
from snapshot.image.layer.index import BlockRef, LayerIndex
from snapshot.image.peer.protocol import (
    FRAME_BYTES,
    MAX_BLOCKS,
    PATH,
    BreakerEvent,
    CircuitBreaker,
    PeerAnswered,
    PeerBack,
    PeerCorrupt,
    PeerFailed,
    PeerLeft,
    PeerTried,
    frame_size,
    parent,
    ranking,
    regions,
    request_body,
    runs,
)
from snapshot.oci.digest import verified
from snapshot.oci.slow_servers import Pace, paced_pool

__all__ = ["HeldBlocks", "PeerPatience", "PeerTier", "SharedTier"]

_log = get_logger(__name__)

_SLICE_BYTES = 1 << 20
_POOLS = 256
"""Number of peers to which connections are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPatience:
    """Time limits and counts for waiting for peers."""

    connect_s: float = 1.0
    # A waiting peer reports every second, so a peer without a byte for this long is gone.
    silent_s: float = 4.0
    total_s: float = 20.0
    """Seconds from the first request for a region to the last byte, over all peers."""
    tries: int = 3
    """Peers with an answer that are asked in turn before the next tier is asked for a block."""
    failures: int = 8
    """Peers that may fail for one block before the next tier is asked."""


class _GoneError(Exception):
    """A peer does not answer correctly."""


class _LateError(Exception):
    """A peer is well, but the time is over."""


class PeerTier(BlockTier):
    """The other nodes of a start.

    ``members`` are the ``HOST:PORT`` of every node that serves. ``me`` is this node's own name among
    them, or any other name if it serves nobody.
    """

    def __init__(
        self,
        members: Sequence[str],
        me: str,
        *,
        token: str = "",
        patience: PeerPatience | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._members, self._me = members, me
        self._patience = patience or PeerPatience()
        self._clock = clock or SystemClock()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._breaker = CircuitBreaker()
        self._lock = threading.Lock()
        self._closed = False
        # Limit only the headers here: while a peer waits it sends a few bytes each second, and the time of a whole
        # answer is limited below.
        pace = Pace(silent_s=self._patience.silent_s, least_bytes_per_s=0)
        self._pool = paced_pool(
            pace, connect_s=self._patience.connect_s, num_pools=_POOLS, maxsize=4
        )
        self.bytes_of: dict[str, int] = {}
        """Bytes of correct blocks, by peer."""

    @override
    def fetch(self, index: LayerIndex, blocks: Sequence[BlockRef]) -> tuple[dict[str, bytes], int]:
        found: dict[str, bytes] = {}
        moved = 0
        for region, refs in regions(blocks):
            # Files of a few bytes are blocks of their own, so a region may need more than one request.
            for at in range(0, len(refs), MAX_BLOCKS):
                came, size = self._region(index, region, refs[at : at + MAX_BLOCKS])
                found |= came
                moved += size
        return found, moved

    def close(self) -> None:
        """Close the connections; requests under way end soon, and new requests return nothing."""
        self._closed = True
        # Connections in use end with their answers, or by their time-outs.
        self._pool.clear()

    def _region(
        self, index: LayerIndex, region: str, refs: Sequence[BlockRef]
    ) -> tuple[dict[str, bytes], int]:
        found: dict[str, bytes] = {}
        moved = 0
        until_s = self._clock.now_s() + self._patience.total_s
        for peer in self._candidates(ranking(self._members, region), region):
            absent = [ref for ref in refs if ref.digest not in found]
            if not absent or self._closed or self._clock.now_s() >= until_s:
                break
            came, size = self._ask(index, peer, absent, until_s)
            found |= came
            moved += size
        return found, moved

    def _candidates(self, ranked: Sequence[str], region: str) -> Iterator[str]:
        """Yield the next peer to ask, which is asked for the blocks that are still missing."""
        asked: set[str] = set()
        for _ in range(self._patience.tries + self._patience.failures):
            away = self._away()
            peer = parent(ranked, self._me, region, away | asked)
            # A peer that failed is away and does not count: tries are counted over peers that answer.
            if peer is None or len(asked - away) == self._patience.tries:
                break
            yield peer
            asked.add(peer)

    def _ask(
        self, index: LayerIndex, peer: str, refs: Sequence[BlockRef], until_s: float
    ) -> tuple[dict[str, bytes], int]:
        """Ask one peer, and wait for it until a point in time."""
        found: dict[str, bytes] = {}
        self._note(PeerTried(peer, self._clock.now_s()))
        sent = request_body(index.blob_digest, [(r.number, r.digest) for r in refs])
        moved = 0
        try:
            with closing(self._posted(peer, sent)) as response:
                for ref in refs:
                    size = int(index.blocks_B["size"][ref.number])
                    data = self._block(response, size, until_s)
                    if data is None:
                        continue
                    moved += len(data)
                    found[ref.digest] = verified(data, ref.digest, name=f"peer {peer}")
                if response.read1(1):  # reach the end, so that the connection can be used again
                    raise _GoneError("sends more than was asked for")  # noqa: TRY301
        except IntegrityError as error:
            self._note(PeerCorrupt(peer, self._clock.now_s()), error)
        except _LateError as error:
            _log.warning("peer %s: %s; asking elsewhere", peer, error)
            self._note(PeerAnswered(peer, self._clock.now_s()))
        except (_GoneError, HTTPError, OSError, ValueError) as error:
            self._note(PeerFailed(peer, self._clock.now_s()), error)
        else:
            self._note(PeerAnswered(peer, self._clock.now_s()))
        with self._lock:
            taken = sum(len(data) for data in found.values())
            self.bytes_of[peer] = self.bytes_of.get(peer, 0) + taken
        return found, moved

    def _posted(self, peer: str, body: bytes) -> BaseHTTPResponse:
        try:
            response = self._send(peer, body)
        except ProtocolError:  # a connection kept since the last request may have gone stale
            response = self._send(peer, body)
        if response.status != 200:
            with closing(response):
                said = response.read1(200)
            raise _GoneError(f"answers {response.status}: {said!r}")
        return response

    def _send(self, peer: str, body: bytes) -> BaseHTTPResponse:
        # The client never repeats a request, because a failed peer is skipped.
        return self._pool.request(
            "POST",
            f"http://{peer}{PATH}",
            body=body,
            headers=self._headers | {"Content-Type": "application/json"},
            retries=False,
            redirect=False,
            preload_content=False,
        )

    def _block(self, response: BaseHTTPResponse, size: int, until_s: float) -> bytes | None:
        """Read the next block, or the notice that it is absent.

        Raises:
            _LateError: It did not come before ``until_s``.
            IntegrityError: It has another size.
        """
        while (said := frame_size(self._read(response, FRAME_BYTES, until_s))) == -1:
            pass
        if said is None:
            return None
        if said != size:
            raise IntegrityError(f"a peer sends a block of {said} bytes; it has {size}")
        return self._read(response, size, until_s)

    def _read(self, response: BaseHTTPResponse, size: int, until_s: float) -> bytes:
        parts: list[bytes] = []
        left = size
        while left:
            if self._closed or self._clock.now_s() >= until_s:
                raise _LateError("its time is over, and it is still waiting or sending")
            part = response.read1(min(left, _SLICE_BYTES))
            if not part:
                raise _GoneError(f"breaks off with {left} of {size} bytes to come")
            parts.append(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _away(self) -> frozenset[str]:
        with self._lock:
            return self._breaker.away(self._clock.now_s())

    def _note(self, event: BreakerEvent, reason: object = "") -> None:
        with self._lock:
            commands = self._breaker.handle(event)
        for command in commands:
            match command:
                case PeerLeft(peer=peer, for_s=for_s):
                    _log.warning("peer %s: %s; left alone for %.0f s", peer, reason, for_s)
                case PeerBack(peer=peer):
                    _log.info("peer %s is back", peer)


class HeldBlocks:
    """Blocks that a node has: the latest ones, and those on its disk."""

    def __init__(self, disk: BlockStore | None, recent_bytes: int = 64 << 20) -> None:
        self._disk = disk
        # For the time until a block is on disk, and for a full disk. Only ``peek`` is used, so that the oldest block is
        # dropped first, which is also the first on the disk.
        self.recent: Lru[str, bytes] = Lru(recent_bytes)

    def get(self, digest: str) -> bytes | None:
        """Return a block that is here and undamaged, or None."""
        data = self.recent.peek(digest)
        if data is None and self._disk is not None:
            data = self._disk.get(digest)
        return data

    def has(self, digest: str) -> bool:
        """Return whether a block is here; only ``get`` compares it with its digest."""
        return digest in self.recent or (self._disk is not None and self._disk.has(digest))

    def store(self, blocks: Mapping[str, bytes]) -> None:
        """Keep blocks, which were compared with their digests, on disk."""
        if self._disk is not None:
            self._disk.put_all(blocks)


class SharedTier(BlockTier):
    """A tier that is asked for a block once, however many callers want it at that time.

    The second caller waits for the first, and counts no bytes as moved.

    Args:
        tier: Tier that is asked for blocks which no other call is asking for.
        held: Blocks in memory or on the disk; looked at first, and given the fetched blocks.
        by_region: Whether the tier may wait for other nodes.
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
        # One region after the other, because waits for other nodes are ordered only within a region.
        for _, refs in regions(blocks):
            came, size = self._fetch(index, refs)
            found |= came
            moved += size
        return found, moved

    def _fetch(self, index: LayerIndex, blocks: Sequence[BlockRef]) -> tuple[dict[str, bytes], int]:
        # A peer may have caused a fetch of the block since it was wanted here.
        here = {ref.digest: self._held.get(ref.digest) for ref in blocks}
        found = {digest: data for digest, data in here.items() if data is not None}
        mine, joined = self._flights.claim(
            dict.fromkeys(ref.digest for ref in blocks if ref.digest not in found)
        )
        came, moved = self._fetch_and_resolve(index, blocks, set(mine))
        found |= came
        # Last: a caller that waited before its own requests were answered could wait for another one that waits for it.
        for digest, flight in joined.items():
            if (data := came.get(digest) or flight.result()) is not None:
                found[digest] = data
        return found, moved

    def _fetch_and_resolve(
        self, index: LayerIndex, blocks: Sequence[BlockRef], left: set[str]
    ) -> tuple[dict[str, bytes], int]:
        """Ask the tier for the remaining blocks, and resolve every call that joined meanwhile, even after a failure."""
        # Another call may have just resolved blocks that arrived since the first look.
        recent = {digest: self._held.recent.peek(digest) for digest in left}
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
            self._held.recent.put(digest, data, len(data))
        for digest in left.intersection(digests):
            left.discard(digest)
            self._flights.resolve(digest, came.get(digest))
