"""Rules among peers: which peer is asked for which block, which is left alone, and the messages.

All nodes must come to the same answers, so that nodes that start together read a registry once.

Blobs are cut into *regions*. For each region every node has a score, the same wherever it is
computed; the order of scores is the region's *ranking*, and its first node is the *home*.
A node asks only nodes that rank before it. So the home asks the registry, and requests for
one region can never go in a circle, even among nodes with different lists and open circuits.

Requests go up a tree over the ranks, here with a fan-out of 2. Each region has a tree of its own,
so every node is near the root of some trees and a leaf of most::

    registry <- 0 <- 1 <- 3
                  |    |- 4
                  |- 2 <- 5
                       |- 6

The messages, version 2, as bytes: a request is ``POST /v2/blocks`` with ``Authorization: Bearer TOKEN`` and JSON::

    {"blob": DIGEST, "blocks": [[NUMBER, DIGEST], ...]}

The blocks are of one layer: their numbers in its index, and the sha256 of their uncompressed bytes.
The peer fetches the blocks that it does not have. The answer is a sequence of frames, one byte and a
little-endian u32 each:

    B size, and ``size`` bytes   the next block that was asked for
    N 0                          the next block that was asked for is not available here
    W 0                          the peer is well and still waiting; sent every second

A peer's answer is never trusted: the receiver compares each block with its own digest.
"""

import hashlib
import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import assert_never

import orjson

from snapshot.image.layer.index import BlockRef
from snapshot.oci.digest import check_digest

__all__ = [
    "ABSENT",
    "FRAME_BYTES",
    "MAX_BLOCKS",
    "MAX_REQUEST_BYTES",
    "PATH",
    "REGION_BYTES",
    "WAITING",
    "BreakerCommand",
    "BreakerEvent",
    "CircuitBreaker",
    "PeerAnswered",
    "PeerBack",
    "PeerCorrupt",
    "PeerFailed",
    "PeerLeft",
    "PeerTried",
    "block_frame",
    "frame_size",
    "parent",
    "parse_request",
    "ranking",
    "region_of",
    "regions",
    "request_body",
    "runs",
]

# Size of a region in a blob: a node passes on a region only once it is complete, so small regions spread the work.
REGION_BYTES = 1 << 20


def region_of(ref: BlockRef) -> str:
    """Return the name of the region in which a block begins."""
    return f"{ref.blob}/{ref.offset // REGION_BYTES}"


def regions(refs: Sequence[BlockRef]) -> Iterator[tuple[str, list[BlockRef]]]:
    """Yield adjacent blocks of one region together, in order; none is left out."""
    return ((region, list(found)) for region, found in groupby(refs, key=region_of))


def runs(refs: Sequence[BlockRef], bridge_bytes: int = 0) -> Iterator[list[BlockRef]]:
    """Yield adjacent blocks together, in order, across gaps of up to ``bridge_bytes``; none is left out."""
    run: list[BlockRef] = []
    for ref in refs:
        if run and not (ref.blob == run[-1].blob and 0 <= ref.offset - run[-1].end <= bridge_bytes):
            yield run
            run = []
        run.append(ref)
    if run:
        yield run


def ranking(members: Collection[str], region: str) -> tuple[str, ...]:
    """Return the members by their score for a region, the home first.

    A member that joins or leaves does not change the order of the others, so only its own share of the
    regions moves.

    Source:
        Rendezvous hashing; Thaler and Ravishankar, "Using Name-Based Mappings to Increase
        Hit Rates" (1998).
    """
    return tuple(sorted(members, key=lambda member: _score(member, region)))


