"""The machine that decides which block is fetched next, from where, and with which neighbours.

Three classes of wanted blocks, served strictly in this order: *demand*, what a reader waits for;
*hot*, what the last start touched, in the order it did; *cold*, the rest, under a bandwidth
cap and only while nobody waits. Some slots are kept free of prefetch, so that a demand
miss starts at once, whatever is queued.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import assert_never

from snapshot.image.layer.index import BlockRef

__all__ = [
    "BESIDE_BYTES",
    "BRIDGE_BYTES",
    "LOOK_AHEAD",
    "BlockWanted",
    "BlocksFetched",
    "Command",
    "Event",
    "FetchBlocks",
    "FetchSettings",
    "Fetcher",
    "GiveUpBlock",
    "HandOverBlock",
    "Priority",
    "Ticked",
    "WakeAt",
]

BRIDGE_BYTES = 32 << 10
"""Between blocks a start touches: of torch's, 40 % of the requests for 3 % more bytes."""
BESIDE_BYTES = 128 << 10
"""Files lie beside those of their folder: import torch without a trace is 465 requests, not 1204, for 12 % more."""
LOOK_AHEAD = 64
"""Blocks after one that are looked at for the next that is wanted: small files are blocks of their own."""


class Priority(IntEnum):
    """How urgent a block is; the smaller, the sooner."""

    DEMAND = 0
    HOT = 1
    COLD = 2


@dataclass(frozen=True, slots=True)
class BlockWanted:
    """Somebody wants blocks, in this order."""

    blocks: tuple[BlockRef, ...]
    priority: Priority


@dataclass(frozen=True, slots=True)
class BlocksFetched:
    """A request has ended: these came and are right; all others of it did not come."""

    request: int
    arrived: frozenset[str]


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""

    now_s: float


@dataclass(frozen=True, slots=True)
class FetchBlocks:
    """Ask a tier for blocks that lie in this order, and close to each other, in one blob."""

    request: int
    tier: str
    priority: Priority
    blocks: tuple[BlockRef, ...]


@dataclass(frozen=True, slots=True)
class HandOverBlock:
    """A block is here, for all that wait for it."""

    digest: str


