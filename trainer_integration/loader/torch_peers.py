"""Torch's collectives for ``omniload.open``: ranks that get their batches from another rank.

They use gloo groups of their own, because the trainer's may move a device's memory.
"""

import hashlib
import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import cast, get_args

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.clock import Deadline
from omniload.base.errors import ConfigError, IntegrityError, UnavailableError
from omniload.batch.wire import Parts
from omniload.front.peers import Kind, Message, Peers
from trainer_integration.loader.gloo_groups import GlooGroup, met_group

__all__ = ["TorchPeers", "all_peers", "peers_of"]

_KINDS = get_args(Kind)
_HEAD_NUMBERS = 5
"""Numbers of a head: opening, kind, step, bytes of the state, bytes of each rank's own part; then the bytes of each
line."""
_MOST_UNDER_WAY = 4
"""Messages that peers may not have taken yet; the fetching rank gets no further ahead of them."""
_LEAST_S = 0.001
"""Least wait, because torch does not accept 0."""
_LOST = ("closed by peer", "reset by peer", "Broken pipe")
"""Texts of gloo's errors when the other process has ended."""

_SIZE_BYTES = 8
"""Size of the length in front of each rank's own part: gloo requires equal lengths, so all have the length of the
longest."""
_NONE, _NOTHING = np.empty(0, np.uint8), Parts()


