"""The steps at which stages that wait for epochs are expected, against steps that are counted one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omniload.mix.schedule import weights_at
from omniload.plan.forecast.sizes import SourceSizes
from omniload.plan.forecast.stages import with_expected_steps
from tests.support.plane.builders import a_mix

SIZES = SourceSizes(samples_S=np.array([300.0, 50.0]), tokens_per_sample_S=np.array([40.0, 20.0]))
"""Of code 12,000 tokens, of web 1,000."""


def a_file(first, second, **stages):
    return a_mix(
        version=2,
        mix={
            "stages": [
                {"weights": first},
                {"from_epochs": {"web": 2}, "weights": second, "ramp_steps": stages.get("ramp", 0)},
                {"from_epochs": {"code": 0.5}, "weights": {"code": 1}},
            ]
        },
    )


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 20))
def test_stages_are_expected_where_their_tokens_come_to_the_epochs(web, code, ramp):
    mix = a_file({"web": web, "code": code}, {"web": 1, "code": code}, ramp=ramp)

    found = with_expected_steps(mix, SIZES, 10**4, tokens_per_step=128)

    drawn_S, steps = np.zeros(2), []
    for step in range(10**4):
        for number, (s, tokens) in enumerate([(1, 2000), (0, 6000)], start=1):
            earliest = 1 if number == 1 else (steps or [0])[0] + max(1, ramp)
            if len(steps) == number - 1 and step >= earliest and drawn_S[s] >= tokens - 1e-6:
                steps.append(step)
        if len(steps) == 2:
            break
        drawn_S += 128 * np.array(weights_at(found.mix.stages, mix.names, step))
    assert [stage.from_step for stage in found.mix.stages[1:]] == steps


def test_a_stage_that_does_not_begin_within_the_run_goes_on_waiting():
    mix = a_file({"web": 1, "code": 1}, {"web": 1, "code": 1})

    found = with_expected_steps(mix, SIZES, 40, tokens_per_step=128)

    assert [stage.waits for stage in found.mix.stages] == [False, False, True]
    assert found.mix.stages[1].from_step == 32  # 2,000 tokens, 64 of them a step
    plain = a_mix()
    assert with_expected_steps(plain, SIZES, 40, tokens_per_step=128) is plain
