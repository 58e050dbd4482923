"""A process that is connected to a Ray before it opens a plane, as in Ray Train: actors, folders, placement groups."""

import subprocess
import sys

import pytest

from tests.support.plane.front_ranks import samples
from tests.support.plane.given.given_ray import run_job

pytestmark = [pytest.mark.ray, pytest.mark.scripts_start_warm]


def test_ranks_that_are_actors_in_captured_bundles_have_a_plane_outside_of_them_that_ends_before_they_do(
    given, mix, unbroken, tmp_path
):
    # Each bundle has the one core that its rank takes, so no role would ever fit into a bundle.
    place = {"planner": {"cpus": 1}, "loaders": {"cpus": 1}}
    told = run_job(given, mix, tmp_path, steps=6, place=place)

    assert samples(told["ranks"]) == unbroken
    first = told["ranks"][0]
    assert first["actors"] == ["constructor-0", "loader-0", "planner"]
    # Of six cores the two bundles have one each; planner and loader have one each of the rest.
    assert first["free"]["CPU"] == 2.0
    assert [rank["stays"] for rank in told["ranks"]] == [True, True]
    assert (told["left"], told["folders"]) == ([], [])


def test_roles_of_the_current_group_take_bundles_that_no_rank_has_and_are_refused_where_there_are_none(
    given, mix, unbroken, tmp_path
):
    group = {"placement_group": "current", "cpus": 1}
    place = {"planner": group, "loaders": group, "wait": 60}
    told = run_job(given, mix, tmp_path / "a", steps=6, bundles=[1, 1, 2], place=place)

    assert samples(told["ranks"]) == unbroken
    free = told["ranks"][0]["free"]
    assert free["CPU"] == 2.0  # as before: the resources of the group are enough
    assert f"CPU_group_2_{told['group']}" not in free

    full = run_job(given, mix, tmp_path / "b", steps=6, place=place)["ranks"][0]
    assert full["error"] == "ConfigError"
    assert "all 2 bundles of group" in full["message"]


def test_a_process_that_is_connected_to_another_ray_than_the_mix_names_is_told_both(
    given, mix, tmp_path
):
    told = run_job(given, mix, tmp_path, steps=1, runtime_address="127.0.0.1:1")

    assert [rank["error"] for rank in told["ranks"]] == ["StateError", "StateError"]
    message = told["ranks"][0]["message"]
    assert f"connected to the Ray at {given['RAY_ADDRESS']}" in message
    assert "runtime.address names the Ray at 127.0.0.1:1" in message


TWO = """
import sys, omniload, ray
before, closes_first = sys.argv[2:]
if before == "connected":
    ray.init()
settings = {"arrays": "numpy", "rank": 0, "world_size": 1, "steps": 6}

def rows(loader, steps):
    return [loader.next_batch().tokens.tolist() for _ in range(steps)]

with omniload.open(sys.argv[1], seed=9, **settings) as loader:
    alone = rows(loader, 6)  # and the process may have another once it is closed
training, evaluation = (omniload.open(sys.argv[1], seed=seed, **settings) for seed in (7, 9))
assert rows(training, 2) != rows(evaluation, 2) == alone[:2]
names = [each for each in ray.util.list_named_actors(all_namespaces=True) if each["name"] == "planner"]
assert len({each["namespace"] for each in names}) == 2, names
first, last = (training, evaluation) if closes_first == "training" else (evaluation, training)
first.close()
left = rows(last, 4)
assert left == alone[2:] or last is training
with omniload.open(sys.argv[1], seed=9, **settings) as third:
    last.close()
    assert rows(third, 6) == alone
assert ray.is_initialized() == (before == "connected")
"""


# Four planes take 20 s on an idle machine.
@pytest.mark.parametrize(
    ("before", "closes_first"),
    [
        ("connected", "training"),
        pytest.param("alone", "training", marks=pytest.mark.soak),
        pytest.param("alone", "evaluation", marks=pytest.mark.soak),
    ],
)
def test_a_process_has_several_planes_of_a_given_ray_that_are_closed_in_any_order(
    given, mix, before, closes_first
):
    words = [sys.executable, "-c", TWO, str(mix), before, closes_first]
    done = subprocess.run(words, env=given, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-3000:]


BESIDE_A_PRIVATE_RAY = """
import sys, omniload
settings = {"arrays": "numpy", "rank": 0, "world_size": 1, "steps": 6}
with omniload.open(sys.argv[1], runtime_address="", **settings) as loader:
    try:
        omniload.open(sys.argv[1], seed=9, **settings)
    except omniload.StateError as error:
        assert "has another data plane open" in str(error), error
    else:
        raise AssertionError("it was opened in the Ray of another plane")
    assert loader.next_batch().step == 0
"""


@pytest.mark.soak
def test_the_ray_that_a_plane_has_started_for_itself_is_no_other_planes(given, mix):
    words = [sys.executable, "-c", BESIDE_A_PRIVATE_RAY, str(mix)]
    done = subprocess.run(words, env=given, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-3000:]


def test_two_ranks_have_a_second_loader_beside_their_first_one_which_ends_before_it(
    given, mix, unbroken, tmp_path
):
    told = run_job(given, mix, tmp_path, steps=6, beside={"seed": 9})

    ranks = told["ranks"]
    assert samples(ranks) == unbroken
    beside = samples([{"rank": rank["rank"], "seen": rank["beside"]} for rank in ranks])
    assert beside.keys() == unbroken.keys()
    assert beside != unbroken
    assert ranks[0]["actors"] == sorted(2 * ["constructor-0", "loader-0", "planner"])
    assert ranks[0]["actors_beside"] == ["constructor-0", "loader-0", "planner"]
    assert (told["left"], told["folders"]) == ([], [])
