"""The order of groups, and the ranks that train on them."""

import numpy as np

from omniload.plan.groups.dealing import EVERYBODY, dealt, in_order, shares_of


def test_the_order_is_the_same_however_ranks_reported_and_none_of_sources():
    keys = np.array([(source, position, 0) for source in (0, 1) for position in range(200)])
    shuffled = np.random.default_rng(1).permutation(keys)

    ordered = keys[in_order(keys)]

    assert np.array_equal(ordered, shuffled[in_order(shuffled)])
    assert 60 < np.count_nonzero(ordered[:200, 0] == 0) < 140


def test_ranks_have_equal_shares():
    assert shares_of(7, 3).tolist() == [3, 2, 2]
    assert shares_of(2, 3).tolist() == [1, 1, 0]


def test_a_rank_keeps_its_own_groups_as_far_as_its_share_goes():
    owners = np.array([1, 1, 1, 0, 1, EVERYBODY])

    assert dealt(owners, 2).tolist() == [1, 1, 1, 0, 0, 0]
