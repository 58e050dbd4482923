"""The nodes of a Ray that a role may use, and the room on each."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")
from omniload.actors.ray.hosts import nodes as nodes_module
from omniload.actors.ray.hosts.nodes import NodeSeen, Team, wait_for_room, why_no_room, why_not
from omniload.base.clock import FakeClock
from omniload.base.errors import UnavailableError
from omniload.mix.schema.places import LoaderPlaceConfig, PlaceConfig

CPU_NODE = NodeSeen(
    place="C",
    address="10.0.0.9",
    has={"CPU": 8.0, "memory": 64e9, "readers": 2.0},
    free={"CPU": 8.0, "memory": 64e9, "readers": 2.0},
    labels={"ray.io/node-group": "readers"},
)
GPU_NODE = NodeSeen(
    place="G",
    address="10.0.0.1",
    has={"CPU": 64.0, "GPU": 8.0},
    free={"CPU": 64.0, "GPU": 8.0},
    labels={"ray.io/node-group": "hosts"},
)
TEAM = Team(home="G", loaders=2, constructors=["G"])


@pytest.mark.parametrize(
    ("wanted", "node", "why"),
    [
        ({}, GPU_NODE, ""),
        ({"without_gpu": True}, CPU_NODE, ""),
        ({"without_gpu": True}, GPU_NODE, "has 8 GPUs"),
        ({"labels": {"ray.io/node-group": "readers"}}, CPU_NODE, ""),
        (
            {"labels": {"ray.io/node-group": "readers"}},
            GPU_NODE,
            "has 'hosts' for label 'ray.io/node-group'",
        ),
        ({"labels": {"disk": "nvme"}}, CPU_NODE, "has no label 'disk'"),
        ({"resources": {"readers": 2}}, CPU_NODE, ""),
        ({"resources": {"readers": 3}}, CPU_NODE, "has 2 of 'readers', less than the 3"),
        ({"resources": {"readers": 1}}, GPU_NODE, "has 0 of 'readers', less than the 1"),
        ({"cpus": 8, "memory": "60GB"}, CPU_NODE, ""),
        ({"cpus": 8.5}, CPU_NODE, "has 8 of 'CPU', less than the 8.5"),
    ],
)
def test_a_loader_may_be_on_a_node_for_which_all_that_is_wanted_holds(wanted, node, why):
    found = why_not(LoaderPlaceConfig.model_validate(wanted), node)

    assert found.startswith(why) if why else not found


@pytest.mark.parametrize(
    ("asked", "room"),
    [
        ({"CPU": 2.0}, 4),
        ({"CPU": 3.0}, 2),
        ({"CPU": 1.0, "readers": 1.0}, 2),
        ({"CPU": 0.1}, 80),
        ({"disks": 1.0}, 0),
    ],
)
def test_a_node_has_room_for_as_many_members_as_its_scarcest_resource(asked, room):
    assert CPU_NODE.room(asked) == room


def a_place(**settings):
    return PlaceConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("place", "nodes", "missing"),
    [
        (a_place(), [], ""),
        (a_place(loaders={"without_gpu": True}), [GPU_NODE, CPU_NODE], ""),
        (a_place(loaders={"resources": {"readers": 1}}), [GPU_NODE, CPU_NODE], ""),
        (
            a_place(loaders={"resources": {"readers": 2}}),
            [GPU_NODE, CPU_NODE],
            "10.0.0.1 has 0 of 'readers', less than the 2 that a loader asks for; 10.0.0.9 has room for 1",
        ),
        (
            a_place(loaders={"without_gpu": True}),
            [GPU_NODE],
            "room for 0 of 2 source loaders and shadows: 10.0.0.1 has 8 GPUs",
        ),
        (
            a_place(planner={"cpus": 60}, constructors={"cpus": 5}),
            [GPU_NODE],
            "a data constructor asks for 5 of 'CPU' on 10.0.0.1, which has 4 of 'CPU' free",
        ),
        # The cores that other roles take of the shared node are not available to loaders.
        (
            a_place(planner={"cpus": 60}, loaders={"cpus": 4}),
            [GPU_NODE],
            "room for 1 of 2 source loaders and shadows: 10.0.0.1 has room for 1",
        ),
        (a_place(planner={"cpus": 1}), [], "the planner asks for 1 of 'CPU' on a node that Ray"),
    ],
)
def test_what_is_missing_for_a_plane_is_said_with_what_each_node_has(place, nodes, missing):
    found = why_no_room(place, TEAM, nodes)

    assert missing in found
    assert bool(missing) == bool(found)


def test_of_many_nodes_some_are_named():
    nodes = [replace(GPU_NODE, place=str(n), address=f"10.0.0.{n}") for n in range(10, 40)]

    found = why_no_room(a_place(loaders={"without_gpu": True}), TEAM, nodes)

    assert found.endswith("10.0.0.17 has 8 GPUs and 22 more")


def test_a_node_that_comes_meanwhile_is_waited_for_and_whoever_waits_is_told_once(caplog):
    clock = FakeClock()
    place = a_place(loaders={"without_gpu": True}, wait="1m")

    def look():
        return [GPU_NODE] if clock.now_s() < 30 else [GPU_NODE, CPU_NODE]

    wait_for_room(place, TEAM, look, clock)

    assert 30 <= clock.now_s() < 32
    assert caplog.text.count("waiting for at most 60 s for room") == 1


def test_a_node_that_does_not_come_is_refused_with_what_is_missing_and_the_limit():
    clock = FakeClock()
    place = a_place(loaders={"without_gpu": True}, wait="1m")

    with pytest.raises(
        UnavailableError,
        match=r"10\.0\.0\.1 has 8 GPUs; waited 60 s for it: .* runtime\.place\.wait",
    ):
        wait_for_room(place, TEAM, lambda: [GPU_NODE], clock)

    assert clock.now_s() < 62


def a_node(name, *, cores=4.0, alive=True):
    resources = {"CPU": cores} if cores else {}
    address = f"10.0.0.{name}"
    return {"NodeID": name, "Alive": alive, "Resources": resources, "NodeManagerAddress": address}


def ray_with(monkeypatch, *nodes, free=None):
    monkeypatch.setattr(nodes_module, "ray", SimpleNamespace(nodes=lambda: list(nodes)))
    state = SimpleNamespace(
        **({} if free is None else {"available_resources_per_node": lambda: free})
    )
    monkeypatch.setattr(nodes_module, "import_module", lambda _: state)


def test_a_node_that_lives_and_has_a_core_that_nobody_claimed_has_room(monkeypatch):
    nodes = [
        a_node("C"),
        a_node("A"),
        a_node("gone", alive=False),
        a_node("full"),
        a_node("head", cores=0),
    ]
    free = {"C": {"CPU": 1.0}, "A": {"CPU": 4.0}, "full": {"CPU": 0.5}, "head": {"memory": 1.0}}

    ray_with(monkeypatch, *nodes, free=free)

    assert nodes_module.nodes_with_room() == ["A", "C"]


def test_where_ray_does_not_say_what_is_claimed_a_node_has_what_it_began_with(monkeypatch):
    ray_with(monkeypatch, a_node("B"), a_node("head", cores=0))

    assert nodes_module.nodes_with_room() == ["B"]


def test_a_placement_group_that_is_named_in_two_ways_has_each_bundle_once(monkeypatch):
    number = "ab" * 18
    ray_with(monkeypatch, a_node("C"), free={"C": {"CPU": 1.0, f"CPU_group_0_{number}": 3.0}})
    bundle = {"name": "data", "state": "CREATED", "bundles": {0: {"CPU": 3.0}}}
    table = {number: bundle | {"bundles_to_node_id": {0: "C"}}}
    nodes_module.ray.util = SimpleNamespace(placement_group_table=lambda: table)
    in_group = {"cpus": 1, "placement_group": "data"}
    place = a_place(planner=in_group, loaders=in_group | {"placement_group": number})

    seen = nodes_module.nodes_seen(*place.groups())
    assert [node.place for node in seen] == ["C", f"C/0/{number}"]
    team = Team(home="C", loaders=2, constructors=[])
    assert why_no_room(place, team, seen) == ""
    assert "have room for 2 of 3" in why_no_room(place, replace(team, loaders=3), seen)


def test_where_ray_does_not_answer_there_is_no_other_node(monkeypatch):
    def silent():
        raise ConnectionError("no head")

    monkeypatch.setattr(nodes_module, "ray", SimpleNamespace(nodes=silent))

    assert nodes_module.nodes_with_room() == []
