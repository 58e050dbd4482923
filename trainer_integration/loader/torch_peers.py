"""Torch's collectives for ``omniload.open``: ranks that have their batches from another one, and exchanges of rollouts.

Each has a gloo group of its own: the trainer's may move a device's memory.
"""

import hashlib
import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeAlias, get_args

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.clock import Deadline
from omniload.base.errors import ConfigError, IntegrityError, UnavailableError
from omniload.front.peers import Kind, Peers
from omniload.front.sampling.exchange import Exchange

__all__ = ["TorchExchange", "TorchPeers", "all_peers", "exchange_of", "peers_of"]

_KINDS = get_args(Kind)
_HEAD_NUMBERS = 5
"""Opening, kind, step, bytes of the state, bytes of the batch."""
_MOST_UNDER_WAY = 4
"""Messages that peers may not have taken yet: the rank that fetches runs no further ahead of them."""
_LEAST_S = 0.001
"""torch takes no wait of 0 for one."""
_NEVER_S = 10 * 365 * 86_400
"""Limit of the group itself; waits have their own, after which they may be taken up again."""


_Message: TypeAlias = tuple[Kind, int, bytes, NDArray[np.uint8]]
_SIZE_BYTES = 8
"""Before each dealt batch: one length for all of them, as gloo wants it, is that of the longest."""


class _Line:
    """A gloo group over which its first rank sends to the others, to the loaders of one opening or of several."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], *, deals: bool) -> None:
        """Send all others of ``ranks`` the same batch, or each its own where it ``deals``."""
        self.first, self._ranks, self._deals = ranks[0], ranks, deals
        self._group = group
        self._sent: deque[tuple[list[dist.Work], list[torch.Tensor]]] = deque()
        self._coming: tuple[dist.Work, torch.Tensor] | None = None
        """The head of the next message, asked for; a wait that was given up is taken up again."""
        self._rest: tuple[list[dist.Work], list[torch.Tensor]] | None = None
        """What comes behind that head, asked for: state and batch."""
        self._turn = threading.Lock()
        self.inboxes: dict[int, deque[_Message]] = {}
        """Messages that have come, of each opening that this rank has open; others are dropped as they come."""

    def give(
        self,
        opening: int,
        message: tuple[Kind, int, bytes],
        arrays: Sequence[NDArray[np.uint8]],
        timeout_s: float,
    ) -> None:
        """Send, in order, without waiting for what was sent, beyond a few messages.

        Raises:
            UnavailableError: Nobody has taken those in time. This one is not sent, and may be given again; the last one
                of an opening is sent all the same.
        """
        kind, step, state = message
        batches = self._dealt(arrays) if self._deals else [torch.from_numpy(b) for b in arrays]
        # Lengths first: whoever receives brings memory of the right size.
        size = len(batches[0]) if batches else 0
        head = torch.tensor([opening, _KINDS.index(kind), step, len(state), size])
        # A copy, for torch warns of memory that it could not write to.
        note = [torch.frombuffer(bytearray(state), dtype=torch.uint8)] if state else []
        is_last = kind == "closed"
        with self._turn:
            # Before it is sent: whoever gives up waiting may give it again, and peers have it once.
            if not is_last:
                self._wait_until_taken(timeout_s, but=_MOST_UNDER_WAY - 1)
            works = [self._broadcast(tensor) for tensor in (head, *note)]
            works += [self._batch(batches[0], batches)] if size else []
            # Held until they are taken: gloo reads from their memory.
            self._sent.append((works, [head, *note, *batches]))
            if is_last:
                self._wait_until_taken(timeout_s, but=_MOST_UNDER_WAY)

    def _wait_until_taken(self, timeout_s: float, *, but: int) -> None:
        """Wait for messages that were sent, the oldest first, until none is left ``but`` a few."""
        while self._sent and (len(self._sent) > but or self._is_taken()):
            works, _ = self._sent[0]
            self._wait(works, timeout_s, f"ranks {list(self._ranks[1:])} take a batch of rank")
            self._sent.popleft()

    def take(self, opening: int, timeout_s: float, rest_s: float) -> _Message:
        """Wait for the next message of an opening; ``rest_s`` is the longest wait for what comes behind a head."""
        inbox, deadline = self.inboxes[opening], Deadline(timeout_s)
        with self._turn:
            while not inbox:
                of, message = self._receive(deadline.left_s(), timeout_s, rest_s)
                if of in self.inboxes:
                    self.inboxes[of].append(message)
            return inbox.popleft()

    def _receive(self, left_s: float, timeout_s: float, rest_s: float) -> tuple[int, _Message]:
        if self._coming is None:
            head = torch.empty(_HEAD_NUMBERS, dtype=torch.int64)
            self._coming = self._broadcast(head), head
        work, head = self._coming
        self._wait([work], left_s, "a batch comes from rank", said_s=timeout_s)
        opening, kind, step, state_bytes, batch_bytes = head.tolist()
        if not (0 <= kind < len(_KINDS) and state_bytes >= 0 and batch_bytes >= 0):
            raise IntegrityError(
                f"rank {self.first} sent the head {head.tolist()}, which is none; install one release on all ranks"
            )
        if self._rest is None:
            parts = [torch.empty(size, dtype=torch.uint8) for size in (state_bytes, batch_bytes)]
            works = [self._broadcast(parts[0])] if state_bytes else []
            works += [self._batch(parts[1], ())] if batch_bytes else []
            self._rest = works, parts
        works, parts = self._rest
        self._wait(works, rest_s, "the rest of a batch comes from rank")
        # Only now: a wait that ran out above leaves both to the next call.
        self._coming = self._rest = None
        batch = parts[1].numpy()
        if self._deals and batch_bytes:
            size = int(batch[:_SIZE_BYTES].view(np.int64)[0])
            batch = batch[_SIZE_BYTES : _SIZE_BYTES + size]
        return opening, (_KINDS[kind], step, parts[0].numpy().tobytes(), batch)

    @staticmethod
    def _dealt(batches: Sequence[NDArray[np.uint8]]) -> list[torch.Tensor]:
        """Return batches of one length, each behind its own."""
        longest = _SIZE_BYTES + max(map(len, batches), default=0)
        dealt = []
        for batch in batches:
            of_rank = np.zeros(longest, np.uint8)
            of_rank[:_SIZE_BYTES] = np.asarray([len(batch)]).view(np.uint8)
            of_rank[_SIZE_BYTES : _SIZE_BYTES + len(batch)] = batch
            dealt.append(torch.from_numpy(of_rank))
        return dealt

    def _broadcast(self, tensor: torch.Tensor) -> dist.Work:
        work: dist.Work = dist.broadcast(tensor, self.first, self._group, async_op=True)
        return work

    def _batch(self, own: torch.Tensor, dealt: Sequence[torch.Tensor]) -> dist.Work:
        """Send a batch, or each rank its own of those dealt, or receive one into ``own``."""
        if not self._deals:
            return self._broadcast(own)
        parts = list(dealt) or None
        into = torch.empty_like(own) if parts else own
        work: dist.Work = dist.scatter(into, parts, self.first, self._group, async_op=True)
        return work

    def _is_taken(self) -> bool:
        return all(work.is_completed() for work in self._sent[0][0])

    def _wait(
        self, works: Sequence[dist.Work], timeout_s: float, what: str, said_s: float | None = None
    ) -> None:
        try:
            for work in works:
                work.wait(timedelta(seconds=max(timeout_s, _LEAST_S)))
        except RuntimeError as error:
            raise UnavailableError(
                f"waited {said_s or timeout_s:g} s until {what} {self.first}; does it run, and do all ranks that it "
                f"serves take every batch? ({str(error).splitlines()[0]})"
            ) from error


class TorchPeers(Peers):
    """Ranks that one of them serves, for the loader of one opening."""

    def __init__(self, line: _Line, name: str, timeout_s: float) -> None:
        self.fetching_rank = line.first
        self._line, self._timeout_s = line, timeout_s
        digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
        self._opening = int.from_bytes(digest, "little")
        line.inboxes[self._opening] = deque()

    @override
    def give(
        self, kind: Kind, step: int, state: bytes, batches: Sequence[NDArray[np.uint8]] = ()
    ) -> None:
        self._line.give(self._opening, (kind, step, state), batches, self._timeout_s)

    @override
    def take(self, timeout_s: float) -> tuple[Kind, int, bytes, NDArray[np.uint8]]:
        return self._line.take(self._opening, timeout_s, self._timeout_s)

    @override
    def close(self) -> None:
        self._line.inboxes.pop(self._opening, None)


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
    # By default every rank of the job would have to make this group, also those outside of it.
    group = _met(ranks, rank, name, timeout_s, use_local_synchronization=True)
    return TorchPeers(_Line(group, ranks, deals=False), name, timeout_s)


_DEALT: dict[dist.ProcessGroup, _Line] = {}
"""The way from rank 0 to all ranks, by the process group that they make: one is opened for each evaluation, and a group
that ends while a rank reads would end that rank's read."""