def parent(
    ranked: Sequence[str], me: str, region: str, away: Collection[str], *, fanout: int = 8
) -> str | None:
    """Return the parent of a node in the tree of a region; None at the root.

    Args:
        ranked: All members, in the order of ``ranking``.
        me: The node that asks. A node that is no member serves nobody and stands below all members.
        region: The region.
        away: Members that are not to be asked.
        fanout: Children of a node; members and other nodes are counted separately.

    Returns:
        A member that ranks before ``me`` and is not away.
    """
    before = list(ranked[: ranked.index(me)] if me in ranked else ranked)
    present = [member for member in before if member not in away]
    if not present:
        return None
    if me in ranked:
        # The places are those of a heap: this node comes after all present ones, at place len(present).
        return present[(len(present) - 1) // fanout]
    # Nodes that do not serve are spread over the upper half of the tree, where blocks arrive first.
    return present[int.from_bytes(_score(me, region)) % (len(present) // 2 + 1) % len(present)]


def _score(member: str, region: str) -> bytes:
    # Not Python's own hash, because the score must be the same on every node.
    return hashlib.blake2b(f"{member}\0{region}".encode(), digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class _OfPeer:
    peer: str
    now_s: float


class PeerTried(_OfPeer):
    """A request to a peer is about to begin."""


class PeerAnswered(_OfPeer):
    """A peer is well, whether or not it had the blocks."""


class PeerFailed(_OfPeer):
    """A peer is missing, does not answer, or broke off."""


class PeerCorrupt(_OfPeer):
    """A peer sent wrong bytes."""


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """A peer is left alone from now on; to be logged once."""

    peer: str
    for_s: float


@dataclass(frozen=True, slots=True)
class PeerBack:
    """A peer that was left alone is asked again."""

    peer: str


BreakerEvent = PeerTried | PeerAnswered | PeerFailed | PeerCorrupt
BreakerCommand = PeerLeft | PeerBack


@dataclass(slots=True)
class _Trouble:
    failures: int
    until_s: float
    half_open: bool = False


@dataclass(slots=True, kw_only=True)
class CircuitBreaker:
    """The machine that knows which peers are left alone for now.

    A peer that fails is left alone for a second, then for two, and so on up to half a minute. At the end
    of this time one request tries it; all others leave it alone until that request has an answer.
    """

    first_s: float = 1.0
    longest_s: float = 30.0
    corrupt_s: float = 300.0
    """Seconds that a peer with wrong bytes is left alone."""
    trial_s: float = 5.0
    """Seconds that other requests wait for the outcome of a trial."""
    _troubles: dict[str, _Trouble] = field(default_factory=dict)

    def away(self, now_s: float) -> frozenset[str]:
        """Return the peers that are not to be asked."""
        return frozenset(p for p, trouble in self._troubles.items() if now_s < trouble.until_s)

    def handle(self, event: BreakerEvent) -> tuple[BreakerCommand, ...]:
        """Apply one event and return the commands, which are worth a line of the log."""
        trouble = self._troubles.get(event.peer)
        match event:
            case PeerTried(now_s=now_s):
                if trouble is not None and now_s >= trouble.until_s:
                    trouble.half_open, trouble.until_s = True, now_s + self.trial_s
            case PeerAnswered(peer=peer):
                # An answer to a request from before the peer was left alone says nothing about now.
                if trouble is not None and trouble.half_open:
                    del self._troubles[peer]
                    return (PeerBack(peer),)
            case PeerFailed(peer=peer, now_s=now_s):
                # When many requests fail together, only the first counts.
                if trouble is None or now_s >= trouble.until_s or trouble.half_open:
                    failures = trouble.failures + 1 if trouble is not None else 1
                    wait_s = min(self.first_s * 2.0 ** min(failures - 1, 30), self.longest_s)
                    return self._leave(peer, failures, now_s, wait_s)
            case PeerCorrupt(peer=peer, now_s=now_s):
                failures = trouble.failures if trouble is not None else 1
                return self._leave(peer, failures, now_s, self.corrupt_s)
            case _:
                assert_never(event)
        return ()

    def _leave(
        self, peer: str, failures: int, now_s: float, wait_s: float
    ) -> tuple[BreakerCommand, ...]:
        self._troubles[peer] = _Trouble(failures, now_s + wait_s)
        return (PeerLeft(peer, wait_s),)


PATH = "/v2/blocks"
MAX_BLOCKS = 4096
"""Most blocks of one request."""
# a number of 13 digits and a sha512 take 154 bytes in JSON
MAX_REQUEST_BYTES = MAX_BLOCKS * 180 + 4096

_FRAME = struct.Struct("<cI")
FRAME_BYTES = _FRAME.size
ABSENT = _FRAME.pack(b"N", 0)
WAITING = _FRAME.pack(b"W", 0)


def request_body(blob: str, blocks: Sequence[tuple[int, str]]) -> bytes:
    """Return the body of a request."""
    return orjson.dumps({"blob": blob, "blocks": blocks})


def parse_request(body: bytes) -> tuple[str, list[tuple[int, str]]]:
    """Return the layer, and the number and digest of each block, that a body asks for.

    Raises:
        ValueError: It is no request, or too large.
    """
    value = orjson.loads(body)
    match value:
        case {"blob": str(blob), "blocks": list(blocks)} if len(value) == 2:
            if not 0 < len(blocks) <= MAX_BLOCKS:
                raise ValueError(f"{len(blocks)} blocks; ask for 1 to {MAX_BLOCKS}")
            return check_digest(blob), [_block(block) for block in blocks]
    raise ValueError("a request is blob, a digest, and blocks, a list")


def block_frame(size_bytes: int) -> bytes:
    """Return the bytes that precede a block."""
    return _FRAME.pack(b"B", size_bytes)


def frame_size(head: bytes) -> int | None:
    """Return the size of the block that follows, None if it is absent, -1 for ``WAITING``.

    Raises:
        ValueError: This is no frame.
    """
    kind, size = _FRAME.unpack(head) if len(head) == FRAME_BYTES else (b"", 0)
    if kind == b"B":
        return int(size)
    if head == ABSENT:
        return None
    if head == WAITING:
        return -1
    raise ValueError(f"{head!r} is no frame")


def _block(value: object) -> tuple[int, str]:
    match value:
        case [int(number), str(digest)] if not isinstance(number, bool) and 0 <= number < 1 << 40:
            return number, check_digest(digest)
    raise ValueError(f"{str(value)[:200]} is not a number and a digest")
