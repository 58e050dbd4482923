"""One optimiser step over the microbatches of a batch.

Losses are summed over tokens and divided by the labels of the whole step, which the data plane counted over all ranks.
So neither loss nor gradient depends on the rank or microbatch of a row, apart from rounding.
"""

import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from omniload.base.errors import ConfigError
from omniload.batch.microbatch import Batch, CpSlice, Microbatch, rows_of
from trainer_integration.config import SpikeGuardConfig
from trainer_integration.moe.model import MoETransformer
from trainer_integration.moe.parallel.process_groups import ProcessGroups
from trainer_integration.moe.parallel.sharding import is_sharded
from trainer_integration.training.optimizer import FlatAdamW
from trainer_integration.training.progress import TrainingProgress
from trainer_integration.training.spike_guard import Spike
from trainer_integration.training.step_figures import StepFigures
from trainer_integration.training.throughput import (
    PassTime,
    PassTimes,
    model_flops,
    token_pairs,
)

__all__ = [
    "StepResult",
    "StepSums",
    "StepTotals",
    "accumulate",
    "train_step",
    "use_one_thread",
]

ALONE = ProcessGroups()
"""Groups of a single rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of a step; all fields but the last are over all ranks."""

    step: int
    """Number of the step."""
    figures: StepFigures
    """Figures of the model in the step; none of them is missing."""
    flops: float
    """FLOPs of the model, forward and backward."""
    spike: Spike | None
    """Reason why the model has not changed; ``None`` if it has."""
    seconds_compute: float
    """Time of this rank's forward and backward passes, which the data plane balances."""
    passes: tuple[PassTime, ...]
    """Time of each of its microbatches; empty if ranks wait for each other within a pass."""


def train_step(
    model: MoETransformer,
    optimizer: FlatAdamW,
    batch: Batch,
    groups: ProcessGroups = ALONE,
    progress: TrainingProgress | None = None,
) -> StepResult:
    """Train on one batch: accumulate, sum over ranks, clip, update; or skip the update of a spike.

    Args:
        model: The model; equal on all ranks, before and after, except for experts that are divided among ranks, and for
            the part of a sharded model.
        optimizer: Its optimiser.
        batch: This rank's share of the step. Microbatches without rows are skipped if the model is not sharded; a rank
            without any still takes part in the sum.
        groups: The ranks that train together.
        progress: Progress of the run before the step, which is updated. ``None``: no tokens before, and no guard.

    Returns:
        Losses and figures of the step. The same batches give the same results.

    Raises:
        StateError: The gradient is not finite, or is a spike at which the run must stop; the model has not changed.
        TypeError: A microbatch is a slice of its rows although no peers share them, or the reverse.
    """
    started_s = time.perf_counter()
    optimizer.clear()
    # A step may have no label at all, for instance if every prompt fills its row.
    labels = max(1, batch.loss_tokens)
    times = PassTimes(model.device)
    sums = accumulate(model, batch, labels, times)
    seconds_compute = time.perf_counter() - started_s
    optimizer.sum_over(groups)
    totals = sums.over(groups)
    passes = times.taken()  # the sums are on the host, so all passes have ended
    tokens = int(totals.tokens)
    # A guard without memory never judges, because its window is not full in one step.
    progress = progress or TrainingProgress(SpikeGuardConfig())
    progress.tokens += tokens
    # After the sum over ranks: each rank then has the same norm, so all judge alike without another message.
    grad_norm = optimizer.norm_of(batch.step)
    spike = progress.guard.judge(grad_norm, batch.step)
    if spike is None:
        optimizer.update(batch.step, grad_norm, progress.tokens)
        # From the rows of all ranks: each rank moves its own copy, and they stay equal.
        model.move_biases(totals.slots_LE)
    else:
        # Nothing is updated, but the figures still contain this step's rate.
        optimizer.set_rate(batch.step, progress.tokens)
    return StepResult(
        step=batch.step,
        figures=_figures(totals, model, labels, grad_norm=grad_norm, lr=optimizer.lr),
        flops=model_flops(model.config, tokens, totals.pairs) + totals.flops_beside,
        spike=spike,
        seconds_compute=seconds_compute,
        passes=passes,
    )


