"""Stages that wait for epochs begin at one step in every run, as if the file named that step.

The model is a file that gives its stages the steps that were found; it has no epochs.
"""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig
from omniload.mix.edits.edit import (
    AddSource,
    BeginStage,
    RetireSource,
    SetWeights,
    SkipShard,
    SkipSteps,
    Undo,
)
from omniload.mix.edits.edits_file import edits_in, read_history, write_history
from omniload.mix.edits.found import require_reached
from omniload.mix.edits.history import History
from omniload.mix.possible import require_possible
from omniload.mix.sources import ParquetSource
from omniload.mix.state import MixState
from tests.property.omniload.machine.test_edits import undone
from tests.support.plane.builders import a_mix
from tests.support.plane.drawn_runs import worlds
from tests.support.plane.edits.promises import require_journal_folds, state_behind
from tests.support.plane.reference import SHARDS, reference_digests
from tests.support.plane.simulation import Simulation

STEPS = 16
NAMES = ("web", "code", "books")

records = st.lists(st.integers(1, 40), min_size=1, max_size=2) | st.just([])
epochs = st.lists(records, min_size=2, max_size=12).map(lambda rows: [[9], *rows])
many = st.lists(epochs, min_size=5, max_size=5)
steps = st.none() | st.integers(0, STEPS - 1)
PARTS = [0.3, 0.5, 1, 1.5, 2]


@st.composite
def mixes(draw, stop="never"):
    """One or two stages by epochs, after a stage by steps or none; each may have a ramp."""
    # Draw no more of a source than a run that repeats none would reach.
    most = {"each_once": 1, "first_exhausted": 0.5}.get(stop, 2)
    parts = st.sampled_from([part for part in PARTS if part <= most])

    def stage(**dated):
        ramp_steps = draw(st.sampled_from([0, 0, 1, 4]))
        ramp = {"ramp": draw(st.sampled_from(["linear", "cosine"]))} if ramp_steps else {}
        weights = {name: draw(st.integers(1, 6)) for name in NAMES}
        return {**dated, "weights": weights, "ramp_steps": ramp_steps, **ramp}

    stages = [{"weights": {name: draw(st.integers(1, 6)) for name in NAMES}}]
    if draw(st.booleans()):
        stages.append(stage(from_step=2))
    for _ in range(draw(st.integers(1, 2))):
        waited = draw(st.sets(st.sampled_from(NAMES), min_size=1, max_size=2))
        stages.append(stage(from_epochs={name: draw(parts) for name in sorted(waited)}))
    return a_mix(
        version=2,
        sources=NAMES,
        rows=4,
        length=16,
        pack={"method": draw(st.sampled_from(["best_fit", "concat_and_split", "none"]))},
        mix={"stages": stages, "level": draw(st.sampled_from(["token", "sample"])), "stop": stop},
        runtime={"prefetch_steps": draw(st.sampled_from([1, 16, 64]))},
    )


@st.composite
def changes(draw):
    asked = []
    for kind in draw(st.lists(st.sampled_from(["set", "add", "retire", "undo"]), max_size=4)):
        name = draw(st.sampled_from(NAMES))
        if kind == "set":
            change = SetWeights(weights={name: float(draw(st.integers(1, 5)))})
        elif kind == "add":
            if any(isinstance(change, AddSource) for change, _ in asked):
                continue
            source = ParquetSource(type="parquet", path="new/*.parquet", tokens="tokens")
            change = AddSource(name="new", source=source, weight=draw(st.integers(1, 5)))
        else:
            change = Undo() if kind == "undo" else RetireSource(name=name)
        asked.append((change, draw(steps)))
    return asked


def simulated(mix, lengths, world, **more):
    simulation = Simulation(mix=mix, epochs=lengths, num_steps=STEPS, **world, **more)
    return simulation, simulation.run()


def begun(history):
    """Return the step at which each stage of the file began; one that an earlier edit took back is found again."""
    found = {}
    for edit in history.edits:
        undone = edit.undoes and history.edits[edit.undoes - 1]
        found = {stage: began for stage, began in found.items() if began.step <= edit.step}
        if undone and isinstance(undone.change, SkipSteps):
            # Steps are drawn after all, so stages that began after them are found again.
            found = {n: e for n, e in found.items() if e.revision < undone.revision}
        if isinstance(edit.change, BeginStage):
            found[edit.change.stage] = edit
    return {stage: edit.step for stage, edit in found.items()}


