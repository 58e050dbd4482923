"""One plane for all ranks of a job: who brings it up, and how the others join it."""

import hashlib
import itertools
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from typing_extensions import override

from omniload.actors.local.plane import LocalPlane
from omniload.actors.opening import open_ray_plane
from omniload.actors.plane import PlaneSpec
from omniload.base.errors import ConfigError, StateError, UnavailableError
from omniload.base.extras import missing_extra
from omniload.base.state import Json
from omniload.client import Client
from omniload.front.launch import Launch, Place
from omniload.front.loader import OpenClient
from omniload.front.rendezvous import (
    Failure,
    FolderRendezvous,
    Invitation,
    Joined,
    Rendezvous,
    read_as,
    wait_for_ranks,
)
from omniload.mix.config import MixConfig

__all__ = ["Alone", "Together", "torch_part"]

_TORCH = "trainer_integration.loader.torch_arrays"
"""Adapters for torch, imported by name: this package imports none of those above it."""
_OPENED = itertools.count()
"""Planes that this process has opened or joined: the n-th of every rank is one plane."""
_LEAVE_S = 10.0


@dataclass(frozen=True, slots=True)
class Alone(OpenClient):
    """Brings up a plane for the one rank there is."""

    spec: PlaneSpec

    @override
    def __call__(self, stack: ExitStack, state: Mapping[str, Json] | None) -> Client:
        spec = replace(self.spec, state=state)
        plane = open_ray_plane(spec) if spec.mix.runtime.kind == "ray" else LocalPlane(spec)
        stack.enter_context(plane)
        return stack.enter_context(Client(plane.handle(0)))


