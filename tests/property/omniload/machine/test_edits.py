"""The mix is changed while a simulated job runs: the samples are a function of mix, seed and edits alone.

The model is ``reference_digests``, which knows the edits from the start and has no machine.
"""

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import ConfigError, StateError
from omniload.machine import queue as queue_module
from omniload.machine.queue import SampleQueue
from omniload.mix.edits.edit import AddSource, RetireSource, SetWeights, SkipShard, SkipSteps, Undo
from omniload.mix.edits.edits_file import read_history, write_history
from omniload.mix.edits.found import require_reached
from omniload.mix.edits.history import History
from omniload.mix.schedule import stages_from, weights_at
from omniload.mix.sources import ParquetSource
from omniload.mix.state import MixState
from tests.support.examples import few
from tests.support.plane.builders import a_mix
from tests.support.plane.drawn_runs import epochs, worlds
from tests.support.plane.edits.promises import (
    require_each_sample_once,
    require_journal_folds,
    saved_state,
    state_behind,
    taken_in,
)
from tests.support.plane.reference import reference_digests
from tests.support.plane.simulation import Simulation

STEPS = 10
NAMES = ("web", "code", "books")

three_epochs, six_epochs = (st.lists(epochs, min_size=n, max_size=n) for n in (3, 6))
weights = st.integers(0, 5).map(float)
steps = st.none() | st.integers(0, STEPS - 1)


@st.composite
def mixes(draw):
    stages = [{"from_step": 0, "weights": {name: draw(st.integers(1, 5)) for name in NAMES}}]
    if draw(st.booleans()):
        later = {name: draw(weights) for name in NAMES[1:]} | {NAMES[0]: 1.0}
        ramp_steps = draw(st.integers(0, 4))
        ramp = {"ramp": draw(st.sampled_from(["linear", "cosine"]))} if ramp_steps else {}
        stages.append({"from_step": 4, "weights": later, "ramp_steps": ramp_steps, **ramp})
    return a_mix(
        version=2,
        sources=NAMES,
        rows=8,
        length=16,
        pack={"method": draw(st.sampled_from(["best_fit", "concat_and_split", "none"]))},
        mix={"stages": stages, "level": draw(st.sampled_from(["token", "sample"]))},
        runtime={"prefetch_steps": draw(st.sampled_from([1, 16, 64]))},
    )


@st.composite
def changes(draw):
    """Changes as users request them, some of them impossible; names of added sources sort anywhere among the others."""
    added = iter(("a-new", "d-new", "zz-new"))
    kinds = draw(st.lists(st.sampled_from(["set", "add", "retire", "undo"]), max_size=6))
    asked = []
    for kind in kinds:
        name = draw(st.sampled_from(NAMES))
        if kind == "set":
            change = SetWeights(weights={name: draw(weights), NAMES[0]: draw(weights)})
        elif kind == "add":
            if (new := next(added, None)) is None:
                continue
            source = ParquetSource(type="parquet", path=f"{new}/*.parquet", tokens="tokens")
            change = AddSource(name=new, source=source, weight=draw(st.integers(1, 5)))
        else:
            change = Undo() if kind == "undo" else RetireSource(name=name)
        asked.append((change, draw(steps)))
    return asked


def simulated(mix, lengths, world, **more):
    steps = {"num_steps": STEPS}
    simulation = Simulation(mix=mix, epochs=lengths, **{**steps, **world, **more})
    return simulation, simulation.run()


@given(mixes(), changes(), worlds(), worlds(), six_epochs, st.data())
def test_a_run_with_edits_is_what_mix_and_edits_alone_decide_and_goes_on_in_another_world(
    mix, asked, world, other, lengths, data
):
    """Each run is checked for all promises, because making a run takes longer than the checks."""
    run, digests = simulated(mix, lengths, world, changes=asked)

    require_decided_and_resumed(run, digests, lengths, other, data)
    require_each_sample_once(run, lengths)


def require_decided_and_resumed(run, digests, lengths, other, data):
    """Check that mix and edits decide a run, that its journal folds, and that it resumes in another world."""
    assert digests == reference_digests(run.history, lengths, num_steps=STEPS)
    assert run.published == list(range(STEPS))
    require_journal_folds(run)
    at = data.draw(st.sampled_from(sorted(run.states)))
    state = taken_in(run, at, run.history)
    resumed, rest = simulated(run.mix, lengths, other, state=state, edits=run.history.edits)
    assert rest == digests[at:]
    assert all(resumed.states[step] == run.states[step] for step in resumed.states)


