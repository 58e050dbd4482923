"""Each moment of a start-up belongs to one stage, or to none."""

import pytest

from snapshot.startup_path import path_of


def path(spans, begin, end):
    return [(part.stage, part.begin_ns, part.end_ns) for part in path_of(spans, begin, end)]


def test_stages_one_after_the_other_are_their_own_path():
    assert path({"a": [(0, 4)], "b": [(4, 9)]}, 0, 9) == [("a", 0, 4), ("b", 4, 9)]


def test_what_ends_first_comes_first_where_stages_overlap():
    assert path({"a": [(0, 6)], "b": [(2, 9)]}, 0, 9) == [("a", 0, 6), ("b", 6, 9)]


def test_a_stage_within_another_takes_its_time_and_gives_the_rest_back():
    assert path({"all": [(0, 9)], "in": [(3, 5)]}, 0, 9) == [
        ("all", 0, 3),
        ("in", 3, 5),
        ("all", 5, 9),
    ]


def test_of_two_that_end_together_the_inner_one_counts():
    assert path({"all": [(0, 9)], "last": [(6, 9)]}, 0, 9) == [("all", 0, 6), ("last", 6, 9)]


def test_a_hole_belongs_to_nobody():
    assert path({"a": [(0, 2), (7, 9)]}, 0, 9) == [("a", 0, 2), (None, 2, 7), ("a", 7, 9)]


def test_the_path_begins_and_ends_where_it_is_told():
    assert path({"a": [(-5, 3)], "b": [(3, 50)]}, 0, 9) == [("a", 0, 3), ("b", 3, 9)]
    assert path({"b": [(20, 50)]}, 0, 9) == [(None, 0, 9)]


def test_stages_of_no_length_have_no_part():
    assert path({"a": [(0, 4)], "mark": [(2, 2)]}, 0, 4) == [("a", 0, 4)]


@pytest.mark.parametrize("spans", [{}, {"a": [(0, 0)]}])
def test_a_start_of_no_length_has_no_path(spans):
    assert path(spans, 0, 0) == []


def test_equal_stages_are_told_apart_by_name_alone():
    spans = {"b": [(0, 4)], "a": [(0, 4)]}

    assert path(spans, 0, 4) == path(dict(reversed(spans.items())), 0, 4) == [("a", 0, 4)]
