"""A cost is fitted to times with outliers, slow ranks and noise, or the reason for a missing fit is given."""

from dataclasses import replace

import numpy as np
import pytest

from omniload.mix.journal.times import NO_TIMES, MeasuredTimes
from omniload.plan.fitting import FittedCost, Unfitted, fitted_cost

LINEAR, QUADRATIC = 2e-6, 5e-9


def times(count=200, *, noise=0.02, speeds=(1.0,), longest=4096, seed=1):
    """Return times of microbatches of documents, on ranks of these speeds in rotation."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(6, 1.2, (count, 8)).clip(1, longest).astype(int).astype(float)
    tokens_M, squares_M = lengths.sum(1), (lengths**2).sum(1)
    ranks_M = np.arange(count) % len(speeds)
    seconds_M = LINEAR * tokens_M + QUADRATIC * squares_M
    seconds_M *= np.array(speeds)[ranks_M] * rng.lognormal(0, noise, count)
    return MeasuredTimes(
        ranks_M=ranks_M, tokens_M=tokens_M, squares_M=squares_M, seconds_M=seconds_M
    )


def fit(measured):
    found = fitted_cost(measured)
    assert isinstance(found, FittedCost), found
    return found


def true_share(found):
    return found.pair_share_by(LINEAR, QUADRATIC)


def test_fitting_finds_the_cost_that_times_were_made_by():
    found = fit(times(noise=0))

    assert found.cost.linear == pytest.approx(LINEAR, rel=1e-3)
    assert found.cost.quadratic == pytest.approx(QUADRATIC, rel=1e-3)
    assert (found.measured, found.used) == (200, 200)
    assert found.residual < 1e-3


@pytest.mark.parametrize("factor", [1000.0, 3.0, 0.1])
def test_fitting_leaves_out_times_that_are_far_from_all_others(factor):
    measured = times(noise=0.01)
    seconds_M = measured.seconds_M.copy()
    seconds_M[::10] *= factor  # a checkpoint is written in them, or a clock is wrong

    found = fit(replace(measured, seconds_M=seconds_M))

    assert found.used == pytest.approx(180, abs=3)
    assert found.pair_share == pytest.approx(true_share(found), abs=0.02)


@pytest.mark.parametrize("odd", [1e-310, 1e-160])
def test_a_time_that_no_cost_comes_to_is_told_as_what_it_is_and_raises_nothing(odd):
    seconds_M = times().seconds_M.copy()
    seconds_M[7] = odd

    found = fitted_cost(replace(times(), seconds_M=seconds_M))

    assert isinstance(found, Unfitted)
    assert "200 times come to no cost" in found.why


def test_fitting_takes_ranks_of_other_speeds_for_one_and_tells_the_cost_of_the_middle_one():
    found = fit(times(count=400, speeds=(1.0, 1.0, 1.5, 0.7, 1.0), noise=0.01))

    assert found.used > 380
    assert found.residual < 0.02
    assert found.pair_share == pytest.approx(true_share(found), abs=0.02)
    assert found.cost.linear == pytest.approx(LINEAR, rel=0.05)


def test_fitting_is_the_same_in_whatever_order_times_are_read():
    measured = times(speeds=(1.0, 1.2))
    order = np.random.default_rng(5).permutation(len(measured))
    columns = ("ranks_M", "tokens_M", "squares_M", "seconds_M")

    assert fitted_cost(measured) == fitted_cost(
        MeasuredTimes(**{name: getattr(measured, name)[order] for name in columns})
    )


def test_fitting_of_work_without_attention_has_no_cost_of_pairs():
    measured = times(noise=0)

    found = fit(replace(measured, seconds_M=measured.tokens_M * LINEAR))

    assert (found.cost.linear, found.cost.quadratic) == (pytest.approx(LINEAR), 0)
    assert found.pair_share == 0


def test_fitting_needs_enough_times_and_says_how_they_are_reported():
    found = fitted_cost(times(31))

    assert isinstance(found, Unfitted)
    assert "31 times were reported, and a fit takes 32" in found.why
    assert "loader.observe(rows, seconds=...)" in found.why
    assert isinstance(fitted_cost(NO_TIMES), Unfitted)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_fitting_of_documents_that_are_all_alike_is_refused_however_exact_the_times(noise):
    found = fitted_cost(times(longest=1, noise=noise))

    assert isinstance(found, Unfitted)
    assert "too alike" in found.why


def test_fitting_of_times_that_are_noise_alone_is_refused():
    found = fitted_cost(times(64, noise=1.0))

    assert isinstance(found, Unfitted)
    assert "too noisy" in found.why


def test_fitting_gives_coefficients_that_can_be_typed():
    cost = fit(times()).cost

    assert (cost.linear, cost.quadratic) == (
        float(f"{cost.linear:g}"),
        float(f"{cost.quadratic:g}"),
    )