@few(10, soak=200)
@given(mixes(), changes(), worlds(), six_epochs)
def test_a_replay_that_knows_every_edit_from_the_start_gives_the_same_steps(
    mix, asked, world, lengths
):
    require_replayed(mix, asked, world, lengths)


def require_replayed(mix, asked, world, lengths):
    """Check that a run which knows the changes from its start takes the steps that they decide."""
    history = History(mix)
    for change, step in asked:
        with suppress(ConfigError):
            history = history.edited(change, 3 if step is None else step)

    _, digests = simulated(mix, lengths, world, edits=history.edits)

    assert digests == reference_digests(history, lengths, num_steps=STEPS)


@given(mixes(), st.integers(0, 20))
def test_stages_from_a_step_give_from_there_on_what_the_stages_give(mix, step):
    stages = mix.mix.stages

    cut = stages_from(stages, step)

    assert cut[0].from_step == step
    for at in range(step, step + 15):
        assert weights_at(cut, NAMES, at) == pytest.approx(weights_at(stages, NAMES, at))


def undone(mix, asked, step):
    """Return the history of a mix with those changes from a step on that are accepted, and each of them undone."""
    history, number = History(mix), 0
    for change, _ in asked:
        try:
            history = history.edited(change, step)
        except ConfigError:
            continue
        number += 1 if not isinstance(change, Undo) else -1
    for _ in range(number):
        history = history.edited(Undo(), step)
    return history


@given(mixes(), changes(), st.integers(0, 20))
def test_undoing_every_edit_gives_the_weights_of_the_file_again(mix, asked, step):
    history = undone(mix, asked, step)

    for at in range(step, step + 15):
        held = {name: share for name, share in history.shares_at(at).items() if share}
        due = {name: share for name, share in History(mix).shares_at(at).items() if share}
        assert held == pytest.approx(due)


def skipping(simulation, first, stop):
    """Return the history of a run at rest that skips some of its steps, as the command line makes it."""
    change, behind = SkipSteps(first=first, stop=stop), state_behind(stop, simulation)
    return simulation.history.edited(change, first, behind=behind, at_rest=True)


def keys_by_step(simulation):
    """Return the pieces of each step, as a sorted list, in which no piece may be repeated."""
    keys = {}
    for (step, _), batch in simulation.batches.items():
        for m in batch.microbatches:
            keys.setdefault(step, []).extend(map(tuple, m.keys_K4.tolist()))
    return {step: sorted(found) for step, found in sorted(keys.items())}


skips = st.tuples(st.integers(0, STEPS - 2), st.integers(1, 4)).map(
    lambda drawn: (drawn[0], min(drawn[0] + drawn[1], STEPS - 1))
)


@few(10, soak=200)
@given(mixes(), worlds(), worlds(), three_epochs, skips, st.data())
def test_steps_that_are_skipped_are_left_out_and_all_others_are_those_of_the_run_without_it(
    mix, world, other, lengths, skip, data
):
    """The model has no edit: it has the steps of the plain run, with a gap. Weights do not move in the gap."""
    mix = mix.model_copy(update={"mix": mix.mix.model_copy(update={"stages": mix.mix.stages[:1]})})
    first, stop = skip
    plain, digests = simulated(mix, lengths, world)
    history = skipping(plain, first, stop)
    at = data.draw(st.sampled_from([s for s in plain.states if s <= first] or [None]))
    saved = None if at is None else taken_in(plain, at, history)

    resumed, rest = simulated(mix, lengths, other, state=saved, edits=history.edits)

    before, after = keys_by_step(plain), keys_by_step(resumed)
    assert rest[: first - (at or 0)] == digests[at or 0 : first]
    for step in range(first, STEPS - (stop - first)):
        assert after[step] == before[step + stop - first]
    assert rest == reference_digests(history, lengths, num_steps=STEPS)[at or 0 :]


