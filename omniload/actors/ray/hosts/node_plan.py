"""Plan of a node of Ray: its ports, the substitutes for its agents, and the process its workers are forked from."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omniload.actors.ray.hosts import late_agent, worker
from omniload.base.errors import ConfigError
from omniload.base.linux.network import LOOPBACK, free_ports

__all__ = ["Listening", "NodePlan", "begin_loading", "places_of", "ports_of", "without_agents"]

_NO_AGENT = shutil.which("cat")
"""Command that reads the pipe held by the raylet, and therefore ends with the raylet."""
_MOST_BYTES = 107
"""Longest path of a Unix socket: the kernel's limit, less the final zero byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where a node listens."""

    address: str = LOOPBACK
    """IP address of this host."""
    ports: range | None = None
    """Ports it listens on; ``None`` for any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """A node to be started."""

    folder: str
    """Folder of its sockets and logs."""
    address: str
    """IP address it listens on."""
    workers: int
    """Number of actor processes that it has room for; 0 if no actor is to run there."""
    object_store_bytes: int
    """Shared memory, in bytes."""
    ports: range | None = None
    """Ports it listens on; ``None`` for any."""
    head: str | None = None
    """Host and port of the head that it joins; ``None`` makes it the head."""


def ports_of(plan: NodePlan) -> dict[str, Any]:
    """Return the ports as Ray's parameters: one for each server, and the rest for processes of actors and ranks."""
    servers = ["runtime_env_agent_port"]
    if plan.ports is not None:
        servers += ["node_manager_port", "object_manager_port"]
        servers += ["gcs_server_port"] if plan.head is None else []
    # The last port of a range is reserved for the lifeline.
    ports = None if plan.ports is None else plan.ports[:-1]
    count = len(servers) + (0 if ports is None else plan.workers + 1)
    is_ranks = plan.head is not None and not plan.workers
    each = f", as for each rank that joins from another host than the plane's: {count} a rank, and one besides"
    why = each if is_ranks else ""
    found = free_ports(plan.address, ports, count, setting="runtime.ports", why=why)
    told: dict[str, Any] = dict(zip(servers, found, strict=False))
    if ports is None:
        return told | ({"gcs_server_port": 0} if plan.head is None else {})
    left = [port for port in ports if port > found[len(servers) - 1]]
    return told | {"worker_port_list": ",".join(map(str, left))}


def places_of(plan: NodePlan) -> dict[str, Any]:
    """Return the folder and the sockets as Ray's parameters; the sockets lie in the folder itself.

    The sockets of Ray's own sessions lie 51 bytes deeper, which leaves 19 of 107 bytes for the folder of temporary
    files. The temporary folder of a Slurm or PBS job has a longer path.

    Raises:
        ConfigError: The paths of the sockets exceed the kernel's limit.
    """
    folder = Path(plan.folder)
    raylet = str(folder / "raylet")
    over = len(os.fsencode(worker.place_of(raylet))) - _MOST_BYTES
    if over > 0:
        above = folder.parents[1]
        size = len(os.fsencode(above))
        raise ConfigError(
            f"{above}, the folder of temporary files, has a path of {size} bytes, but sockets of Ray below it allow "
            f"at most {size - over}; set TMPDIR to a shorter path, such as /tmp"
        )
    return {
        "temp_dir": plan.folder,
        "raylet_socket_name": raylet,
        "plasma_store_socket_name": str(folder / "plasma"),
    }


def without_agents(command: Sequence[str]) -> list[str]:
    """Return a raylet's command line in which substitutes that cost nothing until they are asked replace its agents."""
    told = dict(word.split("=", 1) for word in command if "=" in word)
    place = [told.get(f"--{name}", "") for name in ("node_ip_address", "runtime_env_agent_port")]
    # -I -S: the substitute needs no module of ours, and bare Python starts in 15 ms.
    late = subprocess.list2cmdline([sys.executable, "-I", "-S", late_agent.__file__, *place])
    changed = []
    for word in command:
        option, _, value = word.partition("=")
        if option == "--dashboard_agent_command" and _NO_AGENT:
            changed.append(f"{option}={_NO_AGENT}")
        elif option == "--runtime_env_agent_command" and all(place):
            changed.append(f"{option}={late} {value}")
        else:
            changed.append(word)
    return changed


def begin_loading(raylet: str) -> "subprocess.Popen[bytes]":
    """Start the process that workers of a raylet are forked from; ``raylet`` is the path of the raylet's socket."""
    with socket.socket(socket.AF_UNIX) as listener:
        # This process binds the socket, because workers connect before anything is loaded, and then wait.
        listener.bind(worker.place_of(raylet))
        listener.listen(socket.SOMAXCONN)
        words = [worker.AHEAD, str(listener.fileno()), str(os.getpid())]
        return subprocess.Popen(  # noqa: S603 -- our own module, our own interpreter
            [sys.executable, worker.__file__, *words],
            pass_fds=[listener.fileno()],
            # Ray redirects the output of each worker to files of its own.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C at the terminal is meant for the opener
        )
