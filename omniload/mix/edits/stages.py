"""Stages that wait for epochs: which is due, and what an edit of an earlier step does to one that has begun.

A stage that begins is an edit like any other, made by the planner between two plans. It is a function of the
state, so that every run of a seed, a mix and its edits makes it at the same step::

    stages of the file   0: web 3, code 1          1: from_epochs {web: 2}, web 1, code 3
    before step 840      web stands at 2 times its records: edit 1, ``begin``, from step 840 on

A run that goes on from an earlier step and is changed there draws another web: what begins later in the history is
taken back by that edit, and found anew.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from omniload.mix.config import Stage, WeightsConfig
from omniload.mix.edits.edit import BeginStage, Edit
from omniload.mix.schema.amounts import Amount
from omniload.mix.schema.stages import UNDATED
from omniload.mix.state import MixState

if TYPE_CHECKING:
    from omniload.mix.edits.history import History

__all__ = ["dated", "declared_at", "taken_back", "with_begun"]


def with_begun(history: "History", state: MixState, records_S: Sequence[int]) -> "History":
    """Return the history with the stage that is due before the step of a state; the same one where none is.

    Args:
        history: The mix and its edits.
        state: State before the first step that is not planned, as that step begins.
        records_S: Raw records of each source.
    """
    if not history.base.mix.waits:
        return history
    stages = history.latest.mix.stages
    i = next((i for i, stage in enumerate(stages) if stage.waits), None)
    if i is None:
        return history
    before, stage = stages[i - 1], stages[i]
    # In the order of the file, however soon a source comes to its end; an edit of a step to come counts as a stage.
    ends = before.from_step + max(1, before.ramp_steps)
    if state.step < ends or not _were_gone_through(stage, history, state, records_S):
        return history
    assert stage.from_epochs is not None, "it waits"
    edit = Edit(
        revision=len(history.edits) + 1,
        step=state.step,
        change=BeginStage(stage=stage.from_step // UNDATED, epochs=stage.from_epochs),
        stages=(stage.model_copy(update={"from_step": state.step}), *stages[i + 1 :]),
    )
    return replace(history, edits=(*history.edits, edit))


def _were_gone_through(
    stage: Stage, history: "History", state: MixState, records_S: Sequence[int]
) -> bool:
    names = history.base.names
    # By the cursor, as amounts and ``omniload mix show`` count: what is behind it was drawn to its end.
    return all(
        state.cursors_S[names.index(name)][0]
        >= Amount(epochs=n).units(records_S[names.index(name)])
        for name, n in (stage.from_epochs or {}).items()
    )


def dated(history: "History", stages: Sequence[Stage], step: int) -> tuple[Stage, ...]:
    """Return stages of any revision as an edit of ``step`` finds them: begun by then, or waiting.

    One that waits again is what it was before it began, and what was changed behind its beginning goes: stages of
    steps behind a stage that waits would begin before it.
    """
    if not history.base.mix.waits:
        return tuple(stages)
    begun: dict[int, int] = {}
    beginnings: dict[int, list[Edit]] = {}
    for edit in history.edits:
        begun = {number: at for number, at in begun.items() if at <= edit.step}
        if isinstance(edit.change, BeginStage):
            begun[edit.change.stage] = edit.step
            beginnings.setdefault(edit.step, []).append(edit)
    found: list[Stage] = []
    for stage in stages:
        if stage.from_epochs is None:
            if not (found and found[-1].waits):
                found.append(stage)
            continue
        number = stage.from_step // UNDATED
        whole = stage
        if not stage.waits:
            edits = beginnings[stage.from_step]
            last = edits[-1].change
            assert isinstance(last, BeginStage), "it is among the beginnings"
            number = last.stage
            if stage not in [edit.stages[0] for edit in edits]:
                whole = edits[-1].stages[0]
        at = begun.get(number, step + 1)
        if at <= step:
            found.append(stage.model_copy(update={"from_step": at}))
        else:
            found.append(whole.model_copy(update={"from_step": UNDATED * number}))
    return tuple(found)


def taken_back(history: "History", step: int) -> tuple[int, ...]:
    """Return the edits of weights that no longer hold where an edit of ``step`` takes a beginning back before them."""
    begun: dict[int, int] = {}
    for edit in history.edits:
        begun = {number: at for number, at in begun.items() if at <= edit.step}
        if isinstance(edit.change, BeginStage):
            begun[edit.change.stage] = edit.step
    first = min((at for at in begun.values() if at > step), default=None)
    if first is None:
        return ()
    undone = {edit.undoes for edit in history.edits}
    asked = [e for e in history.edits if e.was_asked and e.stages and e.revision not in undone]
    return tuple(edit.revision for edit in asked if edit.step >= first)


def declared_at(history: "History", step: int) -> WeightsConfig:
    """Return what the file says of weights, with its stages that wait for epochs as they are at a step."""
    weights = history.base.mix
    if not weights.waits:
        return weights
    return weights.model_copy(update={"stages": dated(history, weights.stages, step)})
