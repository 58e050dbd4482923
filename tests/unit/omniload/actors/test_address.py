"""The address of a plane: it travels as text, and a rank that the plane does not have is refused at the handle."""

from pathlib import Path

import numpy as np
import pytest

from omniload.actors.address import HostPlace, PlaneAddress, check_rank
from omniload.base.errors import ConfigError, UnavailableError

SIZES = {"dp": 2, "cp": 3}


@pytest.mark.parametrize("rank", [2, -1, 1 << 70, np.int64(-2)])
def test_a_rank_that_the_plane_does_not_have_is_refused_with_those_it_has(rank):
    with pytest.raises(
        ConfigError, match=rf"dp_rank is {int(rank)}; this plane has dp ranks 0 to 1"
    ):
        check_rank(SIZES, rank, 0)
    with pytest.raises(ConfigError, match=r"cp_rank is 3; this plane has cp ranks 0 to 2"):
        check_rank(SIZES, 0, 3)


@pytest.mark.parametrize("rank", ["0", 0.0, None, True, np.bool_(0), [0], np.float32(1)])
def test_a_rank_that_is_no_integer_is_refused_with_its_type(rank):
    with pytest.raises(ConfigError, match=rf"of type {type(rank).__name__}; .* give an integer"):
        check_rank(SIZES, 0, rank)


def test_integers_of_numpy_are_ranks():
    place = check_rank(SIZES, np.int32(1), np.uint8(2))

    assert place == (1, 2)
    assert [type(rank) for rank in place] == [int, int]


def test_an_address_crosses_a_process_boundary_as_text():
    address = PlaneAddress(
        cluster="127.0.0.2:1",
        namespace="n",
        dp_ranks_of={"a": (0, 2), "b": (1,)},
        cp_size=2,
        board=Path("/run/board"),
        batch_timeout_s=60.0,
    )

    again = PlaneAddress.model_validate_json(address.model_dump_json())

    assert again == address
    assert again.sizes == {"dp": 3, "cp": 2}
    assert [again.constructor_of(rank) for rank in range(3)] == ["a", "b", "a"]


def test_every_host_has_its_own_node_and_folder_and_roles_that_tell_of_it():
    address = PlaneAddress(
        cluster="10.0.0.1:1",
        namespace="n",
        dp_ranks_of={"constructor-0": (0,), "constructor-1": (1,), "constructor-2": (2,)},
        board=Path("/a"),
        node_address="10.0.0.1",
        host="A",
        elsewhere={
            "B": HostPlace(node="1", address="10.0.0.2", board=Path("/b")),
            "C": HostPlace(node="2", address="10.0.0.3", board=Path("/c")),
        },
        host_of={"constructor-1": "B", "constructor-2": "C"},
        lifeline="10.0.0.1:2",
        batch_timeout_s=60.0,
    )

    assert [address.on_host(host) for host in "AC"] == [
        ("10.0.0.1", Path("/a")),
        ("10.0.0.3", Path("/c")),
    ]
    assert address.roles_away_from("A") == {"B": ("constructor-1",), "C": ("constructor-2",)}
    assert address.roles_away_from("B") == {
        "A": ("planner", "loader-0"),
        "C": ("constructor-2",),
    }
    assert address.waited_for_away_from("B") == {
        "A": ("planner", "loader-0", "constructor-0", "rank dp=0"),
        "C": ("constructor-2", "rank dp=2"),
    }
    with pytest.raises(UnavailableError, match="no node on this host"):
        address.on_host("D")
