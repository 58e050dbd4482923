"""The node of each loader and of each of its shadows, and the nodes that have room."""

from types import SimpleNamespace

import pytest

pytest.importorskip("ray")
from omniload.actors.ray.hosts import placing as placing_module
from omniload.actors.ray.hosts.placing import Placing
from omniload.base.clock import FakeClock
from omniload.machine.roster.members import Member


def a_placing(*others):
    """Return a placing of a plane that was opened on node A, and the other nodes that have room."""
    nodes = ["A", *others]
    return Placing("A", lambda: nodes), nodes


def a_timed_placing(*others):
    """Return a placing of a plane that was opened on node A, and its clock."""
    clock = FakeClock()
    return Placing("A", lambda: ["A", *others], clock.now_s), clock


def fail_on(placing, node, life):
    """Let a life of loader-0 start on a node and fail to stand by."""
    member = Member("loader-0", life)
    assert placing.place(member) == node
    placing.end(member, is_replaced=True)


def tries(placing, node):
    """Return whether a shadow of another loader would be started on a node now."""
    pair = [Member("loader-9", life) for life in range(2)]
    found = [placing.place(member) for member in pair]
    for member in pair:
        placing.end(member, is_replaced=False)
    return found[1] == node


def placed(placing, role, lives):
    return [placing.place(Member(role, life)) for life in lives]


def ready(placing, role, life):
    placing.stands_ready(Member(role, life))


@pytest.mark.parametrize(
    ("others", "nodes"),
    [((), "AAA"), (("B",), "ABA"), (("B", "C"), "ABC"), (("B", "C", "D"), "ABC")],
)
def test_a_loader_is_at_home_and_its_shadows_where_the_fewest_of_its_role_are(others, nodes):
    placing, _ = a_placing(*others)

    assert placed(placing, "loader-0", range(3)) == list(nodes)


def test_shadows_of_several_loaders_spread_over_the_nodes_that_there_are():
    placing, _ = a_placing("B", "C")

    found = [placed(placing, f"loader-{number}", range(2)) for number in range(4)]

    assert [loader for loader, _ in found] == ["A"] * 4
    assert sorted(shadow for _, shadow in found) == ["B", "B", "C", "C"]


def test_once_a_shadow_has_taken_over_the_next_one_stands_by_at_home():
    placing, _ = a_placing("B")
    placed(placing, "loader-0", range(2))
    ready(placing, "loader-0", 1)

    placing.end(Member("loader-0"), is_replaced=True)

    assert placing.place(Member("loader-0", 2)) == "A"
    assert placing.away() == [Member("loader-0", 1)]


def test_a_node_that_is_gone_or_full_has_no_further_one():
    placing, nodes = a_placing("B")
    nodes.remove("B")

    assert placed(placing, "loader-0", range(2)) == ["A", "A"]


def test_no_shadow_is_on_a_node_where_one_did_not_come_to_stand_by():
    placing, _ = a_placing("B", "C")
    placed(placing, "loader-0", range(2))

    placing.end(Member("loader-0", 1), is_replaced=True)

    assert placing.place(Member("loader-0", 2)) == "C"
    assert placed(placing, "loader-1", range(2)) == ["A", "C"]


def test_after_two_such_nodes_in_a_row_shadows_stay_at_home():
    placing, _ = a_placing("B", "C", "D")
    placed(placing, "loader-0", range(1))
    for life in (1, 2):
        placing.place(Member("loader-0", life))
        placing.end(Member("loader-0", life), is_replaced=True)

    assert placing.place(Member("loader-0", 3)) == "A"


def test_a_node_on_which_one_stood_by_is_tried_again_and_parts_two_failures():
    placing, _ = a_placing("B", "C", "D")
    placed(placing, "loader-0", range(2))
    placing.end(Member("loader-0", 1), is_replaced=True)
    placing.place(Member("loader-0", 2))
    ready(placing, "loader-0", 2)
    placing.end(Member("loader-0", 2), is_replaced=True)

    assert placing.place(Member("loader-0", 3)) == "C"
    placing.end(Member("loader-0", 3), is_replaced=True)
    assert placing.place(Member("loader-0", 4)) == "D"


def test_a_node_is_left_alone_for_a_while_that_doubles_up_to_an_hour():
    placing, clock = a_timed_placing("B")
    placed(placing, "loader-0", range(1))
    whiles_s = []

    for life in range(1, 11):
        fail_on(placing, "B", life)
        failed_s = clock.now_s()
        # Twice the longest: one that is never tried again fails the test, and does not hang it.
        while not tries(placing, "B") and clock.now_s() < failed_s + 7200:
            clock.advance(10.0)
        whiles_s.append(clock.now_s() - failed_s)

    assert whiles_s == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]


