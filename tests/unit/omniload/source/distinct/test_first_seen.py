"""The first record of each key: as by a dictionary of all keys, in the memory of a few."""

import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omniload.source.distinct.first_seen import Bits, FirstSeen

HIGHEST = 2**64 - 1


@given(
    st.lists(st.lists(st.sampled_from([0, 1, 2**63 - 1, 2**63, HIGHEST, 7 << 60, 9]), max_size=9)),
    st.sampled_from([1, 2, 3, 16, 1000]),
    st.booleans(),
)
@example([[HIGHEST] * 9] * 5, 2, True)
@example([[5, 6], [6, 5], [5]], 2, False)
def test_a_record_is_first_where_no_earlier_one_has_its_key(units, buffer_records, backwards):
    keys = [key for unit in units for key in unit]
    begins = np.cumsum([0, *map(len, units)])

    with FirstSeen(len(keys), buffer_records=buffer_records) as seen:
        parts = list(zip(begins, units, strict=False))
        for begin, unit in parts[::-1] if backwards else parts:
            seen.add(np.asarray(unit, np.uint64), begin + np.arange(len(unit)))
        first = seen.finish()

    wanted = [keys.index(key) == i for i, key in enumerate(keys)]
    assert first.between(0, len(keys)).tolist() == wanted
    assert first.total() == sum(wanted)
    for begin, unit in parts:
        stop = begin + len(unit)
        assert first.between(int(begin), int(stop)).tolist() == wanted[begin:stop]


def test_records_that_were_not_taken_in_are_never_first():
    with FirstSeen(5) as seen:
        seen.add(np.array([3, 3], np.uint64), np.array([1, 4]))
        assert seen.finish().between(0, 5).tolist() == [False, True, False, False, False]


def test_what_was_written_is_gone_behind_it(tmp_path):
    with FirstSeen(8, folder=tmp_path, buffer_records=2) as seen:
        seen.add(np.arange(8, dtype=np.uint64), np.arange(8))
        assert seen.finish().total() == 8
    assert list(tmp_path.iterdir()) == []


def test_bits_of_records_are_those_of_their_bytes():
    bits = Bits.none(20)
    bits.set(np.array([0, 7, 8, 19, 8]))
    assert bits.packed.tolist() == [0b10000001, 1, 0b1000]
    assert bits.between(7, 9).tolist() == [True, True]
    assert bits.between(3, 3).tolist() == []


@pytest.mark.parametrize("distinct", [1, 40_000])
def test_memory_is_that_of_the_buffer_and_not_of_the_records(distinct):
    keys = np.arange(40_000, dtype=np.uint64) % distinct * np.uint64(0x9E3779B97F4A7C15)
    tracemalloc.start()
    try:
        with FirstSeen(len(keys), buffer_records=1000) as seen:
            for start in range(0, len(keys), 500):
                seen.add(keys[start : start + 500], np.arange(start, start + 500))
            total = seen.finish().total()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert total == distinct
    assert peak_bytes < 320_000  # the records take 640,000


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 9))
def test_truths_of_arrow_are_taken_as_they_are(truths, start):
    column = pa.array(truths, pa.bool_()).slice(start)

    found = Bits.of(column)

    assert found.between(0, len(column)).tolist() == column.to_pylist()
    assert found.total() == column.true_count


def test_what_lies_behind_the_last_truth_counts_for_none():
    column = pa.Array.from_buffers(pa.bool_(), 5, [None, pa.py_buffer(b"\xff")])

    assert Bits.of(column).total() == 5


def test_truths_of_arrow_take_a_bit_each():
    column = pa.array(np.ones(8_000_000, np.bool_))

    tracemalloc.start()
    found = Bits.of(column)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert found.total() == 8_000_000
    assert peak < 3 << 20
