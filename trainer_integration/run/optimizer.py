"""AdamW over one flat gradient.

Every parameter's gradient is a window into one float32 buffer, so that summing over
ranks is one collective, and the norm and the clipping one operation each. Gradients that
belong to other process groups (experts under expert parallelism) would get a buffer each.
"""

import math

import torch
import torch.distributed as dist
from torch import nn

from omniload.base.errors import StateError
from trainer_integration.config import OptimizerConfig

__all__ = ["FlatAdamW", "lr_at"]


def lr_at(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of a step: a function of the step, so resuming needs no state.

    Args:
        step: Number of the step, from 0.
        total_steps: Steps of the whole run.
        config: Peak, warm-up and final share.

    Returns:
        Above 0 from the first step on, the peak at the end of warm-up,
        ``lr * final_lr_ratio`` at the last step and after it.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = min(
        1.0, (step + 1 - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    )
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.final_lr_ratio + (1 - config.final_lr_ratio) * cosine)


class FlatAdamW:
    """AdamW with warm-up, cosine and clipping over a flat float32 gradient."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, total_steps: int) -> None:
        self._config = config
        self._total_steps = total_steps
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.gradients = torch.zeros(
            sum(p.numel() for p in self._parameters), device=self._parameters[0].device
        )
        """All gradients, end to end in the order of the parameters."""
        sizes = [p.numel() for p in self._parameters]
        self._windows = [
            window.view_as(parameter)
            for window, parameter in zip(
                torch.split(self.gradients, sizes), self._parameters, strict=True
            )
        ]
        matrices = [p for p in self._parameters if p.ndim >= 2]
        vectors = [p for p in self._parameters if p.ndim < 2]
        self.adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=config.betas,
            fused=True,
        )
        """The optimiser proper, for its state."""

    def clear(self) -> None:
        """Set all gradients to zero and make backward add into the flat buffer."""
        self.gradients.zero_()
        for parameter, window in zip(self._parameters, self._windows, strict=True):
            parameter.grad = window

    def sum_over(self, group: dist.ProcessGroup | None) -> None:
        """Add the gradients of all ranks of ``group``; None is a group of one."""
        if group is not None:
            dist.all_reduce(self.gradients, group=group)

    def step(self, step: int) -> float:
        """Clip, then update all parameters.

        Args:
            step: Number of the step; decides the learning rate.

        Returns:
            Norm of the gradient before clipping.

        Raises:
            StateError: The norm is not finite; no parameter has changed.
        """
        norm = float(torch.linalg.vector_norm(self.gradients))
        if not math.isfinite(norm):
            raise StateError(
                f"gradient norm of step {step} is {norm}; resume from the last checkpoint with "
                f"a lower optimizer.lr than {self._config.lr} or a longer warm-up than "
                f"{self._config.warmup_steps} steps"
            )
        if norm > self._config.clip_norm:
            self.gradients.mul_(self._config.clip_norm / norm)
        for group in self.adamw.param_groups:
            group["lr"] = lr_at(step, self._total_steps, self._config)
        self.adamw.step()
        return norm
