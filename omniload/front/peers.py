"""One rank fetches and serves the others: ``broadcast_at`` of the paper, on the trainer's side.

Ranks along tp, pp and ep train on the same rows. Only the first of them has a handle of the data plane, and it serves
the others::

    plane ── batch ──▶ fetching rank ══ what all use, and the state after it ══▶ its peers
                                     ══ tokens ═══════════════════════════════▶ those of the first and last stage
                                     ══ images to encode ─────────────────────▶ to each its own

So each peer has its batch and the state in memory, and asks no role. A failure of the plane takes the same way, so
every peer raises it.

A plane that is opened next to another one, for instance to evaluate between steps of training, runs in threads of rank
0 alone. Rank 0 takes the batches of all ranks and deals them out in the same way.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from omniload.actors.plane import RankHandle
from omniload.base.errors import ConfigError, StateError
from omniload.base.state import JsonObject
from omniload.batch.microbatch import Batch
from omniload.batch.stages import Stage, own_part
from omniload.batch.wire import Parts, Routes, from_parts, to_bytes, to_parts
from omniload.front.meeting import Failure
from omniload.machine.messages import ResizeAsked

__all__ = [
    "Dealt",
    "FetchingHandle",
    "FollowingHandle",
    "Kind",
    "Message",
    "PartsOf",
    "Peers",
    "Shared",
]

Kind = Literal["hello", "batch", "end", "failure", "closed"]
"""Kind of a message: the state to begin with, a batch, the end of the data, an error, or the last message."""
_NOTHING = Parts()
Message = tuple[Kind, int, bytes, Parts]


class Peers(Protocol):
    """The ranks that one rank serves, over the trainer's own transport, such as NCCL or Gloo."""

    fetching_rank: int
    """The rank that fetches."""

    def give(self, kind: Kind, step: int, state: bytes, parts: Parts = _NOTHING) -> None:
        """Send to all peers, in order, without getting more than a few steps ahead of them.

        Args:
            kind: Kind of the message.
            step: Step of the batch, or the step that the state precedes.
            state: The state as JSON, or a failure.
            parts: The batch: the parts that several peers share, by the agreed lines, and the parts for single peers.

        Raises:
            UnavailableError: A peer has not taken a message that was sent long ago.
        """
        ...

    def take(self, timeout_s: float, behind: Message | None = None) -> Message:
        """Wait for the next message: its kind, its step, a state as JSON, and this rank's part of a batch.

        The same message is returned again until it is passed as ``behind``. Then its receiver certainly has it, despite
        any interrupt.

        Raises:
            UnavailableError: No message has arrived in time; the same call may be repeated.
        """
        ...

    def close(self) -> None:
        """Stop sending and receiving."""
        ...


_STAY = (
    "ranks that have their batches from another rank stay as they are: those along tp, pp and ep, and all of a loader "
    "beside another one; open the loader without them on the mesh, or start again with the last state"
)


class PartsOf(Protocol):
    """Chooses which parts of a step's batches are sent."""

    @property
    def place(self) -> int:
        """Place of the sending rank, among the places whose batches it takes."""
        ...

    def __call__(self, batches: Sequence[Batch]) -> Parts:
        """Return the parts of all places' batches, with their receivers."""
        ...


