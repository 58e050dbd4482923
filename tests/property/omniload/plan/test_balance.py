"""Guarantees of every dealing, compared with models too simple to be wrong."""

from itertools import product
from typing import get_args

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.plan import balance_methods as balance_module
from omniload.plan.balance_methods import BalanceMethod, balance, reachable_bound
from omniload.plan.cost import row_costs

methods = st.sampled_from(get_args(BalanceMethod))
costs = st.lists(st.integers(0, 1_000) | st.integers(0, 1_000_000), max_size=60).map(
    lambda values: np.array(values, np.float64)
)


@st.composite
def problems(draw):
    """Costs, bins, and counts that fit them."""
    costs_N = draw(costs)
    num_bins = draw(st.integers(1, 9))
    least_cap = -(-len(costs_N) // num_bins)
    max_count = draw(st.none() | st.integers(least_cap, least_cap + 3))
    min_count = draw(st.integers(0, len(costs_N) // num_bins))
    return costs_N, num_bins, {"max_count": max_count, "min_count": min_count}


def longest_first(costs_N, num_bins):
    """Deal by the plain model: from the largest on, always to the lightest bin."""
    loads = [0.0] * num_bins
    for cost in sorted(costs_N.tolist(), reverse=True):
        loads[loads.index(min(loads))] += cost
    return loads


@st.composite
def many_bins(draw):
    """Costs and counts of enough bins for whole rounds: of one order of magnitude or of many, with ties."""
    num_bins = draw(st.integers(300, 400))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    num = draw(st.integers(0, 5 * num_bins))
    kinds = (rng.integers(900, 1300, num), rng.lognormal(5, 2, num), rng.integers(0, 4, num))
    most = -(-num // num_bins) + draw(st.integers(0, 2))
    return (
        draw(st.sampled_from(kinds)).astype(float),
        num_bins,
        most,
        draw(st.integers(0, num // num_bins)),
    )


@settings(max_examples=60)
@given(many_bins())
def test_balance_methods_dealt_to_in_rounds_get_what_they_get_one_by_one(problem):
    costs_N, num_bins, most, least = problem
    order = np.argsort(-costs_N, kind="stable")
    loads, counts = [0.0] * num_bins, [0] * num_bins
    alone = balance_module._one_by_one(costs_N[order].tolist(), loads, counts, most, least)

    dealt_N = balance_module._longest_first(costs_N, num_bins, most, least)

    assert dealt_N[order].tolist() == alone


def least_heaviest(costs_N, num_bins):
    """Return the optimum, by trying every dealing."""
    return min(
        max(sum(costs_N[np.array(dealt) == b]) for b in range(num_bins))
        for dealt in product(range(num_bins), repeat=len(costs_N))
    )


@given(problems(), methods)
def test_every_item_is_in_one_bin_and_loads_are_the_sums_of_their_items(problem, method):
    costs_N, num_bins, counts = problem

    balanced = balance(costs_N, num_bins, method=method, **counts)

    assert balanced.bins_N.shape == costs_N.shape
    assert balanced.bins_N.dtype == np.int32
    assert ((balanced.bins_N >= 0) & (balanced.bins_N < num_bins)).all()
    for b in range(num_bins):
        assert balanced.loads_B[b] == costs_N[balanced.bins_N == b].sum()


@given(problems(), methods)
def test_counts_stay_within_their_limits(problem, method):
    costs_N, num_bins, counts = problem

    balanced = balance(costs_N, num_bins, method=method, **counts)

    found = np.bincount(balanced.bins_N, minlength=num_bins)
    assert found.min() >= counts["min_count"]
    if counts["max_count"] is not None:
        assert found.max() <= counts["max_count"]


@given(problems(), methods)
def test_no_dealing_is_below_the_bound(problem, method):
    costs_N, num_bins, counts = problem

    balanced = balance(costs_N, num_bins, method=method, **counts)

    assert balanced.bound == reachable_bound(costs_N, num_bins, **counts)
    assert balanced.loads_B.max() >= balanced.bound * (1 - 1e-12)
    assert balanced.imbalance >= balanced.least_imbalance * (1 - 1e-12)


@given(problems(), methods)
def test_the_same_arguments_give_the_same_dealing(problem, method):
    costs_N, num_bins, counts = problem

    first = balance(costs_N, num_bins, method=method, **counts)
    second = balance(costs_N.copy(), num_bins, method=method, **counts)

    assert first.bins_N.tolist() == second.bins_N.tolist()


@given(costs, st.integers(1, 9))
def test_exchanges_never_make_longest_first_dealing_worse(costs_N, num_bins):
    balanced = balance(costs_N, num_bins)

    assert balanced.loads_B.max() <= max(longest_first(costs_N, num_bins)) * (1 + 1e-12)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_greedy_is_within_grahams_guarantee_of_the_optimum_and_the_bound_is_below_it(
    values, num_bins
):
    costs_N = np.array(values, np.float64)
    optimum = least_heaviest(costs_N, num_bins)

    balanced = balance(costs_N, num_bins)

    assert balanced.bound <= optimum * (1 + 1e-12)
    assert balanced.loads_B.max() <= optimum * (4 / 3 - 1 / (3 * num_bins)) * (1 + 1e-12)


@given(
    st.lists(st.integers(0, 50) | st.integers(40, 50), min_size=2, max_size=7),
    st.integers(1, 3),
    st.data(),
)
def test_the_bound_under_counts_is_below_the_best_dealing_within_them(values, num_bins, data):
    costs_N = np.array(values, np.float64)
    cap = data.draw(st.integers(-(-len(values) // num_bins), len(values)))
    least = data.draw(st.integers(0, len(values) // num_bins))

    best = min(
        max(sum(costs_N[np.array(dealt) == b]) for b in range(num_bins))
        for dealt in product(range(num_bins), repeat=len(values))
        if least <= (counts := np.bincount(dealt, minlength=num_bins)).min() and counts.max() <= cap
    )

    assert reachable_bound(costs_N, num_bins, cap, least) <= best * (1 + 1e-12)


@given(costs, st.integers(1, 9))
def test_scaling_every_cost_by_a_power_of_two_changes_no_bin(costs_N, num_bins):
    plain = balance(costs_N, num_bins)
    scaled = balance(costs_N * 1024.0, num_bins)

    assert plain.bins_N.tolist() == scaled.bins_N.tolist()


@given(st.lists(st.lists(st.integers(0, 10**9), max_size=5), max_size=20))
def test_row_costs_are_the_sums_of_the_pieces_row_by_row(rows):
    cost_P = np.array([cost for row in rows for cost in row], np.float64)
    row_offsets = np.cumsum([0, *map(len, rows)])

    assert row_costs(cost_P, row_offsets).tolist() == [float(sum(row)) for row in rows]
