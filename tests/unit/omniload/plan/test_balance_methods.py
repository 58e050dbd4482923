from typing import get_args

import numpy as np
import pytest

from omniload.plan.balance_methods import TOLERANCE, BalanceMethod, balance, reachable_bound
from omniload.plan.cost import QuadraticCost
from tests.support.plane.builders import costs_of_packed_rows

METHODS = get_args(BalanceMethod)


def long_tailed(num, *, longest=32_768, seed=0):
    """Costs of documents with log-normal lengths."""
    drawn_N = np.random.default_rng(seed).lognormal(6.5, 1.4, num)
    return QuadraticCost(24_576.0, 1.0)(np.clip(drawn_N, 1, longest).astype(np.int32))


def counts_of(balanced, num_bins):
    return np.bincount(balanced.bins_N, minlength=num_bins).tolist()


def test_longest_first_and_exchanges_find_an_even_split_that_dealing_alone_misses():
    costs_N = np.array([3.0, 3.0, 2.0, 2.0, 2.0])  # longest first alone: 7 and 5

    balanced = balance(costs_N, 2)

    assert sorted(balanced.loads_B.tolist()) == [6.0, 6.0]
    assert balanced.imbalance == 1.0


def test_differencing_reproduces_its_textbook_example():
    balanced = balance(np.array([8.0, 7.0, 6.0, 5.0, 4.0]), 2, method="karmarkar_karp")

    assert sorted(balanced.loads_B.tolist()) == [14.0, 16.0]


