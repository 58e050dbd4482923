"""Acceptance of a change, and checks that a resumed run matches what its edits recorded."""

from collections.abc import Sequence
from dataclasses import replace

from omniload.base.errors import ConfigError, StateError
from omniload.mix.config import Stage
from omniload.mix.edits.amounts import require_drawable
from omniload.mix.edits.edit import AddSource, Change, Edit, FitCost, never_held, said_of_going_back
from omniload.mix.edits.history import History
from omniload.mix.edits.stages import begun_anew, gone_through_in
from omniload.mix.fingerprint import SourceFacts, source_parts
from omniload.mix.state import MixState

__all__ = [
    "found_in",
    "merged",
    "never_reached",
    "of_its_run",
    "require_found",
    "require_named",
    "require_open",
    "require_reached",
    "take_up",
]


def found_in(change: Change, facts: SourceFacts | None) -> dict[str, str]:
    """Return the parts of the fingerprint of an added source; empty for any other change.

    Raises:
        ConfigError: The source was not opened.
    """
    if not isinstance(change, AddSource):
        return {}
    if facts is None:
        raise ConfigError(f"source {change.name!r} was not opened before it was added; open it")
    return source_parts(change.name, change.source, facts)


def take_up(
    history: History,
    change: Change,
    step: int,
    facts: SourceFacts | None,
    state: MixState,
    records_S: Sequence[int],
) -> tuple[History, list[int]]:
    """Return the history with one more edit, and the raw records of each source in it.

    Args:
        history: The mix and its edits.
        change: The requested change.
        step: First step that the change is to apply to.
        facts: Facts found about an added source.
        state: State before the first unplanned step.
        records_S: Raw records of each source, without an added source.

    Raises:
        ConfigError: As for ``History.edited`` and ``require_drawable``.
    """
    # The state as its step begins, after skipped steps and with amounts spread anew.
    _, state = history.entered(state)
    records_S = [*records_S, *([] if facts is None else [facts.positions_per_epoch])]
    over = gone_through_in(history, state, records_S)
    after = history.edited(change, step, found_in(change, facts), gone_through=over)
    require_drawable(history, after, state, records_S)
    return after, records_S


def never_reached(history: History, end: int) -> tuple[Edit, ...]:
    """Return the edits that a run ending before step ``end`` does not reach, without edits that no longer apply."""
    gone = {edit.undoes for edit in history.edits} | begun_anew(history)
    behind = (edit for edit in history.edits if edit.step >= end and edit.undoes is None)
    return tuple(edit for edit in behind if edit.revision not in gone)


def merged(kept: History, carried: Sequence[Edit]) -> History:
    """Return the history of a run that resumes from a state with edits.

    Args:
        kept: The history in the run's folder.
        carried: The edits in the state; a folder without edits takes them over.

    Raises:
        StateError: Folder and state disagree, or the edits of the state belong to another mix.
    """
    # The folder may have further edits, made after the state was taken.
    if not carried or kept.edits[: len(carried)] == tuple(carried):
        return kept
    if not kept.edits:
        return require_named(History(kept.base, tuple(carried)), "the edits in the mix state")
    raise StateError(
        f"the mix state carries {len(carried)} edits that are not the first of the {len(kept.edits)} in the run's "
        "folder: the state is of another run; resume from one of this run, or give another run_dir"
    )


def require_named(history: History, where: str) -> History:
    """Return the history if its edits name only its sources.

    Raises:
        StateError: An edit gives a weight or an amount to a source that the mix does not have at that revision.
    """
    for edit in history.edits:
        given: set[str] = set().union(edit.amounts or (), *(stage.weights for stage in edit.stages))
        # Checked at its own revision, because a source that a later edit adds is not there yet.
        if unknown := given - history.of_revision(edit.revision).sources.keys():
            raise StateError(
                f"{where}: edit {edit.revision} speaks of source {min(unknown)!r}, which the mix does not have; "
                "restore it from a backup"
            )
    return history


