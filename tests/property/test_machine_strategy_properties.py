"""The strategy that a mix declares: the chain of primitives, and the case that needs no chain."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omniload.machine import strategy
from omniload.mix.state import MixState
from omniload.plan.membership import membership_of
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.builders import a_mix
from tests.support.plane.reference import known_ahead


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(1, 6))
def test_rows_for_one_bucket_are_placed_as_the_chain_of_primitives_places_them(lengths, rows):
    mix = a_mix(sources=("web",), rows=rows, length=16, micro_rows=rows)
    state, tree = MixState.start(1), ClientPlaceTree.of(dp=1)
    membership = membership_of(mix, state, known_ahead(state, [[[n] for n in lengths]], 200))

    plan = strategy.place(mix, tree, state, membership)
    chained = strategy.dealt_by_chain(mix, tree, 0, membership, 1)

    assert np.array_equal(plan.dp_ranks_R, chained["dp_ranks_R"])
    assert np.array_equal(plan.microbatches_R, chained["microbatches_R"])
    assert (plan.imbalance, plan.bound) == (chained["imbalance"], chained["bound"])
