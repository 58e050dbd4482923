"""Ragged columns, tables of samples, and the version of a state."""

import numpy as np
import pytest

from omniload.base.errors import StateError
from omniload.base.ragged import Ragged, gather_ranges, numbers_of, run_of
from omniload.base.state import require_version
from omniload.mix.samples import SampleTable
from tests.support.plane.builders import a_table


def test_sequences_lie_end_to_end():
    column = Ragged.of([np.array([1, 2]), np.array([], int), np.array([3])])

    assert column.values_V.tolist() == [1, 2, 3]
    assert column.values_V.dtype == np.int32
    assert column.offsets.tolist() == [0, 2, 2, 3]
    assert [column[i].tolist() for i in range(len(column))] == [[1, 2], [], [3]]
    assert column.lengths_N.tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("rows", "run"),
    [
        (range(2, 5), range(2, 5)),
        (np.array([2, 3, 4]), range(2, 5)),
        (np.array([7]), range(7, 8)),
        (np.array([2, 4, 3, 5]), None),
        (np.array([2, 3, 5]), None),
        (np.array([4, 3, 2]), None),
        (range(3, 3), None),
        (np.array([], np.int64), None),
    ],
)
def test_sequences_that_lie_as_they_are_asked_for_are_a_range(rows, run):
    assert run_of(rows) == run
    assert numbers_of(rows).tolist() == list(rows)


def test_no_sequences_make_an_empty_column():
    column = Ragged.of([])

    assert len(column) == 0
    assert column.values_V.tolist() == []


def test_sequences_are_taken_in_any_order_and_more_than_once():
    column = Ragged.of([np.array([1, 2]), np.array([3]), np.array([4, 5, 6])])

    taken = column.take(np.array([2, 0, 2]))

    assert [taken[i].tolist() for i in range(3)] == [[4, 5, 6], [1, 2], [4, 5, 6]]


def test_no_ranges_give_nothing():
    values, offsets = gather_ranges(np.arange(5), np.empty(0, np.int64), np.empty(0, np.int64))

    assert values.tolist() == []
    assert offsets.tolist() == [0]


def test_tables_follow_each_other():
    joined = a_table([3, 4]).followed_by(a_table([5], start=2))

    assert (joined.start, joined.stop) == (0, 3)
    assert joined.positions_N.tolist() == [0, 1, 2]
    assert joined.lengths_N.tolist() == [3, 4, 5]


def test_a_table_that_covers_nothing_can_be_followed():
    assert len(SampleTable.empty(7).followed_by(a_table([5], start=7))) == 1


def test_a_gap_between_tables_is_our_own_mistake():
    with pytest.raises(AssertionError, match="from 3 does not follow one that stops at 2"):
        a_table([3, 4]).followed_by(a_table([5], start=3))


@pytest.mark.parametrize("found", [None, 0, 2, "1"])
def test_a_state_of_another_version_is_refused(found):
    with pytest.raises(StateError, match=rf"cache state has version {found!r}, this code reads 1"):
        require_version({"version": found}, 1, of="cache")


def test_a_state_of_this_version_is_read():
    require_version({"version": 1}, 1, of="cache")
