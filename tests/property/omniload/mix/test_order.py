"""Guarantees of the order of any source."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.mix import order as order_module
from omniload.mix.config import ShuffleConfig
from omniload.mix.order import Order, sorted_places


@st.composite
def sources(draw):
    rows = draw(st.lists(st.integers(0, 9), min_size=1, max_size=20).filter(any))
    shards = np.cumsum([draw(st.booleans()) for _ in rows])
    shuffle = ShuffleConfig(
        method=draw(st.sampled_from(["none", "shards", "block", "units", "full"])),
        block_units=draw(st.integers(1, 5)),
    )
    return {"rows": np.array(rows), "shards": shards, "shuffle": shuffle}


def order_of(source, seed=3, name="web"):
    return Order(
        source["rows"], source["shards"], seed=seed, source=name, shuffle=source["shuffle"]
    )


def listed(located):
    return list(zip(located.units_N.tolist(), located.rows_N.tolist(), strict=True))


@given(sources(), st.integers(0, 1000))
def test_every_epoch_visits_every_record_exactly_once(source, epoch):
    order = order_of(source)
    n = order.positions_per_epoch

    visited = listed(order.locate(epoch * n, (epoch + 1) * n))

    assert sorted(visited) == [
        (unit, row) for unit, rows in enumerate(source["rows"]) for row in range(rows)
    ]


@given(sources(), st.integers(0, 300), st.lists(st.integers(0, 60), max_size=6))
def test_a_range_locates_the_same_however_it_is_cut(source, start, lengths):
    whole, cut = order_of(source), order_of(source)
    stops = (start + np.cumsum([0, *lengths])).tolist()

    pieces = [listed(cut.locate(a, b)) for a, b in pairwise(stops)]

    assert [pair for piece in pieces for pair in piece] == listed(whole.locate(start, stops[-1]))


@given(sources(), st.lists(st.integers(0, 500), max_size=10))
def test_positions_may_be_asked_for_in_any_order(source, positions):
    order = order_of(source)

    assert [listed(order.locate(p, p + 1)) for p in positions] == [
        listed(order_of(source).locate(p, p + 1)) for p in positions
    ]


@given(sources(), st.integers(0, 5))
def test_a_shard_s_units_stay_together(source, epoch):
    order = order_of(source | {"shuffle": ShuffleConfig(method="shards")})
    n = order.positions_per_epoch

    shards = source["shards"][order.locate(epoch * n, (epoch + 1) * n).units_N]

    assert np.count_nonzero(np.diff(shards)) == len(set(shards.tolist())) - 1


@given(sources(), st.integers(0, 5))
def test_spans_cover_the_range_without_gap(source, blocks):
    order = order_of(source)
    stop = order.positions_per_epoch * 2 + blocks

    spans = list(order.spans(1, stop))

    assert [s.start for s in spans] == [1, *(s.stop for s in spans[:-1])]
    assert spans[-1].stop == stop


LARGE = {
    "rows": np.full(40, 25),
    "shards": np.arange(40) // 4,
    "shuffle": ShuffleConfig(block_units=4),
}


@given(st.integers(0, 2**62), st.integers(0, 2**62), st.integers(0, 10**6))
def test_different_seeds_epochs_and_names_give_different_orders(seed, other, epoch):
    n, order = 1000, order_of(LARGE, seed=seed)

    here = listed(order.locate(epoch * n, (epoch + 1) * n))

    assert here != listed(order.locate((epoch + 1) * n, (epoch + 2) * n))
    assert here != listed(order_of(LARGE, seed, "code").locate(epoch * n, (epoch + 1) * n))
    assert seed == other or here != listed(
        order_of(LARGE, other).locate(epoch * n, (epoch + 1) * n)
    )


def test_first_rows_of_a_block_are_uniform_over_epochs():
    order = order_of({"rows": np.array([10]), "shards": np.array([0]), "shuffle": ShuffleConfig()})

    firsts = np.array([order.block_of(epoch, 0).rows[0] for epoch in range(4000)])

    # 400 expected of each; six standard deviations of a binomial are 114.
    assert np.abs(np.bincount(firsts, minlength=10) - 400).max() < 114


@given(
    st.lists(st.tuples(st.sampled_from([0, 2**64 - 64]), st.integers(0, 63)), min_size=2),
    st.lists(st.integers(0, 2**64 - 1)),
    st.sampled_from([1, 2, 5, 1 << 15]),
)
def test_places_of_draws_are_those_of_a_stable_sort(near, far, at_once):
    """This must also work if a chunk ends between draws that are equal."""
    # The draws agree in all bits but a few low ones, or in every bit, which is rare in a real source.
    draws = np.array([*(high + low for high, low in near), *far], np.uint64)
    patched = pytest.MonkeyPatch()
    patched.setattr(order_module, "_AT_ONCE", at_once)

    places = sorted_places(draws)
    patched.undo()

    assert places.tolist() == np.argsort(draws, kind="stable").tolist()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5_000, 70_000])
def test_places_of_any_number_of_draws_are_those_of_a_stable_sort(count):
    draws = np.random.Philox(key=count).random_raw(count) >> np.uint64(50)

    assert sorted_places(draws).tolist() == np.argsort(draws, kind="stable").tolist()
