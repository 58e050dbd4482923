"""Drawing the samples of a step from candidates, by the weights at that step.

Shape suffixes:
    C  candidates        N  samples drawn, in drawing order        S  sources
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from omniload.mix.config import MixConfig, Stage
from omniload.mix.deficit import Drawn, draw, integer_weights
from omniload.mix.schedule import weights_at

__all__ = ["MixSchedule", "draw_candidates"]


@dataclass(frozen=True, slots=True)
class MixSchedule:
    """Weights of the sources over time."""

    stages: tuple[Stage, ...]
    """Weights in stages; the first starts at step 0."""
    names: tuple[str, ...]
    """Names of the sources; a source's number is its place here."""
    level: Literal["token", "sample"] = "token"
    """What a weight counts."""

    @classmethod
    def of(cls, mix: MixConfig) -> Self:
        """Return the schedule of a mix file."""
        return cls(mix.mix.stages, mix.names, mix.mix.level)

    @classmethod
    def constant(
        cls, weights: Mapping[str, float], *, level: Literal["token", "sample"] = "token"
    ) -> Self:
        """Return a schedule of weights that never change."""
        return cls((Stage(from_step=0, weights=dict(weights)),), tuple(weights), level)

    def shares_at(self, step: int) -> dict[str, float]:
        """Return the share of each source at ``step``; they sum to one."""
        return dict(zip(self.names, weights_at(self.stages, self.names, step), strict=True))


def draw_candidates(
    schedule: MixSchedule,
    lengths_C: NDArray[Any],
    sources_C: NDArray[Any],
    *,
    step: int,
    budget: int,
    credits_S: Sequence[int] | None = None,
) -> tuple[NDArray[np.int64], Drawn]:
    """Draw samples until they hold ``budget`` tokens.

    Args:
        schedule: Weights over time.
        lengths_C: Tokens in each candidate.
        sources_C: Number of the source of each; those of a source are drawn in this order.
        step: Number of the step.
        budget: Tokens to draw; the last sample may exceed it.
        credits_S: Credits left by the step before; zeros at the start.

    Returns:
        The candidates drawn, in drawing order ``[N]``, and the draw with the credits for the next step.

    Raises:
        ValueError: A source is not in the schedule, ``step`` is negative, the credits are
            not one for each source, or the candidates of a source ran out before the
            budget was reached.
    """
    num = len(schedule.names)
    if step < 0:
        raise ValueError(f"step is {step}; steps are numbered from 0")
    if credits_S is not None and len(credits_S) != num:
        raise ValueError(f"credits_S has {len(credits_S)} values for {num} sources; give one each")
    if len(sources_C) and not 0 <= sources_C.min() <= sources_C.max() < num:
        raise ValueError(
            f"sources are numbered {int(sources_C.min())} to {int(sources_C.max())}; the schedule names "
            f"{num}, numbered from 0"
        )
    by_source = np.argsort(sources_C, kind="stable")
    cuts = np.cumsum(np.bincount(sources_C, minlength=num))[:-1]
    queues = np.split(by_source, cuts)
    lengths = [lengths_C[queue] for queue in queues]
    by_sample = schedule.level == "sample"
    drawn = draw(
        [np.ones_like(column) for column in lengths] if by_sample else lengths,
        integer_weights(weights_at(schedule.stages, schedule.names, step)),
        [0] * num if credits_S is None else credits_S,
        budget=budget,
        sizes=lengths if by_sample else None,
    )
    if drawn.starved is not None:
        raise ValueError(
            f"source {schedule.names[drawn.starved]!r} has {len(queues[drawn.starved])} candidates, too few "
            f"for a budget of {budget} tokens; load more of it"
        )
    heads = [queue[:n] for queue, n in zip(queues, drawn.counts_S.tolist(), strict=True)]
    # Samples of a source come in its order, so a stable sort by source lines both up.
    chosen_N = np.empty(len(drawn.sources_N), np.int64)
    chosen_N[np.argsort(drawn.sources_N, kind="stable")] = np.concatenate(heads)
    return chosen_N, drawn
