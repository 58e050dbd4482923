"""Joining a data plane from a process that is not the one that opened it."""

from omniload.actors.address import PlaneAddress, check_rank
from omniload.actors.plane import RankHandle
from omniload.actors.ray.cluster import connect
from omniload.actors.ray.environment import ray
from omniload.actors.ray.handle import RayHandle
from omniload.base.errors import UnavailableError
from omniload.base.linux.network import host_id
from omniload.machine.messages import ResizeAsked

__all__ = ["handle_in"]


def handle_in(
    address: PlaneAddress,
    dp_rank: int,
    cp_rank: int = 0,
    *,
    is_connected: bool = False,
    asked: ResizeAsked | None = None,
) -> RankHandle:
    """Return a rank's handle in a process that is not the plane's: joins its Ray first.

    Args:
        address: Where the plane is.
        dp_rank: Place of the rank along dp.
        cp_rank: Along cp.
        is_connected: This process holds the node of its host and is connected to it.
        asked: The ranks that it is one of, where they are not those that the plane was opened for.

    Raises:
        ConfigError: The plane has no such rank.
        StateError: The rank has a handle already.
        UnavailableError: The plane cannot be reached.
    """
    check_rank(address.sizes_with(asked), dp_rank, cp_rank)
    node_address, _ = address.on_host(host_id())
    try:
        if not is_connected:
            connect(address.cluster, address.namespace, node_address)
    except Exception as error:
        raise UnavailableError(
            f"the data plane at {address.cluster} cannot be joined: {error}; it has ended, or this process is none "
            "that its opener started"
        ) from error
    try:
        return RayHandle(address, dp_rank, cp_rank, ray.shutdown, asked)
    except BaseException:
        ray.shutdown()
        raise
