"""Weights at a step: stages, ramps and the steps where they change."""

import numpy as np
import pytest

from omniload.mix.config import Stage
from omniload.mix.schedule import boundaries, stages_from, steps_alike, weights_at
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


class Looked(list):
    """Stages that count the looks at them."""

    looked = 0

    def __getitem__(self, at):
        self.looked += 1
        return super().__getitem__(at)

    def __iter__(self):
        for stage in super().__iter__():
            self.looked += 1
            yield stage


@pytest.mark.parametrize("step", [0, 5_000, 29_998, 10**9])
def test_weights_of_a_step_look_at_few_of_ten_thousand_stages(step):
    stages = Looked(
        Stage(from_step=3 * i, weights={"web": 1 + i % 5, "code": 1}) for i in range(10_000)
    )

    web, _ = weights_at(stages, NAMES, step)

    assert web == pytest.approx(1 - 1 / (2 + min(step // 3, 9_999) % 5))
    assert stages.looked < 20


def test_whether_a_stage_waits_is_asked_of_each_stage_once(monkeypatch):
    asked = []
    every = [{"from_step": i, "weights": {"web": 1, "code": 1}} for i in range(100)]
    weights = a_mix(mix={"stages": every}).mix
    monkeypatch.setattr(Stage, "waits", property(lambda stage: bool(asked.append(stage))))

    assert [weights.waits for _ in range(50)] == [False] * 50
    assert len(asked) == 100


def test_weights_stay_as_they_are_for_as_many_steps_as_is_said():
    found = [weights_at(STAGES, NAMES, step) for step in range(40)]

    for step in range(24):
        alike = min(steps_alike(STAGES, step), 40 - step)
        assert all(weights == found[step] for weights in found[step : step + alike])
    assert [steps_alike(STAGES, step) for step in (0, 9, 10, 12, 13, 19)] == [10, 1, 1, 1, 7, 1]
    assert steps_alike(STAGES, 20) > 10**18


@pytest.mark.parametrize("ramp", ["linear", "cosine"])
def test_stages_that_begin_in_the_middle_give_what_the_whole_gave(ramp):
    stages = [STAGES[0], STAGES[1].model_copy(update={"ramp": ramp, "ramp_steps": 9}), STAGES[2]]
    whole = np.array([weights_at(stages, NAMES, step) for step in range(25)])

    for begin in range(25):
        rest = stages_from(stages, begin)
        for again in range(begin, 25):  # an edit after an edit
            last = stages_from(rest, again)
            found = [weights_at(last, NAMES, step) for step in range(again, 25)]
            assert found == pytest.approx(whole[again:], abs=1e-11)


def test_a_cosine_goes_along_half_a_wave():
    ramp = Stage(from_step=1, weights={"code": 1}, ramp_steps=1000, ramp="cosine")

    found = [weights_at([Stage(weights={"web": 1}), ramp], NAMES, step)[1] for step in range(1002)]

    wave = np.fft.irfft([0, 1], n=2000)[:1001]  # a cosine that is not ours
    assert found[:1001] == pytest.approx((1 - wave / wave[0]) / 2, abs=1e-11)
    assert found[1001] == found[1000] == 1


def test_a_ramp_of_equal_parts_is_written_as_before_there_were_others():
    assert set(STAGES[1].model_dump()) == {"from_step", "weights", "ramp_steps"}
