"""The steps at which stages that wait for epochs, and the end, are expected, against steps counted one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import ConfigError
from omniload.mix.schedule import weights_at
from omniload.plan.forecast.forecast import forecast
from omniload.plan.forecast.sizes import Sampled, SourceSizes
from omniload.plan.forecast.stages import (
    end_is_within,
    first_refused_step,
    require_end,
    steps_to_the_end,
    with_expected_steps,
)
from tests.support.plane.builders import a_mix

SIZES = SourceSizes(
    samples_S=np.array([300.0, 50.0]),
    tokens_per_sample_S=np.array([40.0, 20.0]),
    planned_tokens=130.0,
)
"""Code has 12,000 tokens, web has 1,000, and a step draws 130."""


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

    found = with_expected_steps(mix, SIZES, 10**4)

    drawn_S, steps = np.zeros(2), []
    for step in range(10**4):
        for number, (s, tokens) in enumerate([(1, 2000), (0, 6000)], start=1):
            earliest = 1 if number == 1 else (steps or [0])[0] + max(1, ramp)
            if len(steps) == number - 1 and step >= earliest and drawn_S[s] >= tokens - 1e-6:
                steps.append(step)
        if len(steps) == 2:
            break
        drawn_S += 130 * np.array(weights_at(found.mix.stages, mix.names, step))
    assert [stage.from_step for stage in found.mix.stages[1:]] == steps


def test_a_stage_that_does_not_begin_within_the_run_goes_on_waiting():
    mix = a_file({"web": 1, "code": 1}, {"web": 1, "code": 1})

    found = with_expected_steps(mix, SIZES, 40)

    assert [stage.waits for stage in found.mix.stages] == [False, False, True]
    assert found.mix.stages[1].from_step == 31  # 2,000 tokens, 65 of them a step
    plain = a_mix()
    assert with_expected_steps(plain, SIZES, 40) is plain


def known(**changes):
    """Both sources to one part in a hundred, of 100 records in 10 units that are alike."""
    columns = {"errors": 0.01, "varies": 1.0, "between": 0.0, "records": 100, "units": 10} | changes
    return Sampled(**{f"{name}_S": np.full(2, float(each)) for name, each in columns.items()})


@pytest.mark.parametrize(
    ("epochs", "between", "error"),
    [
        (1, 0, 0.01),
        (3, 1, 0.03),
        (0.5, 0, (0.005**2 + 0.05**2) ** 0.5),
        (1.5, 1, (0.015**2 + 0.25 / 10) ** 0.5),
    ],
)
def test_parts_of_an_epoch_are_known_the_less_the_fewer_records_or_units_they_hold(
    epochs, between, error
):
    errors_S = known(between=between).errors_of(np.full(2, float(epochs)))

    assert errors_S.tolist() == pytest.approx([error, error], rel=1e-3)


AMOUNTS = {"code": {"epochs": 1}, "web": {"epochs": 1}}


def within(mix, sampled, others):
    total = forecast(mix, SIZES, 10**4).total
    return total.stop, end_is_within(mix, total, sampled, others)


def test_an_end_is_known_within_what_its_sources_and_the_steps_that_were_planned_are():
    mix = a_mix(version=2, mix={"amounts": AMOUNTS})

    steps, of_sources = within(mix, known(), [100] * 8)
    _, of_steps = within(mix, known(errors=0), [96, 104] * 4)

    assert steps == steps_to_the_end(mix, SIZES) == 100
    assert of_sources == pytest.approx(0.01 * (12**2 + 1) ** 0.5 / 13)
    assert of_steps == pytest.approx(1.6 * (7 * 16) ** 0.5 / 100)


def test_amounts_of_tokens_are_drawn_however_long_documents_are():
    amounts = {"code": {"tokens": 12_000}, "web": {"tokens": 1_000}}

    assert within(a_mix(version=2, mix={"amounts": amounts}), known(), [100] * 8)[1] == 0


@pytest.mark.parametrize(
    ("sampled", "others"), [(known(errors=np.nan), [100] * 8), (known(), [100] * 3), (known(), [])]
)
def test_nobody_knows_the_end_of_sources_seen_in_one_place_or_by_too_few_steps(sampled, others):
    assert within(a_mix(version=2, mix={"amounts": AMOUNTS}), sampled, others)[1] is None


def test_a_run_that_ends_with_its_first_source_is_known_as_the_least_known_one():
    mix = a_mix(
        mix={"stages": [{"from_step": 0, "weights": {"web": 1, "code": 1}}]}
        | {"stop": "first_exhausted"}
    )

    assert within(mix, known(varies=0), [100] * 8)[1] == pytest.approx(0.01)


def test_sizes_that_gave_what_a_run_drew_come_to_just_that():
    drawn_S, samples_S, epochs_S = np.array([11_000, 3_100]), np.array([250, 90]), np.array([1, 3])

    sizes = SIZES.that_gave(drawn_S, samples_S, epochs_S)

    assert sizes.tokens_of(epochs_S).tolist() == pytest.approx(drawn_S)
    assert (sizes.samples_S * epochs_S).tolist() == pytest.approx(samples_S)


@given(st.integers(1, 400), st.floats(0.3, 5), st.floats(0.05, 0.95))
def test_the_step_at_which_a_run_is_refused_is_the_first_that_goes_beyond_a_cap(steps, cap, share):
    mix = a_mix(mix={"stages": [{"from_step": 0, "weights": {"code": 1 - share, "web": share}}]})
    web = mix.sources["web"].model_copy(update={"max_repetition": max(1.0, cap)})
    mix = mix.model_copy(update={"sources": {**mix.sources, "web": web}})

    found = first_refused_step(mix, SIZES, steps, {})

    # Web has 1,000 tokens; the forecast of the draws is exact to a hundredth.
    most = max(1.0, cap) * 1.01
    beyond = [k for k in range(1, steps + 1) if k * 130 * share / 1_000 > most]
    assert (found is None) == (not beyond)
    if found is not None:
        step, error = found
        assert abs(step - (beyond[0] - 1)) <= (abs(beyond[0] * 0.13 * share - most) < 1e-9)
        assert f"sources.web: {steps:,} steps want its records" in str(error)


def test_a_mix_that_goes_on_for_ever_has_no_end():
    with pytest.raises(ConfigError, match="does not end this mix within"):
        require_end(a_mix(), SIZES)
