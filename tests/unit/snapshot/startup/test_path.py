"""Each moment of a start-up belongs to one stage of the node that the others wait for, or to none."""

import pytest

from snapshot.startup.attempts import attempts_of
from snapshot.startup.path import is_meeting, path_of
from tests.support.snapshot.startup_builders import NS, a_pair


def path(stages, begin, end):
    """Return the path of one node."""
    return [
        (part.stage, part.begin_ns, part.end_ns) for part in path_of({"n": stages}, "n", begin, end)
    ]


def walked(events):
    """Return stage, node and seconds of each part of the path of an attempt."""
    (attempt,) = attempts_of(events)
    return [(part.stage, part.node, (part.end_ns - part.begin_ns) / NS) for part in attempt.path]


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


@pytest.mark.parametrize("stages", [{}, {"a": [(0, 0)]}])
def test_a_start_of_no_length_has_no_path(stages):
    assert path(stages, 0, 0) == []


def test_equal_stages_are_told_apart_by_name_alone():
    stages = {"b": [(0, 4)], "a": [(0, 4)]}

    assert path(stages, 0, 4) == path(dict(reversed(stages.items())), 0, 4) == [("a", 0, 4)]


def test_between_meetings_the_path_is_that_of_the_node_that_came_last():
    assert walked(
        a_pair("image", "a", 0, 10)
        + a_pair("process_group", "a", 10, 32)
        + a_pair("checkpoint_load", "a", 32, 80)
        + a_pair("first_step", "a", 80, 85)
        + a_pair("image", "b", 0, 30)
        + a_pair("process_group", "b", 30, 32)
        + a_pair("checkpoint_load", "b", 32, 40)
        + a_pair("first_step", "b", 40, 86)
    ) == [
        ("image", "b", 30),
        ("process_group", "a", 2),
        ("checkpoint_load", "a", 48),
        ("first_step", "b", 6),
    ]


def test_a_straggler_charges_its_own_stage_not_what_others_do_meanwhile():
    """Eight nodes load for 72 s and open the data plane for some seconds, each at another time; one takes 109 s."""
    events = []
    for number in range(8):
        node, loaded = f"n{number}", 109.0 if number == 7 else 60.0 + 4 * number
        opened = loaded + 3.5 + 0.6 * number
        events += a_pair("checkpoint_load", node, 0, loaded)
        events += a_pair("data_plane", node, loaded, opened)
        events += a_pair("first_step", node, opened, 120)

    (attempt,) = attempts_of(events)

    of_stage = {stage.name: round(stage.path_s, 1) for stage in attempt.stages}
    assert of_stage == {"checkpoint_load": 109.0, "data_plane": 7.7, "first_step": 3.3}
    assert {part.node for part in attempt.path} == {"n7"}
    slowest = {stage.name: stage.slowest for stage in attempt.stages}
    assert slowest["checkpoint_load"] == "n7"


def test_a_node_enters_a_meeting_with_its_last_process():
    assert walked(
        a_pair("process_group", "a", 10, 42, run="rank0")
        + a_pair("model_build", "a", 10, 40, run="rank1")
        + a_pair("process_group", "a", 40, 42, run="rank1")
        + a_pair("process_group", "b", 20, 42)
        + a_pair("first_step", "a", 42, 43)
        + a_pair("first_step", "b", 42, 43)
    ) == [("model_build", "a", 30), ("process_group", "b", 2), ("first_step", "b", 1)]


def test_the_last_tries_of_a_meeting_belong_together():
    """Node b met others in an earlier try of its process, which a never saw."""
    assert walked(
        a_pair("process_group", "b", 0, 5)
        + a_pair("environment", "b", 5, 20)
        + a_pair("process_group", "b", 20, 31)
        + a_pair("environment", "a", 2, 30)
        + a_pair("process_group", "a", 30, 31)
        + a_pair("first_step", "a", 31, 32)
        + a_pair("first_step", "b", 31, 33)
    ) == [
        (None, "a", 2),
        ("environment", "a", 28),
        ("process_group", "b", 1),
        ("first_step", "b", 2),
    ]


def test_the_queue_comes_before_the_nodes_whoever_wrote_of_it():
    assert walked(
        a_pair("queue", "login", 0, 50)
        + a_pair("image", "a", 55, 60)
        + a_pair("image", "b", 55, 58)
    ) == [("queue", "login", 50), (None, "login", 5), ("image", "a", 5)]


def test_where_nodes_wait_at_the_end_of_a_log_the_one_they_wait_for_is_charged():
    events = a_pair("environment", "a", 0, 10) + a_pair("process_group", "a", 10, None)
    events += a_pair("environment", "b", 0, 30) + a_pair("process_group", "b", 30, None)
    events += a_pair("environment", "stuck", 0, None) + a_pair("note", "a", 90, 100)

    assert walked(events) == [("environment", "stuck", 100)]


@pytest.mark.parametrize(
    ("stage", "wanted"),
    [("first_step", True), ("process_group", True), ("data_barrier", True), ("image", False)],
)
def test_meetings_are_known_by_name(stage, wanted):
    assert is_meeting(stage) is wanted