@dataclass(frozen=True, slots=True)
class GiveUpBlock:
    """No tier has a block: all waits for it end with an error."""

    digest: str


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send ``Ticked`` at that time: the cap allows more then."""

    at_s: float


Event = BlockWanted | BlocksFetched | Ticked
Command = FetchBlocks | HandOverBlock | GiveUpBlock | WakeAt


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    """Limits of a fetcher.

    Raises:
        ValueError: No slot is left for prefetch, or none for demand.
    """

    tiers: tuple[str, ...] = ("peer", "registry")
    """Asked in this order; what one does not have is asked of the next."""
    slots: int = 16
    """Requests on their way."""
    reserved_slots: int = 4
    """Of these, never used by prefetch."""
    coalesce_bytes: int = 4 << 20
    """Largest request made of several blocks."""
    bridge_bytes: int = BRIDGE_BYTES
    """Most bytes nobody wants, between two blocks of one request: a request costs more than they do."""
    beside_bytes: int = BESIDE_BYTES
    """A block that is missed and what follows it in the blob are one request of so much."""
    cold_bytes_per_s: float | None = 32e6
    """Cap of cold blocks, in bytes of the blob; None for none."""
    cold_slots: int = 1
    """Requests for cold blocks on their way: a reader that comes meanwhile shares the link with them."""
    cold_request_bytes: int = 256 << 10
    """Largest request for cold blocks made of several."""
    cold_quiet_s: float = 0.05
    """Cold blocks wait until no reader has had to wait for so long: misses come in bursts."""

    def __post_init__(self) -> None:
        if not 0 < self.reserved_slots < self.slots or not self.tiers:
            raise ValueError(
                f"{self.reserved_slots} of {self.slots} slots reserved, tiers {self.tiers}; "
                "leave at least one slot for each, and one tier"
            )


@dataclass(slots=True)
class _Wanted:
    ref: BlockRef
    priority: Priority
    tier: int = 0
    request: int | None = None


@dataclass(slots=True)
class _Queue:
    """Digests in order, and by place; what was moved elsewhere is skipped when met."""

    order: deque[str] = field(default_factory=deque)
    by_place: dict[tuple[str, int, int], str] = field(default_factory=dict)
    """By blob, number of the block, and tier."""


@dataclass(slots=True, kw_only=True)
class Fetcher:
    """Turns wanted blocks into requests; each wanted block ends in one hand-over or one giving up."""

    settings: FetchSettings = field(default_factory=FetchSettings)
    now_s: float = 0.0
    _wanted: dict[str, _Wanted] = field(default_factory=dict)
    _requests: dict[int, FetchBlocks] = field(default_factory=dict)
    _queues: tuple[_Queue, _Queue, _Queue] = field(
        default_factory=lambda: (_Queue(), _Queue(), _Queue())
    )
    _next_request: int = 0
    _allowed_bytes: float = 0.0
    _quiet_at_s: float = 0.0
    """When the last burst of demand counts as over."""

    def __post_init__(self) -> None:
        # Nothing was taken yet, so the first cold request need not be earned.
        self._allowed_bytes = float(self.settings.coalesce_bytes)
        self._quiet_at_s = self.now_s

    @property
    def num_waiting(self) -> int:
        """Blocks that are wanted and neither here nor given up."""
        return len(self._wanted)

    def handle(self, event: Event) -> tuple[Command, ...]:
        """Apply one event and return what must now be done, in order."""
        commands: list[Command] = []
        match event:
            case BlockWanted(blocks=blocks, priority=priority):
                for ref in blocks:
                    self._want(ref, priority)
            case BlocksFetched(request=request, arrived=arrived):
                commands += self._settle(request, arrived)
            case Ticked(now_s=now_s):
                self._tick(now_s)
            case _:
                assert_never(event)
        commands += self._issue()
        return tuple(commands)

    def _want(self, ref: BlockRef, priority: Priority) -> None:
        if priority is Priority.DEMAND:
            self._quiet_at_s = self.now_s + self.settings.cold_quiet_s
        wanted = self._wanted.get(ref.digest)
        if wanted is None:
            wanted = self._wanted[ref.digest] = _Wanted(ref, priority)
        elif priority < wanted.priority:
            wanted.priority = priority
        else:
            return
        if wanted.request is None:
            self._enqueue(wanted)

    def _enqueue(self, wanted: _Wanted, *, first: bool = False) -> None:
        queue = self._queues[wanted.priority]
        if first:
            queue.order.appendleft(wanted.ref.digest)
        else:
            queue.order.append(wanted.ref.digest)
        queue.by_place[wanted.ref.blob, wanted.ref.number, wanted.tier] = wanted.ref.digest

    def _settle(self, request: int, arrived: frozenset[str]) -> Iterator[Command]:
        done = self._requests.pop(request, None)
        if done is not None and done.priority is Priority.DEMAND:
            self._quiet_at_s = self.now_s + self.settings.cold_quiet_s
        for ref in done.blocks if done is not None else ():
            wanted = self._wanted[ref.digest]
            wanted.request = None
            if ref.digest in arrived:
                del self._wanted[ref.digest]
                yield HandOverBlock(ref.digest)
                continue
            wanted.tier += 1
            if wanted.tier == len(self.settings.tiers):
                del self._wanted[ref.digest]
                yield GiveUpBlock(ref.digest)
            else:
                # It has waited its turn at the tier before.
                self._enqueue(wanted, first=True)

    def _tick(self, now_s: float) -> None:
        rate = self.settings.cold_bytes_per_s
        if rate is not None:
            earned = max(now_s - self.now_s, 0.0) * rate
            # No more is saved up: a pause must not become a burst.
            most = float(self.settings.coalesce_bytes)
            self._allowed_bytes = min(self._allowed_bytes + earned, most)
        self.now_s = max(self.now_s, now_s)

    def _issue(self) -> Iterator[Command]:
        demands = sum(r.priority is Priority.DEMAND for r in self._requests.values())
        while len(self._requests) < self.settings.slots:
            command = self._request_of(Priority.DEMAND)
            if command is None:
                break
            demands += 1
            yield command
        most = self.settings.slots - self.settings.reserved_slots
        while len(self._requests) < self.settings.slots and len(self._requests) - demands < most:
            command = self._request_of(Priority.HOT)
            if command is None:
                break
            yield command
        else:
            return  # hot blocks have all slots that prefetch may have, and come before cold ones
        if not demands:
            yield from self._issue_cold(most)

    def _issue_cold(self, most: int) -> Iterator[Command]:
        """Ask for cold blocks where the link is quiet, within the cap; or say when to look again."""
        cold = sum(r.priority is Priority.COLD for r in self._requests.values())
        rate = self.settings.cold_bytes_per_s
        while len(self._requests) < most and cold < self.settings.cold_slots:
            if self._head(Priority.COLD) is None:
                return
            wait_s = self._quiet_at_s - self.now_s
            if rate is not None and self._allowed_bytes < 1.0:
                wait_s = max(wait_s, (1.0 - self._allowed_bytes) / rate, 0.001)
            if wait_s > 0:
                yield WakeAt(self.now_s + wait_s)
                return
            command = self._request_of(Priority.COLD)
            assert command is not None, "a block is wanted"
            cold += 1
            if rate is not None:
                # Below zero at times: what was taken too much is earned back before the next.
                self._allowed_bytes -= sum(ref.size_bytes for ref in command.blocks)
            yield command

    def _head(self, priority: Priority) -> _Wanted | None:
        """Return the first wanted block of a class that still waits there, and drop those before it."""
        order = self._queues[priority].order
        while order:
            wanted = self._wanted.get(order[0])
            if wanted is not None and wanted.request is None and wanted.priority is priority:
                return wanted
            order.popleft()
        return None

    def _request_of(self, priority: Priority) -> FetchBlocks | None:
        """Take the first wanted block of a class, with those whose blocks follow it in the blob."""
        wanted = self._head(priority)
        if wanted is None:
            return None
        queue = self._queues[priority]
        most = self.settings.coalesce_bytes
        if priority is Priority.COLD:
            most = min(most, self.settings.cold_request_bytes)
        taken = [wanted]
        while (found := self._follower(queue, taken[-1])) is not None:
            if found.ref.end - wanted.ref.offset > most:
                break
            taken.append(found)
        request = self._next_request
        self._next_request += 1
        # They stay in the queue's order, where those under way are passed over.
        for each in taken:
            each.request = request
            queue.by_place.pop((each.ref.blob, each.ref.number, each.tier), None)
        blocks = tuple(each.ref for each in taken)
        command = FetchBlocks(request, self.settings.tiers[wanted.tier], priority, blocks)
        self._requests[request] = command
        return command

    def _follower(self, queue: _Queue, wanted: _Wanted) -> _Wanted | None:
        """Return the next wanted block of the same class in the blob, if it is near enough to ride along."""
        last, priority = wanted.ref, wanted.priority
        # What was taken too much of cold blocks would have to be earned, too.
        bridge = 0 if priority is Priority.COLD else self.settings.bridge_bytes
        for number in range(last.number + 1, last.number + 1 + (LOOK_AHEAD if bridge else 1)):
            digest = queue.by_place.get((last.blob, number, wanted.tier))
            found = self._wanted.get(digest) if digest is not None else None
            if found is None or found.request is not None or found.priority is not priority:
                continue
            near = last.blob == found.ref.blob and 0 <= found.ref.offset - last.end <= bridge
            return found if near and found.tier == wanted.tier else None
        return None
