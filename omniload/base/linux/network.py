"""The kernel's network: the address at which a server of this process listens, and the identity of this host."""

import errno
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from omniload.base.errors import ConfigError

__all__ = [
    "LOOPBACK",
    "free_ports",
    "host_id",
    "interface_toward",
    "listening_address",
    "require_reachable",
    "why_not_bound",
]

# For any other address, 127.0.0.2 included, Ray's servers listen on every interface (0004).
LOOPBACK = "127.0.0.1"
"""Default address of servers."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_CONNECTED_S = 5.0
"""Longest time that a connection of this host to itself may take."""


def host_id() -> str:
    """Return an identifier of this host: the kernel's boot and this process's network namespace.

    Host names are no identifiers, because containers share them, and so do network namespaces of one machine.
    """
    # The boot, not the disk, because cloned machines share /etc/machine-id.
    boot = _BOOT_ID.read_text(encoding="ascii").strip()
    return f"{boot}-{_NETWORK.stat().st_ino}"


def require_reachable(address: str) -> None:
    """Check that this process can connect to itself at an address of its host.

    Raises:
        ConfigError: It cannot, for example because the loopback interface of a container is down, or has only IPv6.
    """
    try:
        with socket.create_server((address, 0)) as server:
            socket.create_connection(server.getsockname(), _CONNECTED_S).close()
    except OSError as error:
        said = "no answer" if error.errno is None else os.strerror(error.errno)
        remedy = "bring up its loopback interface (ip link set lo up), with that address"
        raise ConfigError(
            f"processes of this host cannot reach each other at {address} ({said}), over which a data plane on Ray "
            f"speaks; {remedy if address == LOOPBACK else 'see to its interface and firewall'}, or set runtime.kind to "
            "local where one process holds all ranks"
        ) from error


def listening_address(bind: str, *, setting: str, toward: str | None = None) -> str:
    """Return the IPv4 address of this host that a setting means.

    Args:
        bind: Empty for loopback; ``auto``; an interface (``eth0``); a network (``10.0.0.0/8``) in which this host has
            one address; or an address of this host.
        setting: Name of the setting, for messages.
        toward: Host for ``auto``; the address of the route to this host is taken.

    Raises:
        ConfigError: This host has no such address, or more than one.
    """
    if not bind:
        return LOOPBACK
    if bind == "auto":
        return _address_toward(toward, setting)
    own = _own_addresses()
    if bind in own:
        found: Sequence[str] = own[bind]
    else:
        network = _network_of(bind, setting, own)
        found = [a for one in own.values() for a in one if ipaddress.ip_address(a) in network]
    if len(found) != 1:
        raise ConfigError(
            f"{setting} is {bind!r}, and {socket.gethostname()} has {list(found) or 'no address'} there; its addresses "
            f"are {_shown(own)}: name an interface, or a network that holds one of them"
        )
    return found[0]


def free_ports(
    address: str, ports: range | None, count: int, *, setting: str, why: str = ""
) -> list[int]:
    """Return currently free ports of ``address``; another process may take one of them at any moment.

    Args:
        address: IP address of this host.
        ports: The range; ``None`` for any.
        count: Number of ports.
        setting: Name of the setting with the range, for messages.
        why: Reason for the number of ports, for messages.

    Raises:
        ConfigError: The range has too few free ports.
    """
    # 0 is any port that the kernel finds free.
    candidates = [0] * count if ports is None else ports
    held: list[socket.socket] = []
    try:
        for port in candidates:
            if len(held) == count:
                break
            probe = socket.socket()
            # Like servers: for a minute the kernel remembers connections of an earlier listener, such as that of a job
            # that is started again.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                probe.close()
                continue
            # Kept open until all are found, so that none is found twice.
            held.append(probe)
        found = [int(probe.getsockname()[1]) for probe in held]
    finally:
        for probe in held:
            probe.close()
    if len(found) < count:
        where = "" if ports is None else f" of {setting} {ports[0]}-{ports[-1]}"
        raise ConfigError(
            f"{len(found)} ports{where} are free on {address}, and {count} are needed{why}; give a larger range"
        )
    return found


def why_not_bound(error: OSError, port: int) -> str:
    """Return why a TCP port could not be bound, with the process that has it if this user may know.

    All connections of the host and open files of the user are searched, so this is only for messages.
    """
    why = error.strerror or str(error)
    if error.errno != errno.EADDRINUSE:
        return why
    # The process ended meanwhile, or belongs to another user.
    with suppress(psutil.Error, OSError):
        for found in psutil.net_connections("tcp"):
            # A listening connection has an address; other connections may have none.
            listens = found.status == psutil.CONN_LISTEN and found.laddr
            if listens and listens[1] == port and found.pid:
                return f"{why}, by process {found.pid} ({psutil.Process(found.pid).name()})"
    return why


def interface_toward(host: str) -> str | None:
    """Return the interface of this host that packets to ``host`` leave from; ``None`` if there is no route."""
    try:
        address = _address_toward(host, "the interface")
    except ConfigError:
        return None
    return next((name for name, own in _own_addresses().items() if address in own), None)


def _address_toward(host: str | None, setting: str) -> str:
    """Return the address that packets to ``host`` leave from; no packet is sent."""
    if not host:
        raise ConfigError(
            f"{setting} is 'auto', which looks towards MASTER_ADDR, and that is not set; name an interface"
        )
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # The discard port: a datagram socket connects without sending anything, and only then has an address.
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"{setting} is 'auto', and there is no way to MASTER_ADDR {host!r}: {error}; name an interface"
        ) from error


def _network_of(bind: str, setting: str, own: Mapping[str, Sequence[str]]) -> ipaddress.IPv4Network:
    try:
        return ipaddress.IPv4Network(bind, strict=False)
    except ValueError:
        raise ConfigError(
            f"{setting} is {bind!r}, which is no interface of {socket.gethostname()} and no IPv4 address or network; "
            f"it has {_shown(own)}"
        ) from None


def _own_addresses() -> dict[str, list[str]]:
    """Return the IPv4 addresses of each interface."""
    return {
        name: [a.address for a in addresses if a.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }


def _shown(own: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{name} {a}" for name, found in sorted(own.items()) for a in found) or "none"
