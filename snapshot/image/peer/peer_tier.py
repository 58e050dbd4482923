"""Blocks from peers: asks the nodes that ``choice`` names, and compares all it receives.

Peers that failed are left alone for a while, as a machine says.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import assert_never

from typing_extensions import override
from urllib3.exceptions import HTTPError, ProtocolError
from urllib3.response import BaseHTTPResponse

from omniload.base.clock import Clock, SystemClock
from omniload.base.errors import IntegrityError
from omniload.base.log import get_logger
from snapshot.image.block.loader import BlockTier
from snapshot.image.layer.index import BlockRef, LayerIndex
from snapshot.image.peer.choice import holders, parent, ranking, regions
from snapshot.image.peer.wire import FRAME_BYTES, MAX_BLOCKS, PATH, frame_size, request_body
from snapshot.oci.digest import verified
from snapshot.oci.slow_servers import Pace, paced_pool

__all__ = [
    "BreakerCommand",
    "BreakerEvent",
    "CircuitBreaker",
    "PeerAnswered",
    "PeerBack",
    "PeerCorrupt",
    "PeerFailed",
    "PeerLeft",
    "PeerPatience",
    "PeerTier",
    "PeerTried",
]

_log = get_logger(__name__)

_SLICE_BYTES = 1 << 20
_POOLS = 256
"""Peers that connections are kept to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPatience:
    """How long peers are waited for."""

    connect_s: float = 1.0
    silent_s: float = 4.0
    """Without a byte: the peer is gone. It says every second that it is there."""
    total_s: float = 20.0
    """From the first request for a region to the last byte, over all peers."""
    tries: int = 3
    """Peers that answer, asked one after another before a block is asked of the next tier."""
    failures: int = 8
    """Peers, of those asked for one block, that may fail before that."""


@dataclass(frozen=True, slots=True)
class _OfPeer:
    peer: str
    now_s: float


class PeerTried(_OfPeer):
    """A request to a peer is about to begin."""


class PeerAnswered(_OfPeer):
    """A peer is well, whether or not it had what was asked."""


class PeerFailed(_OfPeer):
    """A peer is not there, does not answer, or broke off."""


class PeerCorrupt(_OfPeer):
    """A peer sent other bytes than were asked for."""


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """From now on a peer is left alone; to be said once."""

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

    A peer that fails is left alone for a second, then for two, and so on to half a minute. When
    its time is over, one request tries it; all others go on without it until that has an answer.
    """

    first_s: float = 1.0
    longest_s: float = 30.0
    corrupt_s: float = 300.0
    """How long a peer with wrong bytes is left alone."""
    trial_s: float = 5.0
    """How long others wait for the outcome of a trial."""
    _troubles: dict[str, _Trouble] = field(default_factory=dict)

    def away(self, now_s: float) -> frozenset[str]:
        """Return the peers that are not to be asked."""
        return frozenset(p for p, trouble in self._troubles.items() if now_s < trouble.until_s)

    def handle(self, event: BreakerEvent) -> tuple[BreakerCommand, ...]:
        """Apply one event and return what is worth a log line."""
        trouble = self._troubles.get(event.peer)
        match event:
            case PeerTried(now_s=now_s):
                if trouble is not None and now_s >= trouble.until_s:
                    trouble.half_open, trouble.until_s = True, now_s + self.trial_s
            case PeerAnswered(peer=peer):
                # An answer to what was asked before the peer fell out says nothing of now.
                if trouble is not None and trouble.half_open:
                    del self._troubles[peer]
                    return (PeerBack(peer),)
            case PeerFailed(peer=peer, now_s=now_s):
                # Of many requests that fail together, the first has said it.
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


class _GoneError(Exception):
    """A peer does not answer as it should."""


class _LateError(Exception):
    """A peer is well, but patience has ended."""


class PeerTier(BlockTier):
    """The other nodes of a start.

    ``members`` are the ``HOST:PORT`` of every node that serves, ``me`` this node's own name among
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
        # Only headers are bound here: while a peer waits it sends a few bytes each second, and
        # the time of a whole answer is bound below.
        pace = Pace(silent_s=self._patience.silent_s, least_bytes_per_s=0)
        self._pool = paced_pool(
            pace, connect_s=self._patience.connect_s, num_pools=_POOLS, maxsize=4
        )
        self.bytes_of: dict[str, int] = {}
        """Bytes of right blocks, by peer."""

    @override
    def fetch(self, index: LayerIndex, blocks: Sequence[BlockRef]) -> tuple[dict[str, bytes], int]:
        found: dict[str, bytes] = {}
        moved = 0
        for region, refs in regions(blocks):
            for at in range(0, len(refs), MAX_BLOCKS):
                came, size = self._region(index, region, refs[at : at + MAX_BLOCKS])
                found |= came
                moved += size
        return found, moved

    def close(self) -> None:
        """Let go of connections; requests on their way end soon, and new ones give nothing."""
        self._closed = True
        # Those that are in use end with their answers, or by their time-outs.
        self._pool.clear()

    def _region(
        self, index: LayerIndex, region: str, refs: Sequence[BlockRef]
    ) -> tuple[dict[str, bytes], int]:
        found: dict[str, bytes] = {}
        moved = 0
        until_s = self._clock.now_s() + self._patience.total_s
        for peer, waits in self._candidates(ranking(self._members, region), region):
            absent = [ref for ref in refs if ref.digest not in found]
            if not absent or self._closed or self._clock.now_s() >= until_s:
                break
            came, size = self._ask(index, peer, absent, until_s if waits else None)
            found |= came
            moved += size
        return found, moved

    def _candidates(self, ranked: Sequence[str], region: str) -> Iterator[tuple[str, bool]]:
        """Yield the next peer to ask, and whether to wait for what it does not have yet."""
        asked: set[str] = set()
        for _ in range(self._patience.tries + self._patience.failures):
            away = self._away()
            peer = parent(ranked, self._me, region, away | asked)
            # One that failed is away by now and counts as none: tries are of peers that answer.
            if peer is None or len(asked - away) == self._patience.tries:
                break
            yield peer, True
            asked.add(peer)
        for peer in holders(ranked, self._me, self._away()):
            yield peer, False

    def _ask(
        self, index: LayerIndex, peer: str, refs: Sequence[BlockRef], until_s: float | None
    ) -> tuple[dict[str, bytes], int]:
        """Ask one peer, waiting with it until a time, if one is given."""
        found: dict[str, bytes] = {}
        self._note(PeerTried(peer, self._clock.now_s()))
        waits = until_s is not None
        if until_s is None:
            # Not waited for is read from its memory or disk, at once: more time would be for nothing.
            until_s = self._clock.now_s() + self._patience.silent_s
        sent = request_body(index.blob_digest, [(r.number, r.digest) for r in refs], waits=waits)
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
                if response.read1(1):  # the end, so that the connection serves again
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
        # Never repeated by the client: a peer that fails is passed over.
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
        """Read the next block, or that it is absent.

        Raises:
            _LateError: Not before ``until_s``.
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
