"""Start-ups as a sum of stages: seconds, stragglers, critical path, bytes, clocks."""

import pytest

from omniload.base.errors import StateError
from snapshot.startup.attempts import BETWEEN, Attempt, attempts_of, difference_of, in_order
from tests.support.snapshot.startup_builders import NS, a_pair, a_start


def the_attempt(events) -> Attempt:
    (found,) = attempts_of(events)
    return found


def stage_of(attempt, name):
    return next(stage for stage in attempt.stages if stage.name == name)


def test_a_start_is_divided_into_stages_in_the_order_they_begin():
    attempt = the_attempt(a_start())

    assert [stage.name for stage in attempt.stages] == [
        "queue",
        "image",
        "environment",
        "process_group",
        "model_build",
        "checkpoint_load",
        "data_plane",
        "first_step",
    ]
    assert [round(stage.path_s) for stage in attempt.stages] == [60, 30, 100, 2, 10, 30, 3, 5]
    assert attempt.between_s == 0
    assert attempt.nodes == ("n1", "n2", "n3", "login")
    assert attempt.num_held == 3, "the login node only queued"
    assert attempt.reached


def test_the_slowest_node_is_named_beside_the_median_of_all():
    stage = stage_of(the_attempt(a_start(slow="n2")), "environment")

    assert (stage.slowest, stage.median_s, stage.max_s) == ("n2", 100.0, 150.0)
    assert stage.path_s == pytest.approx(150)


def test_bytes_are_summed_by_tier_for_each_stage_and_for_the_start():
    attempt = the_attempt(a_start())

    assert dict(stage_of(attempt, "image").bytes) == {"registry": 3 << 30}
    assert list(attempt.bytes.items()) == [("store", 3 * 270 << 20), ("registry", 3 << 30)]


def test_a_stage_without_an_end_is_shown_as_unfinished_and_kept_out_of_the_figures():
    events = a_pair("image", "a", 0, 10) + a_pair("image", "b", 0, None)
    attempt = the_attempt(events + a_pair("environment", "a", 10, 40))

    stage = stage_of(attempt, "image")
    assert stage.unfinished == ("b",)
    assert (stage.median_s, stage.max_s, stage.slowest) == (10.0, 10.0, "a")
    assert not attempt.reached
    assert attempt.seconds == pytest.approx(40)


def test_a_stage_that_no_node_ended_has_no_figures():
    stage = stage_of(the_attempt(a_pair("image", "a", 0, None)), "image")

    assert (stage.median_s, stage.max_s, stage.slowest) == (None,) * 3


def test_a_stage_that_failed_is_told_from_one_that_was_done():
    stage = stage_of(
        the_attempt(a_pair("image", "a", 0, 3, facts={"error": "UnavailableError"})), "image"
    )

    assert stage.failed == ("a",)
    assert stage.nodes[0].error == "UnavailableError"


def test_ranks_of_a_node_that_build_at_once_take_from_the_first_begin_to_the_last_end():
    events = [
        event
        for rank in range(4)
        for event in a_pair("model_build", "a", rank, 10 + rank, run=f"rank{rank}")
    ]

    stage = stage_of(the_attempt(events), "model_build")
    assert stage.max_s == pytest.approx(13)
    assert len(stage.nodes[0].runs) == 4


def test_a_rank_that_died_in_a_stage_leaves_its_node_unfinished_though_others_ended():
    events = a_pair("model_build", "a", 0, 5, run="x") + a_pair(
        "model_build", "a", 0, None, run="y"
    )

    assert stage_of(the_attempt(events), "model_build").unfinished == ("a",)


def test_a_stage_carried_out_twice_takes_the_sum_without_the_time_between():
    events = a_pair("environment", "a", 0, 5) + a_pair("environment", "a", 50, 52)

    assert stage_of(the_attempt(events), "environment").max_s == pytest.approx(7)


def test_an_end_without_a_begin_is_counted_and_left_out():
    attempt = the_attempt(a_pair("image", "a", 0, 5)[1:] + a_pair("environment", "a", 5, 6))

    assert attempt.strays == 1
    assert [stage.name for stage in attempt.stages] == ["environment"]


