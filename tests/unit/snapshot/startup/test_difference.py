"""Two starts compared: seconds, ratios, bytes, and the stage that explains the difference."""

import pytest

from snapshot.startup.attempts import BETWEEN, attempts_of
from snapshot.startup.difference import difference_of
from tests.support.snapshot.startup_builders import a_pair, a_start


def the_difference(before, after):
    return difference_of(attempts_of(before)[0], attempts_of(after)[0])


def test_the_stage_that_moved_the_total_explains_it():
    found = the_difference(a_start(), a_start(environment_s=20))

    assert found.seconds == pytest.approx(-80)
    assert found.ratio == pytest.approx(160 / 240)
    assert found.explaining.name == "environment"
    assert found.explained == pytest.approx(1)


def test_a_straggler_is_seen_in_the_ratio():
    found = the_difference(a_start(), a_start(slow="n1"))

    stage = found.explaining
    assert (stage.name, stage.before.straggler_ratio, stage.after.straggler_ratio) == (
        "environment",
        1.0,
        1.5,
    )


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


def test_bytes_and_facts_that_changed_are_told():
    old, new = {"image": "sha256:1", "packages": "p"}, {"image": "sha256:2", "packages": "p"}
    before = a_pair("image", "a", 0, 10, bytes={"registry": 100, "disk": 5}, facts=old)
    after = a_pair("image", "a", 0, 2, bytes={"peer": 60, "disk": 5}, facts=new)

    image = the_difference(before, after).stages[0]

    assert image.changed_bytes == {"peer": 60, "registry": -100}
    assert image.changed_facts == {"image": ("sha256:1", "sha256:2")}
