"""The edit that a change makes: the resulting stages or amounts, what it undoes, and why it is refused.

A change is what a user asks for, and an edit is what applies from its step on::

    set web=3, asked at step 40   ──▶   stages from step 40 on: the one of before with web at 3, and those that follow
    undo                          ──▶   the stages of before the last edit that is left
    skip steps 30 to 40           ──▶   the state behind step 39, at which step 30 goes on
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from omniload.base.errors import ConfigError
from omniload.mix.config import Stage, WeightsConfig
from omniload.mix.edits.amounts import (
    amounts_under,
    counted_alike,
    require_amounts_before,
)
from omniload.mix.edits.edit import (
    MOST_EDITS,
    AddSource,
    BeginStage,
    Change,
    Edit,
    FitCost,
    RetireSource,
    SetAmounts,
    SetWeights,
    SkipShard,
    SkipSteps,
    Undo,
    require_no_secrets,
    why_skipped_for_good,
)
from omniload.mix.edits.shards import require_skippable
from omniload.mix.edits.sources import require_fits, require_known, weighted
from omniload.mix.edits.stages import dated
from omniload.mix.schedule import stages_from
from omniload.mix.schema.stages import GoneThrough
from omniload.mix.state import MixState

if TYPE_CHECKING:
    from omniload.mix.edits.history import History

__all__ = ["next_edit", "undone_by"]


def next_edit(  # noqa: PLR0913 -- what is found and kept of each kind of change
    history: "History",
    change: Change,
    step: int,
    found: Mapping[str, str] | None = None,
    behind: MixState | None = None,
    *,
    at_rest: bool = False,
    gone_through: GoneThrough | None = None,
) -> Edit:
    """Return the edit that a change makes, as the next edit of a history.

    Args:
        history: The mix and its edits so far.
        change: The requested change.
        step: First step that the change is to apply to.
        found: Parts of the fingerprint of an added source.
        behind: State after the skipped steps.
        at_rest: Whether no plane of the run is up; then an undo may draw skipped steps after all.
        gone_through: Returns whether given epochs of a source are over, so that no stage waits for them any more; by
            default none are.

    Raises:
        ConfigError: The change names an unknown source, leaves a stage without weights, undoes nothing, brings a
            source with a secret, or is of a kind that users cannot ask for.
    """
    if isinstance(change, FitCost):
        raise ConfigError(
            "a cost is fitted by the planner, where balance.fit_every of the mix says so"
        )
    require_no_secrets(change)
    change = counted_alike(history, change)
    most = MOST_EDITS - sum(stage.waits for stage in history.base.mix.stages)
    if len(history.edits) >= most:
        raise ConfigError(
            f"the run has {len(history.edits)} edits, {most} at most; end it, write its present mix into a new mix "
            "file, and start a new run"
        )
    undoes = undone_by(history, change, step, at_rest=at_rest)
    _require_behind_skips(history, change, step, undoes)
    require_amounts_before(history, change, step, undoes)
    if isinstance(change, AddSource):
        require_fits(history.base, history.latest, change.name, change.source)
    amounts = amounts_under(history, change, undoes)
    stages = _stages_made_by(history, change, step, undoes) if amounts is None else []
    if stages:
        _require_weights_of_a_file(history, stages, step, gone_through)
    return Edit(
        revision=len(history.edits) + 1,
        step=step,
        change=change,
        stages=tuple(stages),
        amounts=amounts,
        undoes=undoes,
        found=dict(found or {}),
        behind=_kept_behind(history, change, behind),
    )


def undone_by(history: "History", change: Change, step: int, *, at_rest: bool) -> int | None:
    """Return the revision of the edit that a change undoes from a step on; ``None`` if the change is no undo.

    Raises:
        ConfigError: There is nothing to undo, or the edit skips steps and the run has moved past them.
    """
    if not isinstance(change, Undo):
        return None
    gone = {edit.undoes for edit in history.edits}
    # An undo is not undone itself: a second undo undoes the edit before. A stage that began by itself is not undone.
    left = [edit for edit in history.edits if edit.was_asked and edit.revision not in gone]
    if not left:
        raise ConfigError(
            f"there is nothing to undo: of {len(history.edits)} edits of the run none is left"
        )
    if left[-1].behind and not (at_rest and step == left[-1].step):
        raise ConfigError(why_skipped_for_good(left[-1]))
    return left[-1].revision


def _stages_made_by(
    history: "History", change: Change, step: int, undoes: int | None
) -> list[Stage]:
    """Return the stages from ``step`` on that a change makes; empty if weights stay."""
    match change:
        case BeginStage():
            raise ConfigError("a stage begins by itself, once its epochs are over")
        case SkipShard():
            require_skippable(history.edits, change)
        case Undo() if undoes is not None and history.edits[undoes - 1].stages:
            before = history.of_revision(undoes - 1).mix.stages
            return stages_from(dated(history, before, step, undoes), step)
        case SetWeights() | SetAmounts() | AddSource() | RetireSource():
            return _reweighted(history, change, step)
    # Stages that began by epochs after this step are determined anew, because other records are drawn up to there.
    anew = dated(history, history.latest.mix.stages, step, undoes)
    return [] if anew == history.latest.mix.stages else stages_from(anew, step)


def _reweighted(
    history: "History", change: SetWeights | SetAmounts | AddSource | RetireSource, step: int
) -> list[Stage]:
    """Return the stages from ``step`` on under a change of weights."""
    held = dated(history, history.latest.mix.stages, step)
    stages = stages_from(held, step)
    match change:
        case SetWeights(weights=weights):
            require_known(weights, history.latest.names)
            # An unfinished ramp ends here; later stages apply as declared.
            later = [stage for stage in held if stage.from_step > step]
            return [weighted(stages[0], {**stages[0].weights, **weights}, step), *later]
        case AddSource(name=name, weight=float(weight)):
            part = weight / sum(stages[0].weights.values())
            return [
                weighted(s, {**s.weights, name: part * sum(s.weights.values())}, step)
                for s in stages
            ]
        case RetireSource(name=name):
            require_known([name], history.latest.names)
            if not any(stage.weights.get(name, 0.0) for stage in stages):
                raise ConfigError(
                    f"source {name!r} has no weight from step {step} on; it is retired already"
                )
            return [
                weighted(s, {n: w for n, w in s.weights.items() if n != name}, step) for s in stages
            ]
        case _:
            raise AssertionError(f"{change.kind} gives no weights")


def _require_weights_of_a_file(
    history: "History", stages: Sequence[Stage], step: int, gone_through: GoneThrough | None
) -> None:
    """Check the weights from ``step`` on against the rules of a mix file."""
    # Counted from the step, because the first stage of a file begins at 0. Stages that wait come after all others.
    moved = [
        s.model_dump(exclude={"from_step"} if s.waits else {"from_epochs"})
        | ({} if s.waits else {"from_step": s.from_step - step})
        for s in stages
    ]
    for content, (stage, later) in zip(moved, pairwise(stages), strict=False):
        # In a file no stage begins within a ramp, but an edit at a later step ends the ramp that it finds there.
        content["ramp_steps"] = min(stage.ramp_steps, later.from_step - stage.from_step)
    content = history.base.mix.model_dump() | {"stages": moved}
    known = {} if gone_through is None else {"gone_through": gone_through}
    try:
        WeightsConfig.model_validate(content, context=known)
    except ValidationError as error:
        raise ConfigError(
            f"the weights from step {step} on are refused (stages are counted from there): "
            + "; ".join(str(fault["msg"]) for fault in error.errors())
        ) from error


def _require_behind_skips(
    history: "History", change: Change, step: int, undoes: int | None
) -> None:
    """Refuse a change before skipped steps, because the state after them would be a different one.

    Raises:
        ConfigError: There are such steps; the message names the edit.
    """
    skips = [s for s in history.skips(len(history.edits)) if s.revision != undoes]
    if skips and step < skips[-1].step:
        later = (
            "skip steps behind it"
            if isinstance(change, SkipSteps)
            else f"say --at {skips[-1].step} or later"
        )
        raise ConfigError(
            f"step {step} lies before step {skips[-1].step}, where edit {skips[-1].revision} skips steps: with "
            f"another mix before it, it would not be those; {later}, or undo that edit first"
        )


def _kept_behind(
    history: "History", change: Change, behind: MixState | None
) -> dict[str, Any] | None:
    if not isinstance(change, SkipSteps):
        return None
    if behind is None:
        raise ConfigError(
            f"steps {change.first}:{change.stop} cannot be skipped while the run goes on: they are trained on; "
            "end the run, skip them, and go on from a checkpoint before them"
        )
    return behind.to_json(history.of_revision(behind.mix_revision).names, {})