def test_a_clock_set_back_within_a_run_makes_it_nothing_and_says_so():
    attempt = the_attempt(a_pair("image", "a", 10, 4, run="x"))

    assert attempt.backward == 1
    assert stage_of(attempt, "image").max_s == 0


def test_attempts_and_jobs_are_kept_apart():
    events = a_start(attempt=1) + a_start() + a_start(job="other")

    assert [(a.job, a.number) for a in attempts_of(events)] == [
        ("other", 0),
        ("pretrain", 0),
        ("pretrain", 1),
    ]


def test_nothing_gives_no_attempt():
    assert attempts_of([]) == ()


def test_time_in_which_nothing_runs_lies_between_the_stages():
    attempt = the_attempt(a_pair("image", "a", 0, 10) + a_pair("environment", "a", 25, 30))

    assert attempt.between_s == pytest.approx(15)


def test_a_stage_around_others_keeps_what_they_leave():
    attempt = the_attempt(a_pair("script", "a", 0, 100) + a_pair("environment", "a", 20, 70))

    assert stage_of(attempt, "environment").path_s == pytest.approx(50)
    assert stage_of(attempt, "script").path_s == pytest.approx(50)


def test_a_stage_in_pieces_has_no_part_in_what_lies_between_them():
    attempt = the_attempt(
        a_pair("data_plane", "a", 0, 10)
        + a_pair("data_plane", "a", 40, 45)
        + a_pair("model_build", "a", 20, 30)
    )

    assert [(part.stage, (part.end_ns - part.begin_ns) // NS) for part in attempt.path] == [
        ("data_plane", 10),
        (None, 10),
        ("model_build", 10),
        (None, 10),
        ("data_plane", 5),
    ]


def test_what_goes_on_after_the_first_step_is_no_part_of_the_start():
    attempt = the_attempt(a_start() + a_pair("environment_save", "n1", 230, 900))

    assert attempt.seconds == pytest.approx(240)
    assert attempt.between_s == 0


def test_stages_without_number_are_refused():
    events = [event for i in range(257) for event in a_pair(f"s{i}", "a", i, i + 1)]

    with pytest.raises(StateError, match="257 stages, more than 256"):
        attempts_of(events)


def test_numbers_at_the_end_of_names_are_sorted_as_numbers():
    names = ["n10", "n2", "n100", "n3"]

    assert sorted(names, key=in_order) == ["n2", "n3", "n10", "n100"]


def the_difference(before, after):
    return difference_of(attempts_of(before)[0], attempts_of(after)[0])


def test_the_stage_that_moved_the_total_explains_it():
    found = the_difference(a_start(), a_start(environment_s=20))

    assert found.seconds == pytest.approx(-80)
    assert found.ratio == pytest.approx(160 / 240)
    assert found.explaining.name == "environment"
    assert found.explained == pytest.approx(1)


def test_equal_starts_have_nothing_to_explain():
    found = the_difference(a_start(), a_start())

    assert (found.explaining, found.explained) == (None, None)


def test_a_stage_of_one_start_alone_counts_whole_and_time_between_stages_too():
    before = a_pair("image", "a", 0, 10)
    after = a_pair("image", "a", 0, 10) + a_pair("environment", "a", 40, 50)

    found = the_difference(before, after)

    assert {stage.name: round(stage.path_s) for stage in found.stages} == {
        "image": 0,
        "environment": 10,
        BETWEEN: 30,
    }
    assert found.explaining.name == BETWEEN
    assert the_difference(after, before).explaining.path_s == pytest.approx(-30)


def test_against_a_start_of_no_length_there_is_no_ratio():
    assert the_difference(a_pair("image", "a", 0, None), a_start()).ratio is None


def test_bytes_that_changed_are_told():
    before = a_pair("image", "a", 0, 10, bytes={"registry": 100, "disk": 5})
    after = a_pair("image", "a", 0, 2, bytes={"peer": 60, "disk": 5})

    image = the_difference(before, after).stages[0]

    assert image.changed_bytes == {"peer": 60, "registry": -100}
