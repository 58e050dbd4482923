"""Nodes that find each other through a real Ray, and one whose Ray is not there."""

import logging

import pytest

from omniload.actors.ray_cluster import PrivateCluster
from omniload.actors.ray_environment import ray
from snapshot.image import peer_joining
from snapshot.image.block_store import BlockStore
from snapshot.image.peer_directory import group_of
from snapshot.image.peer_node import PeerNode, PeerSettings
from snapshot.image.peer_ray import ACTOR, NAMESPACE
from tests.support.peer_builders import (
    BLOCKS,
    HandTier,
    fetched,
    free_addresses,
    peer_index,
    peer_refs,
)

pytestmark = pytest.mark.ray


@pytest.fixture
def index(tmp_path):
    return peer_index(tmp_path)


@pytest.fixture
def cluster(monkeypatch):
    cluster = PrivateCluster(object_store_bytes=80 << 20, workers=1)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    cluster.close()


def a_node(folder, index, serve, registry):
    settings = PeerSettings(peers=("ray",), serve=serve)
    return PeerNode(settings, registry, BlockStore(folder, 64 << 20), (index,))


def test_two_nodes_find_each_other_and_one_that_leaves_is_forgotten(
    cluster, index, tmp_path, monkeypatch
):
    monkeypatch.setattr(peer_joining, "JOINED_WITHIN_S", 120.0)
    one_address, two_address = free_addresses(2)
    registries = HandTier(), HandTier()
    one = a_node(tmp_path / "one", index, one_address, registries[0])
    assert one._members() == (one_address,)

    two = a_node(tmp_path / "two", index, two_address, registries[1])

    assert two._members() == tuple(sorted([one_address, two_address]))
    found, moved = fetched(two, index, peer_refs(index))
    assert [found[ref.digest] for ref in peer_refs(index)] == BLOCKS[:10]
    # Homes are dealt by a hash: what the first is the home of, it fetched for the second.
    assert sorted(registries[0].numbers + registries[1].numbers) == list(range(10))
    assert moved["peer"] == sum(len(BLOCKS[number]) for number in registries[0].numbers) > 0
    two.close()
    actor = ray.get_actor(ACTOR, NAMESPACE)
    asked = actor.join.remote("", group_of(""), [index.blob_digest])
    assert ray.get(asked) == [one_address]
    one.close()


def test_a_ray_that_is_not_there_costs_a_warning_and_no_start(index, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(peer_joining, "JOINED_WITHIN_S", 0.5)
    monkeypatch.setattr(peer_joining, "_GONE_WITHIN_S", 0.1)
    (address,) = free_addresses(1)
    registry = HandTier()

    with caplog.at_level(logging.WARNING, "omniload"):
        node = a_node(tmp_path / "node", index, address, registry)
        found, _ = fetched(node, index, peer_refs(index, range(3)))
        node.close()

    assert list(found.values()) == BLOCKS[:3]
    assert registry.numbers == [0, 1, 2]
    assert "directory of peers" in caplog.text
