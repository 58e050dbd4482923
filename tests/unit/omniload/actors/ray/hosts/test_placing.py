"""Which node each loader and each of its shadows is on."""

import pytest

pytest.importorskip("ray")
from omniload.actors.ray.hosts.placing import Placing
from omniload.machine.lost_roles import Member


def a_placing(*others):
    """Return a placing of a plane that was opened on node A, and the nodes that have room beside it."""
    nodes = ["A", *others]
    return Placing("A", lambda: nodes), nodes


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


def test_one_that_goes_astray_again_and_again_stays_where_it_is_and_counts_there():
    placing, _ = a_placing("B")
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
    assert placing.place(Member("loader-0", 4)) == "B"


def test_whoever_is_where_it_was_to_be_or_is_no_loader_is_not_astray():
    placing, _ = a_placing("B")
    placed(placing, "loader-0", range(2))

    assert not placing.is_astray(Member("loader-0"), "A")
    assert not placing.is_astray(Member("loader-0", 1), "B")
    assert not placing.is_astray(Member("constructor-0"), "C")