class _Line:
    """Gloo groups over which one rank sends to others, for the loaders of one opening or of several.

    The first group has all of them; each rank is also in the groups of the lines of a batch that it takes, with one
    broadcast per line. A rank's own part is sent over the first group.
    """

    def __init__(
        self,
        group: GlooGroup,
        ranks: Sequence[int],
        lines: Sequence[GlooGroup | None],
    ) -> None:
        """Send to ``ranks``, the first of which sends.

        Args:
            group: Group of all of them.
            ranks: Their numbers in the job.
            lines: Group of each line of a batch; ``None`` if this rank takes none of it.
        """
        self.first, self._ranks, self._group, self._lines = ranks[0], ranks, group, lines
        self._sent: deque[tuple[list[dist.Work], list[torch.Tensor]]] = deque()
        self._coming: tuple[dist.Work, torch.Tensor] | None = None
        """Outstanding receive of the next message's head; an abandoned wait is resumed."""
        self._rest: tuple[list[dist.Work], list[torch.Tensor]] | None = None
        """Outstanding receive of the parts after that head: state, lines, and this rank's own part."""
        self._come: tuple[int, Message] | None = None
        """A message that has arrived, and is not in its inbox yet."""
        self._turn = threading.Lock()
        self.inboxes: dict[int, deque[Message]] = {}
        """Messages that have arrived, for each opening that this rank has open; others are dropped."""

    def give(
        self, opening: int, message: tuple[Kind, int, bytes], parts: Parts, timeout_s: float
    ) -> None:
        """Send, in order, without getting more than a few messages ahead.

        Raises:
            UnavailableError: The peers have not taken those in time. This message is not sent, and may be given again;
                but the last message of an opening is sent anyway.
        """
        kind, step, state = message
        own = _of_one_length(parts.own)
        shared = list(parts.shared) or [_NONE] * len(self._lines)
        # The lengths are sent first, so that the receivers can allocate memory of the right size.
        sizes = [len(state), len(own[0]) if own else 0, *map(len, shared)]
        head = torch.tensor([opening, _KINDS.index(kind), step, *sizes])
        # A copy, because torch warns of memory that it cannot write to.
        note = torch.frombuffer(bytearray(state), dtype=torch.uint8) if state else torch.empty(0)
        lines = [torch.from_numpy(each) for each in shared]
        is_last = kind == "closed"
        with self._turn:
            # Waited for before sending: a caller that gives up may give the message again, and peers get it once.
            if not is_last:
                self._wait_until_taken(timeout_s, but=_MOST_UNDER_WAY - 1)
            works = self._works([head, note, *lines], [self._group, self._group, *self._lines])
            works += [self._scatter(torch.empty_like(own[0]), own)] if own else []
            # The tensors are kept until they are taken, because gloo reads from their memory.
            self._sent.append((works, [head, note, *lines, *own]))
            # The last message is not waited for: a peer that has its last batch may be gone, and does not need it.
            while is_last and len(self._sent) > _MOST_UNDER_WAY:
                self._wait_for_oldest(timeout_s)

    def _wait_until_taken(self, timeout_s: float, *, but: int) -> None:
        """Wait for sent messages, the oldest first, until at most ``but`` are left."""
        while self._sent and (len(self._sent) > but or self._is_taken()):
            self._wait_for_oldest(timeout_s)

    def _wait_for_oldest(self, timeout_s: float) -> None:
        works, _ = self._sent[0]
        self._wait(works, timeout_s, f"ranks {list(self._ranks[1:])} take a batch of rank")
        self._sent.popleft()

    def take(
        self, opening: int, behind: Message | None, timeout_s: float, rest_s: float
    ) -> Message:
        """Wait for an opening's message after ``behind``; ``rest_s`` limits the wait for the parts after a head."""
        inbox, deadline = self.inboxes[opening], Deadline(timeout_s)
        with self._turn:
            if inbox and inbox[0] is behind:
                inbox.popleft()
            while not inbox:
                if self._come is None:
                    self._receive(deadline.left_s(), timeout_s, rest_s)
                of, message = cast("tuple[int, Message]", self._come)
                into = self.inboxes.get(of)
                # Compared by identity, because after an interrupt it may be there already.
                if into is not None and not any(each is message for each in into):
                    into.append(message)
                self._come = None
            return inbox[0]

    def _receive(self, left_s: float, timeout_s: float, rest_s: float) -> None:
        if self._coming is None:
            head = torch.empty(_HEAD_NUMBERS + len(self._lines), dtype=torch.int64)
            self._coming = self._broadcast(head, self._group), head
        work, head = self._coming
        self._wait([work], left_s, "a batch comes from rank", said_s=timeout_s)
        opening, kind, step, state_bytes, own_bytes, *line_bytes = head.tolist()
        sizes = [state_bytes, *line_bytes, own_bytes]
        if not (0 <= kind < len(_KINDS) and min(sizes) >= 0):
            raise IntegrityError(
                f"rank {self.first} sent the head {head.tolist()}, which is none; install one release on all ranks"
            )
        if self._rest is None:
            groups = [self._group, *self._lines]
            # No part of a line arrives that this rank does not take.
            parts = [
                torch.empty(size if group is not None else 0, dtype=torch.uint8)
                for size, group in zip(sizes, [*groups, self._group], strict=True)
            ]
            works = self._works(parts[:-1], groups)
            works += [self._scatter(parts[-1], ())] if own_bytes else []
            self._rest = works, parts
        works, (state, *lines, own) = self._rest
        self._wait(works, rest_s, "the rest of a batch comes from rank")
        found = Parts(
            shared=[line.numpy() for line in lines if len(line)],
            own=[_unpadded(own.numpy())] if own_bytes else (),
        )
        come = opening, (_KINDS[kind], step, state.numpy().tobytes(), found)
        # Only now, so that a wait that ran out leaves all to the next call; one statement, because of interrupts.
        self._come, self._coming, self._rest = come, None, None

    def _works(
        self, tensors: Sequence[torch.Tensor], groups: Sequence[GlooGroup | None]
    ) -> list[dist.Work]:
        """Begin to send or receive the non-empty tensors, each over its group if this rank is in it."""
        return [
            self._broadcast(tensor, group)
            for tensor, group in zip(tensors, groups, strict=True)
            if group is not None and len(tensor)
        ]

    def _broadcast(self, tensor: torch.Tensor, group: GlooGroup) -> dist.Work:
        return group.broadcast(tensor, 0)

    def _scatter(self, own: torch.Tensor, parts: Sequence[torch.Tensor]) -> dist.Work:
        """Send each rank its own of ``parts``, or receive this rank's own into ``own``."""
        # Not sent from rank to rank, because giving up the wait for such a send closes the connection.
        return self._group.scatter(own, list(parts), 0)

    def _is_taken(self) -> bool:
        return all(work.is_completed() for work in self._sent[0][0])

    def _wait(
        self, works: Sequence[dist.Work], timeout_s: float, what: str, said_s: float | None = None
    ) -> None:
        try:
            for work in works:
                work.wait(timedelta(seconds=max(timeout_s, _LEAST_S)))
        except RuntimeError as error:
            if any(word in str(error) for word in _LOST):
                # Raised immediately, whatever the limit: this is the first sign that a rank has failed.
                raise UnavailableError(
                    f"a connection was lost before {what} {self.first}: a process has ended, and its own output says "
                    f"why ({str(error).splitlines()[0]})"
                ) from error
            raise UnavailableError(
                f"waited {said_s or timeout_s:g} s until {what} {self.first}; does it run, and do all ranks that it "
                f"serves take every batch? ({str(error).splitlines()[0]})"
            ) from error


