"""The machine that knows which peers are left alone for now.

A peer that fails is left alone for a second, then for two, and so on to half a minute. When
its time is over, one request tries it; all others go on without it until that has an answer.
"""

from dataclasses import dataclass, field
from typing import assert_never

__all__ = [
    "BreakerCommand",
    "BreakerEvent",
    "CircuitBreaker",
    "PeerAnswered",
    "PeerBack",
    "PeerCorrupt",
    "PeerFailed",
    "PeerLeft",
    "PeerTried",
]


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
    """Counts failures of each peer in a row, and says which peers are away."""

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
