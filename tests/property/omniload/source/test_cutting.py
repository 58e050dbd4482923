"""Units of a shard, compared with a loop over its records; and the table's entry for one unit."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omniload.source.files import ShardFile
from omniload.source.formats.format import UnitTable
from omniload.source.parsing.cutting import byte_ranges, cuts, whole_shard

SHARD = ShardFile(path="a.bin", size_bytes=0, stamp="")


@given(
    sizes=st.lists(st.integers(0, 9), max_size=14),
    unit=st.integers(1, 20),
    parted=st.lists(st.integers(0, 14), max_size=4),
)
def test_a_unit_ends_with_the_record_that_fills_it_however_records_come(sizes, unit, parted):
    ends = np.cumsum(sizes, dtype=np.int64)
    expected, start = [0], 0
    for record, end in enumerate(ends.tolist(), start=1):
        if end - start >= unit or record == len(ends):
            expected.append(record)
            start = end

    found = cuts(np.split(ends, sorted(parted)), unit)

    assert found.records_U.tolist() == expected
    assert found.stops_U.tolist() == [int(ends[record - 1]) for record in expected[1:]]


@given(
    sizes=st.lists(st.integers(0, 9), max_size=14),
    start=st.integers(0, 5),
    unit=st.integers(1, 20),
)
def test_byte_ranges_hold_every_record_of_a_shard_once_and_follow_each_other(sizes, start, unit):
    ends = start + np.cumsum(sizes, dtype=np.int64)

    units = byte_ranges(SHARD, start, cuts([ends - start], unit), content="of it")

    stops = [int(ends[row - 1]) for row in np.cumsum(units.rows).tolist()]
    assert units.rows.sum() == len(sizes)
    assert units.rows.min(initial=1) > 0
    assert units.stops.tolist() == stops
    assert units.starts.tolist() == [start, *stops][: len(stops)]


@given(rows=st.integers(0, 3))
def test_a_shard_that_is_one_unit_has_none_without_a_record(rows):
    units = whole_shard(SHARD, 2, 7, rows=rows, content="of it")

    found = zip(units.rows.tolist(), units.starts.tolist(), units.stops.tolist(), strict=True)
    assert list(found) == ([(rows, 2, 7)] if rows else [])


@given(
    rows_of_shards=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=4),
)
def test_a_table_of_units_knows_what_lies_before_each_in_its_shard(rows_of_shards):
    shards = [shard for shard, rows in enumerate(rows_of_shards) for _ in rows]
    rows = [count for rows in rows_of_shards for count in rows]
    number = np.arange(len(rows))
    table = UnitTable(
        rows_U=np.array(rows, np.int64),
        shards_U=np.array(shards, np.int64),
        starts_U=number * 10,
        stops_U=number * 10 + 5,
    )

    seen = [0] * len(rows_of_shards)
    before = []
    for shard, count in zip(shards, rows, strict=True):
        before.append(seen[shard])
        seen[shard] += count
    units = [table[unit] for unit in range(len(table))]
    assert units == [
        (shard, unit * 10, unit * 10 + 5, count)
        for unit, (shard, count) in enumerate(zip(shards, rows, strict=True))
    ]
    assert [table.rows_before(unit) for unit in range(len(table))] == before
    assert table.first_filled() == next((unit for unit, n in enumerate(rows) if n), None)
