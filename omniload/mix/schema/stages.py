"""What a mix file says of weights over time."""

from collections.abc import Iterator, Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from omniload.base.config import StrictModel, fault_at
from omniload.base.units import Count
from omniload.mix.schema.token_steps import names_tokens
from omniload.mix.schema.weights import Weights, is_nested

__all__ = ["LARGEST_STEP", "Stage", "WeightsConfig", "came_with_version_2"]

LARGEST_STEP = 10**9
"""Steps of a run at most: a hundred years at three steps a second."""


def came_with_version_2(stage: object) -> Iterator[tuple[str, str]]:
    """Yield the keys of a stage that a file of version 1 does not have, and what each is, in a sentence."""
    if not isinstance(stage, Mapping):
        return
    if is_nested(stage.get("weights")):
        yield "weights", "weights hold a group"
    if names_tokens(stage):
        key = "from_tokens" if "from_tokens" in stage else "ramp_tokens"
        yield key, "the stage is dated by tokens"
    if "ramp" in stage:
        yield "ramp", "the ramp has a form"


def _is_linear(ramp: object) -> bool:
    return ramp == "linear"


def _is_none(steps: object) -> bool:
    return steps == 0


class Stage(StrictModel):
    """Source weights from one step onward."""

    from_step: Count = Field(default=0, ge=0, le=LARGEST_STEP)
    """First step at which these weights hold (a ramp starts here)."""
    from_tokens: Count | None = Field(default=None, ge=0, exclude=True)
    """Version 2, in place of ``from_step``: these weights hold from the first step before which so many tokens were
    taken, ``batch.tokens`` a step."""
    weights: Weights
    """Relative weight of each source; they need not sum to one, and a source not named has weight 0. Version 2: a name
    may stand for a group, ``{weight: 4, temperature: 2, of: {python: 9, rust: 1}}``, whose sources share its weight."""
    ramp_steps: Count = Field(default=0, ge=0, le=LARGEST_STEP)
    """Steps over which the weights move from the stage before; 0 changes at once."""
    ramp_tokens: Count | None = Field(default=None, ge=0, exclude=True)
    """Version 2, in place of ``ramp_steps``: tokens over which they move."""
    ramp: Literal["linear", "cosine"] = Field(default="linear", exclude_if=_is_linear)
    """Version 2: how they move. ``linear``: one equal part a step. ``cosine``: slowly at first and at last, along half
    a wave."""
    ramp_done: Count = Field(default=0, ge=0, le=LARGEST_STEP, exclude_if=_is_none)
    """Steps of a cosine ramp that come before this stage: an edit in the middle of one says so; of no use in a
    file."""

    @model_validator(mode="after")
    def _a_curve_needs_steps(self) -> Self:
        # What is not said is left out of the digest of a mix, so that two ways to say one thing are one mix.
        if self.ramp != "linear" and not self.ramp_steps:
            raise fault_at(
                f"ramp is {self.ramp} and ramp_steps is 0, which changes at once; give steps or tokens to it",
                "ramp",
            )
        if self.ramp_done and self.ramp == "linear":
            raise fault_at(
                f"ramp_done is {self.ramp_done}, of a linear ramp; it belongs to a cosine",
                "ramp_done",
            )
        return self

    @model_validator(mode="after")
    def _some_weight(self) -> Self:
        if not any(weight > 0 for weight in self.weights.values()):
            raise fault_at(
                f"weights are all 0 in the stage from step {self.from_step}; give one source a weight above 0",
                "weights",
            )
        return self


class WeightsConfig(StrictModel):
    """How much of each source is drawn."""

    level: Literal["token", "sample"] = "token"
    """What a weight counts."""
    stop: Literal["never", "first_exhausted", "all_exhausted", "each_once"] = "never"
    """``never`` repeats sources for ever. ``first_exhausted`` ends with the last document of the source that comes to
    its end first: no document twice. ``all_exhausted`` repeats sources until each was gone through: no document left
    out. ``each_once`` goes on without a source that has ended: every document exactly once.
    The last step may be short."""
    stages: tuple[Stage, ...] = Field(min_length=1)
    """Weights over time; the first stage starts at step 0."""

    @model_validator(mode="after")
    def _stages_follow_each_other(self) -> Self:
        if self.stages[0].from_step != 0:
            raise fault_at(
                f"stages[0].from_step is {self.stages[0].from_step}; the first stage starts at step 0",
                *("stages", 0, "from_step"),
            )
        if self.stop == "each_once":
            self._require_weights_throughout()
        if self.stages[0].ramp_steps:
            raise fault_at(
                f"stages[0].ramp_steps is {self.stages[0].ramp_steps}; nothing comes before the first stage",
                *("stages", 0, "ramp_steps"),
            )
        for i, (earlier, later) in enumerate(
            zip(self.stages, self.stages[1:], strict=False), start=1
        ):
            if later.from_step < earlier.from_step + max(1, earlier.ramp_steps):
                raise fault_at(
                    f"stages[{i}].from_step is {later.from_step}, before the end of stage {i - 1} and its ramp "
                    f"at step {earlier.from_step + max(1, earlier.ramp_steps)}; move it or shorten the ramp",
                    *("stages", i, "from_step"),
                )
        return self

    def _require_weights_throughout(self) -> None:
        """Refuse a source without a weight in some stage: it could be the only one that is left there."""
        names = {name for stage in self.stages for name in stage.weights}
        for i, stage in enumerate(self.stages):
            if idle := sorted(name for name in names if not stage.weights.get(name, 0.0)):
                raise fault_at(
                    f"stop is each_once and stages[{i}].weights gives {idle[0]!r} no weight; give every source "
                    "one in every stage, however small",
                    *("stages", i, "weights"),
                )
