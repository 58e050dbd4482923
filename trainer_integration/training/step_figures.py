"""What a step tells of the model, over all ranks: computed in ``step``, logged, drawn and passed on under one name."""

from pydantic import ConfigDict

from omniload.base.config import StrictModel

__all__ = ["StepFigures"]


class StepFigures(StrictModel):
    """Figures of one step; those without a default are in every log, the others ``None`` in older ones.

    Each one that is a number goes to the report and to the writers by its name here.
    """

    model_config = ConfigDict(ser_json_inf_nan="constants")  # a loss may be no number

    loss: float
    """Mean cross entropy of a label, in nats."""
    balance_loss: float
    """Mean balance loss; 1 where experts are evenly busy."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    lr: float
    """Learning rate of the step."""
    tokens: int
    """Tokens trained on, without padding."""
    expert_imbalance: float | None = None
    """Token slots of the busiest expert over the mean, in the worst layer; 0 where the step had no tokens."""
    z_loss: float | None = None
    """Mean z-loss of the routers."""
    expert_slots: tuple[int, ...] | None = None
    """Rows that each expert computed, all layers together, ``[experts]``."""
    router_entropy: float | None = None
    """Mean entropy of a router's probabilities, in nats: the logarithm of the experts where it has no opinion."""
    drop_rate: float | None = None
    """Choices of experts that were dropped over all choices."""
