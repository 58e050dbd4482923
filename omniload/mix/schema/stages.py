"""What a mix file says of weights over time."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    model_serializer,
    model_validator,
)

from omniload.base.config import StrictModel, fault_at
from omniload.base.settings.quantities import Count
from omniload.base.units import so_often
from omniload.mix.schema.amounts import Amounts, Total
from omniload.mix.schema.splits import Name
from omniload.mix.schema.token_steps import names_tokens
from omniload.mix.schema.totals.dividing import is_amount, with_total_divided
from omniload.mix.schema.weights import GroupCap, Weights, group_caps, is_nested

__all__ = [
    "LARGEST_STEP",
    "UNDATED",
    "GoneThrough",
    "Stage",
    "WeightsConfig",
    "came_with_version_2",
    "said_epochs",
]

LARGEST_STEP = 10**9
"""Steps of a run at most: a hundred years at three steps a second."""
UNDATED = 1 << 40
"""Stage ``i`` of a file that begins by epochs has this step ``i`` times over until it begins: behind all of a run, and
further apart than any ramp is long, so that it is found by no step."""
Epochs = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
"""Times that the records of a source are gone through."""
GoneThrough: TypeAlias = Callable[[str, float], bool]
"""Tells whether a source was gone through so many times already."""


def said_epochs(epochs: Mapping[str, float]) -> str:
    """Return in words what a stage waits for, or waited."""
    return " and ".join(f"{name} was gone through {so_often(n)}" for name, n in epochs.items())


def came_with_version_2(stage: object) -> Iterator[tuple[str, str]]:
    """Yield the keys of a stage that a file of version 1 does not have, and what each is, in a sentence."""
    if not isinstance(stage, Mapping):
        return
    if is_nested(stage.get("weights")):
        yield "weights", "weights hold a group"
    if names_tokens(stage):
        key = "from_tokens" if "from_tokens" in stage else "ramp_tokens"
        yield key, "the stage is dated by tokens"
    if "from_epochs" in stage:
        yield "from_epochs", "the stage is dated by epochs"
    if "ramp" in stage:
        yield "ramp", "the ramp has a form"


_IN_PLACE_OF = {
    "stages": "amounts are of the whole run, from its first step to its end",
    "level": "each source counts what its amount says",
    "stop": "the run ends when all amounts are drawn",
}
"""Why keys of a mix do not go with amounts."""


def _names_in(amounts: object) -> list[str]:
    """Return the sources that amounts of a file name, within groups too."""
    names: list[str] = []
    for name, entry in amounts.items() if isinstance(amounts, Mapping) else ():
        inner = entry.get("of") if isinstance(entry, Mapping) else None
        names += [str(name)] if inner is None else _names_in(inner)
    return names


# Left out of what is written: a mix that says nothing of it keeps the digest that older releases gave it.
def _is_linear(ramp: object) -> bool:
    return ramp == "linear"


def _is_zero(steps: object) -> bool:
    return steps == 0


class Stage(StrictModel):
    """The weights of sources from one step onward."""

    from_step: Count = Field(default=0, ge=0, le=1 << 62)
    """First step of the stage. Its ramp, if any, starts here."""
    # Not written: what holds is the step, and a mix has one digest however it was dated.
    from_tokens: Count | None = Field(default=None, ge=0, exclude=True)
    """Version 2, in place of ``from_step``: the stage begins at the first step before which the run has taken this many
    tokens, counted as ``batch.tokens`` a step."""
    from_epochs: dict[Name, Epochs] | None = Field(
        default=None, min_length=1, exclude_if=lambda epochs: epochs is None
    )
    """Version 2, in place of ``from_step``. With ``{web: 2}``, the stage begins at the first step before which the run
    has gone through ``web`` twice; with several sources, through all of them. The stage before must have had at least
    one step and must have ended its ramp. Every later stage must begin by epochs, too."""
    weights: Weights
    """Relative weight of each source. Weights need not sum to one, and a source that is not named has weight 0. Version
    2: a name may stand for a group, ``{weight: 4, temperature: 2, of: {python: 9, rust: 1}}``, whose sources share its
    weight."""
    ramp_steps: Count = Field(default=0, ge=0, le=LARGEST_STEP)
    """Steps over which the weights move from those of the stage before; 0 changes them at once."""
    ramp_tokens: Count | None = Field(default=None, ge=0, exclude=True)
    """Version 2, in place of ``ramp_steps``: tokens over which the weights move."""
    ramp: Literal["linear", "cosine"] = Field(default="linear", exclude_if=_is_linear)
    """Version 2: how the weights move. ``linear``: one equal part a step. ``cosine``: slowly at first and at the end,
    along half a wave."""
    ramp_done: Count = Field(default=0, ge=0, le=LARGEST_STEP, exclude_if=_is_zero)
    """Do not set this in a file. An edit in the middle of a cosine ramp uses it to say how many steps of that ramp come
    before the stage."""

    @model_validator(mode="before")
    @classmethod
    def _goes_by_steps_or_tokens_and_weighs(cls, content: object) -> object:
        epochs = content.get("from_epochs") if isinstance(content, Mapping) else None
        if epochs is not None and not isinstance(epochs, Mapping):
            raise fault_at(
                f"from_epochs is {epochs!r:.40}, and sources come to their ends at different steps; name the one that "
                "counts, as from_epochs: {web: 2}; of several, all are waited for",
                "from_epochs",
            )
        if isinstance(content, Mapping) and "ramp_epochs" in content:
            raise fault_at(
                f"ramp_epochs is {content['ramp_epochs']!r:.40}, and how many steps that takes is not known as the "
                "ramp begins; write ramp_tokens (omniload mix stats FILE says how many an epoch has), or draw epochs "
                "by mix.amounts in place of mix.stages",
                "ramp_epochs",
            )
        weights = content.get("weights") if isinstance(content, Mapping) else None
        for name, entry in weights.items() if isinstance(weights, Mapping) else ():
            if is_amount(entry):
                raise fault_at(
                    f"{entry!r:.40} is an amount among weights; give every source one, under mix.amounts in place of "
                    "mix.stages",
                    *("weights", name),
                )
        return content

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
    def _begins_at_a_step_of_a_run(self) -> Self:
        if self.from_step > LARGEST_STEP and self.from_epochs is None:
            raise fault_at(
                f"from_step is {self.from_step}; a run has {LARGEST_STEP} steps at most",
                "from_step",
            )
        return self

    @property
    def begins(self) -> str:
        """When it begins, in words."""
        if self.waits and self.from_epochs is not None:
            return f"from where {said_epochs(self.from_epochs)}"
        return f"from step {self.from_step}"

    @property
    def waits(self) -> bool:
        """Whether nobody knows yet when it begins: it waits for epochs of sources."""
        return self.from_step > LARGEST_STEP

    @model_validator(mode="after")
    def _some_weight(self) -> Self:
        if not any(weight > 0 for weight in self.weights.values()):
            raise fault_at(
                f"weights are all 0 in the stage {self.begins}; give one source a weight above 0",
                "weights",
            )
        return self


class WeightsConfig(StrictModel):
    """How much of each source to draw."""

    level: Literal["token", "sample", "sequence"] = "token"
    """The unit that a weight counts. With ``sequence``, samples must have the length of a row, so every source needs a
    transform of type ``concat``, or ``row_tokens`` if it is a numpy source. Each row then comes from one source."""
    stop: Literal["never", "first_exhausted", "all_exhausted", "each_once", "amounts"] = "never"
    """When the run ends. ``never``: sources repeat for ever. ``first_exhausted``: with the last document of the first
    source to run out, so no document is drawn twice. ``all_exhausted``: sources repeat until the run has gone through
    each of them, so no document is left out. ``each_once``: a source that has run out is left out, so every document is
    drawn exactly once. ``amounts``, for a mix with ``amounts`` and for no other: when all amounts are drawn. The last
    step may be short."""
    stages: tuple[Stage, ...] = Field(min_length=1)
    """The weights over time. The first stage starts at step 0."""
    amounts: Amounts | None = None
    """Version 2, in place of ``stages``: how much of each source the run draws, in ``epochs``, ``samples`` or
    ``tokens``, such as ``{web: {epochs: 1}, code: {tokens: 5G}}``. A group may have an amount, too:
    ``{tokens: 5G, of: {python: 9, rust: 1}}``. With a ``total``, an entry may have a weight: ``{weight: 3}``. All
    sources advance together, and the run ends when all amounts are drawn."""
    # Never kept: what it leaves to weights are amounts, as the file is read.
    total: Total | None = Field(default=None, exclude=True)
    """Version 2: ``tokens`` or ``samples`` of the whole run, such as ``total: {tokens: 100G}``. Entries of ``amounts``
    may then have a ``weight``: they share what the other amounts leave."""
    # Not written: a cap decides nothing that is drawn, and may be another at the next start.
    group_caps: tuple[GroupCap, ...] = Field(default=(), exclude=True)
    """Do not set this in a file. It holds the caps of groups, which omniload collects from the weights or amounts."""

    @property
    def counted(self) -> Literal["token", "sample"]:
        """What a draw counts: a sequence is drawn as any sample is."""
        return "token" if self.level == "token" else "sample"

    @model_validator(mode="before")
    @classmethod
    def _amounts_in_place_of_weights(cls, content: object) -> object:
        if not isinstance(content, Mapping):
            return content
        content = with_total_divided(content)
        amounts = content.get("amounts")
        if amounts is None:
            if content.get("stop") == "amounts":
                raise fault_at(
                    "stop is amounts, but the mix has no amounts; give mix.amounts", "stop"
                )
            return content
        for key in ("stages", "level", "stop"):
            if key in content and (key, content[key]) != ("stop", "amounts"):
                raise fault_at(
                    f"amounts and {key} are given; leave {key} out: {_IN_PLACE_OF[key]}", key
                )
        names = _names_in(amounts)
        # Everything that asks only which sources are drawn from finds them here.
        # Of no names at all the amounts are told to be at fault, and not these weights.
        stage = {"from_step": 0, "weights": dict.fromkeys(names, 1.0) or {"": 1.0}}
        return {**content, "level": "sample", "stop": "amounts", "stages": [stage]}

    # Behind the one above, and so before it: groups are as the file has them.
    @model_validator(mode="before")
    @classmethod
    def _with_caps_of_groups(cls, content: object) -> object:
        if not isinstance(content, Mapping):
            return content
        caps = group_caps(content.get("amounts"), 0, ("amounts",))
        for cap in caps:
            if cap.max_fraction is not None:
                raise fault_at(
                    f"group {cap.name} has max_fraction {cap.max_fraction:g}, a cap on shares, and the mix gives "
                    "amounts; lower its amount instead, and leave max_fraction out",
                    *("amounts", *cap.at, "max_fraction"),
                )
        stages = content.get("stages")
        for i, stage in enumerate(stages if isinstance(stages, list | tuple) else ()):
            if isinstance(stage, Mapping):
                caps += group_caps(stage.get("weights"), i, ("stages", i, "weights"))
        return {**content, "group_caps": caps} if caps else content

    @model_validator(mode="before")
    @classmethod
    def _with_stages_that_wait(cls, content: object) -> object:
        """Put stages that begin by epochs behind all steps: when they begin is found in the run."""
        stages = content.get("stages") if isinstance(content, Mapping) else None
        if not isinstance(stages, list | tuple):
            return content
        found = list(stages)
        for i, stage in enumerate(stages):
            if not isinstance(stage, Mapping) or "from_epochs" not in stage:
                continue
            step = stage.get("from_step", UNDATED * i)
            said = "give one of them"
            if stage["from_epochs"] is None:
                said = "from_epochs names no source; name the one that counts, as {web: 2}, or leave it out"
            elif i == 0:
                said = (
                    "stages[0] has from_epochs, and the first stage starts at step 0; leave it out"
                )
            elif stage.get("from_tokens") is not None:
                said = f"from_epochs and from_tokens {stage['from_tokens']!r:.40} are given; {said}"
            elif step != UNDATED * i:
                said = f"from_epochs and from_step {step!r:.40} are given; {said}"
            else:
                found[i] = {**stage, "from_step": step}
                continue
            raise fault_at(said, "stages", i, "from_epochs")
        return {**content, "stages": found}  # type: ignore[dict-item]

    @cached_property
    def waits(self) -> bool:
        """Whether a stage of the file begins by epochs."""
        return any(stage.waits for stage in self.stages)

    @cached_property
    def repetition_caps(self) -> dict[str, GroupCap]:
        """The group that caps how often each source is gone through, the tightest where there are several."""
        found: dict[str, GroupCap] = {}
        caps = [cap for cap in self.group_caps if cap.max_repetition is not None]
        for cap in sorted(caps, key=lambda cap: -(cap.max_repetition or 0)):
            found |= dict.fromkeys(cap.names, cap)
        return found

    def place_of(self, cap: GroupCap) -> tuple[str | int, ...]:
        """Return the keys of a file that lead to a group which caps how often its sources are gone through."""
        head = ("stages", cap.stage, "weights") if self.amounts is None else ("amounts",)
        return ("mix", *head, *cap.at, "max_repetition")

    @model_serializer(mode="wrap")
    def _as_it_is_written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write amounts or stages: without amounts as releases know it that had none."""
        content: dict[str, Any] = handler(self)
        for key in ("amounts",) if self.amounts is None else ("stages", "level", "stop"):
            content.pop(key, None)
        return content

    @model_validator(mode="after")
    def _stages_follow_each_other(self, info: ValidationInfo) -> Self:
        # Of a run under way: what was waited for may be over, and its source drawn no more.
        over: GoneThrough = (info.context or {}).get("gone_through", lambda _name, _epochs: False)
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
            self._require_some_end(i, earlier, later, over)
            # Else the later ramp would begin from weights that were never reached.
            if later.from_step < earlier.from_step + max(1, earlier.ramp_steps):
                raise fault_at(
                    f"stages[{i}].from_step is {later.from_step}, before the end of stage {i - 1} and its ramp "
                    f"at step {earlier.from_step + max(1, earlier.ramp_steps)}; move it or shorten the ramp",
                    *("stages", i, "from_step"),
                )
        return self

    def _require_some_end(self, i: int, earlier: Stage, later: Stage, over: GoneThrough) -> None:
        """Refuse a stage that would wait for ever, or one of a step behind a stage that waits."""
        if earlier.waits and not later.waits:
            raise fault_at(
                f"stages[{i}] begins at step {later.from_step}, after a stage that waits for epochs and so has no "
                "known first step; use from_epochs here too, or move this stage before that one",
                *("stages", i, "from_step"),
            )
        for name, epochs in (later.from_epochs or {}).items() if later.waits else ():
            waits = f"stages[{i}] waits until {name!r} was gone through {so_often(epochs)}, and "
            at = ("stages", i, "from_epochs", name)
            if not earlier.weights.get(name) and not over(name, epochs):
                raise fault_at(
                    f"{waits}the stage before gives it no weight: it would wait for ever; give it one there, however "
                    "small, or correct the name",
                    *at,
                )
            if (self.stop == "each_once" and epochs > 1) or (
                self.stop == "first_exhausted" and epochs >= 1
            ):
                most = "at most 1" if self.stop == "each_once" else "less than 1"
                raise fault_at(
                    f"{waits}stop is {self.stop}, where no document comes twice: it would wait for ever; wait for "
                    f"{most}, or choose another stop",
                    *at,
                )

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
