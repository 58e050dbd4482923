"""A change of a mix in a running job: the request, and the edit that it becomes.

A *change* is what a user asks for. An *edit* is the result: the weights that apply from its step on, whatever applied
before. Therefore the mix at a step is a function of the file and the edits, and a reader of an edit need not know how
a change is turned into an edit.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from omniload.base.config import StrictModel
from omniload.base.errors import ConfigError
from omniload.base.secrets import without_secrets
from omniload.mix.config import LARGEST_STEP, SourceConfig, Stage
from omniload.mix.schema.amounts import Amount
from omniload.mix.schema.stages import said_epochs
from omniload.mix.schema.weights import LARGEST_NUMBER
from omniload.mix.sources import Name

__all__ = [
    "MOST_EDITS",
    "AddSource",
    "BeginStage",
    "Change",
    "Edit",
    "FitCost",
    "RetireSource",
    "SetAmounts",
    "SetWeights",
    "SkipShard",
    "SkipSteps",
    "Undo",
    "never_held",
    "require_no_secrets",
    "said_of",
    "said_of_going_back",
    "why_skipped_for_good",
]

MOST_EDITS = 4096
"""Largest number of edits of a run: a state carries all edits that apply at its step."""


# Left out when written, so that an edit without amounts reads as in releases that had no amounts.
def _is_none(value: object) -> bool:
    return value is None


Weight = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]


class SetWeights(StrictModel):
    """Give sources other weights; sources that are not named keep theirs."""

    kind: Literal["set"] = "set"
    weights: dict[Name, Weight] = Field(min_length=1)
    """Weights in the scale of the mix file."""


class SetAmounts(StrictModel):
    """Draw other amounts of sources over the whole run; sources that are not named keep theirs."""

    kind: Literal["set_amounts"] = "set_amounts"
    amounts: dict[Name, Amount] = Field(min_length=1)


class AddSource(StrictModel):
    """Draw from a source that is not in the mix file."""

    kind: Literal["add"] = "add"
    name: Name
    source: SourceConfig
    weight: Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)] | None = Field(
        default=None, exclude_if=_is_none
    )
    """Weight in the scale of the weights at the step; later stages give the source the same share."""
    amount: Amount | None = Field(default=None, exclude_if=_is_none)
    """Amount to draw of the source instead of a weight, for a run that draws amounts."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.weight is None) == (self.amount is None):
            raise ValueError("a source is added with a weight or with an amount; give one of them")
        return self


class RetireSource(StrictModel):
    """Stop drawing from a source, in later stages too."""

    kind: Literal["retire"] = "retire"
    name: Name


class SkipSteps(StrictModel):
    """Skip the samples of some steps: the first of these steps draws what follows the last of them."""

    kind: Literal["skip"] = "skip"
    first: Annotated[int, Field(ge=0, le=LARGEST_STEP)]
    stop: Annotated[int, Field(ge=1, le=LARGEST_STEP)]
    """First step that is not skipped."""

    @model_validator(mode="after")
    def _some_steps(self) -> Self:
        if self.stop <= self.first:
            raise ValueError(
                f"steps {self.first}:{self.stop} are none; the second number is the first step that is not skipped"
            )
        return self


class SkipShard(StrictModel):
    """Draw no record of a shard that is not begun: its records keep their positions and give no samples."""

    kind: Literal["skip_shard"] = "skip_shard"
    file: Annotated[str, Field(min_length=1, max_length=4096)]
    """Path or URL of the shard, or the end of one; the whole path once the shard was found."""
    source: Name | None = None
    """Source of the shard; ``None`` to search all sources."""
    number: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    """Number of the shard among the shards of its source that hold records; ``None`` before the shard was found."""
    of: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    """Number of such shards."""


class BeginStage(StrictModel):
    """Begin a stage that waited for epochs of sources; no user asks for it, the planner notices that it is due."""

    kind: Literal["begin"] = "begin"
    stage: Annotated[int, Field(ge=1, le=LARGEST_STEP)]
    """Index among the stages of the mix file, from 0."""
    epochs: dict[Name, Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]]
    """Epochs that the stage waited for."""


