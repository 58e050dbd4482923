"""A node of Ray that is to be started, and which ports its processes get."""

from dataclasses import dataclass
from typing import Any

from omniload.base.linux.network import free_ports

__all__ = ["NodePlan", "ports_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """A node to be started."""

    folder: str
    """Where its sockets and logs go."""
    address: str
    """IP address it listens on."""
    workers: int
    """Processes started ahead of the actors that will run in them."""
    object_store_bytes: int
    """Shared memory."""
    ports: range | None = None
    """Ports it listens on; ``None`` for any."""
    head: str | None = None
    """Host and port of the head that it joins; ``None`` makes it the head."""


def ports_of(plan: NodePlan) -> dict[str, Any]:
    """Return what Ray is told of ports: each server has its own, and processes of actors and ranks share the rest."""
    servers = ["runtime_env_agent_port"]
    if plan.ports is not None:
        servers += ["node_manager_port", "object_manager_port"]
        servers += ["gcs_server_port"] if plan.head is None else []
    # The last of a range is left to the lifeline.
    ports = None if plan.ports is None else plan.ports[:-1]
    count = len(servers) + (0 if ports is None else plan.workers + 1)
    found = free_ports(plan.address, ports, count, setting="runtime.ports")
    told: dict[str, Any] = dict(zip(servers, found, strict=False))
    if ports is None:
        return told | ({"gcs_server_port": 0} if plan.head is None else {})
    left = [port for port in ports if port > found[len(servers) - 1]]
    return told | {"worker_port_list": ",".join(map(str, left))}
