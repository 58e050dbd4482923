"""Packing: which row a piece goes to."""

import numpy as np
import pytest

from omniload.plan.packing import CARRIED, best_fit, fill_in_order


def fitted(lengths, *, first=0, rows=2, capacity=10):
    return best_fit(lengths, num_first=first, num_rows=rows, capacity=capacity).tolist()


def test_a_piece_goes_to_the_fullest_row_that_has_room():
    assert fitted([7, 5, 5, 3]) == [0, 1, 1, 0]
    assert fitted([6, 5, 3]) == [0, 1, 0]  # though the other has more room


def test_what_finds_no_room_is_carried():
    assert fitted([10, 10, 4]) == [0, 1, CARRIED]


def test_what_was_carried_is_placed_before_longer_pieces():
    assert fitted([2, 10, 9], first=1, rows=1) == [0, CARRIED, CARRIED]


def test_carried_pieces_are_placed_in_their_own_order():
    assert fitted([6, 6, 9], first=2, rows=1) == [0, CARRIED, CARRIED]


def test_equal_lengths_keep_their_order():
    assert fitted([5, 5, 5, 5, 5]) == [0, 0, 1, 1, CARRIED]


def test_a_full_row_takes_nothing_more():
    assert fitted([10, 1], rows=1) == [0, CARRIED]


def test_nothing_packs_to_nothing():
    assert fitted([]) == []


@pytest.mark.parametrize(("lengths", "found"), [([11], "11 to 11"), ([3, 0], "0 to 3")])
def test_pieces_that_fit_no_row_are_refused(lengths, found):
    with pytest.raises(ValueError, match=f"pieces have {found} tokens, a row holds 1 to 10"):
        fitted(lengths)


def filled(lengths, *, rows=2, capacity=10):
    columns = fill_in_order(np.asarray(lengths, np.int32), num_rows=rows, capacity=capacity)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_pieces_are_cut_at_row_boundaries():
    assert filled([6, 8, 6]) == [(0, 0, 6, 0), (1, 0, 4, 0), (1, 4, 8, 1), (2, 0, 6, 1)]


def test_a_piece_may_fill_several_rows():
    assert filled([25]) == [(0, 0, 10, 0), (0, 10, 20, 1), (0, 20, 25, CARRIED)]


def test_what_lies_behind_the_last_row_is_carried_whole():
    assert filled([20, 4, 3])[1:] == [(0, 10, 20, 1), (1, 0, 4, CARRIED), (2, 0, 3, CARRIED)]


def test_a_piece_that_ends_with_a_row_is_not_cut():
    assert filled([10, 10]) == [(0, 0, 10, 0), (1, 0, 10, 1)]


def test_no_pieces_fill_no_rows():
    assert filled([]) == []
