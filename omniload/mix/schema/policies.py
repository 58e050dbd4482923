"""What a steering file says: which policy moves the weights of a run, and how often."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from omniload.base.config import StrictModel, fault_at
from omniload.base.settings.quantities import Count
from omniload.mix.schema.splits import Name
from omniload.mix.schema.transforms import Option

__all__ = [
    "ConstantPolicy",
    "LossPolicy",
    "OdmPolicy",
    "PolicyConfig",
    "RegisteredPolicy",
    "RewardPolicy",
    "SteeringConfig",
    "TemperaturePolicy",
]

_LATEST_STEP = 1 << 40
Finite = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class ConstantPolicy(StrictModel):
    """Returns to the shares of the mix file, whatever was set since."""

    type: Literal["constant"]


class LossPolicy(StrictModel):
    """Gives more to the sources whose loss is further above a reference, as DoReMi moves its domain weights.

    A share becomes ``share * exp(rate * excess)``, normalised. The excess of a source is the mean loss of its labels
    since the last decision minus its reference, and at least 0.
    """

    type: Literal["loss"]
    rate: Finite = 0.1
    """How fast shares move: with an excess higher by 1, the exponent of a source is higher by this rate."""
    reference: dict[Name, Finite] = Field(default_factory=dict)
    """Loss per label that each source is expected to come down to, such as the loss of a small model. A source that is
    not named has 0, so a source that is hard by nature gains."""
    declared: Annotated[float, Field(gt=0, le=1)] = 0.1
    """No source falls below this part of the share that the mix file declares."""


class OdmPolicy(StrictModel):
    """Online data mixing: sources are the arms of a bandit, EXP3, and the loss on a source is its reward.

    After t turns of ``every`` steps, with K sources and ``E_t = min(1/K, sqrt(ln K / (K t)))``, a share becomes ``(1 -
    K E_t) exp(E_(t-1) R) / (the sum of exp(E_(t-1) R) over all sources) + E_t``. R, the estimate of a source, is the
    moving mean of its loss divided by its share. So every source has at least the share E_t, which falls from turn to
    turn.
    """

    type: Literal["odm"]
    smoothing: Annotated[float, Field(ge=0, le=0.999)] = 0.9
    """The part of a source's estimate that a turn keeps; the rest comes from that turn."""
    goes_by: Literal["loss", "reward"] = "loss"
    """How to value a source in a turn: by the mean loss of its labels, or by the reward that ``observe`` reported for
    it."""
    from_step: Count = Field(default=0, ge=0, le=_LATEST_STEP)
    """First step of the first turn. Until then, shares do not change."""


class TemperaturePolicy(StrictModel):
    """Raises the shares of the mix file to the power 1 / T while T moves in a line. A higher T evens them out."""

    type: Literal["temperature"]
    start: Annotated[float, Field(gt=0, le=100)]
    """T until ``from_step``."""
    end: Annotated[float, Field(gt=0, le=100)] = 1.0
    """T from ``to_step`` on."""
    from_step: Count = Field(default=0, ge=0, le=_LATEST_STEP)
    """Step from which T moves."""
    to_step: Count = Field(ge=1, le=_LATEST_STEP)
    """Step at which T reaches ``end``."""

    @model_validator(mode="after")
    def _moves_on(self) -> Self:
        if self.to_step <= self.from_step:
            raise fault_at(
                f"to_step is {self.to_step}, and from_step {self.from_step}; the temperature moves between them",
                "to_step",
            )
        return self


class RewardPolicy(StrictModel):
    """Gives more to the sources whose answers in a group differ in reward, and less if all are right or all are wrong.

    A share becomes the share in the file times the part of the source's groups, since the last decision, whose rewards
    differ; then shares are normalised.
    """

    type: Literal["reward"]
    declared: Annotated[float, Field(gt=0, le=1)] = 0.1
    """No source falls below this part of the share that the mix file declares, so a source that is too hard now is
    tried again later."""


class RegisteredPolicy(StrictModel):
    """Your own function, which an installed distribution registers under ``omniload.policies``."""

    type: Literal["registered"]
    function: Name
    """Name of the function among the entry points ``omniload.policies``."""
    options: dict[
        Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=64)], Option
    ] = Field(default_factory=dict)
    """Keyword arguments for the function, besides the measurements of the run."""


PolicyConfig = Annotated[
    ConstantPolicy | LossPolicy | OdmPolicy | RewardPolicy | TemperaturePolicy | RegisteredPolicy,
    Field(discriminator="type"),
]


class SteeringConfig(StrictModel):
    """How a policy moves the weights of a run while it goes on."""

    version: Literal[1]
    """Version of this format."""
    every: Count = Field(ge=1, le=10**9)
    """Steps between two decisions. Each decision that changes something is an edit, and a run has at most 4,096
    edits."""
    least: Annotated[float, Field(ge=0, le=1)] = 0.002
    """A decision that would move every share by less than this changes nothing."""
    policy: PolicyConfig
    """The policy that decides."""
