from typing import get_args

import numpy as np
import pytest

from omniload.plan.balance_methods import BalanceMethod, imbalance_of
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.placement import (
    Distribution,
    Placement,
    microbatch_bound_of,
    num_microbatches_of,
    place,
)
from tests.support.plane.builders import costs_of_packed_rows


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
def test_a_distribution_of_less_than_one_or_of_parts_is_refused(name):
    assert Distribution(**{name: np.int64(2)}) == Distribution(**{name: 2})
    for wrong in (0, 2.5, "2"):
        with pytest.raises(ValueError, match=f"{name} is {wrong!r}; it is a whole number"):
            Distribution(**{name: wrong})


def test_members_are_dealt_over_buckets_first_and_microbatches_then():
    costs_N = np.array([6.0, 1.0, 4.0, 3.0, 6.0, 4.0, 1.0, 3.0])

    dealt, microbatches_N = place(costs_N, 2, Distribution(microbatches=2, max_count=2))

    assert sorted(dealt.loads_B.tolist()) == [14.0, 14.0]
    loads = np.bincount(dealt.bins_N * 2 + microbatches_N, costs_N)
    assert loads.tolist() == [7.0, 7.0, 7.0, 7.0]


def loads_of(costs_N, dp, deal):
    """Return the loads of microbatches, and the dealing over buckets."""
    over_buckets, microbatches_N = place(costs_N, dp, deal)
    places_N = over_buckets.bins_N * deal.microbatches + microbatches_N
    counts = np.bincount(places_N, minlength=dp * deal.microbatches)
    assert (counts == deal.max_count).all(), "as many rows as there is room for"
    loads = np.bincount(places_N, costs_N, dp * deal.microbatches)
    assert over_buckets.loads_B == pytest.approx(loads.reshape(dp, -1).sum(1))
    return loads, over_buckets


@pytest.mark.parametrize(("microbatches", "rows"), [(4, 2), (2, 4), (8, 4), (4, 8)])
@pytest.mark.parametrize("dp", [8, 32])
def test_microbatches_of_several_rows_are_as_even_as_their_rows_allow(dp, microbatches, rows):
    deal = Distribution(microbatches=microbatches, max_count=rows)
    costs_N = costs_of_packed_rows(dp * microbatches * rows)

    loads, over_buckets = loads_of(costs_N, dp, deal)

    bound = microbatch_bound_of(costs_N, dp, deal)
    assert bound <= imbalance_of(loads) <= bound * 1.01
    assert over_buckets.loads_B.max() <= over_buckets.bound * 1.002


def test_buckets_of_microbatches_are_evened_out_by_members_that_change_places():
    costs_N = costs_of_packed_rows(1_024)
    deal = Distribution(microbatches=2, max_count=8)

    loads, over_buckets = loads_of(costs_N, 64, deal)

    assert over_buckets.loads_B.max() <= over_buckets.bound * 1.0001
    assert loads.max() > loads.mean() * 1.001  # microbatches alone would not come so close


def test_buckets_that_are_even_enough_leave_microbatches_as_they_are():
    deal = Distribution(microbatches=2, max_count=4)

    loads, over_buckets = loads_of(costs_of_packed_rows(256, seed=2), 32, deal)

    assert over_buckets.loads_B.max() <= over_buckets.bound * 1.001
    assert loads.max() <= loads.mean() * 1.004


def test_the_bound_of_microbatches_is_that_of_the_heaviest_row_where_each_has_one():
    costs_N = np.array([5.0, 1.0, 1.0, 1.0])

    assert microbatch_bound_of(costs_N, 2, Distribution(microbatches=2, max_count=1)) == 2.5
    assert microbatch_bound_of(costs_N, 1, Distribution(microbatches=2, max_count=2)) == 1.5
    assert microbatch_bound_of(np.ones(8), 2, Distribution(microbatches=2)) == 1.0
    assert microbatch_bound_of(np.zeros(3), 2, Distribution(microbatches=2)) == 1.0


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
    text = a_placement(microbatch_bound=1.5, imbalance_of_module={"encoder": 1.25}).describe()

    assert text.splitlines() == [
        "4 members in 2 buckets along dp, 2 microbatches each",
        "heaviest bucket over the mean: 1.5000 (in order 1.7500, at best 1.0000)",
        "heaviest microbatch over the mean: 2.0000 (at best 1.5000)",
        "by encoder alone: 1.2500",
        "fetching: 2 of 4 ranks",
    ]
