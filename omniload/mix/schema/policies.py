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
    """The shares of the mix file, whatever was set since."""

    type: Literal["constant"]


class LossPolicy(StrictModel):
    """More of the sources whose loss is further above a reference, as DoReMi moves its domain weights.

    A share becomes ``share * exp(rate * excess)``, normalised, where the excess is the mean loss of a label since the
    last decision less the source's reference, at least 0.
    """

    type: Literal["loss"]
    rate: Finite = 0.1
    """How fast shares move: a source whose excess is 1 higher gains so much, in the exponent."""
    reference: dict[Name, Finite] = Field(default_factory=dict)
    """Loss of a label that each source is known to come down to, as that of a small model; 0 where it is not named, so
    that sources that are hard by nature gain."""
    declared: Annotated[float, Field(gt=0, le=1)] = 0.1
    """How much of each share stays what the mix file declares: no source falls below this part of it."""


class OdmPolicy(StrictModel):
    """Online data mixing: sources are the arms of a bandit, EXP3, and what is lost on them is its reward.

    After t turns of ``every`` steps, with K sources and ``E_t = min(1/K, sqrt(ln K / (K t)))``, a share becomes
    ``(1 - K E_t) exp(E_(t-1) R) / (the sum of exp(E_(t-1) R) over all sources) + E_t``, where a source's estimate R is
    the moving mean of its loss over its share. As much as E_t each source has in any case; it falls from turn to turn.
    """

    type: Literal["odm"]
    smoothing: Annotated[float, Field(ge=0, le=0.999)] = 0.9
    """How much of a source's estimate a turn leaves; the rest is what the turn shows."""
    goes_by: Literal["loss", "reward"] = "loss"
    """What a source is worth in a turn: the mean loss of its labels, or the reward that ``observe`` told of it."""
    from_step: Count = Field(default=0, ge=0, le=_LATEST_STEP)
    """Step that the first turn begins with; before it shares stay as they are."""


class TemperaturePolicy(StrictModel):
    """Shares of the mix file to the power of 1 / T, with T moving in a line: 1 is the file, higher makes all alike."""

    type: Literal["temperature"]
    start: Annotated[float, Field(gt=0, le=100)]
    """T up to ``from_step``."""
    end: Annotated[float, Field(gt=0, le=100)] = 1.0
    """T from ``to_step`` on."""
    from_step: Count = Field(default=0, ge=0, le=_LATEST_STEP)
    """Step from which T moves."""
    to_step: Count = Field(ge=1, le=_LATEST_STEP)
    """Step at which it has come to ``end``."""

    @model_validator(mode="after")
    def _moves_on(self) -> Self:
        if self.to_step <= self.from_step:
            raise fault_at(
                f"to_step is {self.to_step}, and from_step {self.from_step}; the temperature moves between them",
                "to_step",
            )
        return self


class RewardPolicy(StrictModel):
    """More of the sources whose groups of answers differ in reward, less of those that are all right or all wrong.

    A share becomes what the file declares, times the part of the source's groups since the last decision whose rewards
    differ, normalised.
    """

    type: Literal["reward"]
    declared: Annotated[float, Field(gt=0, le=1)] = 0.1
    """How much of each share stays what the mix file declares: what is too hard now is looked at again later."""


class RegisteredPolicy(StrictModel):
    """A function of yours, which an installed distribution registers under ``omniload.policies``."""

    type: Literal["registered"]
    function: Name
    """Its name among the entry points ``omniload.policies``."""
    options: dict[
        Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=64)], Option
    ] = Field(default_factory=dict)
    """What it is given by keyword beside what the run has shown."""


PolicyConfig = Annotated[
    ConstantPolicy | LossPolicy | OdmPolicy | RewardPolicy | TemperaturePolicy | RegisteredPolicy,
    Field(discriminator="type"),
]


class SteeringConfig(StrictModel):
    """How the weights of a run are moved while it goes on."""

    version: Literal[1]
    """Version of this format."""
    every: Count = Field(ge=1, le=10**9)
    """Steps between two decisions. Each that changes something is an edit, of which a run has 4,096."""
    least: Annotated[float, Field(ge=0, le=1)] = 0.002
    """A decision that moves no share by as much changes nothing."""
    policy: PolicyConfig
    """What decides."""
