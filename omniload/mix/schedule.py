"""Weights of the sources at a step: stages, and linear ramps between them."""

from collections.abc import Sequence

from omniload.mix.config import MixConfig, Stage

__all__ = ["boundaries", "steps_alike", "weights_at"]

_FOR_EVER = 1 << 62


def weights_at(stages: Sequence[Stage], names: Sequence[str], step: int) -> tuple[float, ...]:
    """Return the share of each source at ``step``; they sum to one.

    A ramp moves from the shares of the stage before to those of its own stage, one
    equal part a step: at its ``i``-th step, ``i`` from 1, the part done is
    ``i / ramp_steps``.
    """
    current = max(i for i, stage in enumerate(stages) if stage.from_step <= step)
    stage = stages[current]
    target = _shares(stage, names)
    done = step - stage.from_step + 1
    if done >= stage.ramp_steps:
        return target
    before = _shares(stages[current - 1], names)
    part = done / stage.ramp_steps
    return tuple(b + (t - b) * part for b, t in zip(before, target, strict=True))


def steps_alike(stages: Sequence[Stage], step: int) -> int:
    """Return for how many steps from ``step`` on the weights stay as they are there; at least 1."""
    current = max(i for i, stage in enumerate(stages) if stage.from_step <= step)
    if step - stages[current].from_step + 1 < stages[current].ramp_steps:
        return 1
    return stages[current + 1].from_step - step if current + 1 < len(stages) else _FOR_EVER


def boundaries(mix: MixConfig) -> tuple[int, ...]:
    """Return the steps at which weights start or stop to change."""
    stages = mix.mix.stages
    return tuple(
        sorted({step for s in stages for step in (s.from_step, s.from_step + s.ramp_steps)})
    )


def _shares(stage: Stage, names: Sequence[str]) -> tuple[float, ...]:
    weights = [stage.weights.get(name, 0.0) for name in names]
    largest = max(weights)  # divided by first: the sum of large weights may be infinite
    total = sum(weight / largest for weight in weights)
    return tuple(weight / largest / total for weight in weights)