def all_peers(rank: int, name: str, timeout_s: float) -> TorchPeers:
    """Return all ranks of the process group, of which rank 0 sends each its own; all of them ask for it here.

    Args:
        rank: Number of this one.
        name: Of the opening, the same at each of them.
        timeout_s: Longest wait for another of them.

    Raises:
        UnavailableError: A rank does not come.
    """
    world = dist.group.WORLD
    assert world is not None, "whoever deals has looked"
    if world not in _DEALT:
        ranks = range(dist.get_world_size())
        _DEALT[world] = _Line(_met(ranks, rank, name, timeout_s), ranks, deals=True)
    return TorchPeers(_DEALT[world], name, timeout_s)


def _met(
    ranks: Sequence[int],
    rank: int,
    name: str,
    timeout_s: float,
    *,
    use_local_synchronization: bool = False,
) -> dist.ProcessGroup:
    """Meet the other ranks in a group of their own; see ``peers_of``."""
    try:
        group: dist.ProcessGroup = dist.new_group(
            list(ranks),
            backend="gloo",
            timeout=timedelta(seconds=timeout_s),
            use_local_synchronization=use_local_synchronization,
            group_desc=name,
        )
        # A broadcast that a slow step kept waiting would end the group for good; waits are bounded one by one.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=_NEVER_S), group)
    except (dist.DistError, RuntimeError) as error:
        raise UnavailableError(
            f"rank {rank} has not met ranks {list(ranks)}, of which the first serves the others, within {timeout_s:g} "
            "s; do they run, and do they call omniload.open as often as this rank?"
        ) from error
    return group


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
