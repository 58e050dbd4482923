"""Places of data constructors: next to their ranks, and every rank has one."""

from collections import Counter

import pytest

pytest.importorskip("ray")
from omniload.actors.plane import PlaneSpec
from omniload.actors.ray.layout import constructors_by_host, dp_ranks_of_constructors, home_roles
from omniload.mix.runtime import RuntimeConfig
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.builders import a_mix


@pytest.mark.parametrize(
    ("host_of_R", "asked", "expected"),
    [
        ("AABB", 0, {"A": 1, "B": 1}),
        ("A" * 16 + "B" * 8, 0, {"A": 2, "B": 1}),
        ("AAB", 2, {"A": 1, "B": 1}),
        ("AB", 8, {"A": 1, "B": 1}),
        ("ABAB", 4, {"A": 2, "B": 2}),
    ],
)
def test_every_host_has_constructors_for_its_own_ranks_alone(tmp_path, host_of_R, asked, expected):
    mix = a_mix()
    mix = mix.model_copy(update={"runtime": mix.runtime.model_copy(update={"constructors": asked})})
    spec = PlaneSpec(mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of(dp=len(host_of_R)))

    found = constructors_by_host(spec, list(host_of_R))

    assert Counter(host for host, _ in found.values()) == expected
    assert sorted(r for _, ranks in found.values() for r in ranks) == list(range(len(host_of_R)))
    assert all(host_of_R[r] == host for host, ranks in found.values() for r in ranks)
    assert list(found) == [f"constructor-{i}" for i in range(len(found))]


@pytest.mark.parametrize(
    ("dp", "cores", "asked", "expected"),
    [
        (4, 2, 0, 1),
        (16, 2, 0, 1),
        (32, 2, 0, 1),
        (32, 1, 0, 1),
        (32, 4, 0, 2),
        (8, 96, 0, 1),
        (32, 96, 0, 4),
        (32, 2, 3, 3),
    ],
)
def test_on_one_host_constructors_are_no_more_than_half_its_cores_unless_so_many_are_asked_for(
    tmp_path, dp, cores, asked, expected
):
    mix = a_mix()
    mix = mix.model_copy(update={"runtime": mix.runtime.model_copy(update={"constructors": asked})})
    spec = PlaneSpec(mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of(dp=dp))

    found = dp_ranks_of_constructors(spec, cores)

    assert len(found) == expected
    assert sorted(r for ranks in found.values() for r in ranks) == list(range(dp))


@pytest.mark.parametrize(
    ("runtime", "roles"),
    [
        ({}, ("planner", "loader-0")),
        # A constructor on another host answers even if the opener's host is cut off.
        ({"place": {"loaders": {"cpus": 1}}}, ("planner", "constructor-3")),
        ({"place": {"loaders": {"cpus": 1}}, "elastic": True}, ("planner",)),
    ],
)
def test_the_openers_host_is_asked_for_by_roles_that_stay_on_it(tmp_path, runtime, roles):
    settings = RuntimeConfig.model_validate({"kind": "ray", "address": "auto"} | runtime)
    mix = a_mix().model_copy(update={"runtime": settings})
    spec = PlaneSpec(mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of())

    assert home_roles(spec, ["constructor-3", "constructor-4"]) == roles
