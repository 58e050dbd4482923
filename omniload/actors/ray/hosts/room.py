"""Nodes of a Ray that have room for a process that stands by, and the host that this process is on."""

import socket
from importlib import import_module
from typing import Any

from omniload.actors.ray.environment import RayError, ray
from omniload.base.log import get_logger

__all__ = ["host_here", "nodes_with_room"]

_LEAST_CORES = 1.0
"""Cores that nobody in the Ray has claimed."""
_LOG = get_logger(__name__)


def host_here() -> str:
    """Return the name that people know this host by: the address of its node, on loopback alone the host's own name."""
    address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    return socket.gethostname() if address.startswith("127.") else address


def nodes_with_room() -> list[str]:
    """Return the numbers of the nodes that live and have a core that nobody has claimed, always in one order."""
    try:
        living = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        free = _free_by_node()
    except (RayError, RuntimeError, ConnectionError) as error:
        _LOG.warning("Ray does not say which nodes it has, so shadows stay on this one: %s", error)
        return []
    return sorted(
        node["NodeID"]
        for node in living
        if free.get(node["NodeID"], node["Resources"]).get("CPU", 0.0) >= _LEAST_CORES
    )


def _free_by_node() -> dict[str, dict[str, float]]:
    """Return what nobody has claimed of each node; nothing where this version of Ray does not say so."""
    try:
        state: Any = import_module("ray._private.state")
        found: dict[str, dict[str, float]] = state.available_resources_per_node()
    except (ImportError, AttributeError) as error:
        _LOG.debug("what nodes have is taken for free: %s", error)
        return {}
    return found
