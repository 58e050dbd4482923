"""How a loader gets its client: a plane for one process, or one plane that rank 0 opens and the others join."""

import hashlib
import itertools
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

from typing_extensions import override

from omniload.actors.address import PlaneAddress
from omniload.actors.local.plane import LocalPlane
from omniload.actors.opening import open_ray_plane, require_ray
from omniload.actors.plane import DataPlane, PlaneSpec, RankHandle
from omniload.base.errors import ConfigError, StateError
from omniload.base.extras import missing_extra
from omniload.base.linux.network import host_id
from omniload.base.log import get_logger
from omniload.base.state import Json
from omniload.batch.stages import Stage
from omniload.batch.wire import Routes
from omniload.client import Client
from omniload.front.arguments import warn_of_own_environment, warn_of_rank_behind
from omniload.front.detached.attaching import attach_to, detached_handle, is_detached
from omniload.front.launch import Launch, Place, group_of_torch
from omniload.front.loader import OpenClient
from omniload.front.meeting import Invitation, Meeting, NodeUp
from omniload.front.mix_values import MixValues
from omniload.front.peers import Dealt, FetchingHandle, FollowingHandle, Peers, Shared
from omniload.front.rendezvous import FolderRendezvous, Rendezvous
from omniload.front.turn import take_turn, take_turn_to_train
from omniload.mix.config import MixConfig
from omniload.mix.schema.splits import TRAIN

__all__ = ["OpenAlone", "OpenTogether", "torch_part"]

_LOG = get_logger(__name__)
_TORCH = "trainer_integration.loader.torch_arrays"
"""Adapters for torch, imported by name because this package imports none of the packages above it."""
_PEERS = "trainer_integration.loader.torch_peers"
_EXCHANGE = "trainer_integration.loader.torch_exchange"
_PARTS = {
    **dict.fromkeys(("peers_of", "all_peers"), _PEERS),
    **dict.fromkeys(("exchange_of", "exchange_among"), _EXCHANGE),
}
"""Where parts are that are not there."""
_OPENED = itertools.count()
"""Counter of planes that this process has opened or joined; the n-th plane is the same on every rank."""
_WORKERS = 2
"""Spare processes on another host: one for its first data constructor, one for its watch of stopped processes."""


@dataclass(frozen=True, slots=True)
class OpenAlone(OpenClient):
    """Opens a plane for the only rank of a job."""

    spec: PlaneSpec

    @override
    def __call__(self, stack: ExitStack, state: Mapping[str, Json] | None) -> Client:
        spec = replace(self.spec, state=state)
        if is_detached(spec):
            address = attach_to(stack, spec, _digest(spec.mix))
            handle = detached_handle(stack, spec, address, Place(dp_rank=0, dp_size=1))
            return stack.enter_context(Client(handle))
        plane = open_ray_plane(spec) if spec.mix.runtime.kind == "ray" else LocalPlane(spec)
        # Entered first, so that it ends last: the client must leave a plane that still runs.
        stack.enter_context(plane)
        return stack.enter_context(Client(plane.handle(0)))


