"""The progress of a run, folded from its journal."""

from dataclasses import replace

import pytest

from omniload.base.errors import StateError
from omniload.machine.messages import (
    AppendJournal,
    PublishPlans,
    SamplesReported,
    Started,
    StepTaken,
)
from omniload.mix.deficit import integer_weights
from omniload.mix.edits.edit import AddSource, SetWeights, SkipSteps
from omniload.mix.edits.history import History
from omniload.mix.progress import fold, progress_of, weights_by_state
from omniload.mix.schedule import weights_at
from omniload.mix.sources import JsonlSource
from omniload.mix.state import MixState
from tests.support.plane.builders import a_mix, a_planner, a_table, resealed


def a_journal(mix, *, steps, epoch=(1000, 1000), length=10):
    """Plan ``steps`` steps of samples of one length; return base, records, and the planner."""
    planner = a_planner(mix, epoch=list(epoch), num_steps=steps)
    base = planner.state_at(0)
    records = []
    events = [Started()] + [
        SamplesReported(source=s, table=a_table([length] * 400)) for s in range(len(mix.names))
    ]
    while events:
        for command in planner.handle(events.pop(0)):
            if isinstance(command, AppendJournal):
                records.append(command.record)
            elif isinstance(command, PublishPlans):
                events += [StepTaken(step=plan.step, dp_rank=0) for plan in command.plans]
    return base, records, planner


def test_a_journal_without_steps_shows_nothing_drawn():
    base, _, _ = a_journal(a_mix(), steps=0)

    progress = progress_of(History(a_mix()), base, [])

    assert (progress.first_step, progress.next_step) == (0, 0)
    assert [(s.drawn, s.share, s.epochs) for s in progress.sources] == [(0, 0, 0), (0, 0, 0)]
    assert [s.target for s in progress.sources] == pytest.approx([0.5, 0.5])


def test_drawn_and_due_follow_the_weights():
    mix = a_mix(weights={"web": 3, "code": 1})
    base, records, planner = a_journal(mix, steps=8)

    progress = progress_of(History(mix), base, records)

    code, web = progress.sources
    assert progress.next_step == 8
    assert (code.drawn, web.drawn) == planner.state.drawn_S
    assert web.due == pytest.approx(0.75 * (web.drawn + code.drawn), abs=1e-6)
    assert web.target == pytest.approx(0.75)
    assert abs(web.drawn - web.due) <= 10
    assert web.share + code.share == pytest.approx(1)


def test_epochs_are_counted_by_the_records_found_at_the_start():
    mix = a_mix()
    base, records, planner = a_journal(mix, steps=5, epoch=(20, 1000))

    progress = progress_of(History(mix), base, records)

    position, *begun = planner.state.cursors_S[0]
    position += any(begun)
    assert progress.sources[0].position == position
    assert progress.sources[0].epochs == pytest.approx(position / 20)


@pytest.mark.parametrize(
    "drawn",
    [
        {"stop": "each_once", "stages": [{"weights": {"web": 7, "code": 5}}]},
        {"amounts": {"web": {"epochs": 1}, "code": {"tokens": 195}}},
    ],
)
def test_a_source_that_the_run_goes_on_without_is_no_longer_due_anything(drawn):
    mix = a_mix(version=2, mix=drawn)
    base, records, planner = a_journal(mix, steps=200, epoch=(20, 60))

    progress = progress_of(History(mix), base, records)

    credits_S = planner.state.credits_S
    assert [source.has_ended for source in progress.sources] == [True, True]
    assert [s.due for s in progress.sources] == [s.drawn for s in progress.sources]
    assert any(credits_S)
    begun = progress_of(History(mix), base, records[:1])
    assert [source.has_ended for source in begun.sources] == [False, False]


def test_tokens_that_wait_for_a_row_are_counted():
    base, records, planner = a_journal(a_mix(), steps=3)

    progress = progress_of(History(a_mix()), base, records)

    assert progress.carried_tokens == int(planner.state.carried.lengths_P.sum()) > 0


@pytest.mark.parametrize("step", [0, 1, 4, 6])
def test_folding_to_a_step_gives_the_state_that_the_planner_had_before_it(step):
    mix = a_mix()
    base, records, _ = a_journal(mix, steps=6)
    _, _, planner = a_journal(mix, steps=step)

    state = fold(History(mix), base, records, planner.fingerprint, step)

    assert state.to_json(mix.names, planner.fingerprint) == planner.state_at(step)


@pytest.mark.parametrize(
    "change",
    [
        SetWeights(weights={"web": 9.0}),
        AddSource(name="books", source=JsonlSource(type="jsonl", path="b.jsonl"), weight=1.0),
    ],
    ids=["set", "add"],
)
def test_steps_in_a_journal_are_of_the_edits_known_then_until_the_run_goes_on_behind_a_skip(change):
    mix = a_mix()
    base, records, planner = a_journal(mix, steps=6)
    behind = fold(History(mix), base, records, planner.fingerprint, 3)
    history = History(mix).edited(SkipSteps(first=2, stop=3), 2, behind=behind, at_rest=True)
    edited = history.edited(change, 4, {"sources.books.records": "9"})

    assert progress_of(edited, base, records) == progress_of(History(mix), base, records)


def test_folding_past_the_end_is_refused():
    mix = a_mix()
    base, records, planner = a_journal(mix, steps=4)

    with pytest.raises(
        StateError, match="covers steps 0 to 3, and the state before step 4; step 9 is outside"
    ):
        fold(History(mix), base, records, planner.fingerprint, 9)


def test_a_journal_of_another_mix_is_refused():
    base, records, _ = a_journal(a_mix(sources=("web", "books")), steps=2)

    with pytest.raises(StateError):
        progress_of(History(a_mix()), base, records)


@pytest.mark.parametrize("written", [None, 3, ["seed"]])
def test_a_base_without_a_fingerprint_is_refused(written):
    base, records, _ = a_journal(a_mix(), steps=2)

    with pytest.raises(
        StateError, match=r"the journal's base has the fingerprint .*, which is none"
    ):
        progress_of(History(a_mix()), base | {"fingerprint": written}, records)


def test_a_base_without_a_step_is_refused():
    base, records, _ = a_journal(a_mix(), steps=2)
    del base["step"]

    with pytest.raises(StateError, match="damaged"):
        progress_of(History(a_mix()), base, records)


@pytest.mark.parametrize("written", ["many", "0 records", ""])
def test_a_fingerprint_that_does_not_say_how_many_records_there_are_is_refused(written):
    base, records, _ = a_journal(a_mix(), steps=2)
    base["fingerprint"]["sources.web.records"] = written
    base = resealed(base)

    with pytest.raises(StateError, match="source 'web' gives"):
        progress_of(History(a_mix()), base, records)


def test_weights_by_state_are_those_of_the_schedule():
    stages = [
        {"from_step": 0, "weights": {"web": 1, "code": 1}},
        {"from_step": 3, "ramp_steps": 3, "weights": {"web": 1, "code": 4}},
    ]
    mix = a_mix(mix={"stages": stages})
    weights = weights_by_state(History(mix))

    found = [weights(replace(MixState.start(2), step=step)) for step in range(9)]

    assert found == [integer_weights(weights_at(mix.mix.stages, mix.names, k)) for k in range(9)]
