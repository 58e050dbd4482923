"""The steps at which stages that wait for epochs are expected to begin: what a forecast knows of them."""

import numpy as np
from numpy.typing import NDArray

from omniload.mix.config import MixConfig, Stage
from omniload.plan.forecast.forecast import tokens_by_step
from omniload.plan.forecast.sizes import SourceSizes

__all__ = ["with_expected_steps"]


def with_expected_steps(
    mix: MixConfig, sizes: SourceSizes, num_steps: int, *, tokens_per_step: float
) -> MixConfig:
    """Return a mix whose stages begin at the steps that its weights and the sizes of its sources come to.

    Args:
        mix: The declared mix; one whose stages all have steps is returned as it is.
        sizes: What its sources hold.
        num_steps: Steps of the run; stages that do not begin within them go on waiting.
        tokens_per_step: Tokens that a step trains on.
    """
    if not mix.mix.waits:
        return mix
    stages: list[Stage] = []
    for i, stage in enumerate(mix.mix.stages):
        if not stage.waits:
            stages.append(stage)
            continue
        # Of the stages before alone: this one and those behind it have not begun.
        weights = mix.mix.model_copy(update={"stages": tuple(stages)})
        so_far = mix.model_copy(update={"mix": weights})
        wanted_S = [(stage.from_epochs or {}).get(name, 0.0) for name in mix.names]
        needed_S = sizes.tokens_of(np.asarray(wanted_S))

        def is_over(
            step: int, so_far: MixConfig = so_far, needed_S: NDArray[np.float64] = needed_S
        ) -> bool:
            drawn_S = tokens_by_step(so_far, sizes, step, tokens_per_step=tokens_per_step)
            return bool((drawn_S >= needed_S).all())

        low, high = stages[-1].from_step + max(1, stages[-1].ramp_steps), num_steps
        if low > high or not is_over(high):
            return _with(mix, (*stages, *mix.mix.stages[i:]))
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if is_over(middle) else (middle + 1, high)
        stages.append(stage.model_copy(update={"from_step": low}))
    return _with(mix, tuple(stages))


def _with(mix: MixConfig, stages: tuple[Stage, ...]) -> MixConfig:
    weights = mix.mix.model_copy(update={"stages": stages})
    return mix.model_copy(update={"mix": weights})
