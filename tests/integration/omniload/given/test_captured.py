"""A process that a Ray of others has connected before it opens a plane, as Ray Train does: actors, folders, bundles."""

import subprocess
import sys

import pytest

from tests.support.plane.front_ranks import samples
from tests.support.plane.given.given_ray import run_job

pytestmark = pytest.mark.ray


def test_ranks_that_are_actors_in_captured_bundles_have_a_plane_outside_of_them_that_ends_before_they_do(
    given, mix, unbroken, tmp_path
):
    # Each bundle has the one core that its rank takes: in one of them no role would ever find room for what it asks.
    place = {"planner": {"cpus": 1}, "loaders": {"cpus": 1}}
    told = run_job(given, mix, tmp_path, steps=6, place=place)

    assert samples(told["ranks"]) == unbroken
    first = told["ranks"][0]
    assert first["actors"] == ["constructor-0", "loader-0", "planner"]
    # Of six cores the two bundles have one each, and planner and loader as many of what is left.
    assert first["free"]["CPU"] == 2.0
    assert [rank["stays"] for rank in told["ranks"]] == [True, True]
    assert (told["left"], told["folders"]) == ([], [])


def test_roles_of_the_current_group_take_bundles_that_no_rank_has_and_are_refused_where_there_are_none(
    given, mix, unbroken, tmp_path
):
    group = {"placement_group": "current", "cpus": 1}
    place = {"planner": group, "loaders": group, "wait": 20}
    told = run_job(given, mix, tmp_path / "a", steps=6, bundles=[1, 1, 2], place=place)

    assert samples(told["ranks"]) == unbroken
    free = told["ranks"][0]["free"]
    assert free["CPU"] == 2.0  # as before: what the group has set aside is enough
    assert f"CPU_group_2_{told['group']}" not in free

    full = run_job(given, mix, tmp_path / "b", steps=6, place=place)["ranks"][0]
    assert full["error"] == "ConfigError"
    assert "each of the 2 bundles of group" in full["message"]


def test_a_process_that_is_connected_to_another_ray_than_the_mix_names_is_told_both(
    given, mix, tmp_path
):
    told = run_job(given, mix, tmp_path, steps=1, runtime_address="127.0.0.1:1")

    assert [rank["error"] for rank in told["ranks"]] == ["StateError", "StateError"]
    message = told["ranks"][0]["message"]
    assert f"connected to the Ray at {given['RAY_ADDRESS']}" in message
    assert "runtime.address names that at 127.0.0.1:1" in message


TWO = """
import sys, omniload, ray
if sys.argv[2] == "connected":
    ray.init()
settings = {"arrays": "numpy", "rank": 0, "world_size": 1, "steps": 6}
with omniload.open(sys.argv[1], **settings) as loader:
    assert loader.next_batch().step == 0
    try:
        omniload.open(sys.argv[1], seed=9, **settings)
    except omniload.StateError as error:
        assert "has another data plane open" in str(error), error
    else:
        raise AssertionError("it was opened")
    with omniload.open(sys.argv[1], runtime="local", runtime_address="", split=None, **settings) as beside:
        assert beside.next_batch().step == 0
    assert [loader.next_batch().step for _ in range(5)] == [1, 2, 3, 4, 5]
    del loader
with omniload.open(sys.argv[1], seed=9, **settings) as loader:
    assert loader.next_batch().step == 0
assert ray.is_initialized() == (sys.argv[2] == "connected")
"""


# Two planes, one after the other: 10 s where nothing else runs.
@pytest.mark.soak
@pytest.mark.parametrize("before", ["connected", "alone"])
def test_a_process_has_one_plane_of_a_ray_at_a_time_and_may_have_another_once_it_is_closed(
    given, mix, before
):
    words = [sys.executable, "-c", TWO, str(mix), before]
    done = subprocess.run(words, env=given, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-3000:]
