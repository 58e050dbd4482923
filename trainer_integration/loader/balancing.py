"""Ranks of equal cost: each global batch is dealt anew over the ranks, and the loss takes that into account."""

import copy
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler

from omniload.base.errors import ConfigError
from omniload.base.units import counted
from omniload.plan.balance_methods import balance

__all__ = ["COUNTS", "CostBatches", "cost_batches", "token_mean"]

COUNTS = ("equal", "free")


class CostBatches:
    """One rank's batches of a ``DistributedSampler``, exchanged with the other ranks' batches of the same step.

    torch decides which samples a step has over all ranks; the cost decides which rank takes which. Every rank computes
    the same dealing by itself, so nothing is sent. A step needs one ``cost_fn`` call per sample of the global batch.
    """

    def __init__(
        self, batches: BatchSampler, cost_fn: Callable[[int], float], counts: str = "equal"
    ) -> None:
        """Deal the batches that ``batches`` gives this rank, and those of the other ranks, by cost.

        Args:
            batches: Batches of a ``DistributedSampler``.
            cost_fn: Cost of the sample of an index; finite, at least 0, and the same on every rank.
            counts: ``equal`` for as many samples on every rank, ``free`` for at least one.
        """
        self.sampler: Any = batches.sampler
        self.batch_size, self.drop_last = batches.batch_size, batches.drop_last
        self._length, self._cost_fn, self._counts = len(batches), cost_fn, counts

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[Any]]:
        return self.after(0)

    def after(self, batches: int) -> Iterator[list[Any]]:
        """Return the order from a batch onward, without asking for the costs of earlier batches."""
        ranks = self.sampler.num_replicas
        order = _global_order(self.sampler)
        whole = islice(order, batches * self.batch_size * ranks, None)
        for _ in range(batches, self._length):
            yield self._dealt(list(islice(whole, self.batch_size * ranks)))

    def _dealt(self, members: list[Any]) -> list[Any]:
        """Return this rank's part of a global batch, in the sampler's order."""
        ranks, rank = self.sampler.num_replicas, self.sampler.rank
        costs_N = np.asarray([self._cost(index) for index in members])
        each = len(members) // ranks
        least, most = (each, each) if self._counts == "equal" else (1, None)
        # The result is the same on every rank without a message, because all use the same costs in the same order.
        dealt = balance(costs_N, ranks, max_count=most, min_count=least)
        return [members[at] for at in np.flatnonzero(dealt.bins_N == rank).tolist()]

    def _cost(self, index: Any) -> float:
        cost = float(self._cost_fn(index))
        if not 0 <= cost < float("inf"):
            raise ConfigError(
                f"cost_fn({index!r:.60}) returned {cost}; a cost is finite and at least 0"
            )
        return cost


def _global_order(sampler: Any) -> Iterator[Any]:
    """Return the indices of all ranks in turn: of rank 0, 1, 2, ..., and again of rank 0."""
    whole = copy.copy(sampler)
    if type(sampler).__iter__ is DistributedSampler.__iter__:
        # Read as the only rank, so that the epoch is shuffled once, and not once per rank.
        whole.rank, whole.num_replicas, whole.num_samples = 0, 1, sampler.total_size
        return iter(whole)
    # A subclass may use any order, so each rank's order is read from a copy with that rank's number.
    orders = []
    for rank in range(sampler.num_replicas):
        whole = copy.copy(sampler)
        whole.rank = rank
        orders.append(iter(whole))
    return chain.from_iterable(zip(*orders, strict=True))


def cost_batches(loader: Any, cost_fn: Any, counts: Any) -> CostBatches:
    """Return the batches of a loader, dealt by cost.

    Raises:
        ConfigError: The loader's order is not that of a ``DistributedSampler``, or a value is unknown.
    """
    if not callable(cost_fn):
        raise ConfigError(
            f"cost_fn={cost_fn!r:.60} is no function; give one that returns the cost of an index"
        )
    if counts not in COUNTS:
        raise ConfigError(f"cost_counts={counts!r:.60} is not one of {list(COUNTS)}; choose one")
    batches = getattr(loader, "batch_sampler", None)
    if type(batches) is not BatchSampler or not isinstance(batches.sampler, DistributedSampler):
        found = type(getattr(batches, "sampler", batches)).__name__
        raise ConfigError(
            f"cost_fn= deals the batches of a DistributedSampler over its ranks, found {found}; "
            "give sampler=DistributedSampler(dataset) and batch_size="
        )
    return CostBatches(batches, cost_fn, counts)


def token_mean(
    loss_sum: torch.Tensor, tokens: "int | torch.Tensor", group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the loss whose gradient, averaged over the ranks, is that of the mean over all tokens of the step.

    Rank ``r`` of ``R`` has the sum ``S_r`` over its ``n_r`` tokens, and ``N`` is the sum of all ``n_r``.
    DistributedDataParallel and FSDP average gradients, so with ``R * S_r / N`` the step's gradient is that of
    ``(S_1 + ... + S_R) / N``. If each rank used its own mean, ``S_r / n_r``, the tokens of a rank with few tokens would
    get more weight.

    Args:
        loss_sum: ``S_r``, with ``reduction="sum"``; scalar.
        tokens: ``n_r``, the number of tokens in ``loss_sum``. May be 0 if another rank has some.
        group: Ranks whose gradients are averaged; by default, the default group.

    Raises:
        ValueError: No rank has a token.
    """
    # Exact up to 2**53, while float32 would round from 2**24 on.
    total = torch.as_tensor(tokens, dtype=torch.float64, device=loss_sum.device).clone()
    ranks = 1
    if dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size(group)
        dist.all_reduce(total, group=group)
    count = float(total)
    if count <= 0:
        raise ValueError(
            f"the step has {count:g} tokens on {counted(ranks, 'rank')}; a mean needs one"
        )
    return loss_sum * (ranks / count)