@dataclass(frozen=True, slots=True)
class Together(OpenClient):
    """Brings the plane up in rank 0, and has the others join it."""

    spec: PlaneSpec
    place: Place
    launch: Launch
    folder: Path | None
    timeout_s: float

    @override
    def __call__(self, stack: ExitStack, state: Mapping[str, Json] | None) -> Client:
        _take_turn(stack)
        rendezvous = self._rendezvous()
        prefix = f"omniload/{self.launch.attempt}/{next(_OPENED)}"
        if self.launch.rank == 0:
            return self._bring_up(stack, rendezvous, prefix, replace(self.spec, state=state))
        try:
            client = self._join(stack, rendezvous, prefix)
        except BaseException as error:
            rendezvous.post(
                f"{prefix}/joined/{self.launch.rank}", Failure.of(error).model_dump_json()
            )
            raise
        return client

    def _bring_up(
        self, stack: ExitStack, rendezvous: Rendezvous, prefix: str, spec: PlaneSpec
    ) -> Client:
        from omniload.actors.ray.environment import token  # noqa: PLC0415 -- an extra

        try:
            plane = stack.enter_context(open_ray_plane(spec))
            handle = plane.handle(self.place.dp_rank, self.place.cp_rank)
        except BaseException as error:
            rendezvous.post(f"{prefix}/plane", Failure.of(error).model_dump_json())
            raise
        invitation = Invitation(
            plane=plane.address,
            token=token(),
            mix=_digest(spec.mix),
            dp_size=self.place.dp_size,
            cp_size=self.place.cp_size,
            host=socket.gethostname(),
        )
        if not rendezvous.post(f"{prefix}/plane", invitation.model_dump_json()):
            raise ConfigError(
                "another process has brought up the plane as rank 0 of this job already; give each process its rank "
                f"({self.launch.found_in}), and each start of the job a folder of its own where address= names one"
            )
        others = range(1, self.launch.world_size)
        wait_for_ranks(rendezvous, [(r, f"{prefix}/joined/{r}") for r in others], self.timeout_s)
        client = stack.enter_context(Client(handle))
        # The others' last questions are answered before the plane ends.
        stack.callback(_wait_until_left, rendezvous, [f"{prefix}/left/{r}" for r in others])
        return client

    def _join(self, stack: ExitStack, rendezvous: Rendezvous, prefix: str) -> Client:
        invitation = read_as(
            rendezvous, f"{prefix}/plane", Invitation, of_rank=0, timeout_s=self.timeout_s
        )
        if invitation is None:
            raise UnavailableError(
                f"rank {self.launch.rank}: rank 0 has not brought up the plane within {self.timeout_s:g} s; does it "
                "run, and does it call omniload.open as often as this rank? timeout= waits longer"
            )
        self._agree(invitation)
        from omniload.actors.ray.environment import use_token  # noqa: PLC0415 -- an extra

        use_token(invitation.token)
        from omniload.actors.ray.joining import handle_in  # noqa: PLC0415

        handle = handle_in(invitation.plane, self.place.dp_rank, self.place.cp_rank)
        stack.callback(rendezvous.post, f"{prefix}/left/{self.launch.rank}", "{}")
        client = stack.enter_context(Client(handle))
        note = Joined(host=socket.gethostname(), pid=os.getpid())
        if not rendezvous.post(f"{prefix}/joined/{self.launch.rank}", note.model_dump_json()):
            raise ConfigError(
                f"another process has joined as rank {self.launch.rank} of this job already; give each process its "
                f"own rank ({self.launch.found_in})"
            )
        return client

    def _agree(self, invitation: Invitation) -> None:
        """Refuse to join a plane that is not this rank's."""
        mine, theirs = (
            (self.place.dp_size, self.place.cp_size),
            (invitation.dp_size, invitation.cp_size),
        )
        if mine != theirs:
            raise ConfigError(
                f"rank {self.launch.rank} counts dp {mine[0]} and cp {mine[1]}, rank 0 dp {theirs[0]} and cp "
                f"{theirs[1]}; start all ranks with one world size and mesh"
            )
        if invitation.mix != _digest(self.spec.mix):
            raise ConfigError(
                f"rank {self.launch.rank} opens another mix than rank 0, or with other settings; give all ranks the "
                "same file and keywords, and open their loaders in the same order"
            )
        if invitation.host != socket.gethostname():
            raise ConfigError(
                f"rank {self.launch.rank} is on {socket.gethostname()}, and the plane of rank 0 listens on loopback "
                f"of {invitation.host} alone; run all ranks on one machine"
            )

    def _rendezvous(self) -> Rendezvous:
        if self.folder is not None:
            return FolderRendezvous(self.folder / "omniload")
        torch_rendezvous = torch_part("rendezvous_of")
        return torch_rendezvous(self.launch, self.timeout_s)  # type: ignore[no-any-return]


_TURN = threading.Lock()
"""Held while this process has a plane of several ranks: it is connected to one Ray at a time."""


def _take_turn(stack: ExitStack) -> None:
    """Refuse a second plane of several ranks in this process, before any rank waits for it.

    Raises:
        StateError: One is open; what to do instead.
    """
    if not _TURN.acquire(blocking=False):
        raise StateError(
            "this process has a loader over several ranks open already; close it before another is opened, or give "
            "rank=0 and world_size=1 for a loader of this process alone, as for evaluation"
        )
    stack.callback(_TURN.release)


def _wait_until_left(rendezvous: Rendezvous, keys: list[str]) -> None:
    for key in keys:
        if rendezvous.read(key, _LEAVE_S) is None:
            return


def torch_part(name: str) -> Callable[..., Any]:
    """Return a part of the adapter for torch.

    Raises:
        ConfigError: torch is not installed.
    """
    try:
        part: Callable[..., Any] = getattr(import_module(_TORCH), name)
    except ModuleNotFoundError as error:
        raise missing_extra(
            "finding the other ranks without address= (or arrays='torch')", error
        ) from error
    return part


def _digest(mix: MixConfig) -> str:
    return hashlib.blake2b(mix.model_dump_json().encode(), digest_size=8).hexdigest()
