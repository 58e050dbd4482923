"""What the options of a node among its peers may say."""

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from omniload.base.errors import ConfigError
from snapshot.image.mount.daemon import mount_settings
from snapshot.image.peer.node import PeerNode, PeerSettings
from snapshot.image.peer.peer_tier import SharedTier
from tests.support.snapshot.peer_builders import HandTier

HERE, THERE = "127.0.0.1:7070", "node2:7070"


def test_without_peers_the_registry_is_asked_as_before():
    registry = HandTier()
    node = PeerNode(PeerSettings(), registry, None, ())

    assert node.tiers == {"registry": registry}
    assert node.numbers() == {}
    node.close()


def test_a_node_that_serves_nobody_asks_its_peers_first():
    node = PeerNode(PeerSettings(peers=(HERE, THERE)), HandTier(), None, ())

    assert list(node.tiers) == ["peer", "registry"]
    assert all(isinstance(tier, SharedTier) for tier in node.tiers.values())
    node.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"peers": (HERE, "[::1]:80"), "serve": HERE},
        {"serve": "localhost:0"},
        {"serve": "[::1]:7070"},
        {"peers": (THERE,), "serve": "0.0.0.0:7070", "peer_name": THERE, "peer_token_file": "t"},
    ],
)
def test_what_can_be_meant_is_taken(fields):
    assert PeerSettings(**fields).serve == fields["serve"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"peers": ("node1",)}, "is not HOST:PORT"),
        ({"peers": ("node1:99999",)}, "is not HOST:PORT"),
        ({"peers": ("http://node1:80",)}, "is not HOST:PORT"),
        ({"peers": ("node1:80/x",)}, "is not HOST:PORT"),
        ({"peers": ("user@node1:80",)}, "is not HOST:PORT"),
        ({"peers": (HERE, HERE)}, "more than once"),
        ({"peers": ("ray", THERE)}, "is not HOST:PORT"),
        ({"peers": ("ray://head",)}, "is not HOST:PORT"),
        ({"serve": "7070"}, "is not HOST:PORT"),
        ({"serve": "0.0.0.0:7070"}, "peer_token_file"),
        ({"serve": "10.1.2.3:7070"}, "peer_token_file"),
        ({"serve": "127.evil.example:7070"}, "peer_token_file"),
        ({"serve": HERE, "peers": (THERE,)}, "not among peers"),
        ({"serve": HERE, "peers": (HERE,), "peer_name": THERE}, "not among peers"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields, said):
    with pytest.raises(ValidationError, match=said):
        PeerSettings(**fields)


@pytest.mark.parametrize("text", [None, "", "short", "two words of some length", "\xff" * 20])
def test_a_token_that_protects_nothing_is_refused(tmp_path, text):
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text, "latin-1")

    with pytest.raises(ConfigError, match="peer_token_file"):
        PeerNode(PeerSettings(peers=(THERE,), peer_token_file=str(path)), HandTier(), None, ())


def test_a_token_is_read_from_a_file_alone(tmp_path):
    os.mkfifo(tmp_path / "token")

    with pytest.raises(ConfigError, match="is a pipe; give the path of a peer_token_file"):
        PeerNode(
            PeerSettings(peers=(THERE,), peer_token_file=str(tmp_path / "token")),
            HandTier(),
            None,
            (),
        )


def test_peers_are_a_list_parted_by_commas_among_other_options():
    found = mount_settings(
        "r.example/a:v",
        "/mnt",
        ("peers=127.0.0.1:1,[::1]:2,node3:3,serve=127.0.0.1:1,peer_token_file=t,slots=8",),
    )

    assert found.sharing.peers == ("127.0.0.1:1", "[::1]:2", "node3:3")
    assert found.sharing.peer_token_file == str(Path("t").absolute())
    assert found.slots == 8


@pytest.mark.parametrize("option", ["peers=a", "serve=0.0.0.0:1", "b:2", "peers=a:1,serve=b:1"])
def test_options_of_peers_that_cannot_be_meant_are_refused(option):
    with pytest.raises(ConfigError, match=r"-o"):
        mount_settings("r.example/a:v", "/mnt", (option,))
