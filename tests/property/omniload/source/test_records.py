"""Guarantees of a source of records over any format, shown with a fake format that counts its decodes."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.ragged import Ragged
from omniload.mix.config import OnError, ShuffleConfig
from omniload.mix.order import Order
from omniload.source.block_memory import BlockMemory
from omniload.source.distinct.mask import RecordRules
from omniload.source.formats.format import Format, Records, UnitTable
from omniload.source.record_source import RecordSource
from omniload.source.transforms.pipeline import Pipeline


class ListFormat:
    """Has units of token lists; ``None`` is a bad record."""

    holds_text = False

    def __init__(self, units):
        self._units = units
        self.decoded = []

    def units(self):
        n = np.arange(len(self._units))
        rows = np.array([len(unit) for unit in self._units])
        return UnitTable(rows_U=rows, shards_U=n // 2, starts_U=n, stops_U=n + 1)

    place_of = Format.place_of

    def name_of_record(self, number):
        return f"record {number}"

    def read_unit(self, unit):
        self.decoded.append(unit)
        lists = self._units[unit]
        return Records(
            column=Ragged.of([np.array(x or [], np.int32) for x in lists]),
            bad_B=np.array([x is None for x in lists], np.bool_),
            reason="bad" if None in lists else "",
        )


records = st.one_of(st.none(), st.lists(st.integers(0, 99), max_size=4))
contents = st.lists(st.lists(records, max_size=6), min_size=1, max_size=8).filter(any)


def an_order(units, method, block_units):
    table = ListFormat(units).units()
    shuffle = ShuffleConfig(method=method, block_units=block_units)
    return Order(table.rows_U, table.shards_U, seed=5, source="web", shuffle=shuffle)


def a_source(units, method="block", block_units=2, limit=10_000):
    held, order = ListFormat(units), an_order(units, method, block_units)
    skip = OnError(policy="skip", limit=limit)
    return RecordSource(
        "web", order, held, pipeline=Pipeline(None, ()), rules=RecordRules(on_error=skip)
    ), held


def samples(block):
    return [
        (position, tuple(block.tokens[i].tolist()))
        for i, position in enumerate(block.table.positions_N.tolist())
    ]


@given(
    contents,
    st.sampled_from(["none", "shards", "block", "units", "full"]),
    st.integers(0, 40),
    st.lists(st.integers(0, 25), max_size=6),
)
def test_any_split_of_a_range_gives_the_same_samples(units, method, start, lengths):
    stops = (start + np.cumsum([0, *lengths])).tolist()
    whole = a_source(units, method)[0].read(start, stops[-1])
    split = a_source(units, method)[0]

    blocks = [split.read(a, b) for a, b in pairwise(stops)]

    assert [sample for block in blocks for sample in samples(block)] == samples(whole)
    assert sum(block.skipped for block in blocks) == whole.skipped


@given(contents, st.sampled_from([1, 200, 2_000]), st.lists(st.integers(0, 25), max_size=6))
def test_blocks_on_disk_give_the_samples_of_blocks_in_memory(units, limit_bytes, lengths):
    stops = np.cumsum([0, *lengths]).tolist()
    spilling = a_source(units)[0]
    spilling.share(BlockMemory(limit_bytes))

    blocks = [spilling.read(a, b) for a, b in pairwise(stops)]

    whole = a_source(units)[0].read(0, stops[-1])
    assert [sample for block in blocks for sample in samples(block)] == samples(whole)


@given(contents, st.integers(0, 3))
def test_an_epoch_gives_every_record_that_holds_tokens_once(units, epoch):
    source, _ = a_source(units)
    n = source.positions_per_epoch

    block = source.read(epoch * n, (epoch + 1) * n)

    flat = [record for unit in units for record in unit]
    assert sorted(tokens for _, tokens in samples(block)) == sorted(tuple(r) for r in flat if r)
    assert block.skipped == sum(record is None for record in flat)


@given(contents, st.integers(1, 4))
def test_an_epoch_read_in_order_decodes_every_unit_once_behind_the_first_read(units, step):
    source, held = a_source(units)
    n = source.positions_per_epoch
    source.read(0, 1)
    of_first = len(held.decoded)

    for at in range(0, n, step):
        source.read(at, min(n, at + step))

    # The first block is decoded again if its first read took only a part of it.
    again = held.decoded[:of_first] if len(held.decoded) > len({*held.decoded}) else []
    assert sorted([*held.decoded[len(again) :]]) == [i for i, unit in enumerate(units) if unit]


@given(contents)
def test_a_source_of_one_block_is_decoded_once_for_all_epochs(units):
    source, held = a_source(units, block_units=8)

    source.read(0, 5 * source.positions_per_epoch)

    assert sorted(held.decoded) == [i for i, unit in enumerate(units) if unit]


@given(contents, st.integers(0, 60), st.integers(0, 60))
def test_tables_describe_the_tokens(units, start, count):
    block = a_source(units)[0].read(start, start + count)

    table = block.table
    assert (table.start, table.stop) == (start, start + count)
    assert table.lengths_N.tolist() == block.tokens.lengths_N.tolist()
    assert (table.lengths_N >= 1).all()
    assert (np.diff(table.positions_N) > 0).all()


@given(contents, st.integers(2, 8), st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_a_first_read_that_is_short_decodes_what_it_needs_alone_and_the_next_one_the_block(
    units, block_units, lengths
):
    order, whole = an_order(units, "block", block_units), a_source(units, "block", block_units)[0]
    source, held = a_source(units, "block", block_units)
    block = {*order.block_of(0, 0).units_U.tolist()}
    stops = np.minimum(np.cumsum([0, *lengths]), len(order.block_of(0, 0).rows)).tolist()

    for number, (start, stop) in enumerate(pairwise(stops)):
        before = len(held.decoded)
        assert samples(source.read(start, stop)) == samples(whole.read(start, stop))
        needed = {*order.locate(start, stop).units_N.tolist()}
        if number == 0 and stop > start:
            few = 2 * (stop - start) <= len(block) and 2 * len(needed) <= len(block)
            assert {*held.decoded} == (needed if few else block)
        elif held.decoded[before:]:
            assert {*held.decoded[before:]} == block

    assert len(held.decoded) <= len(block) * 3 // 2