def test_shadows_of_many_loaders_that_fail_on_one_node_at_once_count_as_one_failure():
    placing, clock = a_timed_placing("B")
    roles = [f"loader-{number}" for number in range(8)]
    for role in roles:
        placed(placing, role, range(2))
    for role in roles:
        placing.end(Member(role, 1), is_replaced=True)

    clock.advance(30.0)
    assert tries(placing, "B")


def test_after_two_nodes_in_vain_one_more_is_tried_after_a_while_and_once_one_stood_by_all_is_forgotten():
    placing, clock = a_timed_placing("B", "C", "D")
    placed(placing, "loader-0", range(1))
    fail_on(placing, "B", 1)
    fail_on(placing, "C", 2)

    clock.advance(29.9)
    fail_on(placing, "A", 3)
    clock.advance(0.1)
    fail_on(placing, "B", 4)
    fail_on(placing, "A", 5)
    clock.advance(60.0)
    assert placing.place(Member("loader-0", 6)) == "B"
    ready(placing, "loader-0", 6)
    placing.end(Member("loader-0", 6), is_replaced=True)
    fail_on(placing, "B", 7)
    clock.advance(30.0)
    assert placing.place(Member("loader-0", 8)) == "B"


def test_shadows_that_share_a_node_with_their_loader_are_found_once_another_node_may_have_them():
    placing, clock = a_timed_placing("B")
    for role in ("loader-0", "loader-1"):
        placed(placing, role, range(2))
        placing.end(Member(role, 1), is_replaced=True)
        assert placing.place(Member(role, 2)) == "A"
        ready(placing, role, 2)
        clock.advance(0.5)

    clock.advance(28.0)
    assert placing.crowded() == []
    clock.advance(1.5)
    found = placing.crowded()
    assert placing.crowded() == []  # one role after the other
    clock.advance(30.0)
    found += placing.crowded()

    assert found == [Member("loader-0", 2), Member("loader-1", 2)]
    assert placing.place(Member("loader-0", 3)) == "B"


@pytest.mark.parametrize(("others", "lives"), [((), 2), (("B",), 2), (("B",), 3)])
def test_nobody_is_crowded_where_every_node_has_one_already(others, lives):
    placing, clock = a_timed_placing(*others)
    placed(placing, "loader-0", range(lives))
    for life in range(1, lives):
        ready(placing, "loader-0", life)
    clock.advance(3600.0)

    assert placing.crowded() == []


def test_the_end_of_a_role_says_nothing_of_the_node():
    placing, _ = a_placing("B")
    placed(placing, "loader-0", range(2))

    placing.end(Member("loader-0", 1), is_replaced=False)

    assert placing.place(Member("loader-0", 2)) == "B"


def test_a_member_that_ray_started_elsewhere_is_tried_again_and_its_node_is_not_blamed():
    placing, _ = a_placing("B")
    placed(placing, "loader-0", range(2))

    assert placing.is_astray(Member("loader-0", 1), "A")
    placing.end(Member("loader-0", 1), is_replaced=True)

    assert placing.place(Member("loader-0", 2)) == "B"
    assert not placing.is_astray(Member("loader-0", 2), "B")


def test_one_that_goes_astray_again_and_again_stays_where_it_is_for_a_while_and_counts_there():
    placing, clock = a_timed_placing("B")
    placed(placing, "loader-0", range(1))
    for life in (1, 2):
        assert placing.place(Member("loader-0", life)) == "B"
        assert placing.is_astray(Member("loader-0", life), "A")
        placing.end(Member("loader-0", life), is_replaced=True)
    placing.place(Member("loader-0", 3))

    assert not placing.is_astray(Member("loader-0", 3), "A")
    assert placing.away() == [
        Member("loader-0", 3)
    ]  # whose heartbeats are asked for, wherever it is
    assert placing.place(Member("loader-0", 4)) == "A"
    clock.advance(60.0)
    assert placing.crowded() == [Member("loader-0", 3)]
    assert placing.place(Member("loader-0", 5)) == "B"


def test_whoever_is_where_it_was_to_be_or_is_no_loader_is_not_astray():
    placing, _ = a_placing("B")
    placed(placing, "loader-0", range(2))

    assert not placing.is_astray(Member("loader-0"), "A")
    assert not placing.is_astray(Member("loader-0", 1), "B")
    assert not placing.is_astray(Member("constructor-0"), "C")