@dataclass(slots=True, kw_only=True)
class StepSums:
    """Sums over the microbatches of a step."""

    figures: Tensor
    """Token loss, balance loss, z-loss, tokens, dropped choices, entropy, FLOPs of images, token pairs: ``[8]``,
    float64."""
    slots_LE: Tensor
    """Rows that each expert of each layer computed, int64."""

    def over(self, groups: ProcessGroups) -> "StepTotals":
        """Sum over ranks, with one message for all."""
        both = torch.cat((self.figures, self.slots_LE.flatten().double()))  # exact below 2**53
        if groups.world is not None:
            dist.all_reduce(both, group=groups.world)
        token_loss, balance, z, tokens, dropped, entropy, flops, pairs, *_ = both.tolist()
        return StepTotals(
            token_loss=token_loss,
            balance_loss=balance,
            z_loss=z,
            tokens=tokens,
            dropped=dropped,
            entropy=entropy,
            flops_beside=flops,
            pairs=pairs,
            slots_LE=both[len(self.figures) :].view_as(self.slots_LE).cpu(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """The sums of all ranks."""

    token_loss: float
    balance_loss: float
    z_loss: float
    tokens: float
    dropped: float
    entropy: float
    """Entropy over tokens, mean over layers."""
    flops_beside: float
    """FLOPs spent on images."""
    pairs: float
    """Sum of the squared lengths of documents."""
    slots_LE: Tensor


def accumulate(
    model: MoETransformer, batch: Batch, labels: int, times: PassTimes | None = None
) -> StepSums:
    """Run all microbatches forward and backward; their gradients add up in the parameters.

    Args:
        model: The model.
        batch: This rank's share of the step.
        labels: Labels of the whole step, over all ranks, by which losses are divided.
        times: Times the passes that wait for no other rank.

    Raises:
        ConfigError: The model does not know a token id.
    """
    config, device = model.config, model.device
    sharded = is_sharded(model)  # other ranks then need this rank's passes
    figures = torch.zeros(8, dtype=torch.float64, device=device)
    slots_LE = torch.zeros(config.num_layers, config.num_experts, dtype=torch.int64, device=device)
    for microbatch in batch.microbatches:
        _require_known(microbatch, batch.step, config.vocab_size)
        inputs = model.inputs_of(microbatch)
        if inputs.is_empty and not (sharded or inputs.meets_peers):
            continue
        is_alone = not (sharded or inputs.meets_peers or model.peers.size > 1)
        with times.of(microbatch) if times is not None and is_alone else nullcontext():
            output = model(inputs)
            # All sums are over tokens and divided below by one number for all ranks, because means of microbatches
            # would give short ones more weight.
            objective = output.token_loss + config.balance_weight * output.balance_loss
            if config.z_weight:
                objective = objective + config.z_weight * output.z_loss
            (objective / labels).backward()
        # Kept on the device, because reading one of them would wait for every earlier pass.
        figures += torch.stack(
            [
                output.token_loss.detach(),
                output.balance_loss.detach().double(),
                output.z_loss.detach().double(),
                figures.new_full((), inputs.num_tokens),
                output.router.dropped.double(),
                output.router.entropy,
                figures.new_full((), model.flops_beside(inputs)),
                figures.new_zeros(()),
            ]
        )
        slots_LE += output.router.slots_LE
    # ``fill_``, because assigning a number waits for a GPU; peers that share rows count their pairs together.
    figures[-1].fill_(token_pairs(batch) / model.peers.size)
    return StepSums(figures=figures, slots_LE=slots_LE)


def _require_known(part: Microbatch | CpSlice, step: int, vocab_size: int) -> None:
    """Refuse token ids without an embedding; torch would report an index out of range, or the device would halt."""
    if (largest := int(rows_of(part, "tokens").max(initial=0))) >= vocab_size:
        raise ConfigError(
            f"step {step} has token id {largest}, and the model {vocab_size} embeddings: name in the mix the tokenizer "
            f"that made the ids (omniload mix check says whose), or set vocab_size of the training file above {largest}"
        )


def _figures(
    totals: StepTotals, model: MoETransformer, labels: int, *, grad_norm: float, lr: float
) -> StepFigures:
    tokens = int(totals.tokens)
    choices = tokens * model.config.top_k * model.config.num_layers
    return StepFigures(
        loss=totals.token_loss / labels,
        balance_loss=totals.balance_loss / labels,
        grad_norm=grad_norm,
        lr=lr,
        tokens=tokens,
        expert_imbalance=_imbalance(totals.slots_LE),
        z_loss=totals.z_loss / labels,
        expert_slots=tuple(totals.slots_LE.sum(0).tolist()),
        router_entropy=totals.entropy / max(1, tokens),
        drop_rate=totals.dropped / max(1, choices),
    )


def _imbalance(slots_LE: Tensor) -> float:
    if int(slots_LE.sum()) == 0:
        return 0.0
    return float((slots_LE.amax(1) / slots_LE.double().mean(1)).max())


def use_one_thread() -> None:
    """Make torch compute on one thread: call once, at the start of every rank's process.

    Several ranks on one machine with more threads than cores spin against each other and take many times as long.
    Results would also depend on the number of threads.
    """
    torch.set_num_threads(1)
