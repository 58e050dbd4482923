"""Torch for ``omniload.open``: tensors, torch's store as the place where ranks meet, its collectives for peers."""

import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from typing_extensions import override

from omniload.base.errors import ConfigError, IntegrityError, UnavailableError
from omniload.front.launch import Launch
from omniload.front.peers import Kind, Peers
from omniload.front.rendezvous import Rendezvous
from omniload.front.rows import Arrays, SideStream
from omniload.front.sampling.exchange import Exchange
from trainer_integration.loader.start_number import agreed_start, has_agents_store

__all__ = [
    "StoreRendezvous",
    "TorchArrays",
    "TorchExchange",
    "TorchPeers",
    "TorchSideStream",
    "exchange_of",
    "peers_of",
    "rendezvous_of",
]

_KINDS = get_args(Kind)
_HEAD_NUMBERS = 4
"""Kind, step, bytes of the state, bytes of the batch."""
_MOST_UNDER_WAY = 4
"""Messages that peers may not have taken yet: the rank that fetches runs no further ahead of them."""
_NEVER_S = 10 * 365 * 86_400
"""Limit of the group itself; waits have their own, after which they may be taken up again."""


class TorchArrays(Arrays):
    """Tensors that share the memory of the arrays they are made of."""

    @override
    def of(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array)

    @override
    def check(self, device: object) -> None:
        try:
            place = torch.device(device)  # type: ignore[call-overload]
            # Of whatever accelerator torch was built for: each has a module with the same functions.
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

    @override
    def side_stream(self, device: object) -> "TorchSideStream | None":
        place = torch.device(device)  # type: ignore[call-overload]
        return TorchSideStream(place, torch.cuda) if place.type == "cuda" else None


class TorchSideStream(SideStream):
    """A stream of a GPU; copies start in pinned memory, which torch's allocator takes back once they are done."""

    def __init__(self, place: torch.device, streams: Any) -> None:
        """Make a stream of a device; ``streams`` is ``torch.cuda``, or what stands for it."""
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
            # Its memory is the side stream's: without this it is given to the next copy as soon as the batch is
            # dropped here, while kernels that read it still wait their turn.
            copy.record_stream(users)


class StoreRendezvous(Rendezvous):
    """Notes as keys of torch's store."""

    def __init__(self, store: Store, start: int = 0) -> None:
        """Keep notes in ``store``; those of other starts of the job are elsewhere, where ``start`` numbers them."""
        # An agent's store outlives a start of the job, and notes of ranks that are gone with it.
        self._store = PrefixStore(f"start-{start}", store)
        self.start = start
        """Which start of the job this is, from 0, as far as its launcher or the store tells."""

    @override
    def post(self, key: str, text: str) -> bool:
        try:
            # The one call of the store that two ranks cannot both be first in; ``set`` would let the last one win.
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
            # Asked for anew: where little time is left, a wait may end before the store has said what is there.
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
"""Stores that this process hosts, for as long as it lives: another rank may open its next loader, and leave its
first note, while this one still closes the last."""


def rendezvous_of(launch: Launch, timeout_s: float) -> StoreRendezvous:
    """Return the rendezvous of a job: the store of its process group, or that of its launcher.

    Without torchrun's own store, rank 0 hosts one at ``MASTER_PORT``; a process group that is
    initialised later shares it, so the order of the two does not matter.

    Raises:
        ConfigError: There is neither a process group nor ``MASTER_ADDR`` and ``MASTER_PORT``.
        UnavailableError: Nobody answers there.
    """
    if dist.is_initialized():
        start = _start_of(launch, timeout_s) if has_agents_store() else launch.restarts
        return StoreRendezvous(dist.distributed_c10d._get_default_store(), start)
    store = _connected(launch, timeout_s, hosted=has_agents_store())
    start = _start_of(launch, timeout_s) if has_agents_store() else launch.restarts
    return StoreRendezvous(store, start)


_STARTS: dict[Launch, int] = {}
"""Which start this process is of, once it is agreed: its loaders may differ in their timeouts, not in this."""


def _start_of(launch: Launch, timeout_s: float) -> int:
    """Return which start this is, agreed within ``timeout_s`` the first time; a process is of one."""
    if launch not in _STARTS:
        store = _connected(launch, timeout_s, hosted=True)
        _STARTS[launch] = agreed_start(store, launch, timeout_s)
    return _STARTS[launch]


def _connected(launch: Launch, timeout_s: float, *, hosted: bool) -> Store:
    """Return a connection to the store that variables name; ``hosted``: an agent of torchrun keeps it."""
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
            f"{timeout_s:g} s ({error}); does rank 0 run? A process that is alone takes rank=0 and world_size=1"
        ) from error
    if launch.rank == 0 and not hosted:
        _HOSTED[host, int(port)] = store
    return store


