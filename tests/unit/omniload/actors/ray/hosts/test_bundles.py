"""Bundles of placement groups as places for members."""

from dataclasses import replace

import pytest

pytest.importorskip("ray")
from omniload.actors.ray.given.seats import Seats
from omniload.actors.ray.hosts import nodes as nodes_module
from omniload.actors.ray.hosts.bundles import Bundle, bundles_in, group_at, node_at, some_of
from omniload.actors.ray.hosts.nodes import NodeSeen, Team, wait_for_room, why_no_room
from omniload.actors.ray.hosts.placing import Placing
from omniload.base.clock import FakeClock
from omniload.base.errors import ConfigError
from omniload.machine.roster.members import Member
from omniload.mix.schema.places import PlaceConfig

NUMBER = "0f" * 18


def a_group(name="job", state="CREATED", nodes=("A", "B")):
    bundles = {index: {"CPU": 4.0} for index in range(len(nodes))}
    return {
        "name": name,
        "state": state,
        "bundles": bundles,
        "bundles_to_node_id": dict(enumerate(nodes)),
    }


def test_bundles_of_a_group_are_found_by_its_name_and_by_its_number_once_it_is_reserved():
    table = {
        NUMBER: a_group(),
        "1f": a_group("other"),
        "2f": a_group("later", "PENDING", nodes=()),
    }

    found = bundles_in(table, "job")

    assert [(each.group, each.index, each.node) for each in found] == [
        (NUMBER, 0, "A"),
        (NUMBER, 1, "B"),
    ]
    assert bundles_in(table, NUMBER) == found
    assert bundles_in(table, "later") == bundles_in(table, "none") == []


def test_a_place_tells_its_node_and_its_group():
    (bundle, _) = bundles_in({NUMBER: a_group()}, "job")

    assert (node_at(bundle.place), group_at(bundle.place)) == ("A", NUMBER)
    assert (node_at("A"), group_at("A")) == ("A", "")


def test_what_is_free_of_a_bundle_is_what_ray_says_of_it_and_not_of_its_node():
    bundle = Bundle(group="f0", index=1, node="A", has={"CPU": 4.0, "readers": 1.0})

    free = bundle.free({"CPU": 9.0, "CPU_group_1_f0": 3.0, "CPU_group_0_f0": 4.0})

    assert free == {"CPU": 3.0, "readers": 0.0}


HOME = NodeSeen(
    place="A", address="10.0.0.1", has={"CPU": 8.0, "GPU": 8.0}, free={"CPU": 8.0}, labels={}
)


def seen(*groups, free=4.0):
    """Return the nodes of a Ray with bundles of groups; each bundle has this many free cores."""
    bundles = [each for group in groups for each in bundles_in({group: a_group()}, "job")]
    return [
        HOME,
        *(
            NodeSeen(
                place=each.place,
                address=f"bundle {each.index} on {each.node}",
                has=each.has,
                free={"CPU": free},
                labels={},
            )
            for each in bundles
        ),
    ]


PLACE = PlaceConfig.model_validate({"loaders": {"placement_group": "job", "cpus": 2}, "wait": 5})
TEAM = Team(home="A", loaders=4, constructors=["A"])


def test_loaders_have_room_in_the_bundles_of_their_group_alone():
    assert why_no_room(PLACE, TEAM, seen(NUMBER)) == ""
    assert "bundle 0 on A has room for 1; bundle 1 on B has room for 1" in why_no_room(
        PLACE, TEAM, seen(NUMBER, free=3.0)
    )
    assert "Ray has reserved no placement group 'job'" in why_no_room(PLACE, TEAM, [HOME])
    whole = PlaceConfig.model_validate({"loaders": {"without_gpu": True}})
    assert "10.0.0.1 has 8 GPUs" in why_no_room(whole, TEAM, seen(NUMBER))


def test_a_name_that_several_groups_have_is_refused_with_their_numbers():
    with pytest.raises(
        ConfigError, match=r"2 placement groups .* \['0f0f.*', 'ff'\]; give the number"
    ):
        wait_for_room(PLACE, TEAM, lambda: seen(NUMBER, "ff"), FakeClock())


def test_members_are_spread_over_bundles_and_each_is_where_its_bundle_is(monkeypatch):
    monkeypatch.setattr(nodes_module, "nodes_seen", lambda *_groups: seen(NUMBER))
    placing = Placing(
        "A", lambda: ["A"], FakeClock().now_s, lambda: nodes_module.room_for(PLACE.loaders)
    )

    places = [placing.place(Member("loader-0", life)) for life in range(3)]

    assert [node_at(place) for place in places] == ["A", "B", "A"]
    assert all(group_at(place) == NUMBER for place in places)
    assert not placing.is_astray(Member("loader-0"), "A")
    assert placing.is_astray(Member("loader-0", 1), "C")


def test_some_bundles_of_a_group_are_wanted_by_their_numbers():
    table = {NUMBER: a_group(nodes=("A", "B", "C"))}
    bundles = bundles_in(table, NUMBER)

    some = some_of([bundles[0], bundles[2]])

    assert [each.index for each in bundles_in(table, some)] == [0, 2]


BESIDE = PlaceConfig.model_validate(
    {
        "planner": {"placement_group": "job", "cpus": 1},
        "constructors": {"placement_group": "job", "cpus": 2},
    }
)


def test_planner_and_constructors_claim_what_they_ask_of_a_bundle_on_their_node():
    assert why_no_room(BESIDE, TEAM, seen(NUMBER)) == ""
    assert why_no_room(BESIDE, TEAM, seen(NUMBER, free=2.0)) == (
        "a data constructor asks for 2 of 'CPU' on bundle 0 on A, which has 1 of 'CPU' free"
    )
    elsewhere = Team(home="A", loaders=1, constructors=["C"])
    home = replace(HOME, place="C", address="10.0.0.3")
    assert why_no_room(BESIDE, elsewhere, [*seen(NUMBER), home]) == (
        "a data constructor is to be on 10.0.0.3, where placement group 'job' has no bundle"
    )


def test_members_that_start_at_once_are_dealt_to_bundles_before_ray_counts_them():
    bundles = [
        NodeSeen(place=f"A/{n}/{NUMBER}", address="", has={}, free={"CPU": 3.0}, labels={})
        for n in range(2)
    ]
    seats, wanted = Seats(lambda _group: [HOME, *bundles]), BESIDE.constructors
    members = [Member(f"constructor-{n}") for n in range(3)]

    places = [seats.of(member, "A", wanted) for member in members[:2]]
    seats.forget(members[0])

    assert places == [(f"A/1/{NUMBER}", {"CPU": 2.0}), (f"A/0/{NUMBER}", {"CPU": 2.0})]
    assert seats.of(members[2], "A", wanted)[0] == places[0][0]


def test_a_member_whose_node_has_no_bundle_is_started_beside_the_group_and_asks_for_nothing(caplog):
    seats = Seats(lambda _group: seen(NUMBER))

    assert seats.of(Member("constructor-0"), "C", BESIDE.constructors) == ("C", {})
    assert "placement group 'job' has no bundle on node C" in caplog.text
    assert seats.of(Member("planner"), "C", PlaceConfig().planner) == ("C", {})
