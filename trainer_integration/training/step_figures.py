"""Figures of the model in a step, over all ranks: computed in ``step``, logged, drawn and passed on under one name."""

from pydantic import ConfigDict

from omniload.base.config import StrictModel

__all__ = ["StepFigures"]


class StepFigures(StrictModel):
    """Figures of one step; those without a default are in every log, the others are ``None`` in older logs.

    Each number goes to the report and to the writers under its name here.
    """

    model_config = ConfigDict(ser_json_inf_nan="constants")  # a loss may be NaN

    loss: float
    """Mean cross entropy per label, in nats."""
    balance_loss: float
    """Mean balance loss; 1 if experts are evenly busy."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    lr: float
    """Learning rate of the step."""
    tokens: int
    """Tokens trained on, without padding."""
    expert_imbalance: float | None = None
    """Token slots of the busiest expert over the mean, in the worst layer; 0 if the step had no tokens."""
    z_loss: float | None = None
    """Mean z-loss of the routers."""
    expert_slots: tuple[int, ...] | None = None
    """Rows that each expert computed, over all layers, ``[experts]``."""
    router_entropy: float | None = None
    """Mean entropy of a router's probabilities, in nats: the logarithm of the number of experts if it has no
    preference."""
    drop_rate: float | None = None
    """Choices of experts that were dropped over all choices."""