def require_reached(history: History, state: MixState, num_carried: int) -> None:
    """Refuse a state that no run with these edits passes through.

    A skip that was undone before the run moved past it changed no sample, so states from before the skip belong to a
    run with both edits too. The same is true of states from before costs were fitted. Their next step has the revision
    of that run.

    Args:
        history: The mix and its edits.
        state: The state.
        num_carried: Number of edits that the state brought.

    Raises:
        StateError: The revision differs; the message names the revision found and the revision expected.
    """
    # At the step before, because an edit that begins at the state's own step takes effect with that step.
    due = history.revision_at(state.step - 1) if state.step else 0
    reopened = history.replanned_from(state.mix_revision)
    if reopened < state.step:
        raise StateError(
            f"the mix state before step {state.step} is of the run before edits skipped something from step "
            f"{reopened:.0f} on; {said_of_going_back(int(reopened))}"
        )
    if state.mix_revision == num_carried < due and _is_alike(history, state, due):
        return
    if state.mix_revision < due:
        first = min(history.edits[state.mix_revision :], key=lambda edit: edit.step)
        raise StateError(
            f"the mix state before step {state.step} is of revision {state.mix_revision} of the mix, and the edits of "
            f"its run make it {due}: edit {first.revision} was made afterwards and holds from step {first.step} on; "
            f"{said_of_going_back(first.step)}"
        )
    for revision, where in ((due, "its run"), (num_carried, "the state itself")):
        if state.mix_revision != revision:
            raise StateError(
                f"the mix state before step {state.step} is of revision {state.mix_revision} of the mix, and the edits "
                f"of {where} make it {revision}; resume from a state of this run"
            )


def of_its_run(history: History, state: MixState) -> MixState:
    """Return a state accepted by ``require_reached``, with its revision in a run with fitted costs.

    Costs are fitted while a run continues, so its journal has the steps after a fit with that revision. A skip that
    was undone may follow them, made while the run was at rest.
    """
    due = history.revision_at(state.step - 1) if state.step else 0
    between = history.edits[state.mix_revision : due]
    fits = [e.revision for e in between if isinstance(e.change, FitCost) and e.step < state.step]
    return replace(state, mix_revision=max(fits)) if fits else state


def _is_alike(history: History, state: MixState, due: int) -> bool:
    """Whether later edits left the samples before a state unchanged: skips that never applied, and fitted costs."""
    void, known = never_held(history.edits[:due]), state.mix_revision
    before = [edit for edit in history.edits[known:due] if edit.step < state.step]
    # A fitted cost deals rows to other ranks and changes no sample.
    are_void = all(
        edit.revision in void
        or (edit.undoes in void and edit.undoes > known)
        or isinstance(edit.change, FitCost)
        for edit in before
    )
    # These edits take back a stage that had begun by epochs, and its beginning is determined anew from there on.
    kept = _without_cuts(history, known) == _without_cuts(history, due)
    return are_void and (kept or not history.base.mix.waits)


def _without_cuts(history: History, revision: int) -> list[Stage]:
    """Return the stages of a revision, without stages that an edit began at its step with the same weights."""
    found: list[Stage] = []
    for stage in history.of_revision(revision).mix.stages:
        before = found[-1] if found else None
        goes_on = (
            before is not None
            and stage.from_epochs is None
            and stage.ramp_steps == 0
            and stage.weights == before.weights
            and stage.from_step >= before.from_step + before.ramp_steps
        )
        if not goes_on:
            found.append(stage)
    return found


def require_found(history: History, facts_S: Sequence[SourceFacts]) -> None:
    """Refuse data that changed after an edit added it.

    Raises:
        StateError: Data changed; the message names the source and every part that differs.
    """
    for edit in history.edits:
        if not isinstance(edit.change, AddSource):
            continue
        number = history.latest.names.index(edit.change.name)
        now = found_in(edit.change, facts_S[number])
        changed = sorted(
            k for k in now.keys() | edit.found.keys() if now.get(k) != edit.found.get(k)
        )
        if changed:
            raise StateError(
                f"source {edit.change.name!r}, which edit {edit.revision} added, is not what it was then: "
                f"{', '.join(changed)} differ; go on with the old data"
            )


def require_open(step: int, *, planned: int, end: int | None, ended: bool) -> None:
    """Refuse a step at which an edit cannot begin.

    Args:
        step: The step.
        planned: First unplanned step.
        end: First step after the end of the run, if known.
        ended: Whether the data has ended.

    Raises:
        ConfigError: The step is planned already, or the run ends before it.
    """
    if ended or (end is not None and step >= end):
        last = planned if ended or end is None else end
        remedy = f"say --at {planned}, or --at next"
        if last <= planned:
            remedy = (
                "all its steps are planned, and keep their mix; a run that is opened with fewer "
                "runtime.prefetch_steps, such as 4, takes changes sooner"
            )
        raise ConfigError(
            f"step {step} is not part of the run, which ends before step {last}: {remedy}"
        )
    if step < planned:
        raise ConfigError(
            f"step {step} is planned already, and ranks may have it; the first step that can be changed is {planned}: "
            f"say --at {planned} or later, or --at next"
        )
