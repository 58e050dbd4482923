"""Torch for ``omniload.open``: tensors, and torch's store as the place where ranks meet."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from typing_extensions import override

from omniload.base.errors import ConfigError, UnavailableError
from omniload.batch.arrays import Arrays, SideStream
from omniload.front.launch import Launch
from omniload.front.rendezvous import Rendezvous
from trainer_integration.loader.start_number import agreed_start, has_agents_store

__all__ = [
    "StoreRendezvous",
    "TorchArrays",
    "TorchSideStream",
    "rendezvous_of",
]


class TorchArrays(Arrays):
    """Tensors that share the memory of the arrays they are made of."""

    @override
    def of(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array)

    @override
    def check(self, device: object) -> None:
        try:
            place = torch.device(device)  # type: ignore[call-overload]
            # For any accelerator that torch was built for: each has a module with the same functions.
            part = None if place.type in {"cpu", "meta"} else torch.get_device_module(place)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f"device {device!r} is none that torch knows; name one such as 'cpu', 'cuda' or 'cuda:1'"
            ) from error
        if part is None:
            return
        count = part.device_count() if part.is_available() else 0
        if (place.index or 0) >= count:
            raise ConfigError(
                f"device {device!r} is not here: torch {torch.__version__} sees {count} of type {place.type}; "
                "name another, or leave device= out"
            )

    @override
    def to(self, tensor: torch.Tensor, device: object) -> torch.Tensor:
        place = torch.device(device)  # type: ignore[call-overload]
        if place.type == "cuda":
            # From pinned memory, the copy runs in parallel with the step before.
            return tensor.pin_memory().to(place, non_blocking=True)
        return tensor.to(place)

    @override
    def side_stream(self, device: object) -> "TorchSideStream | None":
        place = torch.device(device)  # type: ignore[call-overload]
        return TorchSideStream(place, torch.cuda) if place.type == "cuda" else None


class TorchSideStream(SideStream):
    """A stream of a GPU; copies start in pinned memory, which torch's allocator takes back once they are done."""

    def __init__(self, place: torch.device, streams: Any) -> None:
        """Make a stream of a device; ``streams`` is ``torch.cuda``, or the module that replaces it."""
        self._place, self._streams = place, streams
        self._stream = streams.Stream(device=place)

    @override
    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._streams.stream(self._stream):
            return tensor.pin_memory().to(self._place, non_blocking=True)

    @override
    def mark(self) -> object:
        return self._stream.record_event()

    @override
    def arrive(self, copies: Sequence[torch.Tensor], mark: object) -> None:
        users = self._streams.current_stream(self._place)
        users.wait_event(mark)
        for copy in copies:
            # The memory belongs to the side stream. Without this call, it is given to the next copy as soon as the
            # batch is dropped here, while kernels that read it are still queued.
            copy.record_stream(users)


class StoreRendezvous(Rendezvous):
    """Notes as keys of torch's store."""

    def __init__(self, store: Store, start: int = 0) -> None:
        """Keep notes in ``store``; ``start`` numbers the starts of the job, whose notes are kept apart."""
        # An agent's store outlives a start of the job, and so does it keep the notes of ranks that are gone.
        self._store = PrefixStore(f"start-{start}", store)
        self.start = start
        """Number of this start of the job, from 0, as far as its launcher or the store tells."""

    @override
    def post(self, key: str, text: str) -> bool:
        try:
            # The only call of the store in which just one of two ranks can be first; with ``set`` the last would win.
            if self._store.add(f"{key}#", 1) > 1:
                return False
            self._store.set(key, text)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise _gone(error) from error
        return True

    @override
    def read(self, key: str, timeout_s: float) -> str | None:
        try:
            with suppress(dist.DistStoreError):
                self._store.wait([key], timedelta(seconds=max(timeout_s, 0.001)))
            # Asked for again, because with little time left a wait may end before the store has answered.
            if not self._store.check([key]):
                return None
            note: str = self._store.get(key).decode()
        except dist.DistNetworkError as error:
            raise _gone(error) from error
        return note


def _gone(error: Exception) -> UnavailableError:
    return UnavailableError(
        f"torch's store, in which the ranks meet, does not answer: {error}; the process that hosts it has ended"
    )


_HOSTED: dict[tuple[str, int], Store] = {}
"""Stores that this process hosts for its whole life, because another rank may open its next loader and post its first
note while this one still closes the last."""


def rendezvous_of(launch: Launch, timeout_s: float) -> StoreRendezvous:
    """Return the rendezvous of a job: the store of its process group, or that of its launcher.

    Without torchrun's own store, rank 0 hosts one at ``MASTER_PORT``. A process group that is initialised later shares
    it, so the order of the two does not matter.

    Raises:
        ConfigError: There is neither a process group nor ``MASTER_ADDR`` and ``MASTER_PORT``.
        UnavailableError: No process answers there.
    """
    if dist.is_initialized():
        start = _start_of(launch, timeout_s) if has_agents_store() else launch.restarts
        return StoreRendezvous(dist.distributed_c10d._get_default_store(), start)
    store = _connected(launch, timeout_s, hosted=has_agents_store())
    start = _start_of(launch, timeout_s) if has_agents_store() else launch.restarts
    return StoreRendezvous(store, start)


_STARTS: dict[Launch, int] = {}
"""Number of this process's start, once it is agreed; it does not depend on the timeouts of loaders."""


def _start_of(launch: Launch, timeout_s: float) -> int:
    """Return the number of this process's one start, agreed within ``timeout_s`` at the first call."""
    if launch not in _STARTS:
        store = _connected(launch, timeout_s, hosted=True)
        _STARTS[launch] = agreed_start(store, launch, timeout_s)
    return _STARTS[launch]


def _unnamed(host: str) -> str:
    """Return a hint if a host has no address here; empty if it has one. torch reports both cases as a timeout."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:  # an impossible host name is an encoding error
        # Brackets around IPv6 belong to URLs; torch takes addresses as they are.
        bare = " without its brackets" * host.startswith("[")
        return (
            f"this host finds no address for MASTER_ADDR {host!r} ({error}): correct it{bare}, or have it "
            "resolved."
        )
    return ""


def _connected(launch: Launch, timeout_s: float, *, hosted: bool) -> Store:
    """Return a connection to the store that variables name; ``hosted`` means that an agent of torchrun keeps it."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65_536:
        raise ConfigError(
            f"rank {launch.rank} of {launch.world_size}, by {launch.found_in}, has no process group, and MASTER_ADDR "
            f"is {host!r}, MASTER_PORT {port!r}; start by torchrun, call init_process_group first, or name a folder by "
            "address=; a process that is alone takes rank=0 and world_size=1"
        )
    try:
        store = TCPStore(
            host,
            int(port),
            is_master=launch.rank == 0 and not hosted,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            # Another store of this process may be at the port: that of a process group initialised before or after.
            multi_tenant=True,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise UnavailableError(
            f"rank {launch.rank} of {launch.world_size}, by {launch.found_in}, finds no store at {host}:{port} within "
            f"{timeout_s:g} s ({error}); {_unnamed(host) or 'does rank 0 run?'} A process that is alone takes rank=0 "
            "and world_size=1"
        ) from error
    if launch.rank == 0 and not hosted:
        _HOSTED[host, int(port)] = store
    return store