@dataclass(frozen=True, slots=True)
class Shared(PartsOf):
    """One batch goes to all peers: to each the columns that its stage uses, and the images that it encodes."""

    routes: Routes

    @property
    @override
    def place(self) -> int:
        return 0

    @override
    def __call__(self, batches: Sequence[Batch]) -> Parts:
        return to_parts(batches[0], self.routes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt(PartsOf):
    """Each rank of a job is dealt a batch of its own: the used part of the batch of its place."""

    places_R: Sequence[int]
    """Place of each rank along dp and cp; the first rank sends."""
    peers_R: Sequence[int]
    """Number of each rank among the ranks of its place."""
    stages: Sequence[Stage | None]
    """Stage along pp, by the numbers in ``peers_R``."""

    @property
    @override
    def place(self) -> int:
        return self.places_R[0]

    @override
    def __call__(self, batches: Sequence[Batch]) -> Parts:
        made: dict[tuple[int, object], NDArray[np.uint8]] = {}
        own = []
        for place, peer in zip(self.places_R, self.peers_R, strict=True):
            batch, stage = batches[place], self.stages[peer]
            deals_images = any(part.encoding is not None for part in batch.microbatches)
            key = place, peer if deals_images else stage
            if key not in made:
                made[key] = to_bytes(own_part(batch, peer, ()), stage)
            own.append(made[key])
        return Parts(own=own)


class FetchingHandle(RankHandle):
    """Handle of the rank that fetches: it takes batches from the plane, and sends the other ranks theirs."""

    def __init__(self, handles: Sequence[RankHandle], peers: Peers, parts_of: PartsOf) -> None:
        """Fetch through ``handles``.

        Args:
            handles: Handle of the place along dp and cp that the ranks share or, if batches are dealt, of each place.
            peers: The ranks that are served.
            parts_of: Chooses the parts that are sent to them.
        """
        self._handles, self._peers, self._parts_of = handles, peers, parts_of
        self.first_step = self._own.first_step
        self._taken: tuple[int, list[Batch | None]] | None = None
        self._given: int | None = None
        # A peer asks no role, so it also needs the state before its first step.
        peers.give("hello", self.first_step, self._state_before(self.first_step))

    @property
    def _own(self) -> RankHandle:
        return self._handles[self._parts_of.place]

    @override
    def take(self, step: int, timeout_s: float | None = None) -> Batch | None:
        try:
            # A batch that an interrupt kept from the caller is still here, because the plane hands it out only once.
            if self._taken is None or self._taken[0] != step:
                self._taken = step, [handle.take(step, timeout_s) for handle in self._handles]
            batches = self._taken[1]
            # Then all of them are None: a step exists for all ranks or for none.
            ends = None in batches
            state = self._state_before(step if ends else step + 1)
            found = [batch for batch in batches if batch is not None]
            parts = _NOTHING if ends else self._parts_of(found)
        # Of any kind, because peers would wait for a batch that does not come.
        except Exception as error:
            self._peers.give("failure", step, Failure.of(error).model_dump_json().encode())
            raise
        if self._given != step:
            self._peers.give("end" if ends else "batch", step, state, parts)
            self._given = step
        return batches[self._parts_of.place]

    @override
    def taken(self, step: int) -> None:
        for handle in self._handles:
            handle.taken(step)

    @override
    def state_at(self, step: int) -> JsonObject:
        return self._own.state_at(step)

    @override
    def resize(self, asked: ResizeAsked, dp_rank: int) -> None:
        raise ConfigError(_STAY)

    @override
    def close(self) -> None:
        try:
            # A peer that takes nothing any more must not keep the plane open.
            self._peers.give("closed", 0, b"")
        finally:
            self._peers.close()
            for handle in self._handles:
                handle.close()

    def _state_before(self, step: int) -> bytes:
        return json.dumps(self.state_at(step)).encode()


class FollowingHandle(RankHandle):
    """Handle of a peer: batches and states arrive by broadcast."""

    def __init__(self, peers: Peers, timeout_s: float, batch_timeout_s: float) -> None:
        """Wait for the rank that fetches to begin.

        Args:
            peers: The ranks that train on the same rows.
            timeout_s: Longest wait for the fetching rank.
            batch_timeout_s: Longest wait for a batch, unless the call names another.

        Raises:
            UnavailableError: The fetching rank has not begun in time.
            OmniloadError: The error that the fetching rank failed with.
        """
        self._peers, self._batch_timeout_s = peers, batch_timeout_s
        # Waited for here, while the loader opens, so that a peer that never begins is noticed before the first batch.
        self._come = peers.take(timeout_s)
        kind, self.first_step, state, _ = self._come
        self._require(kind, ("hello",), state)
        self._states = {self.first_step: state}
        """States before the next step and before two earlier steps, because a batch may be taken back after another one
        arrived."""

    @override
    def take(self, step: int, timeout_s: float | None = None) -> Batch | None:
        # No message follows the end, and a batch that an interrupt kept from the caller is still here.
        if self._come[0] not in {"batch", "end"} or self._come[1] != step:
            limit_s = timeout_s or self._batch_timeout_s
            self._come = self._peers.take(limit_s, behind=self._come)
        kind, found, state, parts = self._come
        self._require(kind, ("batch", "end"), state)
        if found != step:
            raise StateError(
                f"this rank asks for step {step}, and rank {self._peers.fetching_rank}, which fetches for it, has "
                f"handed on step {found}: all ranks that it serves take every batch, and load one state"
            )
        self._states[step if kind == "end" else step + 1] = state
        self._states.pop(step - 2, None)
        return None if kind == "end" else from_parts(parts)

    @override
    def taken(self, step: int) -> None:
        """Do nothing: the rank that fetches tells the planner for all its peers."""

    @override
    def state_at(self, step: int) -> JsonObject:
        if (state := self._states.get(step)) is None:
            raise StateError(
                f"the state before step {step} is not at hand, those before steps {sorted(self._states)} are; "
                "take the state at the trainer's own step"
            )
        # Parsed only now: a state arrives with every batch, but is needed only once per checkpoint.
        return cast("JsonObject", json.loads(state))

    @override
    def resize(self, asked: ResizeAsked, dp_rank: int) -> None:
        raise ConfigError(_STAY)

    @override
    def close(self) -> None:
        self._peers.close()

    def _require(self, kind: Kind, wanted: tuple[Kind, ...], note: bytes) -> None:
        rank = self._peers.fetching_rank
        if kind == "failure":
            raise Failure.model_validate_json(note).error(rank)
        if kind == "closed":
            raise StateError(
                f"rank {rank}, which fetches for this one, has closed its loader; close those of all its peers with it"
            )
        if kind not in wanted:
            raise StateError(
                f"rank {rank} sent {kind!r} where {' or '.join(wanted)} was to come; open, load and close the loader "
                "on all ranks that it serves alike"
            )
