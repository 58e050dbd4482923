"""Measures the crossover of the transports: ranks on this host, for as long as that takes."""

import multiprocessing
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from omniload.base.errors import UnavailableError
from omniload.base.linux.network import LOOPBACK
from trainer_integration.moe.config import MoEShape
from trainer_integration.moe.parallel.crossover import measured
from trainer_integration.moe.parallel.crossover_table import Crossover, Measured
from trainer_integration.moe.parallel.process_groups import ProcessGroups
from trainer_integration.training.step import use_one_thread

__all__ = ["measured_crossover"]

_START_S = 120.0


def measured_crossover(
    shape: MoEShape, *, sp: int, tokens: int, top_ks: Sequence[int], repetitions: int = 5
) -> Crossover:
    """Start ``sp`` ranks over gloo and loopback, and have them measure.

    Args:
        shape: Of the layer.
        sp: Ranks; they divide its experts.
        tokens: Of a rank.
        top_ks: Experts of a token, rising.
        repetitions: Of each; the median counts.

    Raises:
        UnavailableError: A rank ended, or did not answer in time.
    """
    context = multiprocessing.get_context("spawn")
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    ours, theirs = context.Pipe(duplex=False)
    job = (shape, sp, tokens, tuple(top_ks), repetitions)
    ranks = [
        context.Process(target=_rank, args=(n, store.port, job, theirs), daemon=True)
        for n in range(sp)
    ]
    try:
        for rank in ranks:
            rank.start()
        theirs.close()
        limit_s = _START_S * (1 + len(top_ks))
        try:
            rows: tuple[Measured, ...] | None = ours.recv() if ours.poll(limit_s) else None
        except EOFError:
            rows = None
        if rows is None:
            raise UnavailableError(
                f"{sp} ranks have not measured {len(top_ks)} numbers of experts within {limit_s:g} s, or one has "
                "ended; what it said stands above"
            )
    finally:
        for rank in ranks:
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


_Job = tuple[MoEShape, int, int, tuple[int, ...], int]


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
