"""A change of a mix in a running job: what was asked for, and the edit that it became.

A *change* says what somebody wants. An *edit* says what holds: from its step on these
weights, whatever held before. So a mix at a step is a function of the file and the edits, and nobody who
reads an edit later must know how a change is worked out.
"""

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from omniload.base.config import StrictModel
from omniload.base.errors import ConfigError
from omniload.base.secrets import without_secrets
from omniload.mix.config import LARGEST_STEP, SourceConfig, Stage
from omniload.mix.sources import Name

__all__ = [
    "MOST_EDITS",
    "AddSource",
    "Change",
    "Edit",
    "RetireSource",
    "SetWeights",
    "SkipShard",
    "SkipSteps",
    "Undo",
    "require_no_secrets",
    "said_of",
]

MOST_EDITS = 4096
"""Edits of a run at most: a state carries all that hold at its step."""

Weight = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]


class SetWeights(StrictModel):
    """Give sources other weights; those that are not named keep theirs."""

    kind: Literal["set"] = "set"
    weights: dict[Name, Weight] = Field(min_length=1)
    """In the scale of the mix file."""


class AddSource(StrictModel):
    """Draw from a source that the mix file does not have."""

    kind: Literal["add"] = "add"
    name: Name
    source: SourceConfig
    weight: Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]
    """In the scale of the weights that hold at the step; later stages give it the same share."""


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


class Undo(StrictModel):
    """Let hold what would hold without the latest edit that was not undone."""

    kind: Literal["undo"] = "undo"


Change: TypeAlias = Annotated[
    SetWeights | AddSource | RetireSource | SkipSteps | SkipShard | Undo,
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

    @model_validator(mode="after")
    def _says_what_holds(self) -> Self:
        if isinstance(self.change, SkipSteps) != (self.behind is not None):
            raise ValueError(
                "an edit that skips steps has the state behind them, and no other has one"
            )
        if not self.stages and not isinstance(self.change, SkipSteps | SkipShard | Undo):
            raise ValueError("an edit of weights has stages")
        if isinstance(self.change, SkipShard) and None in (
            self.change.source,
            self.change.number,
            self.change.of,
        ):
            raise ValueError("an edit that skips a shard has its source and its number")
        return self


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


def said_of(change: Change) -> str:
    """Return a change as its command line says it."""
    match change:
        case SetWeights(weights=weights):
            return "set " + " ".join(f"{name}={weight:g}" for name, weight in weights.items())
        case AddSource(name=name, weight=weight):
            return f"add {name} --weight {weight:g}"
        case RetireSource(name=name):
            return f"retire {name}"
        case SkipSteps(first=first, stop=stop):
            return f"skip --steps {first}:{stop}"
        case SkipShard(file=file, source=source):
            return f"skip --shard {file}" + (f" --source {source}" if source else "")
        case Undo():
            return "undo"
