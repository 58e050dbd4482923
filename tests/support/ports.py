"""Ports for programs that must know their port before they listen: until then any other program may take it.

A port that the kernel chose is released and may then be given to the next connection of any process, and parallel
tests open hundreds of connections. These ports lie in a range from which the kernel chooses none, and are drawn from
thousands.
"""

import random
import socket
from contextlib import suppress
from pathlib import Path

__all__ = ["free_port", "free_ports"]

_LEAST = 20_000
"""Ray's workers listen below this port, and the kernel chooses ports above those that are taken here."""


def free_port() -> int:
    """Return a port of this machine on which no process listens and which the kernel gives to no connection."""
    (port,) = free_ports(1)
    return port


def free_ports(count: int) -> list[int]:
    """Return ``count`` free ports, all different."""
    ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    below = int(ephemeral[0]) if int(ephemeral[0]) > _LEAST + 5_000 else 1 << 16
    found: set[int] = set()
    while len(found) < count:
        port = random.SystemRandom().randrange(_LEAST, below)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.add(port)
    return list(found)
