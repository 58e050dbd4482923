"""The announced weights of coming steps are the weights of each of them."""

import math
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omniload.base.errors import ConfigError
from omniload.machine.scaling.coming import Foresight, Pace, read_to
from omniload.mix.edits.edit import SetWeights
from omniload.mix.edits.history import History
from tests.support.plane.builders import a_mix

NAMES = ("code", "math", "web")
weights = st.fixed_dictionaries(dict.fromkeys(NAMES, st.sampled_from([0.0, 1.0, 2.0, 5.0]))).filter(
    lambda each: any(each.values())
)
gaps = st.tuples(st.integers(1, 30), st.integers(0, 20), weights)


def a_history(first, stages, edits):
    """Stages that begin once the ramp before them has ended, and edits of any later steps."""
    found, at = [{"from_step": 0, "weights": first}], 0
    for gap, ramp, each in stages:
        at += gap
        found.append({"from_step": at, "weights": each, "ramp_steps": ramp})
        at += ramp
    # The file omits a source without a weight.
    found.append({"from_step": 1_000, "weights": dict.fromkeys(NAMES, 1.0)})
    history = History(a_mix(sources=NAMES, mix={"stages": found}))
    step = 0
    for gap, _, each in edits:
        step += gap
        with suppress(ConfigError):  # for ramps that an earlier edit has cut off
            history = history.edited(SetWeights(weights=each), step)
    return history


@given(weights, st.lists(gaps, max_size=2), st.lists(gaps, max_size=3), st.data())
def test_a_source_rises_as_far_as_the_greatest_of_its_shares_at_the_steps_up_to_one(
    first, stages, edits, data
):
    history = a_history(first, stages, edits)
    foresight, behind = Foresight(), read_to(history, 0)

    for step in sorted(data.draw(st.lists(st.integers(behind, 120), max_size=6))):
        coming = foresight.at(history, step - behind).coming
        stop = step + data.draw(st.integers(1, 150))
        for source, name in enumerate(NAMES):
            shares = [history.shares_at(k)[name] for k in range(step, stop + 1)]
            rise = None if coming is None else coming.rise(source, step, stop)
            if rise is None:
                assert max(shares) <= shares[0] + 2e-6
                continue
            assert abs(rise.then - max(shares)) < 1e-6
            assert abs(rise.now - shares[0]) < 1e-6
            assert abs(shares[rise.step - step] - rise.then) < 1e-6


def mixed(*weights):
    return dict(zip(NAMES, map(float, weights), strict=True))


def test_a_source_that_falls_first_is_seen_to_rise_behind_that():
    # A long ramp takes web away, and the next stage gives it half at once.
    history = a_history(mixed(0, 0, 1), [(1, 500, mixed(0, 1, 0)), (100, 0, mixed(0, 1, 1))], [])
    foresight = Foresight()

    coming = [foresight.at(history, step).coming for step in (10, 590)]

    assert [each.rise(2, 590, 601).step for each in coming] == [601, 601]


@given(st.integers(1, 900), st.integers(0, 2_100), st.integers(1, 400))
def test_a_cosine_ramp_is_told_of_by_parts_that_are_all_but_straight(ramp, step, ahead):
    stages = [
        {"from_step": 0, "weights": {"code": 9, "web": 1}},
        {
            "from_step": 1_000,
            "weights": {"code": 1, "web": 9},
            "ramp_steps": ramp,
            "ramp": "cosine",
        },
    ]
    history = History(a_mix(sources=("code", "web"), version=2, mix={"stages": stages}))
    found = Foresight().at(history, step)

    rise = None if found.coming is None else found.coming.rise(1, found.step, found.step + ahead)

    now, then = (history.shares_at(k)["web"] for k in (found.step, found.step + ahead))
    told = (now, now) if rise is None else (rise.now, rise.then)
    assert abs(told[0] - now) < 0.008
    assert abs(told[1] - then) < 0.008


@given(
    weights,
    st.lists(gaps, max_size=2),
    st.lists(gaps, max_size=3),
    st.integers(0, 120),
    st.integers(0, 150),
)
@example(
    mixed(0, 0, 1), [(2, 2, mixed(0, 1, 0))], [(1, 0, mixed(0, 0, 1)), (3, 0, mixed(0, 0, 1))], 0, 4
)
def test_greatest_shares_of_coming_steps_are_those_of_one_of_them(
    first, stages, edits, start, length
):
    history = a_history(first, stages, edits)
    each = [history.shares_at(step) for step in range(start, start + length + 1)]

    greatest = history.greatest_shares(start, start + length)

    for name in NAMES:
        assert abs(greatest[name] - max(shares[name] for shares in each)) < 1e-6


@given(
    before=st.lists(st.floats(0.01, 1000.0), max_size=200),
    step_s=st.floats(0.05, 1000.0),
)
def test_a_pace_follows_any_jump_within_six_steps_and_five_minutes(before, step_s):
    pace, now_s, step = Pace(), 0.0, 0
    pace.reach(step, now_s)
    ahead = max(6, math.ceil(300.0 / step_s))
    for step, passed_s in enumerate([*before, *[step_s] * ahead], start=1):
        now_s += passed_s
        pace.reach(step, now_s)

    assert pace.steps_in(step_s) == pytest.approx(1.0, rel=0.5)


@given(
    step_s=st.floats(0.05, 1.0),
    runs=st.lists(st.tuples(st.floats(31.0, 120.0), st.floats(0.0, 3600.0)), max_size=8),
)
def test_no_pause_of_a_trainer_moves_a_pace_by_more_than_half(step_s, runs):
    pace, now_s, step = Pace(), 0.0, 0
    pace.reach(step, now_s)
    for run_s, pause_s in runs:
        for passed_s in (*[step_s] * math.ceil(run_s / step_s), step_s + pause_s):
            now_s, step = now_s + passed_s, step + 1
            pace.reach(step, now_s)
            assert 0.5 <= pace.steps_in(step_s) <= 1.001
