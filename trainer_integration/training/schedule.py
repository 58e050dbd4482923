"""The learning rate: a function of how far the run has come, by steps or by tokens; it has no state."""

import math

from trainer_integration.config import OptimizerConfig

__all__ = ["lr_at"]


def lr_at(step: int, total_steps: int, config: OptimizerConfig, tokens: int = 0) -> float:
    """Return the learning rate of a step.

    Args:
        step: Number of the step, from 0.
        total_steps: Steps of the whole run; by tokens it counts those of ``config`` instead.
        config: Peak, warm-up and final share.
        tokens: Tokens trained on up to and with the step, by which a schedule of tokens goes.

    Returns:
        Above 0 from the first step on, the peak at the end of warm-up,
        ``lr * final_lr_ratio`` at the last step and after it, unless the schedule is constant.
    """
    if config.total_tokens is None:
        return _rate(step + 1, total_steps, config.warmup_steps, config.decay_steps, config)
    warmup, decay = config.warmup_tokens, config.decay_tokens
    return _rate(max(1, tokens), config.total_tokens, warmup, decay, config)


def _rate(done: int, total: int, warmup: int, decay: int | None, config: OptimizerConfig) -> float:
    """Return the rate after ``done`` of ``total`` steps or tokens."""
    if done <= warmup:
        return config.lr * done / warmup
    falls_from = warmup
    if config.schedule == "wsd":
        falls_from = max(falls_from, total - (decay or -(-total // 10)))
    progress = (done - falls_from) / max(1, total - falls_from)
    left = 1.0 - min(1.0, max(0.0, progress))
    if config.schedule == "constant":
        left = 1.0
    elif config.schedule == "cosine":
        left = (1 - math.cos(math.pi * left)) / 2
    return config.lr * (config.final_lr_ratio + (1 - config.final_lr_ratio) * left)
