"""Steps at which stages that wait for epochs begin, and at which a mix ends or is refused: what a forecast knows."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.mix.config import LARGEST_STEP, MixConfig, Stage
from omniload.mix.schema.caps import require_repetitions
from omniload.mix.schema.weights import GroupCap
from omniload.plan.forecast.forecast import Span, first_where, forecast, tokens_by_step
from omniload.plan.forecast.sizes import Sampled, SourceSizes

__all__ = [
    "end_is_within",
    "first_refused_step",
    "require_end",
    "steps_to_the_end",
    "with_expected_steps",
]

_LEAST = 1e-300
_FEWEST = 4
"""Fewest groups of steps from which the variation of further steps can be estimated."""
_STUDENT = 1.6
"""How much wider a 95 % interval is by Student's distribution, with only four groups, than with many."""


def with_expected_steps(mix: MixConfig, sizes: SourceSizes, num_steps: int) -> MixConfig:
    """Return a mix whose stages begin at the steps that its weights and the sizes of its sources come to.

    Args:
        mix: The declared mix; one whose stages all have steps is returned as it is.
        sizes: What its sources hold, and a step draws.
        num_steps: Steps of the run; stages that do not begin within them go on waiting.
    """
    if not mix.mix.waits:
        return mix
    stages: list[Stage] = []
    for i, stage in enumerate(mix.mix.stages):
        if not stage.waits:
            stages.append(stage)
            continue
        # Only earlier stages count, because this one and the later ones have not begun.
        weights = mix.mix.model_copy(update={"stages": tuple(stages)})
        so_far = mix.model_copy(update={"mix": weights})
        wanted_S = [(stage.from_epochs or {}).get(name, 0.0) for name in mix.names]
        needed_S = sizes.tokens_of(np.asarray(wanted_S))

        def is_over(
            step: int, so_far: MixConfig = so_far, needed_S: NDArray[np.float64] = needed_S
        ) -> bool:
            drawn_S = tokens_by_step(so_far, sizes, step)
            return bool((drawn_S >= needed_S).all())

        low, high = stages[-1].from_step + max(1, stages[-1].ramp_steps), num_steps
        if low > high or not is_over(high):
            return _with(mix, (*stages, *mix.mix.stages[i:]))
        first = first_where(is_over, low, high)
        stages.append(stage.model_copy(update={"from_step": first}))
    return _with(mix, tuple(stages))


def steps_to_the_end(mix: MixConfig, sizes: SourceSizes) -> int | None:
    """Return after how many steps a mix ends by itself; ``None``: not within as many as a run may have."""
    dated = with_expected_steps(mix, sizes, LARGEST_STEP)
    expected = forecast(dated, sizes, LARGEST_STEP)
    return expected.total.stop if expected.ends_early else None


def end_is_within(
    mix: MixConfig, total: Span, sampled: Sampled, by_others: Sequence[int | None]
) -> float | None:
    """Return half of what the number of steps is known within in 19 of 20 cases, as a part of it.

    Args:
        mix: The declared mix, which ends by itself.
        total: What it is expected to draw.
        sampled: How well the sizes of its sources are known.
        by_others: The steps that it comes to by steps that were planned, each time without one group of neighbours.

    Returns:
        The part; ``None`` if unknown, because a source was seen in one place, or too few steps were planned.
    """
    errors_S = sampled.errors_of(total.epochs_S)
    if mix.mix.amounts is not None:
        # Tokens that were asked for are drawn, however long documents are.
        asked_S = [mix.mix.amounts[name].kind == "tokens" for name in mix.names]
        errors_S = np.where(asked_S, 0.0, errors_S)
    steps_G = np.asarray([each for each in by_others if each is not None], np.float64)
    if np.isnan(errors_S).any() or len(steps_G) < max(_FEWEST, len(by_others)):
        return None
    if mix.mix.stop in ("first_exhausted", "all_exhausted") and mix.mix.amounts is None:
        # One source decides, which one is not certain.
        of_sources = float((errors_S / np.maximum(total.epochs_S, 1.0)).max())
    else:
        tokens_S = errors_S * total.tokens_S / np.maximum(total.epochs_S, _LEAST)
        of_sources = float(np.sqrt((tokens_S**2).sum()) / total.tokens_S.sum())
    # The jackknife (Efron and Stein, "The Jackknife Estimate of Variance", 1981).
    off_G = steps_G - steps_G.mean()
    of_steps = math.sqrt(float((off_G**2).sum()) * (len(off_G) - 1) / len(off_G)) / steps_G.mean()
    return math.hypot(of_sources, _STUDENT * of_steps)


def _with(mix: MixConfig, stages: tuple[Stage, ...]) -> MixConfig:
    weights = mix.mix.model_copy(update={"stages": stages})
    return mix.model_copy(update={"mix": weights})


def require_end(mix: MixConfig, sizes: SourceSizes) -> int:
    """Return the steps until a mix ends by itself.

    Raises:
        ConfigError: It does not, in as many steps as a run may have.
    """
    if (end := steps_to_the_end(mix, sizes)) is None:
        raise ConfigError(
            f"mix.stop {mix.mix.stop!r} does not end this mix within {LARGEST_STEP:,} steps, the most that a run may "
            "have; say --steps, or give each source more weight"
        )
    return end


def first_refused_step(
    mix: MixConfig,
    sizes: SourceSizes,
    steps: int,
    groups: Mapping[str, tuple[str, GroupCap]],
) -> tuple[int, ConfigError] | None:
    """Return the first step at which a run would go through a source more often than it may, and what is said of it.

    Args:
        mix: The declared mix.
        sizes: What its sources hold, and a step draws.
        steps: Steps of the run.
        groups: As for ``require_repetitions``.

    Returns:
        ``None`` if a run of this many steps is not refused.
    """
    dated = with_expected_steps(mix, sizes, steps)

    def refused(count: int) -> ConfigError | None:
        total = forecast(dated, sizes, count).total
        wanted = dict(zip(mix.names, total.epochs_S.tolist(), strict=True))
        try:
            require_repetitions(mix.sources, wanted, total.stop, groups)
        except ConfigError as error:
            return error
        return None

    if (error := refused(steps)) is None:
        return None
    # Once it is refused it stays so: a longer run draws no less of any source.
    return first_where(lambda count: refused(count) is not None, 1, steps) - 1, error
