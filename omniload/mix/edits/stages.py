"""Stages whose steps no file states: stages that wait for epochs, and stages that edits set for later steps.

A stage that begins is an edit like any other, made by the planner between two plans. The edit is a function of the
state, so every run with the same seed, mix and edits makes it at the same step::

    stages of the file   0: web 3, code 1          1: from_epochs {web: 2}, web 1, code 3
    before step 840      web stands at 2 times its records: edit 1, ``begin``, from step 840 on

If a run resumes from an earlier step and is changed there, it draws another amount of web. Therefore that edit takes
back beginnings that come later in the history, and they are determined anew.

An edit for a later step stays when a mix file that lacks it is followed. Because a file cannot date a stage that its
run lacks, leaving the stage out says nothing against it.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import TYPE_CHECKING

from omniload.mix.config import MixConfig, Stage, WeightsConfig
from omniload.mix.edits.edit import (
    AddSource,
    BeginStage,
    Edit,
    RetireSource,
    SkipShard,
    SkipSteps,
)
from omniload.mix.edits.sources import weighted
from omniload.mix.schedule import stage_at, stages_from
from omniload.mix.schema.amounts import Amount
from omniload.mix.schema.stages import UNDATED, GoneThrough
from omniload.mix.state import MixState

if TYPE_CHECKING:
    from omniload.mix.edits.history import History

__all__ = [
    "begun_anew",
    "by_epochs",
    "dated",
    "declared_at",
    "edits_ahead",
    "gone_through_in",
    "taken_back",
    "with_begun",
    "with_scheduled",
]


def with_begun(history: "History", state: MixState, records_S: Sequence[int]) -> "History":
    """Return the history with the stage that is due before the step of a state; unchanged if none is due.

    Args:
        history: The mix and its edits.
        state: State before the first unplanned step, as that step begins.
        records_S: Raw records of each source.
    """
    if not history.base.mix.waits:
        return history
    stages = history.latest.mix.stages
    i = next((i for i, stage in enumerate(stages) if stage.waits), None)
    if i is None:
        return history
    before, stage = stages[i - 1], stages[i]
    # Stages begin in the order of the file, however early a source ends. An edit at a later step counts as a stage.
    ends = before.from_step + max(1, before.ramp_steps)
    if state.step == before.from_step < ends:
        ends = _end_of_uncut(history, before)
    over, waited = gone_through_in(history, state, records_S), stage.from_epochs or {}
    if state.step < ends or not all(over(name, epochs) for name, epochs in waited.items()):
        return history
    assert stage.from_epochs is not None, "it waits"
    edit = Edit(
        revision=len(history.edits) + 1,
        step=state.step,
        change=BeginStage(stage=stage.from_step // UNDATED, epochs=stage.from_epochs),
        stages=(stage.model_copy(update={"from_step": state.step}), *stages[i + 1 :]),
    )
    return replace(history, edits=(*history.edits, edit))


def gone_through_in(history: "History", state: MixState, records_S: Sequence[int]) -> GoneThrough:
    """Return a function that tells whether a number of epochs of a source of the file is over before a state's step."""
    names = history.base.names

    def was_gone_through(name: str, epochs: float) -> bool:
        # Judged by the cursor, like amounts and ``omniload mix show``: everything before the cursor was drawn
        # completely.
        number = names.index(name)
        return state.cursors_S[number][0] >= Amount(epochs=epochs).units(records_S[number])

    return was_gone_through


def _end_of_uncut(history: "History", stage: Stage) -> int:
    """Return the first step after a stage and its ramp; if skips cut off its beginning, after the whole stage."""
    edit = next((edit for edit in reversed(history.edits) if edit.stages), None)
    undone = history.edits[edit.undoes - 1] if edit is not None and edit.undoes else edit
    if (
        edit is None
        or undone is None
        or edit.step != stage.from_step
        or not isinstance(undone.change, SkipSteps | SkipShard)
    ):
        return stage.from_step + max(1, stage.ramp_steps)
    so_far = replace(history, edits=history.edits[: edit.revision - 1])
    stages = dated(so_far, so_far.latest.mix.stages, edit.step, edit.undoes)
    return _end_of_uncut(so_far, stages[stage_at(stages, edit.step)])


def dated(
    history: "History", stages: Sequence[Stage], step: int, undoes: int | None = None
) -> tuple[Stage, ...]:
    """Return stages of any revision as an edit at ``step`` finds them: either begun by then, or waiting.

    A stage that waits again is restored as it was before it began. Later stages with fixed steps are dropped, because
    they would begin before the stage that waits.

    Args:
        history: The edits before this edit.
        stages: The stages.
        step: First step of this edit.
        undoes: Revision of the edit that this edit undoes.
    """
    if not history.base.mix.waits:
        return tuple(stages)
    begun = _beginnings_kept(history, _beginnings(history), step, undoes)
    # Only stages by epochs follow a stage by epochs. Therefore they have the last numbers of the file, whatever edits
    # lie between.
    number = len(history.base.mix.stages) - sum(stage.from_epochs is not None for stage in stages)
    found: list[Stage] = []
    for stage in stages:
        if stage.from_epochs is None:
            if not (found and found[-1].waits):
                found.append(stage)
            continue
        if number in begun:
            found.append(stage.model_copy(update={"from_step": begun[number].step}))
        else:
            whole = stage if stage.waits else _as_it_waited(history, stage, number)
            found.append(whole.model_copy(update={"from_step": UNDATED * number}))
        number += 1
    return tuple(found)


