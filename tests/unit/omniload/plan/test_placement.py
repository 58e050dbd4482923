from typing import get_args

import numpy as np
import pytest

from omniload.plan.balance_methods import BalanceMethod
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.placement import (
    Distribution,
    Placement,
    imbalance_of,
    num_microbatches_of,
    place,
)


def a_placement(**changes):
    defaults = {
        "members_N": np.array([7, 5, 9, 2]),
        "buckets_N": np.array([0, 1, 0, 1], np.int32),
        "microbatches_N": np.array([0, 0, 1, 0], np.int32),
        "loads_BM": np.array([[4.0, 2.0], [2.0, 0.0]]),
        "imbalance": 1.5,
        "bound": 1.0,
        "imbalance_before": 1.75,
        "tree": ClientPlaceTree.of(dp=2, tp=2),
        "distribution": Distribution(microbatches=2),
        "broadcast": ("tp",),
    }
    return Placement(**(defaults | changes))


@pytest.mark.parametrize(
    ("num_rows", "dp", "rows_per_microbatch", "expected"),
    [(64, 8, 2, 4), (65, 8, 2, 5), (8, 8, 1, 1), (1, 8, 4, 1), (0, 2, 1, 1)],
)
def test_microbatches_are_as_many_as_the_rows_of_the_fullest_rank_need(
    num_rows, dp, rows_per_microbatch, expected
):
    assert num_microbatches_of(num_rows, dp, rows_per_microbatch) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 1, 1), "num_rows is -1"),
        ((1, 0, 1), "dp is 0"),
        ((1, 1, 0), "rows_per_microbatch is 0"),
    ],
)
def test_microbatches_of_nothing_sensible_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        num_microbatches_of(*arguments)


@pytest.mark.parametrize("name", ["group_size", "microbatches", "max_count"])
def test_a_distribution_below_one_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        Distribution(**{name: 0})


def test_members_are_dealt_over_buckets_first_and_microbatches_then():
    costs_N = np.array([6.0, 1.0, 4.0, 3.0, 6.0, 4.0, 1.0, 3.0])

    dealt, microbatches_N = place(costs_N, 2, Distribution(microbatches=2, max_count=2))

    assert sorted(dealt.loads_B.tolist()) == [14.0, 14.0]
    loads = np.bincount(dealt.bins_N * 2 + microbatches_N, costs_N)
    assert loads.tolist() == [7.0, 7.0, 7.0, 7.0]


def test_one_heavy_row_does_not_leave_a_microbatch_empty():
    costs_N = np.array([100.0, *[1.0] * 7])

    dealt, microbatches_N = place(costs_N, 2, Distribution(microbatches=3, max_count=3))

    counts = np.bincount(dealt.bins_N * 3 + microbatches_N, minlength=6)
    assert counts.min() >= 1


@pytest.mark.parametrize("method", get_args(BalanceMethod))
def test_rows_that_cost_nothing_still_fill_every_microbatch(method):
    dealt, microbatches_N = place(np.zeros(6), 2, Distribution(microbatches=3), method=method)

    assert np.bincount(dealt.bins_N * 3 + microbatches_N, minlength=6).tolist() == [1] * 6


def test_too_few_microbatches_are_refused_with_how_many_are_needed():
    with pytest.raises(ValueError, match=r"hold 8 of 9; use 3 microbatches"):
        place(np.ones(9), 2, Distribution(microbatches=2, max_count=2))


def test_no_buckets_are_refused():
    with pytest.raises(ValueError, match="num_bins is 0"):
        place(np.ones(2), 0, Distribution())


def test_members_of_a_microbatch_keep_the_order_of_the_step():
    placement = a_placement()

    assert placement.members_of(0, 0).tolist() == [7]
    assert placement.members_of(1, 0).tolist() == [5, 2]
    assert placement.members_of(1, 1).tolist() == []


def test_a_placement_tells_who_fetches():
    placement = a_placement()

    assert placement.fetching_ranks == (0, 2)
    assert placement.num_microbatches == 2


def test_the_slowest_microbatch_is_measured_against_the_mean_of_all():
    assert a_placement().microbatch_imbalance == 2.0
    assert imbalance_of(np.zeros((2, 2))) == 1.0


def test_a_placement_describes_itself_with_the_figure_before_and_the_best_possible():
    text = a_placement(imbalance_of_module={"encoder": 1.25}).describe()

    assert text.splitlines() == [
        "4 members in 2 buckets along dp, 2 microbatches each",
        "heaviest bucket over the mean: 1.5000 (in order 1.7500, at best 1.0000)",
        "heaviest microbatch over the mean: 2.0000",
        "by encoder alone: 1.2500",
        "fetching: 2 of 4 ranks",
    ]