def test_of_many_steps_that_are_skipped_next_to_nothing_is_read(monkeypatch):
    mix = a_mix(sources=NAMES, rows=8, length=16, runtime={"prefetch_steps": 3})
    lengths = [[[16]] * 500] * 3
    world = {"dp": 1, "num_loaders": 1, "num_constructors": 1, "seed": 1, "num_steps": 14}
    plain, digests = simulated(mix, lengths, world)
    history = skipping(plain, 1, 13)
    asked, real = {}, SampleQueue.ask

    def ask(queue, *arguments, **words):
        start, stop = real(queue, *arguments, **words)
        asked.setdefault(id(queue), []).append((start, stop))
        return start, stop

    monkeypatch.setattr(SampleQueue, "ask", ask)
    monkeypatch.setattr(queue_module, "_SMALL_READ", 1)
    monkeypatch.setattr(queue_module, "_FIRST_READ", 1)
    _, rest = simulated(mix, lengths, world, edits=history.edits)

    assert rest[0] == digests[0]
    assert rest == reference_digests(history, lengths, num_steps=14)
    for ranges in asked.values():
        gaps = [start - stop for (_, stop), (start, _) in pairwise(ranges)]
        assert max(gaps) > 5, ranges  # the reads until step 1 was planned lie before the gap


@few(8, soak=200)
@given(mixes(), changes(), worlds(), six_epochs, skips)
def test_nothing_but_what_was_skipped_is_lost_though_the_mix_was_edited(
    mix, asked, world, lengths, skip
):
    plain, _ = simulated(mix, lengths, world, changes=asked)
    history = skipping(plain, *skip)

    resumed, _ = simulated(mix, lengths, world, edits=history.edits)

    for step in resumed.states:
        taken_in(resumed, step, history)
    left_out = {
        k for s, keys in keys_by_step(plain).items() if skip[0] <= s < skip[1] for k in keys
    }
    trained = [key for keys in keys_by_step(resumed).values() for key in keys]
    assert len({*trained}) == len(trained)
    assert not left_out & {*trained}
    once = {k for s, keys in keys_by_step(plain).items() if s < skip[0] for k in keys}
    later = {k for s, keys in keys_by_step(plain).items() if s >= skip[1] for k in keys}
    names = history.latest.names
    last = resumed.states[max(resumed.states)]
    waiting = {(names.index(row[0]), *row[1:4]) for row in last["carried"]}
    reached = {
        number: tuple(last["sources"][name]["cursor"][:2])
        for number, name in enumerate(names)
        if name in last["sources"]
    }
    due = {k for k in once | later if (k[1], k[2]) < reached.get(k[0], (0, 0))}
    if mix.pack.method != "concat_and_split":
        assert due <= {*trained} | waiting


@few(8, soak=200)
@given(mixes(), worlds(), worlds(), three_epochs, skips, st.data())
def test_a_run_that_skipped_steps_goes_on_from_what_it_saved_behind_them(
    mix, world, other, lengths, skip, data
):
    """Weights move, also in skipped steps, and change once more at the skipped steps."""
    plain, _ = simulated(mix, lengths, world)
    history = skipping(plain, *skip)
    if data.draw(st.booleans()):
        history = history.edited(SetWeights(weights={NAMES[1]: 3}), skip[0])
    first, digests = simulated(mix, lengths, world, edits=history.edits)
    assert digests == reference_digests(history, lengths, num_steps=STEPS)

    saved = {step: taken_in(first, step, history) for step in first.states}

    at = data.draw(st.sampled_from(sorted(saved)))
    _, rest = simulated(mix, lengths, other, state=saved[at], edits=history.edits)
    assert rest == digests[at:]


@pytest.mark.parametrize("again", [None, 0.0])
@pytest.mark.parametrize(("first", "stage"), [(5, 7), (0, 7), (0, 9)])
def test_what_was_drawn_in_skipped_steps_may_be_of_weights_that_hold_no_more(first, stage, again):
    stages = [
        {"from_step": 0, "weights": dict.fromkeys(NAMES, 1)},
        {"from_step": stage, "weights": {NAMES[0]: 1}},
    ]
    mix = a_mix(sources=NAMES, rows=8, length=16, mix={"stages": stages})
    lengths = [[[9], [5]]] * 3
    plain, _ = simulated(mix, lengths, {"dp": 1})
    history = skipping(plain, first, 8)
    if again is not None:
        history = history.edited(SetWeights(weights={NAMES[1]: again}), first)
    run, _ = simulated(mix, lengths, {"dp": 1}, edits=history.edits)

    assert [taken_in(run, step, history).step for step in sorted(run.states)] == sorted(run.states)