@dataclass(frozen=True, slots=True)
class OpenTogether(OpenClient):
    """Opens the plane in rank 0 of a job; every other rank joins it, or takes its batches from another rank.

    Each rank does one of four things::

        plane                             rank 0         other ranks    peers along tp, pp, ep
        actors of a Ray                   _bring_up      _join          _follow the first of them
        threads of rank 0: all ranks are
        peers of it                       _bring_up      _join          _follow
        threads of rank 0, beside a plane
        that this process has open        _deal          _follow        _follow

    The last line is an evaluation during a training: rank 0 takes all batches, and sends the other ranks theirs.
    """

    spec: PlaneSpec
    place: Place
    launch: Launch
    folder: Path | None
    timeout_s: float

    @override
    def __call__(self, stack: ExitStack, state: Mapping[str, Json] | None) -> Client:
        deals = self._deals_beside(stack)
        meeting = Meeting(
            self._rendezvous(),
            f"omniload/{self.launch.attempt}/{next(_OPENED)}",
            self.launch,
            self.place,
            self.timeout_s,
        )
        part = self._bring_up if self.launch.rank == 0 else self._join
        if deals:
            part = self._deal if self.launch.rank == 0 else self._follow
        if not self.place.fetches(self.launch.rank):
            part = self._follow
        try:
            return part(stack, meeting, replace(self.spec, state=state))
        # Also for Ctrl-C and exits, because the other ranks would wait until their limit.
        except BaseException as error:
            meeting.fail(error)
            raise

    def _deals_beside(self, stack: ExitStack) -> bool:
        """Take this process's turn for a plane of several ranks; return whether it was taken, so that rank 0 deals.

        Raises:
            StateError: It is taken, and rank 0 cannot send batches to the others, or would hold up a training.
        """
        mix = self.spec.mix
        # In a Ray of the user's, a training has no need of the turn.
        trains = mix.split == TRAIN and not mix.runtime.address
        try:
            (take_turn_to_train if trains else take_turn)(stack)
        except StateError:
            ends = mix.split != TRAIN or mix.mix.stop == "each_once"
            if ends and group_of_torch() == (self.launch.rank, self.launch.world_size):
                return True
            # In a Ray of the user's, a process may be part of several planes.
            if not mix.runtime.address:
                raise
        return False

    def _bring_up(self, stack: ExitStack, meeting: Meeting, spec: PlaneSpec) -> Client:
        # Called last, as the plane has ended: nodes on other hosts live until then.
        stack.callback(meeting.end)
        # Only rank 0 asks the plane.
        if spec.tree.num_buckets("cp") == 1 and spec.mix.runtime.kind != "ray":
            # Peers ask no plane, but wait for the note that this posts.
            meeting.gather(None)
            plane: DataPlane = stack.enter_context(LocalPlane(spec))
            address = None
            handle = plane.handle(self.place.dp_rank, self.place.cp_rank)
        elif is_detached(spec):
            # No rank starts a node, because every host is part of the Ray already.
            meeting.gather(None)
            address = attach_to(stack, spec, _digest(spec.mix))
            handle = detached_handle(stack, spec, address, self.place)
        else:
            plane = ray_plane = stack.enter_context(open_ray_plane(spec, meeting.gather))
            address = ray_plane.address
            handle = plane.handle(self.place.dp_rank, self.place.cp_rank)
        self._invite(meeting, spec, address)
        # A rank that cannot join fails the job here, at its start, and not later, by a batch that it never takes.
        meeting.wait_until_joined(range(1, self.launch.world_size))
        client = stack.enter_context(Client(self._serving_peers(handle, meeting)))
        # The other ranks' last questions are answered before the plane ends.
        stack.callback(self._see_off, meeting)
        return client

    def _see_off(self, meeting: Meeting) -> None:
        """Wait until the other ranks have closed their loaders, or say whose will fail now."""
        if (late := meeting.wait_until_left(range(1, self.launch.world_size))) is not None:
            warn_of_rank_behind(late)

    def _deal(self, stack: ExitStack, meeting: Meeting, spec: PlaneSpec) -> Client:
        """Take the batches of all ranks from threads of this process, and send the other ranks theirs."""
        if spec.mix.split == TRAIN:
            _LOG.warning(
                "this mix is opened while these ranks have another loader open, so it is taken for an evaluation: "
                "rank 0 reads all of it in its own threads and sends the other ranks their parts; to train on this "
                "mix, close the other loader first"
            )
        stack.callback(meeting.end)
        meeting.gather(None)
        # Before sources are opened: it explains why one is refused that needs a variable or a path of another process.
        warn_of_own_environment(spec.mix.runtime, os.environ)
        plane = stack.enter_context(LocalPlane(spec))
        self._invite(meeting, spec, None, deals=True)
        meeting.wait_until_joined(range(1, self.launch.world_size))
        places = product(range(self.place.dp_size), range(self.place.cp_size))
        handles = [plane.handle(dp_rank, cp_rank) for dp_rank, cp_rank in places]
        dealt = Dealt(
            places_R=self.place.places_of(self.launch.world_size),
            peers_R=self.place.peers_in(self.launch.world_size),
            stages=self._stages(),
        )
        dealing = FetchingHandle(handles, self._meet_all(meeting), dealt)
        client = stack.enter_context(Client(dealing))
        stack.callback(self._see_off, meeting)
        return client

    def _invite(
        self, meeting: Meeting, spec: PlaneSpec, plane: PlaneAddress | None, *, deals: bool = False
    ) -> None:
        """Post the plane's address and the identity of its mix for the other ranks."""
        step = 0 if spec.state is None else spec.state["step"]
        assert isinstance(step, int), "the plane goes on from it"
        meeting.invite(
            Invitation(
                plane=plane,
                deals=deals,
                mix=_digest(spec.mix),
                dp_size=self.place.dp_size,
                cp_size=self.place.cp_size,
                step=step,
            ),
            MixValues.of(spec.mix),
        )

    def _join(self, stack: ExitStack, meeting: Meeting, spec: PlaneSpec) -> Client:
        require_ray()
        from omniload.actors.ray.environment import miss_hosts_soon  # noqa: PLC0415 -- an extra
        from omniload.actors.ray.hosts.members import MemberNode, listening_of  # noqa: PLC0415
        from omniload.actors.ray.layout import store_bytes  # noqa: PLC0415
        from omniload.actors.ray.rank.joining import handle_in  # noqa: PLC0415
        from omniload.actors.ray.tokens import use_given_token, use_token  # noqa: PLC0415

        runtime = spec.mix.runtime
        listening = listening_of(runtime.bind, runtime.ports, os.environ.get("MASTER_ADDR"))
        assigned = meeting.arrive()
        if assigned.head is None and is_detached(spec):
            use_given_token()
            return self._attach(stack, meeting, spec)
        # Rank 0 alone asks the plane. Its invitation tells whether it deals, or counts other ranks than this one.
        if assigned.head is None:
            return self._take_from_peer(stack, meeting, spec)
        # Otherwise a rank that is cut off would leave Ray only after the connections' own limit of two minutes.
        miss_hosts_soon()
        starts_node = assigned.first_of.get(host_id()) == self.launch.rank
        if starts_node:
            bytes_ = store_bytes(spec.mix)
            node = MemberNode(assigned.head, listening, bytes_=bytes_, workers=_WORKERS)
            stack.callback(node.close)
            # Other ranks of this host use the node, and rank 0 uses its actors until the plane has ended.
            stack.callback(meeting.wait_until_ended)
            meeting.post(f"node/{self.launch.rank}", NodeUp(place=node.place).model_dump_json())
        elif assigned.head.token is None:
            use_given_token()
        else:
            use_token(assigned.head.token)
        invitation = meeting.invitation()
        self._agree(meeting, invitation, spec.state)
        assert invitation.plane is not None, "a plane of a Ray has an address"
        # A process that started its node is connected to Ray through the node.
        handle = handle_in(
            invitation.plane, self.place.dp_rank, self.place.cp_rank, is_connected=starts_node
        )
        return self._client_of(stack, meeting, handle)

    def _attach(self, stack: ExitStack, meeting: Meeting, spec: PlaneSpec) -> Client:
        """Join the detached plane that rank 0 has attached to."""
        invitation = meeting.invitation()
        self._agree(meeting, invitation, spec.state)
        assert invitation.plane is not None, "a plane of a Ray has an address"
        at = replace(spec, state={"step": invitation.step})
        handle = detached_handle(stack, at, invitation.plane, self.place)
        return self._client_of(stack, meeting, handle)

    def _client_of(self, stack: ExitStack, meeting: Meeting, handle: RankHandle) -> Client:
        """Tell rank 0 that this rank has its handle of the plane; return its client."""
        # This runs after the next callback: a rank has left once its handle is closed.
        stack.callback(meeting.leave)
        stack.callback(handle.close)
        meeting.join()
        # Before peers meet: they make a group of torch, which fails by a limit of its own if one of them comes late.
        meeting.wait_until_joined(self.place.peers[1:])
        return stack.enter_context(Client(self._serving_peers(handle, meeting)))

    def _follow(self, stack: ExitStack, meeting: Meeting, spec: PlaneSpec) -> Client:
        """Take batches from the peer that fetches them, or from rank 0 if it deals them."""
        meeting.arrive()
        return self._take_from_peer(stack, meeting, spec)

    def _take_from_peer(self, stack: ExitStack, meeting: Meeting, spec: PlaneSpec) -> Client:
        """Return the client of a rank that asks no plane: the one that fetches for it has accepted the invitation."""
        invitation = meeting.invitation()
        self._agree(meeting, invitation, spec.state)
        if not self.place.peers and not invitation.deals:
            raise StateError(
                f"rank {self.launch.rank} has another loader over several ranks open, and rank 0 has none; close and "
                "open loaders on all ranks alike"
            )
        stack.callback(meeting.leave)
        meeting.join()
        if invitation.deals:
            peers = self._meet_all(meeting)
        else:
            # The fetching rank posts that it has joined, or its failure. Rank 0 posts neither: it has opened the plane.
            meeting.wait_until_joined(rank for rank in self.place.peers[:1] if rank)
            peers = self._meet_peers(meeting)
        handle = FollowingHandle(peers, self.timeout_s, spec.mix.runtime.batch_timeout)
        return stack.enter_context(Client(handle))

    def _serving_peers(self, handle: RankHandle, meeting: Meeting) -> RankHandle:
        """Return a handle that also sends each batch to the peers of this rank, where it has any: they have joined."""
        if not self.place.peers:
            return handle
        return FetchingHandle([handle], self._meet_peers(meeting), Shared(self._routes()))

    def _stages(self) -> tuple[Stage | None, ...]:
        return self.place.stages(self.spec.mix.batch.pipeline)

    def _routes(self) -> Routes:
        return Routes.among(self._stages(), sliced=self.place.cp_size > 1)

    def _meet_all(self, meeting: Meeting) -> Peers:
        meet: Callable[..., Peers] = torch_part("all_peers")
        return meet(self.launch.rank, meeting.prefix, self.timeout_s)

    def _meet_peers(self, meeting: Meeting) -> Peers:
        meet: Callable[..., Peers] = torch_part("peers_of")
        lines = [[self.place.peers[peer] for peer in line] for line in self._routes().lines]
        return meet(lines, self.launch.rank, meeting.prefix, self.timeout_s)

    def _agree(
        self, meeting: Meeting, invitation: Invitation, state: Mapping[str, Json] | None
    ) -> None:
        """Refuse to join a plane of another mix or other ranks, or one that continues from another step than the model.

        A rank without a state uses rank 0's.
        """
        mine, theirs = (
            (self.place.dp_size, self.place.cp_size),
            (invitation.dp_size, invitation.cp_size),
        )
        if mine != theirs:
            raise self._disagreement(invitation)
        if invitation.mix != _digest(self.spec.mix):
            of_0 = meeting.values_of_0()
            own = MixValues.of(self.spec.mix)
            said = "" if of_0 is None else f": {own.said_beside(of_0)}"
            raise ConfigError(
                f"rank {self.launch.rank} opens another mix than rank 0, or with other settings{said}; give all ranks "
                "the same file and keywords, and open their loaders in the same order"
            )
        if state is not None and state.get("step") != invitation.step:
            raise StateError(
                f"rank {self.launch.rank} was given the state before step {state.get('step')!r:.20}, and rank 0 "
                + (f"that before step {invitation.step}" if invitation.step else "begins at step 0")
                + "; give all ranks the state of one checkpoint, from a folder that all of them see"
            )

    def _disagreement(self, invitation: Invitation) -> ConfigError:
        """Return the refusal of a rank that counts other ranks than rank 0."""
        return ConfigError(
            f"rank {self.launch.rank} counts dp {self.place.dp_size} and cp {self.place.cp_size}, rank 0 dp "
            f"{invitation.dp_size} and cp {invitation.cp_size}; start all ranks with one world size and mesh"
        )

    def _rendezvous(self) -> Rendezvous:
        if self.folder is not None:
            return FolderRendezvous(self.folder / "omniload")
        torch_rendezvous = torch_part("rendezvous_of")
        return torch_rendezvous(self.launch, self.timeout_s)  # type: ignore[no-any-return]


def torch_part(name: str) -> Callable[..., Any]:
    """Return a part of the adapters for torch.

    Raises:
        ConfigError: torch is not installed.
    """
    try:
        part: Callable[..., Any] = getattr(import_module(_PARTS.get(name, _TORCH)), name)
    except ModuleNotFoundError as error:
        raise missing_extra(
            "finding the other ranks without address= (or arrays='torch')", error
        ) from error
    return part


def _digest(mix: MixConfig) -> str:
    """Return a digest of a mix that all its ranks share, without the listening address, which is each rank's own."""
    # Taken from the model and not from the file, because comments and the order of keys may differ between hosts.
    text = mix.model_dump_json(exclude={"runtime": {"bind", "metrics_bind"}})
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