def a_wanted(rooms, home="A"):
    """Return a placing whose members are all to be on nodes of ``rooms``, and its clock."""
    clock = FakeClock()
    return Placing(home, lambda: [home], clock.now_s, lambda: rooms), clock


@pytest.mark.parametrize(
    ("rooms", "nodes"),
    [
        ({"C1": 9}, ["C1"] * 4),
        ({"C1": 9, "C2": 9}, ["C1", "C2", "C1", "C2"]),
        # Ray does not yet count the resources that a member will use there.
        ({"C1": 1, "C2": 9}, ["C1", "C2", "C2", "C2"]),
        # The opener's node is one of them as any other.
        ({"A": 9, "B": 9}, ["A", "B", "A", "B"]),
    ],
)
def test_loaders_are_spread_over_the_nodes_that_are_wanted_for_as_many_as_each_has_room(
    rooms, nodes
):
    placing, _ = a_wanted(rooms)

    assert [placing.place(Member(f"loader-{number}")) for number in range(4)] == nodes
    assert placing.away() == [
        Member(f"loader-{number}") for number in range(4) if nodes[number] != "A"
    ]


def test_a_shadow_is_on_another_of_the_nodes_that_are_wanted_where_there_is_one():
    placing, _ = a_wanted({"C1": 9, "C2": 9})
    assert placed(placing, "loader-0", range(3)) == ["C1", "C2", "C1"]

    alone, _ = a_wanted({"C1": 9})
    assert placed(alone, "loader-0", range(2)) == ["C1", "C1"]


def test_what_a_member_asked_for_is_counted_once_as_soon_as_its_process_is_known():
    rooms = {"C1": 2, "C2": 1}
    placing, _ = a_wanted(rooms)
    assert placed(placing, "loader-0", [0]) == ["C1"]

    rooms["C1"] = 1  # Ray has counted it
    assert not placing.is_astray(Member("loader-0"), "C1")

    assert [placing.place(Member(f"loader-{n}")) for n in (1, 2)] == ["C2", "C1"]


def test_where_none_has_room_a_member_waits_for_what_the_one_before_it_gives_back():
    placing, _ = a_wanted({"C1": 0})

    assert placed(placing, "loader-0", [1]) == ["C1"]


def test_a_node_that_no_member_comes_to_is_left_alone_while_there_is_another_one():
    placing, _ = a_wanted({"C1": 9, "C2": 9})
    fail_on(placing, "C1", 1)

    assert placed(placing, "loader-0", [2]) == ["C2"]
    placing.end(Member("loader-0", 2), is_replaced=True)
    assert placed(placing, "loader-0", [3]) == ["C1"]  # all are left alone, and one it must be


def test_loaders_are_at_home_while_no_node_that_is_wanted_lives_and_move_once_one_does(caplog):
    rooms = {}
    placing, clock = a_wanted(rooms)
    member = Member("loader-0", 1)
    assert placing.place(member) == "A"
    assert placing.is_stranded(member)
    assert not placing.is_away(member)
    assert "no node that runtime.place.loaders names is left in Ray: loader-0+1" in caplog.text
    placing.stands_ready(member)

    clock.advance(31)
    assert placing.crowded() == []
    rooms["C1"] = 1
    clock.advance(31)
    assert placing.crowded() == [member]
    assert placing.place(Member("loader-0", 2)) == "C1"
    placing.end(member, is_replaced=True)
    assert not placing.is_stranded(member)


def test_nobody_moves_to_a_node_that_is_wanted_and_full():
    rooms = {"C1": 9}
    placing, clock = a_wanted(rooms)
    for life in range(2):
        placing.place(Member("loader-0", life))
        ready(placing, "loader-0", life)

    rooms["C2"] = 0
    clock.advance(31)
    assert placing.crowded() == []
    rooms["C2"] = 1
    clock.advance(31)
    assert sorted(m.number for m in placing.crowded()) == [0, 1]


@pytest.mark.parametrize(("address", "host"), [("127.0.0.1", "node7"), ("10.0.0.2", "10.0.0.2")])
def test_a_host_is_called_by_the_address_of_its_node_or_on_loopback_by_its_name(
    monkeypatch, address, host
):
    util = SimpleNamespace(get_node_ip_address=lambda: address)
    monkeypatch.setattr(placing_module, "ray", SimpleNamespace(util=util))
    monkeypatch.setattr(placing_module.socket, "gethostname", lambda: "node7")

    assert placing_module.host_here() == host
