from itertools import pairwise
from typing import get_args

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.mix.schedule import MixSchedule
from omniload.plan.balance_methods import BalanceMethod
from omniload.plan.cost import QuadraticCost
from omniload.plan.dgraph import DGraph
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.placement import num_microbatches_of

COST = QuadraticCost(768.0, 1.0)

lengths = st.lists(st.integers(1, 5_000), min_size=1, max_size=80).map(
    lambda values: np.array(values, np.int32)
)
methods = st.sampled_from(get_args(BalanceMethod))
trees = st.builds(
    ClientPlaceTree.of,
    dp=st.integers(1, 6),
    cp=st.integers(1, 2),
    tp=st.integers(1, 3),
    pp=st.integers(1, 2),
)


@given(lengths, trees, methods, st.integers(1, 4))
def test_every_member_has_one_place_within_the_caps(lengths_N, tree, method, rows):
    microbatches = num_microbatches_of(len(lengths_N), tree.size_of("dp"), rows)
    graph = DGraph.of_samples(lengths_N).distribute("dp", microbatches=microbatches, max_count=rows)

    placement = graph.cost(COST).balance(method).plan(tree)

    places = [
        placement.members_of(bucket, microbatch).tolist()
        for bucket in range(tree.size_of("dp"))
        for microbatch in range(microbatches)
    ]
    assert sorted(member for members in places for member in members) == list(range(len(lengths_N)))
    assert max(map(len, places)) <= rows
    if len(lengths_N) >= len(places):
        assert min(map(len, places)) >= 1


@given(lengths, trees, methods, st.integers(1, 4))
def test_loads_and_figures_agree_with_the_members(lengths_N, tree, method, microbatches):
    graph = DGraph.of_samples(lengths_N).distribute("dp", microbatches=microbatches)

    placement = graph.cost(COST).balance(method).plan(tree)

    cost_N = COST(lengths_N)
    for b in range(tree.size_of("dp")):
        for m in range(microbatches):
            assert placement.loads_BM[b, m] == cost_N[placement.members_of(b, m)].sum()
    sums = placement.loads_BM.sum(axis=1)
    assert np.isclose(placement.imbalance, sums.max() / sums.mean())
    assert placement.bound <= placement.imbalance * (1 + 1e-12)


@settings(deadline=None)
@given(st.lists(trees, min_size=2, max_size=4), st.integers(1_000, 60_000), methods)
def test_what_a_step_trains_on_does_not_depend_on_the_mesh(meshes, budget, method):
    rng = np.random.default_rng(budget)
    graph = DGraph.of_samples(
        rng.integers(1, 500, 1_000).astype(np.int32), rng.integers(0, 3, 1_000)
    ).mix(MixSchedule.constant({"a": 5, "b": 3, "c": 2}), budget=budget)
    declared = graph.distribute("dp", microbatches=2).cost(COST).balance(method)

    placements = [declared.plan(tree) for tree in meshes]

    assert len({tuple(p.members_N.tolist()) for p in placements}) == 1


@given(lengths, trees)
def test_balancing_is_never_worse_than_dealing_in_order_with_free_counts(lengths_N, tree):
    placement = DGraph.of_samples(lengths_N).distribute("dp").cost(COST).balance().plan(tree)

    dp = tree.size_of("dp")
    longest_first = [0.0] * dp
    for cost in sorted(COST(lengths_N).tolist(), reverse=True):
        longest_first[longest_first.index(min(longest_first))] += cost
    mean = sum(longest_first) / dp
    if len(lengths_N) < 2 * dp:  # no least count interferes
        assert placement.imbalance <= max(longest_first) / mean * (1 + 1e-12)
    assert placement.imbalance >= 1 - 1e-12


@given(lengths, st.data())
def test_rows_cost_what_their_pieces_cost(lengths_P, data):
    cuts = data.draw(st.lists(st.integers(0, len(lengths_P)), max_size=10).map(sorted))
    row_offsets = np.array([0, *cuts, len(lengths_P)])

    graph = DGraph.of_rows(lengths_P, row_offsets).distribute("dp").cost(COST)

    expected = [float(COST(lengths_P[a:b]).sum()) for a, b in pairwise(row_offsets.tolist())]
    assert graph.costs["backbone"].tolist() == expected
