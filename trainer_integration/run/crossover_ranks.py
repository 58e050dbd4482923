"""Measures the crossover of the transports: the number of experts per token up to which ``a2a`` beats ``ag_rs``.

Ranks on this host, like those that will train, measure it. By bytes, the two are equal when a token has as many experts
as there are ranks. By time they differ, because an all-to-all of many small parts costs more per byte than a ring.

Shape suffixes:
    N  tokens of this rank        K  experts of a token        D  width        E  experts of all ranks
"""

import multiprocessing
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from omniload.base.errors import UnavailableError, system_refusals
from omniload.base.linux.network import LOOPBACK
from trainer_integration.moe.block import Experts
from trainer_integration.moe.config import MoEShape
from trainer_integration.moe.parallel.collectives import Peers
from trainer_integration.moe.parallel.crossover_table import Crossover, Measured, TransportName
from trainer_integration.moe.parallel.ep_transport import (
    AllGatherReduceScatter,
    AllToAll,
    Transport,
)
from trainer_integration.moe.parallel.process_groups import ProcessGroups
from trainer_integration.training.step import use_one_thread

__all__ = ["measured", "measured_crossover"]

_NAMES: tuple[TransportName, ...] = ("a2a", "ag_rs")
_START_S = 120.0
_Job = tuple[MoEShape, int, int, tuple[int, ...], int]


def measured(
    peers: Peers, shape: MoEShape, tokens: int, top_ks: Sequence[int], repetitions: int
) -> tuple[Measured, ...]:
    """Time a layer of experts under both transports; all ranks call it together, and get the same answer.

    Choices of experts are random and even, like those of an untrained router.
    """
    experts = Experts(shape, shape.num_experts // peers.size)
    # Each rank has its own tokens and choices, as ranks that train have.
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
        # Alternately, so that other work of the host slows both.
        for name in _NAMES * (repetitions + 1):  # the first of each warms up
            transport = _transport(name, shape.num_experts, peers, tokens)
            # Backward sends as much again, and is included, because training pays for both.
            leaf_ND, leaf_NK = x_ND.requires_grad_(), gates_NK.requires_grad_()
            peers.traffic.clear()
            dist.barrier(group=peers.group)
            began_s = time.perf_counter()
            experts(leaf_ND, leaf_NK, experts_NK, transport).sum().backward()
            # There is no wait for a device, because this is measured on CPUs, where a call returns when it is done.
            took_s[name].append(time.perf_counter() - began_s)
            sent[name] = sum(peers.traffic.values())
        seconds = {name: _slowest(median(took_s[name][1:]), peers) for name in _NAMES}
        sent = {name: _mean(sent[name], peers) for name in _NAMES}
        rows.append(Measured(top_k=top_k, seconds=seconds, sent_bytes=sent))
    return tuple(rows)


def _slowest(seconds: float, peers: Peers) -> float:
    """Return the longest time of any rank."""
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


def measured_crossover(
    shape: MoEShape, *, sp: int, tokens: int, top_ks: Sequence[int], repetitions: int = 5
) -> Crossover:
    """Start ``sp`` ranks over gloo and loopback, and have them measure.

    Args:
        shape: Shape of the layer.
        sp: Number of ranks, which divide its experts.
        tokens: Tokens of a rank.
        top_ks: Experts of a token, rising.
        repetitions: Repetitions of each; the median counts.

    Raises:
        UnavailableError: A rank did not start, ended, or did not answer in time.
    """
    # A fork would copy the store's sockets without the thread that serves them.
    context = multiprocessing.get_context("spawn")
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    ours, theirs = context.Pipe(duplex=False)
    job = (shape, sp, tokens, tuple(top_ks), repetitions)
    ranks = [
        context.Process(target=_rank, args=(n, store.port, job, theirs), daemon=True)
        for n in range(sp)
    ]
    started: list[SpawnProcess] = []
    try:
        for number, rank in enumerate(ranks):
            with system_refusals(f"rank {number} of {sp} that measure"):
                rank.start()
            started.append(rank)
        # This end is closed here, because it would keep the pipe open, whose end shows that all ranks have ended.
        theirs.close()
        limit_s = _START_S * (1 + len(top_ks))
        try:
            rows: tuple[Measured, ...] | None = ours.recv() if ours.poll(limit_s) else None
        except EOFError:
            rows = None
        if rows is None:
            raise UnavailableError(
                f"{sp} ranks have not measured {len(top_ks)} numbers of experts within {limit_s:g} s, or one has "
                "ended; its output is above"
            )
    finally:
        for rank in started:
            # If one rank has failed, the others wait for it in a collective.
            rank.kill()
            rank.join()
    return Crossover(
        sp=sp,
        tokens=tokens,
        dim=shape.dim,
        hidden=shape.hidden,
        num_experts=shape.num_experts,
        rows=rows,
    )


def _rank(number: int, port: int, job: _Job, told: Connection) -> None:
    shape, sp, tokens, top_ks, repetitions = job
    use_one_thread()
    store = TCPStore(LOOPBACK, port, wait_for_workers=False)
    timeout = timedelta(seconds=_START_S)
    dist.init_process_group("gloo", store=store, rank=number, world_size=sp, timeout=timeout)
    rows = measured(ProcessGroups.of(1, sp).sp, shape, tokens, top_ks, repetitions)
    if number == 0:
        told.send(rows)
    told.close()
    dist.destroy_process_group()
