"""Torch's collectives for ``omniload.DynamicSampler``: ranks exchange the results of their rollouts.

They use a gloo group of their own, because the trainer's group may move a device's memory. A gather does not tell which
rank is missing, so each rank notes in torch's store which gather it has reached.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from typing_extensions import override

from omniload.base.errors import UnavailableError
from omniload.base.units import counted
from omniload.front.sampling.exchange import Exchange
from trainer_integration.loader.gloo_groups import GlooGroup, met_group

__all__ = ["TorchExchange", "exchange_among", "exchange_of"]

_SHOWN = 8
"""Most ranks named in a message."""
_STUCK_S = 10.0
"""Longest wait for torch's store, which ignores its own limit if the process that hosts it is stopped."""


class _Arrivals:
    """Which gather each rank has reached, as notes in torch's store."""

    def __init__(self, place: str, ranks: Sequence[int], rank: int) -> None:
        """Note that ``rank`` of ``ranks`` has reached no gather yet; a store may have notes of an earlier start."""
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.distributed_c10d.PrefixStore(place, store)
        self._ranks, self._rank = ranks, rank
        self._count, self._is_stuck = -1, False
        self.come()

    def come(self) -> None:
        """Note that this rank reaches the next gather.

        Raises:
            DistNetworkError: The process that hosts the store has ended.
        """
        self._count += 1
        # A question without an answer blocks every other one.
        if not self._is_stuck:
            self._store.set(str(self._rank), str(self._count))

    def missing(self) -> str:
        """Return which ranks have not reached this rank's present gather."""
        answers: list[str] = []
        if not self._is_stuck:
            asking = threading.Thread(
                target=lambda: answers.append(self._missing()), name="omniload-missing", daemon=True
            )
            asking.start()
            asking.join(_STUCK_S)
            self._is_stuck = not answers
        return answers[0] if answers else "torch's store does not answer, nor may its host, rank 0"

    def _missing(self) -> str:
        try:
            absent = [rank for rank in self._ranks if not self._has_come(rank)]
        except RuntimeError:
            return f"rank {self._ranks[0]}, or whoever hosts torch's store, has ended"
        if not absent:
            return "all had come, and one has ended since"
        names = f"{absent[:_SHOWN]}{', ...' if len(absent) > _SHOWN else ''}"
        return f"{counted(len(absent), 'rank')} of the job did not come: {names}"

    def _has_come(self, rank: int) -> bool:
        # Checked first, because reading a note that does not exist would wait for it.
        return self._store.check([str(rank)]) and int(self._store.get(str(rank))) >= self._count


class TorchExchange(Exchange):
    """All-gathers of bytes, over a gloo group of their own, because the trainer's may move a device's memory."""

    def __init__(
        self, group: GlooGroup, arrivals: _Arrivals, rank: int, size: int, timeout_s: float
    ) -> None:
        """Gather over ``group``, in which this is ``rank`` of ``size``."""
        self.rank, self.size = rank, size
        self._group, self._arrivals, self._timeout_s = group, arrivals, timeout_s

    @override
    def all_gather(self, part: bytes) -> list[bytes]:
        try:
            self._arrivals.come()
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            self._group.allgather([sizes], [torch.tensor([len(part)])]).wait()
            lengths = [int(size) for size in sizes]
            # Padded to one length for all ranks, as gloo requires.
            mine = torch.zeros(max(lengths), dtype=torch.uint8)
            mine[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            parts = [torch.empty_like(mine) for _ in range(self.size)]
            self._group.allgather([parts], [mine]).wait()
        except RuntimeError as error:
            raise UnavailableError(
                f"rank {self.rank} of {self.size} waited up to {self._timeout_s:g} s for the others' rollouts: "
                f"{self._arrivals.missing()}; do they run, and ask for as many batches? timeout= waits longer "
                f"({str(error).splitlines()[0]:.200})"
            ) from error
        return [
            each[:length].numpy().tobytes() for each, length in zip(parts, lengths, strict=True)
        ]


_EXCHANGES: Counter[tuple[dist.ProcessGroup, tuple[int, ...]]] = Counter()
"""Number of exchanges that the same ranks of a job have made: the n-th of each rank is the same one, whatever other
groups the rank has."""


def exchange_of(process_group: dist.ProcessGroup | None, timeout_s: float) -> TorchExchange:
    """Return an exchange among the ranks of a process group, all by default; all of them must call this.

    Raises:
        UnavailableError: A rank does not come.
    """
    return exchange_among(dist.get_process_group_ranks(process_group or _world()), timeout_s)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "whoever asks has looked"
    return world


def exchange_among(numbers: Sequence[int], timeout_s: float) -> TorchExchange:
    """Return an exchange among ranks of the job, by their numbers in it, which all of them ask for here.

    Raises:
        UnavailableError: A rank does not come.
    """
    ranks, world = sorted(numbers), _world()
    made, rank = (world, tuple(ranks)), dist.get_rank()
    name = f"omniload/exchange/{_EXCHANGES[made]}"
    try:
        # Posted before they meet, so that no rank counts as missing for lack of its first note.
        arrivals = _Arrivals(f"{name}/{'-'.join(map(str, ranks))}/come", ranks, rank)
        group = met_group(ranks, rank, name, timeout_s)
    except (UnavailableError, dist.DistNetworkError) as error:
        raise UnavailableError(
            f"ranks {ranks} have not met within {timeout_s:g} s; do all of them make a sampler of their loaders? "
            f"({str(error.__cause__ or error).splitlines()[0]:.200})"
        ) from error
    _EXCHANGES[made] += 1
    # An abandoned gather is never resumed: it ends, and the exchange with it.
    group._set_default_timeout(timedelta(seconds=timeout_s))
    return TorchExchange(group, arrivals, ranks.index(rank), len(ranks), timeout_s)
