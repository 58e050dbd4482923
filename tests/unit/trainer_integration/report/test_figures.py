"""What the page draws: every figure by step, thinned, and the work that was lost."""

import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omniload.mix.edits.edit import SetWeights
from omniload.mix.edits.history import History
from tests.support.plane.builders import a_mix
from tests.support.trainer.run_lines import a_killed_run, a_memory, a_step, an_event
from trainer_integration.report import figures
from trainer_integration.report.figures import MOST_POINTS, run_figures, smoothed

MIX = a_mix(weights={"web": 3, "code": 2})


def drawn(lines, history=None):
    found = run_figures("a/run", lines, History(MIX) if history is None else history)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    return found


def test_every_step_has_its_place_by_step_tokens_and_time():
    found = drawn(a_killed_run())

    assert found["x"] == {
        "step": [0, 1, 2, 3, 4, 5],
        "tokens": [1000, 2000, 3000, 4000, 5000, 6000],
        "seconds": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    }
    assert found["figures"]["lr"] == [1e-3] * 6
    assert found["figures"]["grad_norm"] == [1.0] * 6
    assert found["figures"]["target/web"] == [0.6] * 6


def test_work_that_was_lost_and_the_ends_of_attempts_are_told():
    found = drawn(a_killed_run())

    assert found["lost"] == [{"step": [2, 3], "loss": [8.8, 8.7]}]
    assert found["ends"] == [
        {"number": 1, "step": 3, "text": "1: rank 1: signal SIGKILL; resumed from step 2"}
    ]


def test_changes_of_the_mix_stand_where_they_held_and_later_ones_not_yet():
    history = History(MIX)
    for step, code in ((2, 1.0), (9, 3.0)):
        history = history.edited(SetWeights(weights={"code": code}), step)

    assert drawn(a_killed_run(), history)["edits"] == [
        {"number": 1, "step": 2, "text": "set code=1"}
    ]


def test_an_attempt_that_ended_before_its_first_step_ends_where_the_last_one_did():
    lines = [an_event("start"), a_step(0), an_event("restart"), an_event("restart"), a_step(0)]

    assert [end["step"] for end in drawn(lines)["ends"]] == [0, 0]


def test_memory_has_times_of_its_own_and_one_without_samples_is_empty():
    found = drawn([*a_killed_run(), a_memory(20.0, rank_0=5)])

    assert found["memory"]["rank"] == [220.0, 200.0, 5.0]
    assert len(found["memory"]["seconds"]) == 3
    assert drawn([a_step(0)])["memory"] == {"seconds": []}


def test_what_was_not_logged_or_is_no_number_is_left_out():
    lines = [a_step(0, loss=math.nan, z_loss=0.5), a_step(1, grad_norm=math.inf)]

    found = drawn(lines)["figures"]

    assert found["loss"] == [None, 8.9]
    assert found["grad_norm"] == [1.0, None]
    assert found["z_loss"] == [0.5, None]
    assert "drop_rate" not in found


@given(st.integers(1, 40), st.integers(1, 12))
def test_a_long_run_is_thinned_to_means_that_lose_no_step(num_steps, most):
    lines = [a_step(step, loss=float(step)) for step in range(num_steps)]
    before = figures.MOST_POINTS
    figures.MOST_POINTS = most
    try:
        found = drawn(lines)
    finally:
        figures.MOST_POINTS = before

    ends = found["x"]["step"]
    assert len(ends) == min(num_steps, most)
    assert ends == sorted(set(ends))
    assert (ends[-1], found["x"]["tokens"][-1]) == (num_steps - 1, 1000 * num_steps)
    starts = [0, *(end + 1 for end in ends[:-1])]
    for start, end, mean in zip(starts, ends, found["figures"]["loss"], strict=True):
        assert math.isclose(mean, (start + end) / 2, rel_tol=1e-5)


def test_as_many_points_as_a_screen_shows():
    found = drawn([a_step(step) for step in range(MOST_POINTS + 7)])

    assert {len(column) for column in found["figures"].values()} == {MOST_POINTS}


def test_smoothing_takes_the_mean_around_a_row_and_fewer_at_the_ends():
    values = np.asarray([[0.0], [3.0], [6.0], [9.0]])

    assert smoothed(values, 3)[:, 0].tolist() == [1.5, 3.0, 6.0, 7.5]
    assert smoothed(values, 1)[:, 0].tolist() == [0.0, 3.0, 6.0, 9.0]
