"""The forecast agrees with the sum of every step."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omniload.mix.schedule import weights_at
from omniload.plan.forecast.forecast import forecast, steps_per_epoch, tokens_by_step
from omniload.plan.forecast.sizes import SourceSizes
from tests.support.examples import few
from tests.support.plane.builders import a_mix

NAMES = ("web", "code", "news")
weights = st.fixed_dictionaries(dict.fromkeys(NAMES, st.integers(1, 9)))


@st.composite
def mixes(draw):
    """Up to four stages with ramps, drawn by tokens or by samples."""
    stages = [{"from_step": 0, "weights": draw(weights)}]
    at = draw(st.integers(1, 20))
    for _ in range(draw(st.integers(0, 3))):
        ramp = draw(st.integers(0, 15))
        form = {"ramp": draw(st.sampled_from(["linear", "cosine"]))} if ramp else {}
        stages.append({"from_step": at, "ramp_steps": ramp, **form, "weights": draw(weights)})
        at += max(1, ramp) + draw(st.integers(0, 10))
    level = draw(st.sampled_from(["token", "sample"]))
    return a_mix(version=2, sources=NAMES, mix={"stages": stages, "level": level})


sizes = st.builds(
    lambda samples, lengths: SourceSizes(
        samples_S=np.asarray(samples, float), tokens_per_sample_S=np.asarray(lengths, float)
    ),
    st.lists(st.integers(1, 1000), min_size=3, max_size=3),
    st.lists(st.integers(1, 1000), min_size=3, max_size=3),
)


def added_up(mix, held, step, tokens_per_step):
    """Compute the plain model: one step after another."""
    total = np.zeros(3)
    for k in range(step):
        shares = np.asarray(weights_at(mix.mix.stages, mix.names, k))
        if mix.mix.level == "sample":
            shares = shares * held.tokens_per_sample_S
            shares = shares / shares.sum()
        total += shares * tokens_per_step
    return total


@given(mixes(), sizes, st.integers(0, 90), st.integers(1, 10_000))
def test_tokens_are_those_of_every_step_added_up(mix, held, step, tokens_per_step):
    found = tokens_by_step(mix, replace(held, planned_tokens=tokens_per_step), step)

    np.testing.assert_allclose(found, added_up(mix, held, step, tokens_per_step), rtol=1e-9)


@given(mixes(), sizes, st.integers(0, 90))
def test_stages_follow_each_other_and_add_up_to_the_whole(mix, held, num_steps):
    expected = forecast(mix, held, num_steps)

    edges = [expected.stages[0].start, *(span.stop for span in expected.stages)]
    assert edges[0] == 0
    assert edges[-1] == num_steps
    assert edges == sorted(edges)
    for name in ("tokens_S", "samples_S", "epochs_S"):
        summed = sum(getattr(span, name) for span in expected.stages)
        np.testing.assert_allclose(summed, getattr(expected.total, name), rtol=1e-9, atol=1e-6)


@given(mixes(), sizes, st.integers(1, 90), st.sampled_from(["first_exhausted", "all_exhausted"]))
def test_a_run_ends_at_the_first_step_that_the_stop_policy_names(mix, held, num_steps, stop):
    mix = mix.model_copy(update={"mix": mix.mix.model_copy(update={"stop": stop})})
    epoch = held.samples_S * held.tokens_per_sample_S
    every = np.any if stop == "first_exhausted" else np.all

    end = forecast(mix, held, num_steps).total.stop

    def done(step):
        return every(tokens_by_step(mix, held, step) >= epoch)

    first = next((step for step in range(num_steps + 1) if done(step)), None)
    assert end == (num_steps if first is None else first)


@few(8, soak=200)
@given(mixes(), sizes, st.integers(1, 90))
def test_no_more_is_forecast_of_a_source_than_the_stop_policy_lets_a_run_draw(mix, held, num_steps):
    epoch = held.samples_S * held.tokens_per_sample_S

    def drawn(stop, steps):
        chosen = mix.model_copy(update={"mix": mix.mix.model_copy(update={"stop": stop})})
        return forecast(chosen, held, steps).total

    assert (drawn("first_exhausted", num_steps).tokens_S <= epoch * (1 + 1e-9)).all()
    once = drawn("each_once", num_steps)
    assert (once.tokens_S <= epoch * (1 + 1e-9)).all()
    expected = min(float(epoch.sum()), num_steps * mix.batch.tokens)
    np.testing.assert_allclose(once.tokens_S.sum(), expected, rtol=1e-9)
    enough = int(epoch.sum()) // mix.batch.tokens + 1
    np.testing.assert_allclose(drawn("each_once", enough).tokens_S, epoch, rtol=1e-9)


@given(mixes(), sizes, st.integers(1, 400))
def test_an_epoch_of_a_source_ends_with_the_first_step_that_has_drawn_all_of_it(mix, held, tokens):
    held = replace(held, planned_tokens=float(tokens))

    steps = steps_per_epoch(mix, held)

    epoch_S = held.samples_S * held.tokens_per_sample_S
    for s, step in enumerate(steps):
        drawn = [tokens_by_step(mix, held, k)[s] for k in (step - 1, step)]
        assert drawn[0] < epoch_S[s] * (1 + 1e-6)
        assert drawn[1] >= epoch_S[s] * (1 - 1e-6)


def test_a_source_that_is_never_drawn_again_has_no_epoch():
    stages = [
        {"from_step": 0, "weights": {"web": 1, "code": 1, "news": 1}},
        {"from_step": 10, "weights": {"web": 1, "code": 1}},
    ]
    held = SourceSizes(
        samples_S=np.full(3, 1e6), tokens_per_sample_S=np.ones(3), planned_tokens=30.0
    )

    steps = steps_per_epoch(a_mix(sources=NAMES, mix={"stages": stages}), held)

    assert dict(zip(sorted(NAMES), steps, strict=True)) == {
        "web": 66670,
        "code": 66670,
        "news": None,
    }