def _of_one_length(parts: Sequence[NDArray[np.uint8]]) -> list[torch.Tensor]:
    """Return each rank's own part, preceded by its length and padded to one common length."""
    longest = _SIZE_BYTES + max(map(len, parts), default=0)
    padded = []
    for part in parts:
        of_rank = np.zeros(longest, np.uint8)
        of_rank[:_SIZE_BYTES] = np.asarray([len(part)]).view(np.uint8)
        of_rank[_SIZE_BYTES : _SIZE_BYTES + len(part)] = part
        padded.append(torch.from_numpy(of_rank))
    return padded


def _unpadded(own: NDArray[np.uint8]) -> NDArray[np.uint8]:
    size = int(own[:_SIZE_BYTES].view(np.int64)[0])
    return own[_SIZE_BYTES : _SIZE_BYTES + size]


class TorchPeers(Peers):
    """The ranks that one rank serves, for the loader of one opening."""

    def __init__(self, line: _Line, name: str, timeout_s: float) -> None:
        self.fetching_rank = line.first
        self._line, self._timeout_s = line, timeout_s
        digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
        self._opening = int.from_bytes(digest, "little")
        line.inboxes[self._opening] = deque()

    @override
    def give(self, kind: Kind, step: int, state: bytes, parts: Parts = _NOTHING) -> None:
        self._line.give(self._opening, (kind, step, state), parts, self._timeout_s)

    @override
    def take(self, timeout_s: float, behind: Message | None = None) -> Message:
        return self._line.take(self._opening, behind, timeout_s, self._timeout_s)

    @override
    def close(self) -> None:
        self._line.inboxes.pop(self._opening, None)


def peers_of(lines: Sequence[Sequence[int]], rank: int, name: str, timeout_s: float) -> TorchPeers:
    """Return the ranks that train on the same rows as ``rank``, which meets the others here.

    Args:
        lines: Ranks that take each line of a batch, the sending rank first; the first line has all of them.
        rank: Number of this rank.
        name: Name of the opening, the same on each of them.
        timeout_s: Longest wait for another of them.

    Raises:
        ConfigError: There is no process group, so no mesh belongs to this job.
        UnavailableError: A peer does not come.
    """
    ranks = lines[0]
    if not dist.is_initialized():
        raise ConfigError(
            f"rank {rank} has peers {list(ranks)} along tp, pp or ep, and no process group; call "
            "init_process_group (init_device_mesh does) before omniload.open"
        )
    # All ranks have the lines in one order, so that no two ranks wait for each other at different lines.
    groups = [met_group(line, rank, name, timeout_s) if rank in line else None for line in lines]
    assert groups[0] is not None, "a rank is among its peers"
    return TorchPeers(_Line(groups[0], ranks, groups), name, timeout_s)


_DEALT: dict[dist.ProcessGroup, _Line] = {}
"""Connection from rank 0 to all ranks, by the process group that they make. It is kept, because each evaluation opens
one, and a group that ends while a rank reads would end that rank's read."""


def all_peers(rank: int, name: str, timeout_s: float) -> TorchPeers:
    """Return all ranks of the process group, to which rank 0 sends each its own part; all of them must call this.

    Args:
        rank: Number of this rank.
        name: Name of the opening, the same on each of them.
        timeout_s: Longest wait for another of them.

    Raises:
        UnavailableError: A rank does not come.
    """
    world = dist.group.WORLD
    assert world is not None, "whoever deals has looked"
    if world not in _DEALT:
        ranks = range(dist.get_world_size())
        _DEALT[world] = _Line(met_group(ranks, rank, name, timeout_s), ranks, ())
    return TorchPeers(_DEALT[world], name, timeout_s)
