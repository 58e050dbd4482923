"""The collectives of a layer, forward and backward, and the bytes that they send.

The backward of each collective is another one here: that of an exchange of rows is the reverse exchange, that of a
gather is a sum that is scattered. Bytes count if they leave a rank for another one, by purpose.

Shape suffixes:
    N  rows of this rank        M  rows of all ranks        ``...`` whatever a row is
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from omniload.base.errors import StateError

__all__ = ["ALONE", "Peers"]

# torch before 2.13 has both under other names, for which later releases warn.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The ranks that share every layer: its tokens (SP) and its experts (EP)."""

    group: dist.ProcessGroup | None = None
    """``None`` for a single rank."""
    rank: int = 0
    """This rank's place among them."""
    size: int = 1
    """Number of ranks."""
    traffic: Counter[str] = field(default_factory=Counter)
    """Bytes this rank has sent to others, by purpose; ``NAME.backward`` for gradients."""

    def exchange(
        self, rows_N: Tensor, send: Sequence[int], receive: Sequence[int], name: str
    ) -> Tensor:
        """Send each peer its rows and return what they sent, in the order of their ranks, ``[M, ...]``.

        Args:
            rows_N: Rows for peer 0, then those for peer 1, ...
            send: Number of rows for each peer.
            receive: Number of rows from each peer, equal to the peer's ``send``.
            name: Purpose of the rows, for ``traffic``.
        """
        rows_M: Tensor = _Exchange.apply(rows_N, self, tuple(send), tuple(receive), name)  # type: ignore[no-untyped-call]
        return rows_M

    def require_agreed(
        self, send: Sequence[int], receive: Sequence[int], device: torch.device
    ) -> None:
        """Compare the image embeddings that peers expect with those sent: a mismatch would block or corrupt memory.

        Args:
            send: Number of embeddings for each peer.
            receive: Number of embeddings expected from each peer.
            device: Device of the group's tensors.

        Raises:
            StateError: Two ranks differ; raised on all of them.
        """
        ones = [1] * self.size
        told = self.exchange(torch.tensor(send, device=device), ones, ones, "image counts").tolist()
        faults = [
            f"rank {rank} sends {sends} embeddings of images and rank {self.rank} expects {expected}"
            for rank, (sends, expected) in enumerate(zip(told, receive, strict=True))
            if sends != expected
        ]
        if int(self.summed(torch.tensor(len(faults), device=device))):
            found = (
                faults[0] if faults else "other ranks differ in the embeddings of images they send"
            )
            raise StateError(
                f"{found}: they have batches of different steps; take every batch once on every rank"
            )

    def gather(self, rows_N: Tensor, name: str) -> Tensor:
        """Return the rows of all peers in the order of their ranks, ``[M, ...]``; all have the same number."""
        rows_M: Tensor = _Gather.apply(rows_N, self, name)  # type: ignore[no-untyped-call]
        return rows_M

    def sum_scattered(self, rows_M: Tensor, name: str) -> Tensor:
        """Return this rank's share of the sum of all peers' rows, ``[N, ...]``."""
        rows_N: Tensor = _SumScattered.apply(rows_M, self, name)  # type: ignore[no-untyped-call]
        return rows_N

    def summed(self, figures: Tensor) -> Tensor:
        """Return the sum over peers, without a gradient."""
        # A copy, because the sum is written in place, and the caller still needs this rank's figures.
        total = figures.detach().clone()
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return total

    def count(self, name: str, elements: int, of: Tensor) -> None:
        """Count elements that leave this rank."""
        self.traffic[name] += elements * of.element_size()


ALONE = Peers()
"""Peers of a rank that shares its layers with no other rank."""


def _exchanged(
    rows: Tensor, peers: Peers, send: Sequence[int], receive: Sequence[int], name: str
) -> Tensor:
    rows = rows.contiguous()
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(received, rows, list(receive), list(send), group=peers.group)
    # Rows that a rank keeps are not transmitted.
    others = sum(send) - send[peers.rank]
    peers.count(name, others * rows[:1].numel() if len(rows) else 0, rows)
    return received


def _gathered(rows: Tensor, peers: Peers, name: str) -> Tensor:
    rows = rows.contiguous()
    # One buffer, in the order of ranks, because a list of tensors would have to be concatenated afterwards.
    gathered = rows.new_empty(peers.size * len(rows), *rows.shape[1:])
    _ALL_GATHER(gathered, rows, group=peers.group)
    peers.count(name, (peers.size - 1) * rows.numel(), rows)
    return gathered


def _sum_scattered(rows: Tensor, peers: Peers, name: str) -> Tensor:
    rows = rows.contiguous()
    share = rows.new_empty(len(rows) // peers.size, *rows.shape[1:])
    _REDUCE_SCATTER(share, rows, group=peers.group)
    peers.count(name, (peers.size - 1) * share.numel(), rows)
    return share


class _Exchange(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        rows: Tensor,
        peers: Peers,
        send: tuple[int, ...],
        receive: tuple[int, ...],
        name: str,
    ) -> Tensor:
        ctx.peers, ctx.send, ctx.receive, ctx.name = peers, send, receive, name
        return _exchanged(rows, peers, send, receive, name)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        back = _exchanged(grad, ctx.peers, ctx.receive, ctx.send, ctx.name + ".backward")
        return back, None, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, rows: Tensor, peers: Peers, name: str) -> Tensor:
        ctx.peers, ctx.name = peers, name
        return _gathered(rows, peers, name)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # A row that all ranks received has a gradient from each of them.
        return _sum_scattered(grad, ctx.peers, ctx.name + ".backward"), None, None


class _SumScattered(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, rows: Tensor, peers: Peers, name: str) -> Tensor:
        ctx.peers, ctx.name = peers, name
        return _sum_scattered(rows, peers, name)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # Every rank's summand went into the row with the same weight, so each gets the row's gradient unchanged.
        return _gathered(grad, ctx.peers, ctx.name + ".backward"), None, None
