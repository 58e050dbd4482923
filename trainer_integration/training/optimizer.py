"""AdamW over one flat gradient, and its learning rate, which is a stateless function of the run's progress.

Every parameter's gradient is a window into one buffer. So the sum over ranks is one collective, and the norm and the
clipping are one operation each. Gradients of experts that are divided among ranks come last, because they are summed
over the ranks with the same experts.

For a sharded model, the buffer contains this rank's parts, which backward has already summed over the data-parallel
ranks. What remains is the sum over the peers that share layers, and the norm over all parts.

The step is that of ``torch.optim.AdamW``, through the function below it. Any method of a ``torch.optim.Optimizer``
would import torch's compiler, which takes 0.5 s at every start of a rank.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from omniload.base.errors import StateError
from trainer_integration.config import OptimizerConfig
from trainer_integration.moe.model import MoETransformer, is_of_experts
from trainer_integration.moe.parallel.process_groups import ProcessGroups

__all__ = ["FlatAdamW", "lr_at"]

_EPS = 1e-8
"""The value of ``torch.optim.AdamW``."""


def lr_at(step: int, total_steps: int, config: OptimizerConfig, tokens: int = 0) -> float:
    """Return the learning rate of a step.

    Args:
        step: Number of the step, from 0.
        total_steps: Steps of the whole run; a schedule by tokens uses the total of ``config`` instead.
        config: Peak, warm-up and final share.
        tokens: Tokens trained on up to and including the step, for a schedule by tokens.

    Returns:
        Above 0 from the first step on, the peak at the end of warm-up, ``lr * final_lr_ratio`` at the last step and
        after it, unless the schedule is constant.
    """
    if config.total_tokens is None:
        return _rate(step + 1, total_steps, config.warmup_steps, config.decay_steps, config)
    warmup, decay = config.warmup_tokens, config.decay_tokens
    # A rate of 0 would make the first update empty; without a warm-up it would be 0 over 0.
    return _rate(max(1, tokens), config.total_tokens, warmup, decay, config)


def _rate(done: int, total: int, warmup: int, decay: int | None, config: OptimizerConfig) -> float:
    """Return the rate after ``done`` of ``total`` steps or tokens."""
    if done <= warmup:
        return config.lr * done / warmup
    falls_from = warmup
    if config.schedule == "wsd":
        # Rounded up, so that a run of nine steps has one step of decay.
        falls_from = max(falls_from, total - (decay or -(-total // 10)))
    progress = (done - falls_from) / max(1, total - falls_from)
    left = 1.0 - min(1.0, max(0.0, progress))
    if config.schedule == "constant":
        left = 1.0
    elif config.schedule == "cosine":
        left = (1 - math.cos(math.pi * left)) / 2
    return config.lr * (config.final_lr_ratio + (1 - config.final_lr_ratio) * left)


class FlatAdamW:
    """AdamW with warm-up, cosine and clipping over a flat gradient of the parameters' own type."""

    def __init__(self, model: MoETransformer, config: OptimizerConfig, total_steps: int) -> None:
        self._config = config
        self._total_steps = total_steps
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        shared_out = model.peers.size > 1
        of_experts = [p for n, p in named if shared_out and is_of_experts(n)]
        common = [p for n, p in named if not (shared_out and is_of_experts(n))]
        self._parameters = common + of_experts
        first = self._parameters[0]
        sizes = [_held(p).numel() for p in self._parameters]
        self.gradients = torch.zeros(sum(sizes), device=first.device, dtype=first.dtype)
        """All gradients of this rank, concatenated; those of experts that are divided among ranks are last."""
        num_common = sum(sizes[: len(common)])
        self._common, self._of_experts = self.gradients[:num_common], self.gradients[num_common:]
        self._peers = model.peers
        self._sharded_over = first.device_mesh.get_group() if isinstance(first, DTensor) else None
        self._windows = [
            _like(parameter, window.view_as(_held(parameter)))
            for window, parameter in zip(
                torch.split(self.gradients, sizes), self._parameters, strict=True
            )
        ]
        self.lr = config.lr
        """Learning rate of the last step."""
        self.state: dict[Tensor, dict[str, Tensor]] = {
            parameter: {
                # One for each parameter, because the fused step increments all of them.
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            for parameter in self._parameters
        }
        """State of each parameter, under the names of ``torch.optim.AdamW``, for checkpoints."""

    def clear(self) -> None:
        """Set all gradients to zero and make backward add into the flat buffer."""
        self.gradients.zero_()
        for parameter, window in zip(self._parameters, self._windows, strict=True):
            parameter.grad = window

    def sum_over(self, groups: ProcessGroups) -> None:
        """Sum the gradients over all ranks; those of experts over the ranks with the same experts."""
        if groups.world is None:
            return
        if self._sharded_over is not None:
            if self._peers.group is not None:
                dist.all_reduce(self._common, group=self._peers.group)
            return
        # One message for all parameters, because a collective has a fixed cost and there are hundreds of parameters.
        dist.all_reduce(self._common, group=groups.world)
        if len(self._of_experts):
            dist.all_reduce(self._of_experts, group=groups.dp)

    def norm(self) -> float:
        """Return the norm of the gradient over all parameters, including those of other ranks."""
        # Both in one tensor, so that the ranks of a sharded model exchange one message.
        squares = torch.stack([_square(self._common), _square(self._of_experts)])
        if self._sharded_over is not None:
            dist.all_reduce(squares, group=self._sharded_over)
        # Peers have different experts; for all other parameters, each already has the same sum.
        squares[1:] = self._peers.summed(squares[1:])
        return math.sqrt(float(squares.sum()))

    def norm_of(self, step: int) -> float:
        """Return ``norm`` for a step.

        Raises:
            StateError: It is not finite.
        """
        norm = self.norm()
        if not math.isfinite(norm):
            warm_up = self._config.warmup_tokens or self._config.warmup_steps
            raise StateError(
                f"gradient norm of step {step} is {norm}; resume from the last checkpoint with "
                f"a lower optimizer.lr than {self._config.lr} or a longer warm-up than "
                f"{warm_up} {'tokens' if self._config.warmup_tokens else 'steps'}"
            )
        return norm

    def update(self, step: int, norm: float, tokens: int = 0) -> None:
        """Clip, then update all parameters.

        Args:
            step: Number of the step; decides the learning rate.
            norm: Result of ``norm_of`` for the step.
            tokens: Tokens trained on up to and including the step, which decide the rate of a schedule by tokens.
        """
        if norm > self._config.clip_norm:
            self.gradients.mul_(self._config.clip_norm / norm)
        self.set_rate(step, tokens)
        matrices: list[tuple[Tensor, Tensor]] = []
        vectors: list[tuple[Tensor, Tensor]] = []
        for parameter, window in zip(self._parameters, self._windows, strict=True):
            (matrices if parameter.ndim >= 2 else vectors).append((parameter, window))
        self._update(matrices, self._config.weight_decay)
        # Weights of norms are excluded: decay would pull the values they scale to 0, without keeping any matrix small.
        self._update(vectors, 0.0)

    @torch.no_grad()
    def _update(self, pairs: list[tuple[Tensor, Tensor]], weight_decay: float) -> None:
        states = [self.state[parameter] for parameter, _ in pairs]
        adamw(
            [parameter for parameter, _ in pairs],
            [gradient for _, gradient in pairs],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=self._config.betas[0],
            beta2=self._config.betas[1],
            lr=self.lr,
            weight_decay=weight_decay,
            eps=_EPS,
            maximize=False,
        )

    def set_rate(self, step: int, tokens: int = 0) -> None:
        """Set the learning rate of a step."""
        self.lr = lr_at(step, self._total_steps, self._config, tokens)

    def step(self, step: int) -> float:
        """Clip and update; return the norm of the gradient before clipping. See ``norm_of`` and ``update``."""
        norm = self.norm_of(step)
        self.update(step, norm)
        return norm


def _held(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: Tensor, part: Tensor) -> Tensor:
    """Return this rank's part of a gradient as a gradient of ``parameter``; both share the memory."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        # A check would be a collective for each parameter, although the condition is true by construction.
        run_check=False,
        # Stated because parts may be unequal; torch would assume that all of them are as long as this one.
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _square(values: Tensor) -> Tensor:
    # In float64, because in float32 the squares of millions of small gradients vanish next to a few large ones.
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm.square()
