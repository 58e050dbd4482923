"""Loss of each source of an evaluation mix: every document once, independent of the ranks.

The rows of the mix come in one fixed order, and are dealt to the data-parallel ranks in turn, microbatch by microbatch.
Each rank reads all of them, and computes its own share. All ranks make the same number of forward passes, for which the
ranks of a sharded model meet. Peers that share layers take the same microbatches.

Shape suffixes:
    N  tokens of this rank        M  those with a label        S  sources        F  figures: losses, labels
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.batch.microbatch import CpSlice, Microbatch
from omniload.batch.slices import slice_for_cp
from omniload.client import Client
from trainer_integration.moe.documents import on_device
from trainer_integration.moe.model import MoETransformer
from trainer_integration.moe.parallel.process_groups import ProcessGroups
from trainer_integration.moe.parallel.sharding import is_sharded

__all__ = ["Evaluation", "evaluate", "summed_losses"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Result of an evaluation."""

    loss: dict[str, float]
    """Mean cross entropy per label, in nats, by source; sources without a label are left out."""
    labels: dict[str, int]
    """Number of labels by source."""


@torch.no_grad()
def evaluate(model: MoETransformer, spec: PlaneSpec, groups: ProcessGroups) -> Evaluation:
    """Return the losses of a mix that hands out every document once; all ranks call it together.

    Args:
        model: The model, which does not change.
        spec: The mix, for one rank, without a folder to keep anything in.
        groups: The ranks that share the work.
    """
    names = spec.mix.names
    dp_rank, dp_size = 0, 1
    if groups.dp is not None:
        dp_rank, dp_size = dist.get_rank(groups.dp), dist.get_world_size(groups.dp)
    sums_SF = torch.zeros(len(names), 2, dtype=torch.float64)
    # Nothing of it is kept, because the same mix is opened again for the next evaluation.
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        for rows, counts in _dealt(_microbatches(client), dp_rank, dp_size):
            found_SF = summed_losses(model, rows, len(names)).cpu()
            # A pass that does not count serves the ranks of a sharded model: its rows belong to another rank.
            if counts:
                sums_SF += found_SF
    if isinstance(model, FSDPModule):
        # Parameters outside of layers stay whole after a forward pass, for a backward pass.
        model.reshard()
    # Each peer has counted its own part of a row, so the sum over all ranks counts every token once.
    if groups.world is not None:
        dist.all_reduce(sums_SF, group=groups.world)
    loss_S, labels_S = sums_SF.T.tolist()
    found = [
        (n, loss, round(labels)) for n, loss, labels in zip(names, loss_S, labels_S, strict=True)
    ]
    return Evaluation(
        loss={name: loss / labels for name, loss, labels in found if labels},
        labels={name: labels for name, _, labels in found},
    )


def _microbatches(client: Client) -> Iterator[Microbatch]:
    while (batch := client.next_batch()) is not None:
        for rows in batch.microbatches:
            assert isinstance(rows, Microbatch), "the plane is of one rank"
            yield rows


def _dealt(
    microbatches: Iterable[Microbatch], rank: int, size: int
) -> Iterator[tuple[Microbatch, bool]]:
    """Yield every ``size``-th microbatch from ``rank`` on, and whether it counts; all ranks get the same number.

    A rank that the last round does not reach gets the round's first microbatch, which does not count.
    """
    first, number = None, -1
    for number, rows in enumerate(microbatches):
        if number % size == 0:
            first = rows
        if number % size == rank:
            yield rows, True
    if first is not None and 0 < (number + 1) % size <= rank:
        yield first, False


@torch.no_grad()
def summed_losses(model: MoETransformer, rows: Microbatch, num_sources: int) -> Tensor:
    """Return this rank's cross entropy and its labels, summed by source, ``[S, F]``, float64."""
    peers = model.peers
    part: Microbatch | CpSlice = rows
    sources_RT = rows.source_ids_RT
    if peers.size > 1:
        part = piece = slice_for_cp(rows, peers.rank, peers.size)
        sources_RT = sources_RT[:, piece.indices_C]
    inputs = model.inputs_of(part, dealt=False)
    sums_SF = torch.zeros(num_sources, 2, dtype=torch.float64, device=model.device)
    if inputs.is_empty and not is_sharded(model):
        return sums_SF
    sources_N = on_device(sources_RT[sources_RT >= 0], model.device)
    labelled_M, losses_M = model.label_losses(inputs)
    # Loss and count together, so that one pass adds up both.
    both_MF = torch.stack((losses_M, torch.ones_like(losses_M)), dim=1)
    return sums_SF.index_add_(0, sources_N[labelled_M], both_MF)
