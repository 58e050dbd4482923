"""Figures of one planned step: its padding, and the balance of its ranks and microbatches."""

from dataclasses import dataclass

from omniload.mix.columns import NO_COLUMNS
from omniload.mix.config import MixConfig
from omniload.plan.balance_methods import balance
from omniload.plan.records import PieceTags, StepPlan
from omniload.plan.strategies import costs_of_rows

__all__ = ["StepFigures", "figures_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Figures of one planned step."""

    tokens: int
    """Tokens in its rows."""
    capacity: int
    """Tokens that its rows could hold."""
    imbalance: float
    """Heaviest rank over the mean, as planned."""
    imbalance_before: float
    """The same with rows dealt in order."""
    bound: float
    """Lower bound of ``imbalance`` for these rows."""
    microbatch_imbalance: float
    """Heaviest microbatch over the mean of all, as planned."""
    microbatch_bound: float
    """Lower bound of ``microbatch_imbalance`` for these rows."""


def figures_of(
    mix: MixConfig, plan: StepPlan, dp: int, tags: PieceTags = NO_COLUMNS
) -> StepFigures:
    """Measure a planned step, with the tags that are read of its samples, against its rows dealt to ranks in order."""
    costs_R = costs_of_rows(mix, plan, tags)
    return StepFigures(
        tokens=int(plan.pieces.lengths_P.sum()),
        capacity=plan.num_rows * mix.pack.length,
        imbalance=plan.imbalance,
        imbalance_before=balance(costs_R, dp, method="none").imbalance,
        bound=plan.bound,
        microbatch_imbalance=plan.microbatch_imbalance,
        microbatch_bound=plan.microbatch_bound,
    )
