"""Copies of ranges, compared with slicing them one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base import ragged
from omniload.base.ragged import Ragged, Ranges, gather_across, gather_ranges

DTYPES = (np.uint8, np.int16, np.int32, np.int64, np.float32)


@st.composite
def columns_and_ranges(draw):
    """Columns of one type, and ranges of them in any order, overlapping or empty."""
    dtype = draw(st.sampled_from(DTYPES))
    sizes = draw(st.lists(st.integers(0, 60), min_size=1, max_size=4))
    columns = [
        (np.arange(size) * 7 + 31 * i).astype(dtype) for i, size in enumerate(sizes, start=1)
    ]
    ranges = []
    for _ in range(draw(st.integers(0, 12))):
        which = draw(st.integers(0, len(columns) - 1))
        start = draw(st.integers(0, sizes[which]))
        ranges.append((which, start, draw(st.integers(start, sizes[which]))))
    return columns, np.array(ranges, np.int64).reshape(-1, 3)


FEW_AND_NONE = st.sampled_from([ragged._FEW, 0])
"""Number of ranges up to which each is sliced: all of these, or none, so that Arrow copies them."""


def gathered(columns, ranges, few, window_bytes=ragged._WINDOW_BYTES):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged, "_FEW", few)
        patch.setattr(ragged, "_WINDOW_BYTES", window_bytes)
        return gather_across(columns, *ranges.T)


def expected_of(columns, ranges):
    parts = [columns[which][start:stop].tolist() for which, start, stop in ranges.tolist()]
    return [value for part in parts for value in part], np.cumsum([0, *map(len, parts)]).tolist()


@given(columns_and_ranges(), FEW_AND_NONE)
def test_ranges_of_several_columns_are_copied_end_to_end(drawn, few):
    columns, ranges = drawn

    values, offsets = gathered(columns, ranges, few)

    assert (values.tolist(), offsets.tolist()) == expected_of(columns, ranges)
    assert values.dtype == columns[0].dtype
    assert offsets.dtype == np.int64


@given(columns_and_ranges(), st.sampled_from([16, 64, 128]))
def test_columns_longer_than_a_window_are_copied_alike(drawn, window_bytes):
    columns, ranges = drawn

    values, offsets = gathered(columns, ranges, 0, window_bytes)

    assert (values.tolist(), offsets.tolist()) == expected_of(columns, ranges)


def test_what_was_copied_is_no_view_of_the_column():
    column = np.arange(40, dtype=np.int32)

    values, _ = gather_ranges(column, np.array([0, 8]), np.array([6, 40]))
    column[:] = -1

    assert values.tolist() == [*range(6), *range(8, 40)]


def test_what_was_copied_may_be_written_to():
    values, _ = gather_ranges(np.arange(40, dtype=np.int32), np.array([0]), np.array([40]))

    values[0] = 7

    assert values[0] == 7


def test_a_column_that_may_not_be_written_to_is_copied_too():
    column = np.frombuffer(np.arange(20, dtype=np.int32).tobytes(), np.int32)

    values, _ = gather_ranges(column, np.array([18, 1]), np.array([20, 12]))

    assert values.tolist() == [18, 19, *range(1, 12)]


@given(columns_and_ranges(), st.randoms())
def test_ranges_packed_in_any_order_hold_what_they_point_to(drawn, random):
    columns, ranges = drawn
    which, starts, stops = ranges.T
    order = list(range(len(ranges)))
    random.shuffle(order)

    taken = Ranges(columns=columns, which_N=which, starts_N=starts, stops_N=stops).take(
        np.array(order, np.int64)
    )
    packed = taken.packed()

    assert packed.lengths_N.tolist() == taken.lengths_N.tolist()
    assert (packed.values_V.tolist(), packed.offsets.tolist()) == expected_of(
        columns, ranges[np.array(order, np.int64)]
    )


@given(st.lists(st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=4), max_size=4))
def test_several_columns_shown_as_ranges_are_their_sequences_in_order(columns):
    shown = Ranges.of([Ragged.of([np.array(s, np.int32) for s in column]) for column in columns])

    packed = shown.packed()

    assert len(shown) == sum(map(len, columns))
    assert [packed[i].tolist() for i in range(len(packed))] == [s for c in columns for s in c]


@given(
    columns_and_ranges(),
    st.integers(-100, 200),
    st.integers(-100, 200),
    st.integers(-3, 6),
    FEW_AND_NONE,
    st.data(),
)
def test_a_range_that_is_not_within_its_column_is_refused_and_never_read(
    drawn, start, stop, which, few, data
):
    columns, ranges = drawn
    inside = 0 <= which < len(columns) and 0 <= start <= stop <= len(columns[which])
    at = data.draw(st.integers(0, len(ranges)))
    ranges = np.insert(ranges, at, (which, start, stop), axis=0)

    if inside:
        values, offsets = gathered(columns, ranges, few)
        assert (values.tolist(), offsets.tolist()) == expected_of(columns, ranges)
    else:
        with pytest.raises(ValueError, match=rf"range {at} is|ranges lie in columns"):
            gathered(columns, ranges, few)


def test_ranges_of_unequal_number_are_refused():
    with pytest.raises(ValueError, match="2 columns, 2 starts and 1 stops"):
        gather_across([np.arange(9)], np.zeros(2, int), np.array([0, 1]), np.array([3]))


class Looked(np.ndarray):
    """A column that counts how often a part of it was taken."""

    looked = 0

    def __getitem__(self, at):
        Looked.looked += 1
        return super().__getitem__(at)


def test_many_ranges_of_two_tokens_are_copied_without_a_look_at_each(monkeypatch):
    monkeypatch.setattr(Looked, "looked", 0)
    columns = [np.arange(20_000, dtype=np.int32).view(Looked) for _ in range(3)]
    starts = np.arange(10_000) * 2

    values, _ = gather_across(columns, np.arange(10_000) % 3, starts, starts + 2)

    assert values.tolist() == list(range(20_000))
    assert Looked.looked < 30
