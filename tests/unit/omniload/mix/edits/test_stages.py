"""Stages that wait for epochs, and edits before, at and after the step at which they begin."""

from dataclasses import replace

import pytest

from omniload.base.errors import ConfigError, StateError
from omniload.mix.edits.answers import EditTaken
from omniload.mix.edits.edit import (
    BeginStage,
    RetireSource,
    SetWeights,
    SkipShard,
    SkipSteps,
    Undo,
    said_of,
)
from omniload.mix.edits.edits_file import read_history, write_history
from omniload.mix.edits.found import require_reached
from omniload.mix.edits.history import History
from omniload.mix.edits.stages import gone_through_in, with_begun
from omniload.mix.state import MixState
from tests.support.plane.builders import a_mix

RECORDS_S = [100, 10]
"""Records of code and of web."""
SKIPPED = SkipShard(file="a", source="code", number=0, of=4)


def waiting(*more, **stage):
    first = {"weights": {"web": 3, "code": 1}}
    second = {"from_epochs": {"web": 2}, "weights": {"web": 1, "code": 3}, **stage}
    return History(a_mix(version=2, mix={"stages": [first, second, *more]}))


def standing(step, web):
    return replace(MixState.start(2), step=step, cursors_S=((0, 0, 0), (web, 0, 0)))


def test_a_stage_begins_at_the_first_step_with_all_records_behind_it():
    history = waiting(ramp_steps=2)

    assert with_begun(history, standing(7, 19), RECORDS_S) is history
    assert with_begun(history, standing(0, 20), RECORDS_S) is history  # the first has not held
    begun = with_begun(history, standing(7, 20), RECORDS_S)

    assert [(e.revision, e.step, said_of(e.change)) for e in begun.edits] == [
        (1, 7, "stage 1 of the file begins: web was gone through 2 times")
    ]
    assert [begun.shares_at(step)["web"] for step in (6, 7, 8, 99)] == [0.75, 0.5, 0.25, 0.25]
    assert with_begun(begun, standing(9, 40), RECORDS_S) is begun


def test_stages_begin_in_their_order_and_behind_the_ramp_before():
    third = {"from_epochs": {"web": 2.5, "code": 0.1}, "weights": {"code": 1}}
    history = with_begun(waiting(third, ramp_steps=4), standing(7, 30), RECORDS_S)

    assert with_begun(history, standing(10, 99), RECORDS_S) is history
    assert with_begun(history, standing(11, 99), RECORDS_S) is history  # no epoch of code has ended
    state = replace(standing(11, 99), cursors_S=((10, 0, 0), (25, 0, 0)))
    assert with_begun(history, state, RECORDS_S).shares_at(11) == {"code": 1, "web": 0}


def test_an_edit_of_a_step_to_come_holds_a_stage_up():
    history = waiting().edited(SetWeights(weights={"code": 2}), 12)

    assert with_begun(history, standing(8, 20), RECORDS_S) is history
    assert with_begun(history, standing(12, 20), RECORDS_S) is history
    assert with_begun(history, standing(13, 20), RECORDS_S).edits[-1].step == 13


def test_a_source_that_is_waited_for_keeps_a_weight_until_then():
    history = waiting()

    for change in (RetireSource(name="web"), SetWeights(weights={"web": 0})):
        with pytest.raises(ConfigError, match=r"'web' was gone through 2 times, .* wait for ever"):
            history.edited(change, 3)
    begun = with_begun(history, standing(7, 20), RECORDS_S)
    assert begun.edited(RetireSource(name="web"), 9).shares_at(9) == {"code": 1, "web": 0}


def test_a_source_whose_epochs_are_over_is_dropped_though_a_stage_waits_for_its_ramp_yet():
    history, over = ramped(), gone_through_in(ramped(), standing(7, 20), RECORDS_S)

    with pytest.raises(ConfigError, match=r"'web' was gone through 2 times, .* wait for ever"):
        history.edited(RetireSource(name="web"), 7)
    dropped = history.edited(RetireSource(name="web"), 7, gone_through=over)
    # It delays nothing else from then on either.
    dropped = dropped.edited(SetWeights(weights={"code": 5}), 8, gone_through=over)

    assert dropped.shares_at(8) == {"code": 1, "web": 0}
    assert with_begun(dropped, standing(8, 20), RECORDS_S) is dropped
    assert with_begun(dropped, standing(9, 20), RECORDS_S).edits[-1].step == 9  # the ramp ended


