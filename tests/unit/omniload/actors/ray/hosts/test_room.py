"""Which nodes of a Ray may have a process that stands by."""

from types import SimpleNamespace

import pytest

pytest.importorskip("ray")
from omniload.actors.ray.hosts import room


def a_node(name, *, cores=4.0, alive=True):
    return {"NodeID": name, "Alive": alive, "Resources": {"CPU": cores} if cores else {}}


def ray_with(monkeypatch, *nodes, free=None):
    monkeypatch.setattr(room, "ray", SimpleNamespace(nodes=lambda: list(nodes)))
    state = SimpleNamespace(
        **({} if free is None else {"available_resources_per_node": lambda: free})
    )
    monkeypatch.setattr(room, "import_module", lambda _: state)


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

    assert room.nodes_with_room() == ["A", "C"]


def test_where_ray_does_not_say_what_is_claimed_a_node_has_what_it_began_with(monkeypatch):
    ray_with(monkeypatch, a_node("B"), a_node("head", cores=0))

    assert room.nodes_with_room() == ["B"]


def test_where_ray_does_not_answer_there_is_no_other_node(monkeypatch):
    def silent():
        raise ConnectionError("no head")

    monkeypatch.setattr(room, "ray", SimpleNamespace(nodes=silent))

    assert room.nodes_with_room() == []


@pytest.mark.parametrize(("address", "host"), [("127.0.0.1", "node7"), ("10.0.0.2", "10.0.0.2")])
def test_a_host_is_called_by_the_address_of_its_node_or_on_loopback_by_its_name(
    monkeypatch, address, host
):
    util = SimpleNamespace(get_node_ip_address=lambda: address)
    monkeypatch.setattr(room, "ray", SimpleNamespace(util=util))
    monkeypatch.setattr(room.socket, "gethostname", lambda: "node7")

    assert room.host_here() == host
