"""A change of a mix in a running job: what was asked for, and the edit that it became.

A *change* says what somebody wants. An *edit* says what holds: from its step on these
weights, whatever held before. So a mix at a step is a function of the file and the edits, and nobody who
reads an edit later must know how a change is worked out.
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
"""Edits of a run at most: a state carries all that hold at its step."""


# Left out of what is written: an edit without amounts reads as releases wrote it that had none.
def _is_none(value: object) -> bool:
    return value is None


Weight = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]


class SetWeights(StrictModel):
    """Give sources other weights; those that are not named keep theirs."""

    kind: Literal["set"] = "set"
    weights: dict[Name, Weight] = Field(min_length=1)
    """In the scale of the mix file."""


class SetAmounts(StrictModel):
    """Have a run draw other amounts of sources, over the whole of it; those that are not named keep theirs."""

    kind: Literal["set_amounts"] = "set_amounts"
    amounts: dict[Name, Amount] = Field(min_length=1)


class AddSource(StrictModel):
    """Draw from a source that the mix file does not have."""

    kind: Literal["add"] = "add"
    name: Name
    source: SourceConfig
    weight: Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)] | None = Field(
        default=None, exclude_if=_is_none
    )
    """In the scale of the weights that hold at the step; later stages give it the same share."""
    amount: Amount | None = Field(default=None, exclude_if=_is_none)
    """What a run that draws amounts draws of it, in place of a weight."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.weight is None) == (self.amount is None):
            raise ValueError("a source is added with a weight or with an amount; give one of them")
        return self


class RetireSource(StrictModel):
    """Draw no more from a source, in no later stage either."""

    kind: Literal["retire"] = "retire"
    name: Name


class SkipSteps(StrictModel):
    """Leave out what was trained on in some steps: the first of them draws what comes behind the last."""

    kind: Literal["skip"] = "skip"
    first: Annotated[int, Field(ge=0, le=LARGEST_STEP)]
    stop: Annotated[int, Field(ge=1, le=LARGEST_STEP)]
    """First step that is not left out."""

    @model_validator(mode="after")
    def _some_steps(self) -> Self:
        if self.stop <= self.first:
            raise ValueError(
                f"steps {self.first}:{self.stop} are none; the second number is the first step that is not skipped"
            )
        return self


class SkipShard(StrictModel):
    """Draw no record of a shard that is not begun: its records keep their positions and give no sample."""

    kind: Literal["skip_shard"] = "skip_shard"
    file: Annotated[str, Field(min_length=1, max_length=4096)]
    """Path or URL of the shard, or the end of one; once it was looked for, all of it."""
    source: Name | None = None
    """The source that has it; ``None`` to look in all of them."""
    number: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    """Its number among the shards of its source that hold records; ``None`` before it was looked for."""
    of: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    """How many those are."""


class BeginStage(StrictModel):
    """Begin a stage that waited for epochs of sources: asked for by nobody, the planner finds that it is due."""

    kind: Literal["begin"] = "begin"
    stage: Annotated[int, Field(ge=1, le=LARGEST_STEP)]
    """Its place among the stages of the mix file, from 0."""
    epochs: dict[Name, Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]]
    """What it waited for."""


class FitCost(StrictModel):
    """Deal rows by another cost: asked for by nobody, the planner finds it in the compute times that ranks report."""

    kind: Literal["fit_cost"] = "fit_cost"
    linear: Annotated[float, Field(ge=0, le=LARGEST_NUMBER, allow_inf_nan=False)]
    """Seconds of a token."""
    quadratic: Annotated[float, Field(ge=0, le=LARGEST_NUMBER, allow_inf_nan=False)]
    """Seconds of a pair of tokens of one document."""
    measured: Annotated[int, Field(ge=1)]
    """Times that it was fitted to."""
    residual: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Median distance of a time from the fit, as a part of it."""

    @model_validator(mode="after")
    def _some_cost(self) -> Self:
        if self.linear == 0 and self.quadratic == 0:
            raise ValueError("linear and quadratic are both 0; a cost is above 0")
        return self


class Undo(StrictModel):
    """Let hold what would hold without the latest edit that was not undone."""

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
    """A change that was taken up."""

    revision: Annotated[int, Field(ge=1, le=MOST_EDITS)]
    """Its place among the edits of the run, from 1: the revision of the mix that it makes."""
    step: Annotated[int, Field(ge=0, le=LARGEST_STEP)]
    """First step that it holds at."""
    change: Change
    stages: tuple[Stage, ...]
    """Weights from ``step`` on; they take the place of all stages from there on. None where weights stay."""
    amounts: dict[Name, Amount] | None = Field(default=None, exclude_if=_is_none)
    """Amounts from ``step`` on, of the whole run; a source that is not among them is drawn no more. ``None`` where
    amounts stay, or the mix gives weights."""
    undoes: Annotated[int, Field(ge=1, le=MOST_EDITS)] | None = None
    """Revision of the edit that it undoes."""
    found: dict[str, str] = Field(default_factory=dict)
    """What a source that it adds was found to be: parts of the fingerprint."""
    behind: dict[str, Any] | None = None
    """Of skipped steps: the state behind them, as ``MixState.to_json`` gives it; ``step`` goes on from there."""

    @model_serializer(mode="wrap")
    def _without_what_it_has_not(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write an edit that skips nothing as releases know it that could not skip."""
        content: dict[str, Any] = handler(self)
        if self.behind is None:
            del content["behind"]
        return content

    @property
    def was_asked(self) -> bool:
        """Whether somebody asked for it, and may undo it."""
        return self.undoes is None and not isinstance(self.change, BeginStage | FitCost)

    @model_validator(mode="after")
    def _says_what_holds(self) -> Self:
        if isinstance(self.change, SkipSteps) != (self.behind is not None):
            raise ValueError(
                "an edit that skips steps has the state behind them, and no other has one"
            )
        starts = [stage.from_step for stage in self.stages]
        # Else there may be no stage at its own step: whoever writes an edit by hand writes its digest too.
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
    """Return the revisions of skips that hold at no step, as each was undone from its own step on, or an earlier one.

    Args:
        edits: All of a run, from revision 1 on.
    """
    return {
        edit.undoes
        for edit in edits
        if edit.undoes is not None
        and edit.step <= (undone := edits[edit.undoes - 1]).step
        and isinstance(undone.change, SkipSteps | SkipShard)
    }


def require_no_secrets(change: Change) -> None:
    """Refuse a source whose declaration holds a secret: the run's folder and every checkpoint would keep it.

    Raises:
        ConfigError: Showing where, without the secret.
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
    """Return an amount as a command line says it: ``2epochs``."""
    # In all its digits: what is said can be typed again, and is the same.
    return f"{getattr(amount, amount.kind):.16g}{amount.kind}"


def said_of(change: Change) -> str:
    """Return a change as its command line says it."""
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
    """Return what a run goes on from that is to draw a step anew: of step 0 there is no state."""
    if not step:
        return "begin it anew, without a state"
    return f"go on from a checkpoint of step {step} or before"


def why_skipped_for_good(edit: Edit) -> str:
    """Say when the steps that an edit skips are drawn after all, and how a run that has gone on comes there."""
    step = edit.step
    # From step 0 there is no state to go back to.
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
