"""Membership: the pieces that a step trains on, by example."""

import functools
import itertools
import operator
from dataclasses import replace

import numpy as np

from omniload.mix.state import MixState
from omniload.plan.membership import Membership, Starved, membership_of
from tests.support.plane.builders import a_mix, a_table, with_overlong


def of(mix, lengths, state=None):
    """Plan a step of sources whose samples from the cursor on have these lengths."""
    state = state or MixState.start(len(mix.names))
    return membership_of(mix, state, [a_table(column) for column in lengths])


def one(pack=None, **changes):
    return a_mix(
        sources=("web",),
        rows=2,
        length=10,
        micro_rows=1,
        pack={"lookahead_rows": 0, **(pack or {})},
        **changes,
    )


def rows_of(membership):
    """Return the rows as lists of (source, position, start, stop)."""
    pieces = [
        (source, position, start, stop)
        for source, position, _, start, stop, _ in membership.pieces.rows()
    ]
    bounds = membership.row_offsets.tolist()
    return [pieces[a:b] for a, b in itertools.pairwise(bounds)]


def carried_of(membership):
    return [(p, start, stop) for _, p, _, start, stop, _ in membership.after.carried.rows()]


def test_whole_documents_fill_the_rows():
    membership = of(one(), [[6, 5, 5, 4, 9, 9]])

    assert rows_of(membership) == [[(0, 0, 0, 6), (0, 3, 0, 4)], [(0, 1, 0, 5), (0, 2, 0, 5)]]
    assert membership.after.cursors_S == ((3, 1, 0),)
    assert membership.finished_S.tolist() == [4]


def test_what_finds_no_room_is_carried_and_placed_first_next_time():
    mix = one()
    first = of(mix, [[8, 8, 9, 9]])

    assert rows_of(first) == [[(0, 2, 0, 9)], [(0, 0, 0, 8)]]
    assert carried_of(first) == [(1, 0, 8)]
    again = membership_of(mix, first.after, [a_table([9, 9, 9], start=3)])
    assert rows_of(again)[0] == [(0, 1, 0, 8)]


def test_what_is_carried_counts_towards_the_next_step():
    mix = one()
    first = of(mix, [[8, 8, 9, 9]])

    again = membership_of(mix, first.after, [a_table([6, 6, 6], start=3)])

    assert again.finished_S.tolist() == [2]
    assert again.served_S == (12,)


def test_looking_ahead_draws_a_row_more_to_choose_from():
    membership = of(one({"lookahead_rows": 1}), [[6, 6, 6, 6, 4, 4, 4]])

    assert [sum(stop - start for *_, start, stop in row) for row in rows_of(membership)] == [10, 10]
    assert carried_of(membership) == [(2, 0, 6), (3, 0, 6)]


def test_a_long_document_is_drawn_a_row_at_a_time():
    membership = of(one(), [[45, 3]])

    assert rows_of(membership) == [[(0, 0, 0, 10)], [(0, 0, 10, 20)]]
    assert membership.after.cursors_S == ((0, 0, 20),)
    assert membership.finished_S.tolist() == [0]


def test_a_long_document_goes_on_where_it_was_left():
    mix = one()
    state = of(mix, [[45, 3]]).after

    second = membership_of(mix, state, [a_table([45, 3])])
    third = membership_of(mix, second.after, [a_table([45, 3, 12, 7])])

    assert rows_of(second) == [[(0, 0, 20, 30)], [(0, 0, 30, 40)]]
    assert sorted(functools.reduce(operator.iadd, rows_of(third), [])) == [
        (0, 0, 40, 45),
        (0, 1, 0, 3),
        (0, 2, 0, 10),
        (0, 2, 10, 12),
    ]


def test_a_long_document_does_not_hold_up_other_sources():
    mix = a_mix(rows=2, length=10, micro_rows=1, pack={"lookahead_rows": 0})

    membership = of(mix, [[1000], [5] * 9])

    assert membership.served_S == (10, 10)


def test_an_overlong_document_is_cut_off_when_asked_to():
    membership = of(one({"overlong": "truncate"}), [[45, 10]])

    assert rows_of(membership) == [[(0, 0, 0, 10)], [(0, 1, 0, 10)]]
    assert membership.lost_S.tolist() == [35]
    assert membership.after.cursors_S == ((1, 1, 0),)


