"""The order of a source as a function of position."""

import numpy as np
import pytest

from omniload.mix.config import ShuffleConfig
from omniload.mix.order import Order


def an_order(rows=(3, 2, 4, 1), shards=(0, 0, 1, 2), **changes):
    settings = {"seed": 7, "source": "web", "shuffle": ShuffleConfig(block_units=2)}
    return Order(np.array(rows), np.array(shards), **(settings | changes))


def pairs(order, start, stop):
    located = order.locate(start, stop)
    return list(zip(located.units_N.tolist(), located.rows_N.tolist(), strict=True))


def test_without_shuffle_records_come_as_stored():
    order = an_order(shuffle=ShuffleConfig(method="none"))

    assert pairs(order, 0, 6) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]


@pytest.mark.parametrize("method", ["none", "shards"])
def test_rows_that_stay_in_order_are_a_range_and_no_array(method):
    order = an_order((2, 2, 2), (0, 0, 1), shuffle=ShuffleConfig(method=method))

    assert [order.block_of(0, block).rows for block in (0, 1, 2)] == 3 * [range(2)]


def test_a_record_is_numbered_within_its_shard_whatever_the_units():
    order = an_order(rows=(3, 0, 2, 4, 1), shards=(0, 0, 0, 2, 2))

    assert order.number_in_shard(0, 2) == 2
    assert order.number_in_shard(2, 1) == 4
    assert order.number_in_shard(3, 0) == 0
    assert order.number_in_shard(4, 0) == 4


def test_a_record_is_told_by_its_number_in_its_shard_where_units_of_shards_lie_among_each_other():
    rng = np.random.default_rng(0)
    rows_U, shards_U = rng.integers(0, 5, 200), rng.integers(0, 7, 200)
    order = Order(rows_U, shards_U, seed=1, source="web", shuffle=ShuffleConfig())
    filled = np.flatnonzero(rows_U)

    numbers = [order.number_in_shard(unit, 1) for unit in filled]

    assert numbers == [
        1 + rows_U[(shards_U == shards_U[unit]) & (np.arange(200) < unit)].sum() for unit in filled
    ]


def test_shuffling_shards_keeps_the_order_inside_a_shard():
    order = an_order(shuffle=ShuffleConfig(method="shards"))

    located = pairs(order, 0, 10)

    assert sorted(located) == sorted(pairs(an_order(), 0, 10))
    first = located.index((0, 0))
    assert located[first : first + 5] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_shuffling_shards_permutes_them():
    order = an_order((1,) * 50, range(50), shuffle=ShuffleConfig(method="shards"))

    assert [unit for unit, _ in pairs(order, 0, 50)] != list(range(50))


def test_by_units_a_block_holds_units_of_any_shard():
    order = an_order((10,) * 64, np.arange(64) // 16, shuffle=ShuffleConfig(method="units"))

    of_shards = [set((order.block_of(0, block).units_U // 16).tolist()) for block in range(64 // 4)]

    assert sum(len(shards) > 2 for shards in of_shards) > 8


def test_in_full_all_rows_are_permuted_together_and_a_later_epoch_otherwise():
    order = an_order((50, 50, 50, 50), (0, 0, 1, 1), shuffle=ShuffleConfig(method="full"))

    located = order.locate(0, 400)

    assert [(span.epoch, span.block) for span in order.spans(0, 400)] == [(0, 0), (1, 0)]
    assert set(located.units_N[:20].tolist()) == {0, 1, 2, 3}
    assert pairs(order, 0, 200) != pairs(order, 200, 400)


def test_a_block_mixes_rows_of_its_units_only():
    order = an_order((50, 50, 50, 50), (0, 0, 1, 1))

    located = order.locate(0, 100)

    assert len(set(located.units_N.tolist())) == 2
    assert [span.block for span in order.spans(0, 100)] == [0]
    assert len(set(np.diff(located.units_N[:20]).tolist())) > 1


GOLDEN_FIRST_EPOCH = [
    (2, 1),
    (2, 3),
    (2, 2),
    (2, 0),
    (3, 0),
    (1, 0),
    (0, 0),
    (0, 1),
    (0, 2),
    (1, 1),
]
GOLDEN_SECOND_EPOCH = [
    (0, 2),
    (3, 0),
    (0, 1),
    (0, 0),
    (2, 1),
    (1, 0),
    (2, 2),
    (1, 1),
    (2, 3),
    (2, 0),
]


def test_the_order_of_a_seed_never_changes_between_releases():
    order = an_order()

    assert pairs(order, 0, 10) == GOLDEN_FIRST_EPOCH
    assert pairs(order, 10, 20) == GOLDEN_SECOND_EPOCH


def test_an_empty_shard_more_does_not_change_the_order():
    with_empty = an_order((3, 0, 2, 4, 1), (0, 1, 2, 3, 4))
    without = an_order((3, 2, 4, 1), (0, 1, 2, 3))

    renumbered = [(unit - (unit > 1), row) for unit, row in pairs(with_empty, 0, 10)]

    assert renumbered == pairs(without, 0, 10)


def test_the_fingerprint_tells_orders_apart():
    orders = [
        an_order(),
        an_order(seed=8),
        an_order(source="code"),
        an_order(shuffle=ShuffleConfig(block_units=3)),
        an_order(shuffle=ShuffleConfig(method="none")),
        an_order((3, 2, 4, 2)),
        an_order(shards=(0, 1, 1, 2)),
    ]

    assert len({order.fingerprint for order in orders}) == len(orders)
    assert an_order().fingerprint == orders[0].fingerprint


def test_spans_end_where_blocks_and_epochs_end():
    order = an_order((2, 2, 2), (0, 0, 0))

    spans = list(order.spans(3, 13))

    assert [(s.epoch, s.block, s.offset, s.start, s.stop) for s in spans] == [
        (0, 0, 3, 3, 4),
        (0, 1, 0, 4, 6),
        (1, 0, 0, 6, 10),
        (1, 1, 0, 10, 12),
        (2, 0, 0, 12, 13),
    ]


def test_a_source_of_one_block_has_the_same_units_in_every_epoch():
    order = an_order((1, 1, 1), (0, 1, 2), shuffle=ShuffleConfig(block_units=4))

    assert {tuple(order.block_of(epoch, 0).units_U) for epoch in range(20)} == {(0, 1, 2)}


def test_positions_of_a_far_epoch_need_no_earlier_one():
    near, far = an_order(), an_order()
    for epoch in range(5):
        near.locate(epoch * 10, epoch * 10 + 10)

    assert pairs(near, 10**15, 10**15 + 30) == pairs(far, 10**15, 10**15 + 30)


def test_an_empty_range_locates_nothing():
    located = an_order().locate(5, 5)

    assert len(located.units_N) == len(located.rows_N) == 0


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3)])
def test_a_range_that_is_none_is_refused(start, stop):
    with pytest.raises(ValueError, match=f"positions {start} to {stop}"):
        an_order().locate(start, stop)


def test_a_source_without_rows_has_no_order():
    with pytest.raises(ValueError, match="no row"):
        an_order((0, 0), (0, 1))


def test_negative_row_counts_are_refused():
    with pytest.raises(ValueError, match=r"unit_rows\[1\] is -2"):
        an_order((3, -2), (0, 1))


def test_columns_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="both are"):
        an_order((3, 2), (0,))


def test_a_block_that_is_not_there_is_named():
    with pytest.raises(IndexError, match="block is 9"):
        an_order().block_of(0, 9)