def dated(history):
    """Return the mix of a file with the steps at which the stages begin; stages that never began are left out."""
    steps_of, stages = begun(history), []
    for i, stage in enumerate(history.base.mix.stages):
        if stage.from_epochs is None:
            stages.append(stage)
        elif i in steps_of:
            stages.append(stage.model_copy(update={"from_epochs": None, "from_step": steps_of[i]}))
    weights = history.base.mix.model_copy(update={"stages": tuple(stages)})
    return history.base.model_copy(update={"mix": weights})


def is_sound(history):
    """Return whether a file could say so: if weights are set within a ramp, the next stage may begin before its end."""
    try:
        MixConfig.model_validate(history.base.model_dump())
    except ValidationError as error:
        return "before the end of stage" not in str(error)
    return True


def require_due(history, states, lengths):
    """Compare the steps at which stages began with the manual: the first step with every record before it."""
    stages = history.base.mix.stages
    for number, step in begun(history).items():
        if step not in states:  # due where the steps end, as in a longer run
            continue

        def is_over(at, epochs=stages[number].from_epochs):
            ends = {
                name: states[at]["sources"][name]["cursor"][0]
                >= int(n * len(lengths[history.base.names.index(name)]))
                for name, n in epochs.items()
            }
            return all(ends.values())

        assert is_over(step)
        before = history.at(step).mix.stages
        held = next(i for i, stage in enumerate(before) if stage.from_step == step)
        earlier = before[held - 1]
        earliest = earlier.from_step + max(1, earlier.ramp_steps)
        assert step >= earliest
        assert step == earliest or step - 1 not in states or not is_over(step - 1)


def first_due(history, states, lengths, fingerprint):
    """Return the step at which each stage begins by the manual, if no edit changes weights."""

    def is_over(step, epochs):
        saved = state_of(states[step], history, fingerprint)
        state = history.entering(saved, history.revision_at(step))
        numbers = {name: history.base.names.index(name) for name in epochs}
        return all(
            state.cursors_S[numbers[name]][0] >= int(n * len(lengths[numbers[name]]))
            for name, n in epochs.items()
        )

    found, start, before = {}, 0, None
    for number, stage in enumerate(history.base.mix.stages):
        if stage.from_epochs is None:
            start = stage.from_step
        else:
            least = start + max(1, before.ramp_steps)
            steps = (step for step in sorted(states) if step >= least)
            start = next((step for step in steps if is_over(step, stage.from_epochs)), STEPS)
            if start == STEPS:
                break
            found[number] = start
        before = stage
    return found


def state_of(saved, history, fingerprint):
    carried = edits_in(saved)
    found = history.fingerprint_at(len(carried), fingerprint)
    state = MixState.from_json(saved, history.of_revision(len(carried)).names, found)
    require_reached(history, state, len(carried))
    return state


@settings(max_examples=12)
@given(mixes(), changes(), worlds(), many)
def test_the_run_is_that_of_a_file_with_the_steps_that_were_found(mix, asked, world, lengths):
    simulation, digests = simulated(mix, lengths, world, changes=asked)

    history = simulation.history
    if is_sound(plain := History(dated(history))):
        for edit in history.edits:
            if not isinstance(edit.change, BeginStage):
                plain = plain.edited(edit.change, edit.step, edit.found)
        assert digests == reference_digests(plain, lengths, num_steps=STEPS)
    assert digests == reference_digests(history, lengths, num_steps=STEPS)
    require_due(history, simulation.states, lengths)
    waiting = [stage for stage in mix.mix.stages if stage.from_epochs is not None]
    left = [stage for stage in history.latest.mix.stages if stage.waits]
    assert len(begun(history)) + len(left) == len(waiting)