def _as_it_waited(history: "History", stage: Stage, number: int) -> Stage:
    """Return a begun stage as it was when it began, because an edit at its own step may have changed it."""
    began = [
        edit.stages[0]
        for edit in history.edits
        if edit.step == stage.from_step
        and isinstance(edit.change, BeginStage)
        and edit.change.stage == number
    ]
    return stage if stage in began or not began else began[-1]


def by_epochs(history: "History") -> list[tuple[int, int | None, Stage]]:
    """Return the stages that begin by epochs: number in the file, step at which it began, and the stage as declared."""
    stages = [stage for stage in history.latest.mix.stages if stage.from_epochs is not None]
    first = len(history.base.mix.stages) - len(stages)
    return [
        (number, None, stage)
        if stage.waits
        else (number, stage.from_step, _as_it_waited(history, stage, number))
        for number, stage in enumerate(stages, first)
    ]


def _beginnings(history: "History") -> dict[int, Edit]:
    """Return the edit that began each stage, without edits that an edit at an earlier step took back."""
    begun: dict[int, Edit] = {}
    for edit in history.edits:
        begun = _beginnings_kept(history, begun, edit.step, edit.undoes)
        if isinstance(edit.change, BeginStage):
            begun[edit.change.stage] = edit
    return begun


def begun_anew(history: "History") -> frozenset[int]:
    """Return the edits that began a stage and no longer apply, because an edit at an earlier step took them back."""
    kept = {edit.revision for edit in _beginnings(history).values()}
    begins = (edit for edit in history.edits if isinstance(edit.change, BeginStage))
    return frozenset(edit.revision for edit in begins if edit.revision not in kept)


def _beginnings_kept(
    history: "History", begun: Mapping[int, Edit], step: int, undoes: int | None
) -> dict[int, Edit]:
    """Return the beginnings that an edit at ``step`` leaves as they are."""

    def is_kept(edit: Edit) -> bool:
        if undoes is None or not isinstance(history.edits[undoes - 1].change, SkipSteps):
            return edit.step <= step
        # If skipped steps are drawn after all, what began after them is in the future again.
        return edit.step < step or (edit.step == step and edit.revision < undoes)

    return {number: edit for number, edit in begun.items() if is_kept(edit)}


def taken_back(history: "History", step: int, undoes: int | None = None) -> tuple[int, ...]:
    """Return the edits of weights that no longer apply because an edit at ``step`` takes back an earlier beginning."""
    begun = _beginnings(history)
    kept = _beginnings_kept(history, begun, step, undoes)
    first = min((edit.step for number, edit in begun.items() if number not in kept), default=None)
    if first is None:
        return ()
    undone = {edit.undoes for edit in history.edits}
    asked = [e for e in history.edits if e.was_asked and e.stages and e.revision not in undone]
    return tuple(edit.revision for edit in asked if edit.step >= first)


def declared_at(history: "History", step: int) -> WeightsConfig:
    """Return the weights of the file, with stages that wait for epochs as they are at a step."""
    weights = history.base.mix
    if not weights.waits:
        return weights
    return weights.model_copy(update={"stages": dated(history, weights.stages, step)})


def with_scheduled(
    file: MixConfig, history: "History", step: int
) -> tuple[list[Stage], frozenset[int]]:
    """Return the stages of a file from a step on, with stages that edits scheduled, and the steps of the latter.

    Args:
        file: The mix of the file.
        history: The mix that applies.
        step: First unplanned step.
    """
    own, declared, held = (
        stages_from(dated(history, stages, step), step)
        for stages in (file.mix.stages, history.base.mix.stages, history.latest.mix.stages)
    )
    # A stage that the run was started with does not come from an edit, even if the file leaves it out.
    known = {stage.from_step for stage in (*own, *declared)}
    ahead = [stage for stage in held if stage.from_step not in known]
    steps = frozenset(stage.from_step for stage in ahead)
    for edit in edits_ahead(history, steps):
        own = [_under(edit, stage, file) if stage.from_step > edit.step else stage for stage in own]
    return sorted((*own, *ahead), key=lambda stage: stage.from_step), steps


def _under(edit: Edit, stage: Stage, file: MixConfig) -> Stage:
    """Return a stage of a file after an edit: a source that the edit adds or retires is so in all later stages."""
    weights = dict(stage.weights)
    match edit.change:
        case AddSource(name=name) if name not in file.names:
            first = edit.stages[0].weights
            others = sum(weight for other, weight in first.items() if other != name)
            weights[name] = sum(weights.values()) * first[name] / others
        case RetireSource(name=name) if any(w for n, w in weights.items() if n != name):
            weights.pop(name, None)
    return weighted(stage, weights, edit.step)


def edits_ahead(history: "History", steps: AbstractSet[int]) -> Iterator[Edit]:
    """Yield the edits that take effect at some steps, only the last one of each step, in the order of the steps."""
    by_step = {edit.step: edit for edit in history.edits if edit.stages and edit.step in steps}
    yield from (by_step[step] for step in sorted(by_step))
