"""One optimiser step over the microbatches of a batch.

Losses are summed over tokens and divided by the labels of the whole step, which the
data plane counted over all ranks. So neither loss nor gradient depends on which rank or
microbatch a row lands in, beyond rounding.
"""

import time
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from omniload.base.state import JsonObject
from omniload.batch.microbatch import Batch, CpSlice
from trainer_integration.moe.inputs import ModelInputs
from trainer_integration.moe.model import MoETransformer
from trainer_integration.run.optimizer import FlatAdamW

__all__ = ["BatchClient", "StepResult", "train_step", "use_one_thread"]


class BatchClient(Protocol):
    """Where a rank gets its batches from."""

    def next_batch(self) -> Batch | None:
        """Return the batch of the next step; None at the end of the data."""
        ...

    def state_dict(self) -> JsonObject:
        """Return the loader's state after the batches handed out so far, however many are prefetched."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did; all but the last field are of all ranks together."""

    step: int
    """Number of the step."""
    loss: float
    """Mean cross entropy of a label, in nats."""
    balance_loss: float
    """Mean balance loss; 1 where experts are evenly busy."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    lr: float
    """Learning rate of the step."""
    tokens: int
    """Tokens trained on, without padding."""
    expert_imbalance: float
    """Token slots of the busiest expert over the mean, worst layer; 0 where the step had no tokens."""
    seconds_compute: float
    """Time of this rank's forward and backward passes: what the data plane balances."""


def train_step(
    model: MoETransformer,
    optimizer: FlatAdamW,
    batch: Batch,
    group: dist.ProcessGroup | None = None,
) -> StepResult:
    """Train on one batch: accumulate, sum over ranks, clip, update.

    Args:
        model: The model; equal on all ranks, before and after.
        optimizer: Its optimiser.
        batch: This rank's share of the step. Microbatches without rows are skipped; a
            rank without any still takes part in the sum.
        group: Data-parallel ranks; None trains alone.

    Returns:
        Losses and figures of the step. The same batches give the same results.

    Raises:
        StateError: The gradient is not finite; the model has not changed.
        TypeError: A microbatch is a slice of its rows.
    """
    started_s = time.perf_counter()
    optimizer.clear()
    labels = max(1, batch.loss_tokens)
    sums, slots_LE = _accumulate(model, batch, labels)
    seconds_compute = time.perf_counter() - started_s
    optimizer.sum_over(group)
    if group is not None:
        slots_LE = _summed_over(group, sums, slots_LE)
    grad_norm = optimizer.step(batch.step)
    token_loss, balance_loss, tokens = sums.tolist()
    return StepResult(
        step=batch.step,
        loss=token_loss / labels,
        balance_loss=balance_loss / labels,
        grad_norm=grad_norm,
        lr=optimizer.adamw.param_groups[0]["lr"],
        tokens=int(tokens),
        expert_imbalance=_imbalance(slots_LE),
        seconds_compute=seconds_compute,
    )


def _accumulate(
    model: MoETransformer, batch: Batch, labels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run all microbatches forward and backward.

    Returns:
        Summed token loss, balance loss and tokens ``[3]``, and how many token slots each
        expert of each layer took.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    slots_LE = torch.zeros(model.config.num_layers, model.config.num_experts, dtype=torch.int64)
    for microbatch in batch.microbatches:
        if isinstance(microbatch, CpSlice):
            raise TypeError(
                f"step {batch.step} brings a context-parallel slice; the included model attends to "
                "whole rows, so give it a mesh without cp"
            )
        inputs = ModelInputs.of(microbatch)
        if inputs.num_tokens == 0:
            continue
        output = model(inputs)
        objective = output.token_loss + model.config.balance_weight * output.balance_loss
        (objective / labels).backward()
        sums += torch.stack(
            (
                output.token_loss.detach(),
                output.balance_loss.detach().double(),
                torch.tensor(float(inputs.num_tokens), dtype=torch.float64),
            )
        )
        slots_LE += torch.tensor(output.slots_by_expert)
    return sums, slots_LE


def _summed_over(
    group: dist.ProcessGroup, sums_3: torch.Tensor, slots_LE: torch.Tensor
) -> torch.Tensor:
    """Sum ``sums_3`` over ranks in place, and return the sum of ``slots_LE``: one message for both."""
    both = torch.cat((sums_3, slots_LE.flatten().double()))  # counts are exact below 2**53
    dist.all_reduce(both, group=group)
    sums_3.copy_(both[: len(sums_3)])
    return both[len(sums_3) :].view_as(slots_LE)


def _imbalance(slots_LE: torch.Tensor) -> float:
    if int(slots_LE.sum()) == 0:
        return 0.0
    return float((slots_LE.amax(1) / slots_LE.double().mean(1)).max())


def use_one_thread() -> None:
    """Make torch compute on one thread: call once, at the start of every rank's process.

    Several ranks on one machine with more threads than cores spin against each other
    and take many times as long; results then also depend on the number of threads.
    """
    torch.set_num_threads(1)
