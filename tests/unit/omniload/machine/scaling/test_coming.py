"""The view of coming steps: the sources that rise, their shares, and the time until then."""

import pytest

from omniload.machine.scaling.coming import Foresight, Pace, read_to
from omniload.mix.edits.edit import AddSource, SetWeights
from omniload.mix.edits.history import History
from tests.support.plane.builders import a_mix

CODE, WEB = 0, 1
STAGES = [
    {"from_step": 0, "weights": {"code": 1, "web": 3}},
    {"from_step": 50, "weights": {"code": 1}},
    {"from_step": 100, "weights": {"code": 1, "web": 1}, "ramp_steps": 20},
    {"from_step": 200, "weights": {"code": 1, "web": 4}},
]


def seen_from(step, stages=STAGES, edits=()):
    history = History(a_mix(mix={"stages": stages}))
    for change, at in edits:
        history = history.edited(change, at)
    return Foresight().at(history, step - read_to(history, 0))


def rise(step, source, stop, **changes):
    ahead = seen_from(step, **changes)
    assert ahead.step == step
    return None if ahead.coming is None else ahead.coming.rise(source, step, stop)


def test_a_stage_is_seen_from_its_first_step_on_and_not_half_before_it():
    assert rise(20, CODE, 49) is None
    found = rise(20, CODE, 50)
    assert (found.step, found.now, found.then) == (50, 0.25, 1.0)
    assert rise(20, CODE, 49.2) == found


def test_what_falls_is_no_rise_and_behind_the_last_change_nothing_is_seen():
    assert rise(20, WEB, 90) is None
    assert seen_from(200).coming is None
    assert seen_from(20, stages=STAGES[:1]).coming is None


def test_of_a_ramp_as_much_is_seen_as_it_has_come_to_by_then():
    shares = [rise(100, WEB, step).then for step in (105, 110, 119, 150)]

    assert shares == pytest.approx([0.15, 0.275, 0.5, 0.5])
    assert rise(110, WEB, 115).now == pytest.approx(0.275)


def test_the_greatest_of_several_stages_counts_and_a_source_at_zero_says_what_it_was_drawn_with():
    found = rise(60, WEB, 300)

    assert (found.step, found.now, found.then, found.drawn) == (200, 0.0, 0.8, 0.75)
    never = [{"from_step": 0, "weights": {"code": 1}}, STAGES[3]]
    assert rise(60, WEB, 300, stages=never).drawn == 0.0


def test_edits_of_coming_steps_are_seen_and_so_is_a_source_that_is_added():
    books = AddSource(
        name="books",
        source={"type": "parquet", "path": "books/*.parquet", "tokens": "tokens"},
        weight=1.0,
    )
    edits = [(SetWeights(weights={"web": 9.0}), 230), (books, 240)]

    assert rise(210, WEB, 235, edits=edits).then == pytest.approx(0.9)
    added = rise(210, 2, 250, edits=edits)
    assert (added.step, added.now) == (240, 0.0)
    assert added.then == pytest.approx(1 / 11)


def test_a_stage_that_waits_for_epochs_is_not_seen_before_it_begins():
    waits = [STAGES[0], {"from_epochs": {"web": 2}, "weights": {"code": 1}}]

    history = History(a_mix(version=2, mix={"stages": waits}))

    assert Foresight().at(history, 20).coming is None


def test_what_comes_is_found_once_for_a_stretch_of_steps_and_anew_with_an_edit():
    foresight, history = Foresight(), History(a_mix(mix={"stages": STAGES}))
    behind = read_to(history, 0)

    first = foresight.at(history, 10 - behind).coming

    assert foresight.at(history, 48 - behind).coming is first
    assert foresight.at(history, 50 - behind).coming is not first
    edited = history.edited(SetWeights(weights={"code": 9.0}), 60)
    assert foresight.at(edited, 51 - behind).coming.steps[1:3] == (59, 60)


def test_a_pace_is_that_of_the_last_half_minute_and_no_pause_slows_it():
    pace = Pace()
    assert pace.steps_in(60) == 0
    for step in range(100):
        pace.reach(step, 2.0 * step)
        pace.reach(step, 2.0 * step + 1)
    assert pace.steps_in(60) == pytest.approx(30)

    pace.reach(100, 2.0 * 100 + 600)  # an evaluation
    assert pace.steps_in(60) > 15
    pace.reach(90, 900.0)  # of a planner that took over
    for step in range(1, 20):
        pace.reach(90 + 16 * step, 900.0 + 32 * step)
    assert pace.steps_in(60) == pytest.approx(30, rel=0.05)
    assert pace.stride == 16


def test_steps_that_take_much_longer_from_one_on_are_followed_within_five_and_one_is_a_pause():
    pace, found = Pace(), []
    for step in range(1200):
        pace.reach(step, 0.1 * step)
    for step in range(1, 6):
        pace.reach(1200 + step, 120.0 + 60.0 * step)
        found.append(1 / pace.steps_in(1.0))

    assert found[0] < 0.2
    assert found == sorted(found)
    assert found[-1] == pytest.approx(60.0, rel=0.1)
