"""Torch for ``omniload.open``: batches as tensors, and torch's store as the place where ranks meet."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from typing_extensions import override

from omniload.base.errors import ConfigError, UnavailableError
from omniload.front.launch import Launch
from omniload.front.rendezvous import Rendezvous
from omniload.front.rows import Arrays

__all__ = ["StoreRendezvous", "TorchArrays", "rendezvous_of"]


class TorchArrays(Arrays):
    """Tensors that share the memory of the arrays they are made of."""

    @override
    def of(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array)

    @override
    def check(self, device: object) -> None:
        try:
            place = torch.device(device)  # type: ignore[call-overload]
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
            # From pinned memory the copy goes on beside the step before.
            return tensor.pin_memory().to(place, non_blocking=True)
        return tensor.to(place)


class StoreRendezvous(Rendezvous):
    """Notes as keys of torch's store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @override
    def post(self, key: str, text: str) -> bool:
        if self._store.add(f"{key}#", 1) > 1:
            return False
        self._store.set(key, text)
        return True

    @override
    def read(self, key: str, timeout_s: float) -> str | None:
        try:
            self._store.wait([key], timedelta(seconds=max(timeout_s, 0.001)))
        except dist.DistStoreError:
            return None
        note: str = self._store.get(key).decode()
        return note


def rendezvous_of(launch: Launch, timeout_s: float) -> StoreRendezvous:
    """Return the rendezvous of a job: the store of its process group, or that of its launcher.

    Without torchrun's own store, rank 0 hosts one at ``MASTER_PORT``; a process group that is
    initialised later shares it, so the order of the two does not matter.

    Raises:
        ConfigError: There is neither a process group nor ``MASTER_ADDR`` and ``MASTER_PORT``.
        UnavailableError: Nobody answers there.
    """
    if dist.is_initialized():
        return StoreRendezvous(dist.distributed_c10d._get_default_store())
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65_536:
        raise ConfigError(
            f"rank {launch.rank} of {launch.world_size} has no process group, and MASTER_ADDR is {host!r}, MASTER_PORT "
            f"{port!r}; start by torchrun, call init_process_group first, or name a folder by address="
        )
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            host,
            int(port),
            is_master=launch.rank == 0 and not hosted,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise UnavailableError(
            f"rank {launch.rank} finds no store at {host}:{port} within {timeout_s:g} s ({error}); does rank 0 run?"
        ) from error
    return StoreRendezvous(store)
