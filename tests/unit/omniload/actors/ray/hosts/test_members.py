"""Hosts of a plane: whether ranks of others may join it later, and the settings that they receive."""

import pytest

pytest.importorskip("ray")
from omniload.actors.address import HostPlace, PlaneAddress
from omniload.actors.plane import PlaneSpec
from omniload.actors.ray.cluster import Listening
from omniload.actors.ray.hosts.members import terms_of
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.corpora import a_corpus


def a_spec(folder, **runtime):
    mix = a_corpus(folder)
    runtime = mix.runtime.model_copy(update=runtime)
    mix = mix.model_copy(update={"runtime": runtime})
    return PlaneSpec(mix=mix, base_dir=folder, tree=ClientPlaceTree.of())


@pytest.mark.parametrize(
    ("runtime", "address", "may_join"),
    [
        ({"elastic": True}, "127.0.0.1", False),
        ({"elastic": False, "bind": "eth0"}, "10.0.0.1", False),
        ({"elastic": True, "bind": "eth0"}, "10.0.0.1", True),
        ({"elastic": True, "address": "10.0.0.1:6379"}, "127.0.0.1", True),
    ],
)
def test_ranks_of_other_hosts_may_join_where_ranks_come_and_go_and_the_plane_is_reached(
    tmp_path, runtime, address, may_join
):
    terms = terms_of(a_spec(tmp_path, **runtime), Listening(address=address))

    assert (terms is not None) == may_join
    assert terms is None or terms.is_given == ("address" in runtime)


def test_a_rank_that_brings_a_node_reads_the_heartbeats_of_the_host_that_serves(tmp_path):
    plane = PlaneAddress(
        cluster="10.0.0.1:20000",
        namespace="omniload-0",
        dp_ranks_of={"constructor-0": (0, 1)},
        board=tmp_path / "there",
        host="A",
        batch_timeout_s=1.0,
    )
    place = HostPlace(node="n", address="10.0.0.2", board=tmp_path / "here")

    mine = plane.with_node_on("B", place)

    assert mine.on_host("B") == ("10.0.0.2", tmp_path / "here")
    assert mine.roles_away_from("B") == {"A": ("planner", "loader-0")}
    assert mine.board_of("constructor-0") == tmp_path / "there"
    assert plane.elsewhere == {}