def ramped():
    """One stage of a ramp that ends at step 12, and one that waits."""
    stages = [
        {"weights": {"web": 3, "code": 1}},
        {"from_step": 4, "ramp_steps": 8, "weights": {"web": 1, "code": 1}},
        {"from_epochs": {"web": 2}, "weights": {"code": 1}},
    ]
    return History(a_mix(version=2, mix={"stages": stages}))


def test_a_beginning_is_not_undone_and_an_undo_behind_it_does_not_undo_it():
    set_ = waiting(ramp_steps=4).edited(SetWeights(weights={"web": 9}), 3)
    begun = with_begun(set_, standing(7, 20), RECORDS_S)

    undone = begun.edited(Undo(), 8)

    # The ramp continues, from the weights that would have been used without the edit.
    plain = with_begun(waiting(ramp_steps=4), standing(7, 20), RECORDS_S)
    for step in range(8, 14):
        assert undone.shares_at(step) == pytest.approx(plain.shares_at(step))
    with pytest.raises(ConfigError, match="nothing to undo"):
        undone.edited(Undo(), 9)
    with pytest.raises(ConfigError, match="begins by itself"):
        waiting().edited(BeginStage(stage=1, epochs={"web": 2}), 4)


def test_an_edit_of_an_earlier_step_takes_a_beginning_back():
    begun = with_begun(waiting(), standing(7, 20), RECORDS_S)

    changed = begun.edited(SetWeights(weights={"web": 1}), 5)

    assert changed.shares_at(7)["web"] == 0.5
    assert changed.latest.mix.stages[-1].waits
    assert with_begun(changed, standing(9, 20), RECORDS_S).edits[-1].step == 9


@pytest.mark.parametrize("ramp", [{}, {"ramp_steps": 4}])
@pytest.mark.parametrize("at", [7, 8, 9, 20])
@pytest.mark.parametrize("change", [SetWeights(weights={"web": 1}), Undo(), SKIPPED])
def test_what_was_changed_behind_a_beginning_goes_with_it(ramp, at, change):
    begun = with_begun(waiting(**ramp), standing(7, 20), RECORDS_S)
    later = begun.edited(SetWeights(weights={"web": 2}), at).edited(Undo(), at + 2)
    later = later.edited(SetWeights(weights={"web": 5}), at + 3)

    changed = later.edited(change, 5)

    assert [s.waits for s in changed.latest.mix.stages] == [False, False, True]
    assert changed.latest.mix.stages[-1] == waiting(**ramp).latest.mix.stages[-1]
    assert EditTaken.of(later, changed, 5, 5).taken_back == (4,)
    again = with_begun(changed, standing(9, 20), RECORDS_S)
    assert again.edits[-1].step == 9
    assert again.shares_at(99)["web"] == 0.25


def test_what_was_changed_between_two_beginnings_stays_where_the_first_does():
    third = {"from_epochs": {"web": 3}, "weights": {"web": 1}}
    begun = with_begun(waiting(third), standing(7, 20), RECORDS_S)
    set_ = begun.edited(SetWeights(weights={"web": 9}), 9)
    both = with_begun(set_, standing(12, 30), RECORDS_S)

    changed = both.edited(SetWeights(weights={"web": 6}), 11)
    assert EditTaken.of(both, changed, 5, 5).taken_back == ()
    assert changed.shares_at(10)["web"] == 0.75
    assert [s.from_step for s in changed.latest.mix.stages[:-1]] == [0, 7, 9, 11]
    assert changed.latest.mix.stages[-1].waits


@pytest.mark.parametrize("ramp", [{}, {"ramp_steps": 4}])
@pytest.mark.parametrize("began", [True, False])
def test_a_skip_across_a_beginning_begins_the_stage_at_its_first_step_and_undone_it_is_found_anew(
    ramp, began
):
    before = waiting(**ramp)
    if began:
        before = with_begun(before, standing(7, 20), RECORDS_S)
    behind = replace(standing(9, 24), mix_revision=len(before.edits))

    skipped = before.edited(SkipSteps(first=5, stop=9), 5, behind=behind, at_rest=True)
    begun = with_begun(skipped, replace(behind, step=5, mix_revision=1), RECORDS_S)

    assert [begun.edits[-1].step, begun.revision_at(4)] == [5, 0]
    assert begun.shares_at(99)["web"] == 0.25
    undone = begun.edited(Undo(), 5, at_rest=True)
    assert undone.shares_at(6) == {"code": 0.25, "web": 0.75}
    assert undone.latest.mix.stages[-1] == waiting(**ramp).latest.mix.stages[-1]
    assert with_begun(undone, standing(5, 15), RECORDS_S) is undone
    again = with_begun(undone, standing(7, 20), RECORDS_S)
    assert again.shares_at(99)["web"] == 0.25
    assert again.edits[-1].step == 7