def test_steps_are_skipped_that_drew_from_nothing_but_a_source_that_came_with_the_first_of_them():
    """All other sources have the same cursors after the skipped steps as before."""
    mix = a_mix(sources=NAMES[:1], rows=8, length=16)
    source = ParquetSource(type="parquet", path="new/*.parquet", tokens="tokens")
    added = History(mix).edited(AddSource(name="new", source=source, weight=1), 3)
    lengths = [[[9], [5]], [[7], [4], [8]]]
    world = {"dp": 1, "edits": added.edited(RetireSource(name=NAMES[0]), 3).edits}
    plain, _ = simulated(mix, lengths, world)
    history = skipping(plain, 3, 5)

    _, rest = simulated(mix, lengths, {"dp": 1}, edits=history.edits)

    assert rest == reference_digests(history, lengths, num_steps=STEPS)


def test_only_a_file_with_skipped_steps_is_of_a_version_that_older_releases_refuse(tmp_path):
    plain, _ = simulated(a_mix(sources=NAMES, rows=8, length=16), [[[9], [5]]] * 3, {"dp": 1})
    skipped = skipping(plain, 4, 7)
    kept = []
    for history in (History(skipped.base).edited(SetWeights(weights={"web": 2}), 3), skipped):
        write_history(tmp_path, history)
        kept.append(orjson.loads((tmp_path / "edits.json").read_bytes()))
        assert read_history(tmp_path, skipped.base) == history

    assert [each["version"] for each in kept] == [1, 2]
    assert ["behind" in each["edits"][0] for each in kept] == [False, True]


def test_what_lies_before_skipped_steps_changes_no_more_and_a_skip_is_undone_at_rest():
    mix = a_mix(sources=NAMES, rows=8, length=16)
    plain, _ = simulated(mix, [[[9], [5]]] * 3, {"dp": 1})
    history = skipping(plain, 4, 7)

    changes = (
        (SetWeights(weights={"web": 2}), 3, "say --at 4 or later"),
        (SkipSteps(first=2, stop=3), 2, "skip steps behind it"),
    )
    for change, step, remedy in changes:
        with pytest.raises(
            ConfigError, match=f"lies before step 4, where edit 1 skips .*; {remedy}"
        ):
            history.edited(change, step, behind=MixState.start(3), at_rest=True)
    with pytest.raises(ConfigError, match=r"at rest, .*\(steps=4\), then say undo --at 4"):
        history.edited(Undo(), 4)
    undone = history.edited(Undo(), 4, at_rest=True)
    lengths = [[[9], [5]]] * 3
    assert reference_digests(undone, lengths, num_steps=9) == reference_digests(
        mix, lengths, num_steps=9
    )
    later = saved_state(plain, max(plain.states))
    with pytest.raises(StateError, match="checkpoint of step 4 or before"):
        require_reached(history, later, 0)
    # A state that was saved under the skip belongs to another run, even if no step was planned after it.
    with pytest.raises(StateError, match="edit 2 was made afterwards and holds from step 4"):
        require_reached(undone, replace(later, mix_revision=1), 1)


@few(8, soak=200)
@given(mixes(), worlds(), worlds(), three_epochs, skips, st.data())
def test_a_skip_that_was_undone_before_the_run_went_on_leaves_every_state_of_before_as_it_was(
    mix, world, other, lengths, skip, data
):
    plain, digests = simulated(mix, lengths, world)
    change = SkipShard(file="web/1", source="web", number=1, of=3)
    skips_steps = data.draw(st.booleans())
    skipped = skipping(plain, *skip) if skips_steps else plain.history.edited(change, skip[0])
    undone = skipped.edited(Undo(), skip[0], at_rest=True)
    if data.draw(st.booleans()):
        undone = undone.edited(change, STEPS).edited(Undo(), STEPS, at_rest=True)

    at = data.draw(st.sampled_from(sorted(plain.states)))
    saved = taken_in(plain, at, undone)
    run, rest = simulated(mix, lengths, other, state=saved, edits=undone.edits)

    assert rest == digests[at:]
    for step in run.states:
        taken_in(run, step, undone)