@settings(max_examples=24)
@given(
    st.sampled_from(["each_once", "first_exhausted", "all_exhausted"]).flatmap(mixes),
    worlds(),
    worlds(),
    many,
    st.none() | st.tuples(st.sampled_from(NAMES), st.integers(0, SHARDS - 1)),
)
def test_a_run_that_comes_to_its_end_is_that_of_a_file_with_the_steps_that_were_found(
    mix, world, other, lengths, shard
):
    history = History(mix)
    if shard:
        change = SkipShard(file="a", source=shard[0], number=shard[1], of=SHARDS)
        history = history.edited(change, 0, at_rest=True)

    try:
        simulation, digests = simulated(mix, lengths, world, edits=history.edits)
    except ConfigError:  # a source whose shards are all left out has no records
        assert shard
        return

    found = simulation.history
    plain, again = simulated(dated(found), lengths, other, edits=history.edits)
    assert again == digests
    assert plain.history.edits == history.edits
    # A stage may be due where the data ends; it then begins after the last step.
    steps = {stage: step for stage, step in begun(found).items() if step < len(digests)}
    fingerprint = simulation.planner.fingerprint
    assert steps == first_due(found, simulation.states, lengths, fingerprint)


@settings(max_examples=12)
@given(mixes(), worlds(), worlds(), many, st.data())
def test_a_run_that_is_killed_begins_its_stages_where_it_would_have(
    mix, world, other, lengths, data
):
    first, digests = simulated(mix, lengths, world)
    at = data.draw(st.sampled_from(sorted(first.states)))
    saved = json.loads(json.dumps(first.states[at]))
    # The folder may be gone, and then only the state's own edits are known.
    history = data.draw(st.sampled_from([first.history, History(mix, edits_in(saved))]))
    state = state_of(saved, history, first.planner.fingerprint)
    revision = len(edits_in(saved))
    sizes = [len(epoch) for epoch in lengths[:3]]
    require_possible(state, history.of_revision(revision), sizes)

    second, rest = simulated(mix, lengths, other, state=state, edits=history.edits)

    assert rest == digests[at:]
    assert second.history.edits == first.history.edits
    assert all(second.states[step] == first.states[step] for step in second.states)


@settings(max_examples=12)
@given(mixes(), worlds(), worlds(), changes(), many, st.data())
def test_a_change_of_an_earlier_step_has_later_stages_begin_where_its_own_run_comes_to(
    mix, world, other, asked, lengths, data
):
    first, digests = simulated(mix, lengths, world)
    at = data.draw(st.sampled_from(sorted(first.states)))
    state = state_of(first.states[at], first.history, first.planner.fingerprint)
    asked = [(change, step) for change, step in asked if step is None or step >= at]

    second, rest = simulated(
        mix, lengths, other, state=state, edits=first.history.edits, changes=asked
    )

    history = second.history
    whole = digests[:at] + rest
    assert whole == reference_digests(history, lengths, num_steps=STEPS)
    require_due(history, first.states | second.states, lengths)
    # From the start, with the history of the folder: the same beginnings are found.
    replayed, again = simulated(mix, lengths, world, edits=history.edits)
    assert again == whole
    assert replayed.history.edits == history.edits


@settings(max_examples=16)
@given(mixes(), worlds(), worlds(), many, st.integers(0, STEPS - 2), st.integers(1, 6), st.data())
def test_steps_and_shards_that_are_skipped_have_stages_begin_where_the_rest_comes_to(
    mix, world, other, lengths, first_step, count, data
):
    first, digests = simulated(mix, lengths, world)
    history, behind = first.history, None
    if data.draw(st.booleans()):
        change = SkipSteps(first=first_step, stop=min(first_step + count, STEPS - 1))
        behind = state_behind(change.stop, first)
    else:
        name = data.draw(st.sampled_from(NAMES))
        change = SkipShard(file="a", source=name, number=data.draw(st.integers(0, 2)), of=SHARDS)
    history = history.edited(change, first_step, behind=behind, at_rest=True)
    # Resume from there, or from a checkpoint before it.
    at = data.draw(st.sampled_from([step for step in first.states if step <= first_step]))
    state = state_of(first.states[at], history, first.planner.fingerprint)

    try:
        second, rest = simulated(mix, lengths, other, state=state, edits=history.edits)
    except ConfigError:  # a source whose shards are all left out has no records
        assert isinstance(change, SkipShard)
        return

    plain = History(dated(second.history))
    # No stage has begun by an edit there, so the state is one of the unchanged file.
    behind = None if behind is None else replace(behind, mix_revision=0)
    plain = plain.edited(change, first_step, behind=behind, at_rest=True)
    assert digests[:at] + rest == reference_digests(plain, lengths, num_steps=STEPS)
    states, fingerprint = first.states | second.states, first.planner.fingerprint
    steps = {stage: step for stage, step in begun(second.history).items() if step < STEPS}
    assert steps == first_due(second.history, states, lengths, fingerprint)

    undone = second.history.edited(Undo(), first_step, at_rest=True)
    third, again = simulated(mix, lengths, world, state=state, edits=undone.edits)
    assert digests[:at] + again == digests
    assert begun(third.history) == begun(first.history)