@pytest.mark.parametrize("began", [True, False])
def test_a_skip_that_is_undone_at_once_leaves_states_good_up_to_a_beginning_behind_it(began):
    history = waiting()
    if began:
        history = with_begun(history, standing(7, 20), RECORDS_S)
    behind = replace(standing(9, 24), mix_revision=len(history.edits))
    skipped = history.edited(SkipSteps(first=5, stop=9), 5, behind=behind, at_rest=True)
    undone = skipped.edited(Undo(), 5, at_rest=True)

    for step in (6, 7):
        require_reached(undone, standing(step, 19), 0)
    later = replace(standing(8, 22), mix_revision=len(history.edits))
    said = EditTaken.of(skipped, undone, 5, 5, at_rest=True)
    if began:
        with pytest.raises(StateError, match="edit 2 was made afterwards"):
            require_reached(undone, later, later.mix_revision)
    else:
        require_reached(undone, later, later.mix_revision)
    assert ("step 7, where a stage by epochs had begun" in said.unsure) == began


def test_a_stage_that_has_not_held_for_a_step_does_so_behind_a_skip_too():
    by_step = {"from_step": 5, "weights": {"web": 1}}
    third = {"from_epochs": {"web": 2}, "weights": {"code": 1}}
    history = History(a_mix(version=2, mix={"stages": [{"weights": {"web": 1}}, by_step, third]}))
    begun = with_begun(history, standing(7, 20), RECORDS_S)
    behind = replace(standing(9, 24), mix_revision=1)
    skipped = begun.edited(SkipSteps(first=5, stop=9), 5, behind=behind, at_rest=True)

    assert with_begun(skipped, standing(5, 24), RECORDS_S) is skipped
    assert with_begun(skipped, standing(6, 24), RECORDS_S).edits[-1].step == 6


def test_an_answer_speaks_of_what_was_asked_and_not_of_a_stage_that_began_behind_it():
    before = waiting()
    after = before.edited(SetWeights(weights={"web": 1}), 6)
    begun = with_begun(after, standing(7, 20), RECORDS_S)

    taken = EditTaken.of(before, begun, 6, 2)

    assert taken == EditTaken.of(before, after, 6, 2)
    assert (taken.edit.step, taken.after["web"], taken.until) == (6, 0.5, None)
    assert taken.until_epochs == {"web": 2}
    assert "until_epochs" not in EditTaken.of(begun, begun.edited(Undo(), 8), 8, 2).model_dump()


def test_a_step_of_the_file_between_is_told_in_place_of_the_epochs_behind_it():
    by_step = {"from_step": 9, "weights": {"web": 1}}
    third = {"from_epochs": {"web": 2}, "weights": {"code": 1}}
    before = History(a_mix(version=2, mix={"stages": [{"weights": {"web": 1}}, by_step, third]}))

    for step, until in ((4, (9, None)), (11, (None, {"web": 2}))):
        taken = EditTaken.of(before, before.edited(SetWeights(weights={"web": 2}), step), step, 2)
        assert (taken.until, taken.until_epochs) == until


def test_a_stage_that_would_be_left_without_weights_is_told_by_what_it_waits_for():
    history = History(
        a_mix(
            version=2,
            mix={
                "stages": [
                    {"weights": {"web": 1, "code": 1}},
                    {"from_epochs": {"web": 2}, "weights": {"code": 1}},
                ]
            },
        )
    )

    with pytest.raises(ConfigError, match="a weight from where web was gone through 2 times on;"):
        history.edited(RetireSource(name="code"), 3)


def test_a_beginning_is_kept_as_a_version_that_older_releases_refuse(tmp_path):
    begun = with_begun(waiting(), standing(7, 20), RECORDS_S)

    write_history(tmp_path, begun)

    assert b'"version":5' in (tmp_path / "edits.json").read_bytes().replace(b" ", b"")
    assert read_history(tmp_path, begun.base) == begun
