"""Whether files look sorted: by values between places, by trends along them, and by the sizes of units."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.source.survey.spread import Spread, unevenness

LENGTHS = st.lists(st.integers(1, 10_000), min_size=3, max_size=30)


@given(st.lists(LENGTHS, min_size=3, max_size=6))
def test_what_lies_between_places_is_what_their_means_leave_of_the_variance_less_that_of_chance(
    places,
):
    spread = Spread()
    for place, lengths in enumerate(places):
        spread.add(place, np.array(lengths))

    logs = [np.log1p(lengths) for lengths in places]
    every = np.concatenate(logs)
    means = np.concatenate([np.full(len(each), each.mean()) for each in logs])
    if every.var() < 0.009 or len(every) < 32:
        assert spread.between == 0
    elif every.var() > 0.011:
        # Means of squares, within and of all, each by its degrees of freedom.
        within = ((every - means) ** 2).sum() / (len(every) - len(places))
        assert spread.between == pytest.approx(max(0, 1 - within / every.var(ddof=1)), abs=1e-6)


@pytest.mark.parametrize(("places", "records"), [(3, 3), (5, 3), (8, 4), (20, 3)])
def test_of_few_records_at_each_place_chance_is_not_taken_for_an_order(places, records):
    drawn = np.random.default_rng(7).lognormal(5, 1, (1000, places, records)).astype(np.int64)

    alarms = sum(Spread.of(each + 1).between >= 0.5 for each in drawn)

    assert alarms <= 3


@given(st.lists(st.integers(1, 10_000), min_size=32, max_size=80), st.integers(0, 80))
def test_what_goes_along_a_place_is_the_squared_correlation_however_it_is_taken_in(lengths, cut):
    spread = Spread()
    spread.add(7, np.array(lengths[:cut], np.int64))
    spread.add(7, np.array(lengths[cut:], np.int64))

    logs = np.log1p(lengths)
    if logs.var() > 0.011:
        expected = np.corrcoef(logs, np.arange(len(logs)))[0, 1] ** 2
        assert spread.along == pytest.approx(expected, abs=1e-6)


def cut_in_units(lengths_N, units):
    rows_U = np.full(units, len(lengths_N) // units)
    return lengths_N.reshape(units, -1).sum(axis=1), rows_U, lengths_N[: rows_U[0]]


@given(st.integers(0, 10_000), st.floats(0.3, 1.8), st.integers(8, 80), st.integers(20, 500))
def test_units_of_shuffled_records_do_not_look_sorted(seed, sigma, units, rows):
    lengths_N = np.random.default_rng(seed).lognormal(5, sigma, units * rows).astype(np.int64) + 1

    assert unevenness(*cut_in_units(lengths_N, units)) < 2


@given(st.integers(0, 10_000), st.floats(0.5, 1.8), st.sampled_from([1, -1]))
def test_units_of_sorted_records_do(seed, sigma, way):
    lengths_N = np.random.default_rng(seed).lognormal(5, sigma, 16_000).astype(np.int64) + 1

    assert unevenness(*cut_in_units(np.sort(lengths_N)[::way], 16)) > 2


def test_of_few_units_and_of_sizes_that_are_not_known_nothing_is_said():
    sizes_U, rows_U, first_N = cut_in_units(np.arange(1, 16_001), 16)

    assert unevenness(sizes_U, rows_U, first_N) > 2
    assert unevenness(sizes_U[:7], rows_U[:7], first_N) == 1
    assert unevenness(np.where(np.arange(16) < 7, sizes_U, -1), rows_U, first_N) == 1


def test_one_unit_with_a_document_far_longer_than_others_is_no_order():
    lengths_N = np.full(16_000, 100)
    lengths_N[5_000] = 10_000_000

    assert unevenness(*cut_in_units(lengths_N, 16)) == 1


@pytest.mark.parametrize(("one_in", "length"), [(100, 100_000), (1000, 1_000_000)])
def test_units_of_shuffled_records_do_not_look_sorted_by_a_few_that_are_far_longer(one_in, length):
    alarms = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        lengths_N = rng.lognormal(6, 0.6, 16 * 100 * 10).astype(np.int64) + 1
        lengths_N[rng.random(len(lengths_N)) < 1 / one_in] = length
        alarms += unevenness(*cut_in_units(lengths_N, 160)) >= 2

    assert alarms <= 2


def test_of_short_files_and_long_ones_behind_each_other_units_look_sorted():
    rng = np.random.default_rng(1)
    files = [rng.lognormal(mean, 0.5, 800).astype(np.int64) + 1 for mean in (5, 8, 6, 7)]

    assert unevenness(*cut_in_units(np.concatenate(files), 16)) > 2
