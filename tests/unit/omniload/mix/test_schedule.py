"""Weights at a step: stages, ramps and the steps where they change."""

import pytest

from omniload.mix.config import Stage
from omniload.mix.schedule import boundaries, steps_alike, weights_at
from tests.support.plane.builders import a_mix

NAMES = ("web", "code")
STAGES = (
    Stage(from_step=0, weights={"web": 3, "code": 1}),
    Stage(from_step=10, weights={"web": 1, "code": 3}, ramp_steps=4),
    Stage(from_step=20, weights={"code": 5}),
)


@pytest.mark.parametrize(
    ("step", "web"),
    [
        (0, 0.75),
        (9, 0.75),
        (10, 0.625),
        (11, 0.5),
        (12, 0.375),
        (13, 0.25),
        (14, 0.25),
        (19, 0.25),
        (20, 0.0),
        (10**9, 0.0),
    ],
)
def test_weights_move_in_equal_parts_along_a_ramp_and_at_once_without_one(step, web):
    assert weights_at(STAGES, NAMES, step) == pytest.approx((web, 1 - web))


def test_weights_are_shares_whatever_they_sum_to():
    stage = Stage(from_step=0, weights={"web": 1e12, "code": 1e12})

    assert weights_at([stage], NAMES, 0) == (0.5, 0.5)


def test_a_source_that_a_stage_does_not_name_has_no_weight_in_it():
    assert weights_at(STAGES, ("books", *NAMES), 0) == pytest.approx((0, 0.75, 0.25))


def test_the_last_step_of_a_ramp_reaches_the_weights_exactly():
    assert weights_at(STAGES, NAMES, 13) == weights_at(STAGES, NAMES, 19)


def test_boundaries_are_where_weights_start_or_stop_to_change():
    mix = a_mix(mix={"stages": [stage.model_dump() for stage in STAGES]})

    assert boundaries(mix) == (0, 10, 14, 20)


def test_weights_stay_as_they_are_for_as_many_steps_as_is_said():
    found = [weights_at(STAGES, NAMES, step) for step in range(40)]

    for step in range(24):
        alike = min(steps_alike(STAGES, step), 40 - step)
        assert all(weights == found[step] for weights in found[step : step + alike])
    assert [steps_alike(STAGES, step) for step in (0, 9, 10, 12, 13, 19)] == [10, 1, 1, 1, 7, 1]
    assert steps_alike(STAGES, 20) > 10**18
