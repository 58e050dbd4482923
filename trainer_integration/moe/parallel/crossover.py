"""Up to how many experts a token ``a2a`` beats ``ag_rs``: measured on ranks such as will train.

By bytes the two are level where a token has as many experts as there are ranks; by time they differ,
as an all-to-all of many small parts costs more a byte than a ring does.

Shape suffixes:
    N  tokens of this rank        K  experts of a token        D  width        E  experts of all ranks
"""

import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from trainer_integration.moe.config import MoEShape
from trainer_integration.moe.experts import Experts
from trainer_integration.moe.parallel.collectives import Peers
from trainer_integration.moe.parallel.crossover_table import Measured, TransportName
from trainer_integration.moe.parallel.ep_transport import (
    AllGatherReduceScatter,
    AllToAll,
    Transport,
)

__all__ = ["measured"]

_NAMES: tuple[TransportName, ...] = ("a2a", "ag_rs")


def measured(
    peers: Peers, shape: MoEShape, tokens: int, top_ks: Sequence[int], repetitions: int
) -> tuple[Measured, ...]:
    """Time a layer of experts under both transports; all ranks call it together, and have the same answer.

    Choices are random and even: what an untrained router does.
    """
    experts = Experts(shape, shape.num_experts // peers.size)
    generator = torch.Generator().manual_seed(peers.rank)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    x_ND = torch.randn(tokens, shape.dim, generator=generator)
    odds_NE = torch.rand(tokens, shape.num_experts, generator=generator)
    rows = []
    for top_k in top_ks:
        experts_NK = odds_NE.topk(top_k).indices
        gates_NK = torch.full((tokens, top_k), 1 / top_k)
        took_s: dict[TransportName, list[float]] = {name: [] for name in _NAMES}
        sent: dict[TransportName, int] = {}
        # In turn: what else the host does then slows both.
        for name in _NAMES * (repetitions + 1):  # the first of each warms up
            transport = _transport(name, shape.num_experts, peers, tokens)
            leaf_ND, leaf_NK = x_ND.requires_grad_(), gates_NK.requires_grad_()
            peers.traffic.clear()
            dist.barrier(group=peers.group)
            began_s = time.perf_counter()
            experts(leaf_ND, leaf_NK, experts_NK, transport).sum().backward()
            took_s[name].append(time.perf_counter() - began_s)
            sent[name] = sum(peers.traffic.values())
        seconds = {name: _slowest(median(took_s[name][1:]), peers) for name in _NAMES}
        sent = {name: _mean(sent[name], peers) for name in _NAMES}
        rows.append(Measured(top_k=top_k, seconds=seconds, sent_bytes=sent))
    return tuple(rows)


def _slowest(seconds: float, peers: Peers) -> float:
    """Return the most of what any rank took."""
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=peers.group)
    return float(most)


def _mean(sent_bytes: int, peers: Peers) -> int:
    total = peers.summed(torch.tensor(sent_bytes, dtype=torch.float64))
    return round(float(total) / peers.size)


def _transport(name: TransportName, num_experts: int, peers: Peers, tokens: int) -> Transport:
    if name == "a2a":
        return AllToAll(num_experts, peers, drops=False)
    return AllGatherReduceScatter(num_experts, peers, [tokens] * peers.size)
