"""Joining a data plane from a process that is not the one that opened it."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from omniload.actors.address import Head, PlaneAddress, check_rank
from omniload.actors.lifeline import LifelineEnd
from omniload.actors.ray.cluster import connect
from omniload.actors.ray.environment import miss_hosts_soon, ray
from omniload.actors.ray.given.namespaces import in_turn, is_used, use_connection
from omniload.actors.ray.given.running import require_same
from omniload.actors.ray.hosts.members import MemberNode, listening_of
from omniload.actors.ray.rank.handle import RayHandle
from omniload.base.errors import UnavailableError
from omniload.base.linux.file_lock import locked
from omniload.base.linux.network import host_id
from omniload.machine.messages import ResizeAsked

__all__ = ["handle_in", "node_for_rank"]

_TURN_S = 120.0
_LOOK_S = 0.1


def node_for_rank(address: PlaneAddress, token: str) -> MemberNode:
    """Start the node of one rank on another host than the opener's, and connect this process to it.

    A node of each rank and not of each host: it ends with its rank, and no other rank with it.

    Args:
        address: Where the plane is; it takes ranks of other hosts.
        token: Secret of its Ray.

    Raises:
        ConfigError: This host has no address as the plane's, or too few ports; or no node of a Ray that was given.
        StateError: This process uses Ray already.
        UnavailableError: The plane has ended, or its Ray cannot be joined.
    """
    terms = address.terms
    assert terms is not None, "whoever reads the address refuses one without"
    # Checked first, because Ray waits for minutes if there is no answer.
    LifelineEnd(address.lifeline).close()
    miss_hosts_soon()
    head = Head(
        cluster=address.cluster,
        namespace=address.namespace,
        token=None if terms.is_given else token,
    )
    # Not the interface towards MASTER_ADDR, because each replica has an address of its own there.
    toward = address.cluster.rpartition(":")[0]
    listening = listening_of(terms.bind, terms.ports, toward)
    with _turn() if listening.ports else nullcontext():
        return MemberNode(head, listening, bytes_=terms.store_bytes, workers=0)


@contextmanager
def _turn() -> Iterator[None]:
    """Let one rank of this user at a time start a node on this host; two would find the same ports free.

    Raises:
        UnavailableError: Others take too long.
    """
    place = Path(tempfile.gettempdir()) / f"omniload-starts-{os.geteuid()}.lock"
    until_s = time.monotonic() + _TURN_S
    while True:
        try:
            with locked(place, waits=False):
                yield
                return
        except BlockingIOError:
            if time.monotonic() >= until_s:
                raise UnavailableError(
                    f"other ranks of this host have been starting nodes of Ray for {_TURN_S:.0f} s, and hold {place}; "
                    "free cores of this host, or leave out runtime.ports"
                ) from None
        time.sleep(_LOOK_S)


def _was_connected(namespace: str) -> bool:
    """Return whether this process is connected already, as a worker of Ray Train, or for a rank in another thread."""
    if not ray.is_initialized():
        return False
    return is_used() or ray.get_runtime_context().namespace != namespace


def handle_in(
    address: PlaneAddress,
    dp_rank: int,
    cp_rank: int = 0,
    *,
    is_connected: bool = False,
    asked: ResizeAsked | None = None,
) -> RayHandle:
    """Return a rank's handle in a process that is not the plane's: joins its Ray first.

    Args:
        address: Where the plane is.
        dp_rank: Place of the rank along dp.
        cp_rank: Along cp.
        is_connected: This process holds a node of its host and is connected to it.
        asked: The ranks that it belongs to, if they are not those that the plane was opened for.

    Raises:
        ConfigError: The plane has no such rank.
        StateError: The rank has a handle already, or this process is connected to another Ray or has another plane.
        UnavailableError: The plane cannot be reached.
    """
    check_rank(address.sizes_with(asked), dp_rank, cp_rank)
    leave = _join(address, is_connected=is_connected)
    try:
        return RayHandle(address, dp_rank, cp_rank, leave, asked)
    except BaseException:
        leave()
        raise


def _join(address: PlaneAddress, *, is_connected: bool) -> Callable[[], None]:
    """Connect this process to a plane's Ray; return the function that disconnects it."""
    node_address, _ = address.on_host(host_id())
    with in_turn(f"joins the Ray at {address.cluster}"):
        is_shared = _was_connected(address.namespace)
        if is_shared:
            require_same(address.cluster)
        try:
            if not (is_shared or is_connected):
                connect(address.cluster, address.namespace, node_address)
        except Exception as error:
            raise UnavailableError(
                f"the data plane at {address.cluster} cannot be joined: {error}; it has ended, or its opener did not "
                "start this process"
            ) from error
        use_no_more = use_connection(made=not is_shared)

    def leave() -> None:
        with in_turn(f"leaves the Ray at {address.cluster}"):
            if use_no_more():
                ray.shutdown()

    return leave