class TorchPeers(Peers):
    """Ranks that train on the same rows, over a gloo group of their own: the trainer's may move a device's memory."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], timeout_s: float) -> None:
        self.fetching_rank, self._peers = ranks[0], list(ranks[1:])
        self._group, self._timeout_s = group, timeout_s
        self._sent: deque[tuple[list[dist.Work], list[torch.Tensor]]] = deque()
        self._coming: tuple[dist.Work, torch.Tensor] | None = None
        """The head of the next message, asked for; a wait that was given up is taken up again."""
        self._rest: tuple[list[dist.Work], list[torch.Tensor]] | None = None
        """What comes behind that head, asked for: state and batch."""

    @override
    def give(self, kind: Kind, step: int, state: bytes, batch: NDArray[np.uint8]) -> None:
        # Lengths first: a broadcast has its receivers bring memory of the right size.
        head = torch.tensor([_KINDS.index(kind), step, len(state), len(batch)], dtype=torch.int64)
        tensors = [head]
        # A copy, for torch warns of memory that it could not write to.
        tensors += [torch.frombuffer(bytearray(state), dtype=torch.uint8)] if state else []
        tensors += [torch.from_numpy(batch)] if len(batch) else []
        # Held until they are taken: gloo reads from their memory.
        self._sent.append(([self._broadcast(tensor) for tensor in tensors], tensors))
        while self._sent and (len(self._sent) > _MOST_UNDER_WAY or self._is_taken()):
            works, _ = self._sent[0]
            self._wait(works, self._timeout_s, f"ranks {self._peers} take a batch of rank")
            self._sent.popleft()

    @override
    def take(self, timeout_s: float) -> tuple[Kind, int, bytes, NDArray[np.uint8]]:
        if self._coming is None:
            head = torch.empty(_HEAD_NUMBERS, dtype=torch.int64)
            self._coming = self._broadcast(head), head
        work, head = self._coming
        self._wait([work], timeout_s, "a batch comes from rank")
        kind, step, state_bytes, batch_bytes = head.tolist()
        if not (0 <= kind < len(_KINDS) and state_bytes >= 0 and batch_bytes >= 0):
            raise IntegrityError(
                f"rank {self.fetching_rank} sent the head {head.tolist()}, which is none; install one release on all "
                "ranks"
            )
        if self._rest is None:
            parts = [torch.empty(size, dtype=torch.uint8) for size in (state_bytes, batch_bytes)]
            self._rest = [self._broadcast(part) for part in parts if len(part)], parts
        works, parts = self._rest
        self._wait(works, self._timeout_s, "the rest of a batch comes from rank")
        # Only now: a wait that ran out above leaves both to the next call.
        self._coming = self._rest = None
        return _KINDS[kind], step, parts[0].numpy().tobytes(), parts[1].numpy()

    @override
    def close(self) -> None:
        self._sent.clear()

    def _broadcast(self, tensor: torch.Tensor) -> dist.Work:
        work: dist.Work = dist.broadcast(tensor, self.fetching_rank, self._group, async_op=True)
        return work

    def _is_taken(self) -> bool:
        return all(work.is_completed() for work in self._sent[0][0])

    def _wait(self, works: Sequence[dist.Work], timeout_s: float, what: str) -> None:
        try:
            for work in works:
                work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise UnavailableError(
                f"waited {timeout_s:g} s until {what} {self.fetching_rank}; does it run, and do all ranks along tp, pp "
                f"and ep take every batch? ({str(error).splitlines()[0]})"
            ) from error


def peers_of(ranks: Sequence[int], rank: int, name: str, timeout_s: float) -> TorchPeers:
    """Return the ranks that train on the same rows as ``rank``, which meets the others here.

    Raises:
        ConfigError: There is no process group, so no mesh is of this job.
        UnavailableError: A peer does not come.
    """
    if not dist.is_initialized():
        raise ConfigError(
            f"rank {rank} has peers {list(ranks)} along tp, pp or ep, and no process group; call "
            "init_process_group (init_device_mesh does) before omniload.open"
        )
    try:
        group = dist.new_group(
            list(ranks),
            backend="gloo",
            timeout=timedelta(seconds=timeout_s),
            # By default every rank of the job would have to make this group, also those outside of it.
            use_local_synchronization=True,
            group_desc=name,
        )
        # A broadcast that a slow step kept waiting would end the group for good; waits are bounded one by one.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=_NEVER_S), group)
    except (dist.DistError, RuntimeError) as error:
        raise UnavailableError(
            f"rank {rank} has not met its peers {list(ranks)} along tp, pp and ep within {timeout_s:g} s; do they run, "
            "and do they call omniload.open as often as this rank?"
        ) from error
    return TorchPeers(group, ranks, timeout_s)


class TorchExchange(Exchange):
    """All-gathers of bytes, over a gloo group of their own: the trainer's may move a device's memory."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._timeout_s = group, timeout_s

    @override
    def all_gather(self, part: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._gather(sizes, torch.tensor([len(part)]))
        lengths = [int(size) for size in sizes]
        # One length for all, as gloo wants it.
        mine = torch.zeros(max(lengths), dtype=torch.uint8)
        mine[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        self._gather(parts, mine)
        return [
            each[:length].numpy().tobytes() for each, length in zip(parts, lengths, strict=True)
        ]

    def _gather(self, parts: list[torch.Tensor], mine: torch.Tensor) -> None:
        try:
            dist.all_gather(parts, mine, group=self._group)
        except RuntimeError as error:
            raise UnavailableError(
                f"rank {self.rank} of {self.size} waited up to {self._timeout_s:g} s for the others' rollouts "
                f"({str(error).splitlines()[0]:.200}); do they run, and ask for as many batches? timeout= waits longer"
            ) from error


def exchange_of(process_group: dist.ProcessGroup | None, timeout_s: float) -> TorchExchange:
    """Return an exchange among the ranks of a process group, all by default, which all of them ask for here.

    Raises:
        UnavailableError: A rank does not come.
    """
    ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    try:
        group = dist.new_group(
            ranks,
            backend="gloo",
            timeout=timedelta(seconds=timeout_s),
            use_local_synchronization=True,
        )
    except (dist.DistError, RuntimeError) as error:
        raise UnavailableError(
            f"ranks {ranks} have not met within {timeout_s:g} s; do all of them make a sampler of their loaders? "
            f"({str(error).splitlines()[0]:.200})"
        ) from error
    return TorchExchange(group, timeout_s)