class FitCost(StrictModel):
    """Deal rows by another cost; no user asks for it, the planner fits it to the compute times that ranks report."""

    kind: Literal["fit_cost"] = "fit_cost"
    linear: Annotated[float, Field(ge=0, le=LARGEST_NUMBER, allow_inf_nan=False)]
    """Seconds per token."""
    quadratic: Annotated[float, Field(ge=0, le=LARGEST_NUMBER, allow_inf_nan=False)]
    """Seconds per pair of tokens of one document."""
    measured: Annotated[int, Field(ge=1)]
    """Number of compute times in the fit."""
    residual: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Median relative distance of a compute time from the fit."""

    @model_validator(mode="after")
    def _some_cost(self) -> Self:
        if self.linear == 0 and self.quadratic == 0:
            raise ValueError("linear and quadratic are both 0; a cost is above 0")
        return self


class Undo(StrictModel):
    """Undo the latest edit that was not undone yet."""

    kind: Literal["undo"] = "undo"


Change: TypeAlias = Annotated[
    SetWeights
    | SetAmounts
    | AddSource
    | RetireSource
    | SkipSteps
    | SkipShard
    | BeginStage
    | FitCost
    | Undo,
    Field(discriminator="kind"),
]


class Edit(StrictModel):
    """A change that was accepted."""

    revision: Annotated[int, Field(ge=1, le=MOST_EDITS)]
    """Number of the edit in the run, from 1: the revision of the mix that the edit makes."""
    step: Annotated[int, Field(ge=0, le=LARGEST_STEP)]
    """First step that the edit applies to."""
    change: Change
    stages: tuple[Stage, ...]
    """Weights from ``step`` on, which replace all stages from there on. Empty if weights stay."""
    amounts: dict[Name, Amount] | None = Field(default=None, exclude_if=_is_none)
    """Amounts from ``step`` on, for the whole run; a source that is absent is no longer drawn. ``None`` if amounts
    stay, or if the mix gives weights."""
    undoes: Annotated[int, Field(ge=1, le=MOST_EDITS)] | None = None
    """Revision of the edit that this edit undoes."""
    found: dict[str, str] = Field(default_factory=dict)
    """Facts about an added source: parts of the fingerprint."""
    behind: dict[str, Any] | None = None
    """State after skipped steps, as ``MixState.to_json`` gives it; ``step`` continues from there."""

    @model_serializer(mode="wrap")
    def _without_what_it_has_not(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write an edit that skips nothing in the form of releases that could not skip."""
        content: dict[str, Any] = handler(self)
        if self.behind is None:
            del content["behind"]
        return content

    @property
    def was_asked(self) -> bool:
        """Whether a user asked for the edit and may undo it."""
        return self.undoes is None and not isinstance(self.change, BeginStage | FitCost)

    @model_validator(mode="after")
    def _says_what_holds(self) -> Self:
        if isinstance(self.change, SkipSteps) != (self.behind is not None):
            raise ValueError(
                "an edit that skips steps has the state behind them, and no other has one"
            )
        starts = [stage.from_step for stage in self.stages]
        # Otherwise there may be no stage at the edit's own step. An edit written by hand has a valid digest too.
        if self.stages and (starts[0] != self.step or sorted({*starts}) != starts):
            raise ValueError(
                f"stages of an edit begin at its step {self.step} and follow each other, not at {starts[:8]}"
            )
        holds = self.stages or self.amounts
        if not holds and not isinstance(self.change, SkipSteps | SkipShard | FitCost | Undo):
            raise ValueError("an edit of weights has stages, one of amounts has amounts")
        if isinstance(self.change, SkipShard) and None in (
            self.change.source,
            self.change.number,
            self.change.of,
        ):
            raise ValueError("an edit that skips a shard has its source and its number")
        return self


def never_held(edits: Sequence[Edit]) -> set[int]:
    """Return the revisions of skips that apply to no step, because each was undone from its own step or earlier.

    Args:
        edits: All edits of a run, from revision 1 on.
    """
    return {
        edit.undoes
        for edit in edits
        if edit.undoes is not None
        and edit.step <= (undone := edits[edit.undoes - 1]).step
        and isinstance(undone.change, SkipSteps | SkipShard)
    }


def require_no_secrets(change: Change) -> None:
    """Refuse a source whose declaration holds a secret, because the run's folder and every checkpoint would keep it.

    Raises:
        ConfigError: There is a secret; the message shows where, without the secret.
    """
    if not isinstance(change, AddSource):
        return
    for text in (*change.source.paths, *change.source.tags.values()):
        if (shown := without_secrets(text)) != text:
            raise ConfigError(
                f"source {change.name!r}: {shown!r:.200} holds credentials, which the run's folder and every "
                "checkpoint would keep; give them by the environment of the store's client, such as AWS_ACCESS_KEY_ID, "
                "and leave them out of the URL"
            )


def _said_amount(amount: Amount) -> str:
    """Return an amount as the command line takes it: ``2epochs``."""
    # With all digits, so that the text can be typed again and means the same amount.
    return f"{getattr(amount, amount.kind):.16g}{amount.kind}"


def said_of(change: Change) -> str:
    """Return a change as the command line takes it."""
    match change:
        case SetWeights(weights=weights):
            said = "set " + " ".join(f"{name}={weight:g}" for name, weight in weights.items())
        case SetAmounts(amounts=amounts):
            said = "set " + " ".join(f"{n}={_said_amount(a)}" for n, a in amounts.items())
        case AddSource(name=name, amount=Amount() as amount):
            said = f"add {name} --amount {_said_amount(amount)}"
        case AddSource(name=name, weight=weight):
            said = f"add {name} --weight {weight:g}"
        case RetireSource(name=name):
            said = f"retire {name}"
        case SkipSteps(first=first, stop=stop):
            said = f"skip --steps {first}:{stop}"
        case BeginStage(stage=stage, epochs=epochs):
            said = f"stage {stage} of the file begins: {said_epochs(epochs)}"
        case FitCost(linear=linear, quadratic=quadratic, measured=measured):
            said = (
                f"balance by linear {linear:g}, quadratic {quadratic:g}, fitted to {measured} times"
            )
        case SkipShard(file=file, source=source):
            said = f"skip --shard {file}" + (f" --source {source}" if source else "")
        case _:
            said = change.kind
    return said


def said_of_going_back(step: int) -> str:
    """Return how a run must continue to draw a step anew; there is no state before step 0."""
    if not step:
        return "begin it anew, without a state"
    return f"go on from a checkpoint of step {step} or before"


def why_skipped_for_good(edit: Edit) -> str:
    """Return when the steps skipped by an edit are drawn after all, and what a run that has moved on must do."""
    step = edit.step
    # There is no state before step 0.
    back = (
        f"end the run, go on from a checkpoint of step {step} or before up to step {step} and no further "
        f"(steps={step}), then say undo --at {step}"
        if step
        else "begin anew, in another run_dir"
    )
    return (
        f"edit {edit.revision} ({said_of(edit.change)}) can only be undone of a run at rest, before it has planned "
        f"step {step} again. If it has: leave it, only what was skipped is not trained on; or, to have that too, {back}"
    )
