"""A node of Ray that is to be started: its ports, what stands in for its agents, what its workers are forked from."""

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
"""It reads the pipe that the raylet holds, and ends with it."""
_MOST_BYTES = 107
"""Of the path of a Unix socket: what the kernel takes, less the zero behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where a node listens."""

    address: str = LOOPBACK
    """IP address of this host."""
    ports: range | None = None
    """``None`` for any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """A node to be started."""

    folder: str
    """Where its sockets and logs go."""
    address: str
    """IP address it listens on."""
    workers: int
    """Processes of actors that there is room for; 0 where none is to run."""
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
    """Return what Ray is told of its folder and its sockets: they lie in that folder itself.

    Those of a session of Ray's lie 51 bytes deeper, which leaves 19 of 107 for the folder of temporary files; that of
    a job of Slurm or PBS takes more.

    Raises:
        ConfigError: Their paths are longer than those of sockets may be.
    """
    folder = Path(plan.folder)
    raylet = str(folder / "raylet")
    over = len(os.fsencode(worker.place_of(raylet))) - _MOST_BYTES
    if over > 0:
        above = folder.parents[1]
        size = len(os.fsencode(above))
        raise ConfigError(
            f"{above}, the folder of temporary files, is a path of {size} bytes, and sockets of Ray below it "
            f"take one of {size - over} at most; set TMPDIR to a shorter one, such as /tmp"
        )
    return {
        "temp_dir": plan.folder,
        "raylet_socket_name": raylet,
        "plasma_store_socket_name": str(folder / "plasma"),
    }


def without_agents(command: Sequence[str]) -> list[str]:
    """Return a raylet's command line, changed to start in place of its agents what costs nothing until it is asked."""
    told = dict(word.split("=", 1) for word in command if "=" in word)
    place = [told.get(f"--{name}", "") for name in ("node_ip_address", "runtime_env_agent_port")]
    # -I -S: it needs no module of ours, and Python alone is up in 15 ms.
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
    """Begin the process that workers of a raylet are forked from, by the path of the raylet's socket."""
    with socket.socket(socket.AF_UNIX) as listener:
        # Here, and not by the process: workers connect before anything is loaded, and wait for their answers.
        listener.bind(worker.place_of(raylet))
        listener.listen(socket.SOMAXCONN)
        words = [worker.AHEAD, str(listener.fileno()), str(os.getpid())]
        return subprocess.Popen(  # noqa: S603 -- our own module, our own interpreter
            [sys.executable, worker.__file__, *words],
            pass_fds=[listener.fileno()],
            # A worker has files of Ray's for what it writes.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C at the terminal is for the opener
        )