def test_an_overlong_document_is_left_out_when_asked_to():
    membership = of(one({"overlong": "drop"}), [[45, 10, 11, 10]])

    assert rows_of(membership) == [[(0, 1, 0, 10)], [(0, 3, 0, 10)]]
    assert membership.lost_S.tolist() == [56]
    assert membership.served_S == (20,)


def test_a_source_may_say_for_itself_what_becomes_of_its_long_documents():
    mix = a_mix(
        sources=("web", "chat", "code"), rows=4, length=10, micro_rows=1, pack={"lookahead_rows": 0}
    )

    membership = of(with_overlong(mix, ["truncate", "drop", None]), [[45, 10], [45, 10], [45]])

    assert rows_of(membership) == [
        [(0, 0, 0, 10)],
        [(1, 1, 0, 10)],
        [(2, 0, 0, 10)],
        [(0, 1, 0, 10)],
    ]
    assert membership.lost_S.tolist() == [35, 45, 0]


def test_concatenation_wastes_no_token_and_carries_the_rest():
    membership = of(one({"method": "concat_and_split"}), [[7, 7, 9]])

    assert rows_of(membership) == [[(0, 0, 0, 7), (0, 1, 0, 3)], [(0, 1, 3, 7), (0, 2, 0, 6)]]
    assert carried_of(membership) == [(2, 6, 9)]


def test_without_packing_every_document_has_a_row_and_none_waits():
    membership = of(one({"method": "none"}), [[7, 3, 9]])

    assert rows_of(membership) == [[(0, 0, 0, 7)], [(0, 1, 0, 3)]]
    assert carried_of(membership) == []


def test_without_packing_a_document_longer_than_a_row_has_a_row_for_each_part():
    membership = of(one({"method": "none"}), [[13, 3, 9]])

    assert rows_of(membership) == [[(0, 0, 0, 10)], [(0, 0, 10, 13)]]


def test_a_piece_that_was_cut_knows_the_size_of_its_document():
    membership = of(one({"method": "concat_and_split"}), [[7, 7, 9]])

    assert membership.pieces.sizes_P.tolist() == [7, 7, 7, 9]


def test_a_source_that_is_due_and_unknown_starves_the_step():
    assert of(a_mix(rows=2, length=10, micro_rows=1), [[5] * 9, [5]]) == Starved(1)


def test_a_source_of_which_everything_is_dropped_starves_the_step():
    assert of(one({"overlong": "drop"}), [[45, 45]]) == Starved(0)


def test_a_draw_towards_an_end_names_the_first_source_drawn_up_and_the_one_that_it_ran_out_of():
    weights = {"a": 1, "b": 2, "c": 3}
    mix = a_mix(
        sources=tuple(weights), weights=weights, rows=8, length=10, mix={"stop": "each_once"}
    )

    def found(*counts):
        ahead = [a_table([10] * count) for count in counts]
        return membership_of(mix, MixState.start(3), ahead, [9_999] * 3)

    assert found(1, 1, 1) == Starved(1, 2)
    # When more of the third source is known, the first one is exhausted as well.
    assert found(1, 1, 9) == Starved(0, 1)


def test_weights_by_sample_count_a_document_once_however_long_it_is():
    mix = a_mix(
        rows=2, length=10, micro_rows=1, mix={"level": "sample"}, pack={"lookahead_rows": 0}
    )

    membership = of(mix, [[25, 25], [1] * 9])

    assert membership.served_S[0] in (1, 2)
    assert abs(membership.served_S[0] - membership.served_S[1]) <= 1


def test_a_step_that_is_already_full_draws_nothing():
    mix = one()
    carried = of(mix, [[8, 8, 9, 9]]).pieces
    state = replace(MixState.start(1), carried=carried)

    membership = membership_of(mix, state, [a_table([9, 9])])

    assert isinstance(membership, Membership)
    assert membership.finished_S.tolist() == [1]
    assert np.diff(membership.row_offsets).tolist() == [1, 1]


def test_weights_follow_the_step():
    stages = [
        {"from_step": 0, "weights": {"web": 1, "code": 1}},
        {"from_step": 1, "weights": {"code": 1}},
    ]
    mix = a_mix(rows=2, length=10, micro_rows=1, mix={"stages": stages}, pack={"lookahead_rows": 0})

    first = of(mix, [[5] * 9, [5] * 9])
    second = membership_of(mix, first.after, [a_table([5] * 9), a_table([5] * 9)])

    assert first.served_S == (10, 10)
    assert second.served_S == (20, 0)
