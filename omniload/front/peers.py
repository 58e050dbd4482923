"""One rank fetches, others are served by it: the paper's ``broadcast_at``, on the trainer's side.

Ranks along tp, pp and ep train on the same rows. The first of them has a handle of the
data plane; the others know the plane through it alone::

    plane ── batch ──▶ fetching rank ══ what all use, and the state after it ══▶ its peers
                                     ══ tokens ═══════════════════════════════▶ those of the first and last stage
                                     ══ images to encode ─────────────────────▶ to each its own

So each peer has batch and state at hand, and asks nobody. A failure of the plane goes the
same way: every peer raises it.

A plane that is opened beside another one, as to evaluate between steps of training, has threads of rank 0 alone. That
rank takes the batches of all ranks, and deals them out in the same manner.
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
"""What a message is: the state to begin with, a batch, the data's end, an error, the last one."""
_NOTHING = Parts()
Message = tuple[Kind, int, bytes, Parts]


class Peers(Protocol):
    """The ranks that one of them serves, over the trainer's own way between ranks, such as NCCL or Gloo."""

    fetching_rank: int
    """The rank that fetches."""

    def give(self, kind: Kind, step: int, state: bytes, parts: Parts = _NOTHING) -> None:
        """Send to all peers, in order, without waiting for them beyond a few steps.

        Args:
            kind: What it is.
            step: Step of the batch, or before which the state stands.
            state: The state as JSON, or a failure.
            parts: The batch: what several peers share, by the lines that were agreed on, and what each has alone.

        Raises:
            UnavailableError: A peer has not taken what was sent long before.
        """
        ...

    def take(self, timeout_s: float, behind: Message | None = None) -> Message:
        """Wait for the next message: its kind, its step, a state as JSON, and what this rank gets of a batch.

        The same one comes again until it is given as ``behind``: its taker has it by then, whatever interrupted it.

        Raises:
            UnavailableError: None has come in time; the same call may be repeated.
        """
        ...

    def close(self) -> None:
        """Send and take no more."""
        ...


_STAY = (
    "ranks that have their batches from another rank stay as they are: those along tp, pp and ep, and all of a loader "
    "beside another one; open the loader without them on the mesh, or start again with the last state"
)


class PartsOf(Protocol):
    """Says what is sent of the batches of a step."""

    @property
    def place(self) -> int:
        """Place of the rank that sends, among those whose batches it takes."""
        ...

    def __call__(self, batches: Sequence[Batch]) -> Parts:
        """Return what goes to whom of the batches of all places."""
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
    """Each rank of a job is dealt a batch of its own: that of its place, with what it uses of it."""

    places_R: Sequence[int]
    """Place of each rank along dp and cp, of which the first sends."""
    peers_R: Sequence[int]
    """Number of each rank among those of its place."""
    stages: Sequence[Stage | None]
    """Stage of each such number along pp."""

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
    """Handle of the rank that fetches: it takes batches from the plane, and sends others theirs."""

    def __init__(self, handles: Sequence[RankHandle], peers: Peers, parts_of: PartsOf) -> None:
        """Fetch by ``handles``.

        Args:
            handles: Of the place along dp and cp that the ranks share; or where batches are dealt, of each place.
            peers: The ranks that are served.
            parts_of: What is sent to them.
        """
        self._handles, self._peers, self._parts_of = handles, peers, parts_of
        self.first_step = self._own.first_step
        self._taken: tuple[int, list[Batch | None]] | None = None
        self._given: int | None = None
        # A peer asks nobody: the state before its first step must be with it too.
        peers.give("hello", self.first_step, self._state_before(self.first_step))

    @property
    def _own(self) -> RankHandle:
        return self._handles[self._parts_of.place]

    @override
    def take(self, step: int, timeout_s: float | None = None) -> Batch | None:
        try:
            # What an interrupt kept from the caller is here: of the plane it comes once.
            if self._taken is None or self._taken[0] != step:
                self._taken = step, [handle.take(step, timeout_s) for handle in self._handles]
            batches = self._taken[1]
            ends = None in batches  # then of all of them: a step is of all ranks or of none
            state = self._state_before(step if ends else step + 1)
            found = [batch for batch in batches if batch is not None]
            parts = _NOTHING if ends else self._parts_of(found)
        except Exception as error:  # of any kind: peers would wait for a batch that does not come
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
    """Handle of a peer: batches and states come by broadcast."""

    def __init__(self, peers: Peers, timeout_s: float, batch_timeout_s: float) -> None:
        """Wait for the rank that fetches to begin.

        Args:
            peers: The ranks that train on the same rows.
            timeout_s: Longest wait for it.
            batch_timeout_s: Longest wait for a batch, unless it is asked for with another.

        Raises:
            UnavailableError: It has not begun in time.
            OmniloadError: What it failed with.
        """
        self._peers, self._batch_timeout_s = peers, batch_timeout_s
        # Here, where the loader opens: a peer that never begins is not first missed at the first batch.
        self._come = peers.take(timeout_s)
        kind, self.first_step, state, _ = self._come
        self._require(kind, ("hello",), state)
        self._states = {self.first_step: state}
        """States before the next step, and before two earlier ones: a batch may be taken back behind one that came."""

    @override
    def take(self, step: int, timeout_s: float | None = None) -> Batch | None:
        # Nothing is sent behind the end, and what an interrupt kept from the caller is here.
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
        # Read only now: it came with every batch, and is asked for once a checkpoint.
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