@settings(max_examples=12)
@given(mixes(), changes(), worlds(), worlds(), many, st.integers(0, STEPS - 2), st.data())
def test_a_run_that_skips_steps_and_is_changed_is_that_of_a_file_with_the_steps_that_were_found(
    mix, asked, world, other, lengths, first_step, data
):
    first, digests = simulated(mix, lengths, world)
    change = SkipSteps(first=first_step, stop=data.draw(st.integers(first_step + 1, STEPS - 1)))
    behind = state_behind(change.stop, first)
    history = first.history.edited(change, first_step, behind=behind, at_rest=True)
    state = state_of(first.states[first_step], history, first.planner.fingerprint)
    known = len(history.edits)

    second, rest = simulated(mix, lengths, other, state=state, edits=history.edits, changes=asked)

    whole = digests[:first_step] + rest
    if is_sound(plain := History(dated(second.history))):
        behind = replace(behind, mix_revision=0)
        plain = plain.edited(change, first_step, behind=behind, at_rest=True)
        for edit in second.history.edits[known:]:
            if not isinstance(edit.change, BeginStage):
                plain = plain.edited(edit.change, edit.step, edit.found)
        assert whole == reference_digests(plain, lengths, num_steps=STEPS)
    assert whole == reference_digests(second.history, lengths, num_steps=STEPS)


@settings(max_examples=12)
@given(mixes(), changes(), worlds(), many)
def test_journal_and_folder_give_the_planners_own_states(mix, asked, world, lengths):
    simulation, _ = simulated(mix, lengths, world, changes=asked)
    with TemporaryDirectory() as folder:
        write_history(Path(folder), simulation.history)
        history = read_history(Path(folder), mix)

    assert history == simulation.history
    require_journal_folds(simulation)


@settings(max_examples=24)
@given(mixes(), worlds(), worlds(), many, st.data())
def test_a_source_is_dropped_once_nothing_waits_for_its_epochs_any_more_and_not_before(
    mix, world, other, lengths, data
):
    first, digests = simulated(mix, lengths, world)
    at = data.draw(st.sampled_from(sorted(first.states)[-5:]))
    state = state_of(first.states[at], first.history, first.planner.fingerprint)
    name = data.draw(st.sampled_from(NAMES))
    number = mix.names.index(name)

    def is_over(history, state):
        waits = [s.from_epochs.get(name, 0) for s in history.latest.mix.stages if s.waits]
        records, gone = len(lengths[number]), history.entered(state)[1].cursors_S[number][0]
        return all(gone >= int(epochs * records) for epochs in waits)

    second, rest = simulated(
        mix,
        lengths,
        other,
        state=state,
        edits=first.history.edits,
        changes=[(RetireSource(name=name), at)],
    )

    history = second.history
    dropped = [edit for edit in history.edits if isinstance(edit.change, RetireSource)]
    if dropped:
        before = History(mix, history.edits[: dropped[0].revision - 1])
        assert is_over(before, state)
    assert digests[:at] + rest == reference_digests(history, lengths, num_steps=STEPS)
    require_due(history, first.states | second.states, lengths)


@given(mixes(), changes(), st.integers(0, 20))
def test_undoing_every_edit_gives_the_weights_of_the_file_again(mix, asked, step):
    history = undone(mix, asked, step)

    held = [stage.model_copy(update={"from_step": 0}) for stage in history.latest.mix.stages][-1:]
    assert held[0].from_epochs == mix.mix.stages[-1].from_epochs
    assert held[0].weights == mix.mix.stages[-1].weights
    assert replace(history, edits=()) == History(mix)