def test_no_balancing_deals_contiguous_runs_in_order():
    balanced = balance(np.ones(7), 3, method="none", max_count=3)

    assert balanced.bins_N.tolist() == [0, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("method", METHODS)
def test_one_bin_takes_everything(method):
    assert balance(np.array([1.0, 2.0, 3.0]), 1, method=method).bins_N.tolist() == [0, 0, 0]


@pytest.mark.parametrize("method", METHODS)
def test_no_items_leave_every_bin_empty(method):
    balanced = balance(np.empty(0), 3, method=method)

    assert balanced.bins_N.tolist() == []
    assert balanced.loads_B.tolist() == [0, 0, 0]
    assert balanced.bound == 0
    assert (balanced.imbalance, balanced.least_imbalance) == (1.0, 1.0)


@pytest.mark.parametrize("method", METHODS)
def test_items_that_cost_nothing_are_still_dealt_within_the_counts(method):
    balanced = balance(np.zeros(6), 3, method=method, max_count=2)

    assert counts_of(balanced, 3) == [2, 2, 2]
    assert balanced.imbalance == 1.0


@pytest.mark.parametrize("method", METHODS)
def test_fewer_items_than_bins_go_one_to_a_bin_at_most(method):
    balanced = balance(np.array([5.0, 1.0]), 4, method=method)

    assert sorted(balanced.loads_B.tolist()) == [0, 0, 1, 5]


@pytest.mark.parametrize("seed", range(3))
def test_thousands_of_long_tailed_samples_are_balanced_to_the_bound(seed):
    balanced = balance(long_tailed(4_096, seed=seed), 64)

    assert balanced.loads_B.max() <= balanced.bound * (1 + TOLERANCE)


@pytest.mark.parametrize("seed", range(3))
def test_a_cap_on_the_counts_costs_little_balance(seed):
    balanced = balance(long_tailed(4_096, seed=seed), 64, max_count=64)

    assert counts_of(balanced, 64) == [64] * 64
    assert balanced.loads_B.max() <= balanced.bound * 1.001


def test_differencing_that_breaks_the_cap_is_repaired():
    costs_N = np.array([90.0, *[1.0] * 9])
    free = balance(costs_N, 2, method="karmarkar_karp")
    assert max(counts_of(free, 2)) > 5  # otherwise this test proves nothing

    capped = balance(costs_N, 2, method="karmarkar_karp", max_count=5)

    assert counts_of(capped, 2) == [5, 5]


@pytest.mark.parametrize("method", METHODS)
def test_a_bin_is_never_left_below_the_least_count(method):
    costs_N = np.array([100.0, 90.0, *[1.0] * 6])

    balanced = balance(costs_N, 4, method=method, min_count=2, max_count=6)

    assert min(counts_of(balanced, 4)) >= 2


def test_an_exchange_does_not_take_the_last_item_that_a_bin_must_keep():
    costs_N = np.array([10.0, 9.9, 2.0, 1.0, 4.0, 4.0])  # giving 2.0 away would be lighter

    balanced = balance(costs_N, 3, min_count=2)

    assert counts_of(balanced, 3) == [2, 2, 2]


@pytest.mark.parametrize(("ranks", "seed"), [(64, 0), (64, 1), (256, 2)])
def test_balance_methods_relieve_a_bin_of_as_many_items_by_any_other_bin(ranks, seed):
    # Heavy rows are dealt with the lightest ones, which lie in bins that are no lighter.
    costs_N = costs_of_packed_rows(5 * ranks, seed=seed)

    balanced = balance(costs_N, ranks, max_count=5, min_count=5)

    assert counts_of(balanced, ranks) == [5] * ranks
    assert balanced.loads_B.max() <= balanced.bound * 1.002


def test_the_bound_of_pairs_is_the_heaviest_beside_the_lightest():
    assert reachable_bound(np.array([9.0, 5.0, 4.0, 3.0, 2.0, 1.0]), 3, 2, 2) == 10.0
    assert reachable_bound(np.array([9.0, 9.0, 9.0, 3.0, 2.0, 1.0]), 3, 2, 2) == 12.0


def test_the_bound_is_the_mean_when_items_are_small():
    assert reachable_bound(np.ones(12), 4) == 3.0


def test_the_bound_is_the_largest_item_when_one_outweighs_the_mean():
    assert reachable_bound(np.array([10.0, 1.0, 1.0]), 3) == 10.0


def test_the_bound_knows_that_two_of_the_largest_meet():
    assert reachable_bound(np.array([6.0, 6.0, 6.0, 5.0, 5.0]), 4) == 10.0


def test_the_bound_knows_the_company_that_counts_force_on_the_largest():
    assert reachable_bound(np.array([10.0, 1.0, 1.0, 1.0]), 2) == 10.0
    assert reachable_bound(np.array([10.0, 1.0, 1.0, 1.0]), 2, max_count=2) == 11.0
    assert reachable_bound(np.array([10.0, 1.0, 1.0, 1.0]), 2, min_count=2) == 11.0


def test_the_report_says_when_balancing_cannot_help():
    balanced = balance(np.array([30.0, 1.0, 1.0]), 4)

    assert balanced.least_imbalance == balanced.imbalance == 30.0 / 8.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bins": 0}, "num_bins is 0; give at least one bin"),
        ({"costs_N": [1.0, -2.0]}, r"costs_N\[1\] is -2.0"),
        ({"costs_N": [float("nan")]}, r"costs_N\[0\] is nan"),
        ({"costs_N": [1.0, float("inf")]}, r"costs_N\[1\] is inf"),
        ({"costs_N": [[1.0]]}, r"shape \(1, 1\)"),
        ({"max_count": 1}, "raise max_count to 2"),
        ({"max_count": 0}, "holds 0 of 3 items"),
        ({"min_count": 2}, "choose one from 0 to 1"),
        ({"min_count": -1}, "min_count -1"),
        ({"method": "best"}, "method is 'best'"),
    ],
)
def test_wrong_arguments_are_refused_with_the_value_and_a_remedy(changes, message):
    arguments = {"costs_N": [1.0, 2.0, 3.0], "num_bins": 2} | changes
    costs_N = np.array(arguments.pop("costs_N"))

    with pytest.raises(ValueError, match=message):
        balance(costs_N, arguments.pop("num_bins"), **arguments)


def test_the_bound_refuses_what_balancing_refuses():
    with pytest.raises(ValueError, match="num_bins is -1"):
        reachable_bound(np.ones(2), -1)
