"""Addresses of servers: every form of the setting, and the refusals, which name the addresses of this host."""

import errno
import os
import re
import socket
from types import SimpleNamespace

import pytest

from omniload.base.errors import ConfigError
from omniload.base.linux import network
from omniload.base.linux.network import (
    host_id,
    interface_toward,
    listening_address,
    why_not_bound,
)


@pytest.fixture(autouse=True)
def interfaces(monkeypatch):
    """Two networks, one of them with two addresses, and an address of another family."""
    found = {
        "lo": ["127.0.0.1"],
        "eth0": ["10.1.2.3"],
        "ib0": ["192.168.7.1", "192.168.7.2"],
        "down": [],
    }
    addresses = {
        name: [SimpleNamespace(family=socket.AF_INET, address=a) for a in own]
        for name, own in found.items()
    }
    addresses["eth0"].append(SimpleNamespace(family=socket.AF_INET6, address="fe80::1"))
    monkeypatch.setattr(network.psutil, "net_if_addrs", lambda: addresses)


@pytest.mark.parametrize(
    ("bind", "address"),
    [
        ("", "127.0.0.1"),
        ("eth0", "10.1.2.3"),
        ("10.0.0.0/8", "10.1.2.3"),
        ("10.1.2.77/24", "10.1.2.3"),
        ("192.168.7.2", "192.168.7.2"),
    ],
)
def test_a_setting_names_one_address_of_this_host(bind, address):
    assert listening_address(bind, setting="runtime.bind") == address


@pytest.mark.parametrize(
    ("bind", "why"),
    [
        ("ib0", r"has \['192.168.7.1', '192.168.7.2'\] there"),
        ("192.168.0.0/16", r"has \['192.168.7.1', '192.168.7.2'\] there"),
        ("down", "has no address there"),
        ("172.16.0.0/12", "has no address there"),
        ("10.1.2.4", "has no address there; its addresses are eth0 10.1.2.3"),
        ("eth9", "no interface of .* and no IPv4 address or network"),
        ("fe80::1", "no interface of .* and no IPv4 address or network"),
        ("10.0.0.0/40", "no interface of .* and no IPv4 address or network"),
        ("auto", "looks towards MASTER_ADDR, and that is not set"),
    ],
)
def test_a_setting_that_names_none_or_several_is_refused_with_those_there_are(bind, why):
    with pytest.raises(ConfigError, match=rf"^runtime.bind is '{bind}'.*{why}"):
        listening_address(bind, setting="runtime.bind")


def test_a_host_is_told_by_its_kernel_and_its_network(monkeypatch, tmp_path):
    mine = host_id()
    (tmp_path / "net").write_text("")
    monkeypatch.setattr(network, "_NETWORK", tmp_path / "net")

    assert host_id() != mine
    assert host_id().rpartition("-")[0] == mine.rpartition("-")[0]


def test_the_interface_towards_a_host_is_the_one_whose_address_packets_leave_from(monkeypatch):
    routes = {"10.1.9.9": "10.1.2.3", "192.168.7.9": "192.168.7.2", "172.16.0.1": "172.16.0.9"}

    def leaving(host, setting):
        if host not in routes:
            raise ConfigError(f"{setting}: no way to {host}")
        return routes[host]

    monkeypatch.setattr(network, "_address_toward", leaving)

    found = [interface_toward(host) for host in ("10.1.9.9", "192.168.7.9", "172.16.0.1", "")]
    assert found == ["eth0", "ib0", None, None]


def a_listener(port, pid, status="LISTEN"):
    return SimpleNamespace(status=status, laddr=("127.0.0.1", port), pid=pid)


@pytest.mark.parametrize(
    ("code", "pid", "said"),
    [
        (
            errno.EADDRINUSE,
            os.getpid(),
            rf"Address already in use, by process {os.getpid()} \(.+\)",
        ),
        (errno.EADDRINUSE, None, "Address already in use"),  # another user's
        (errno.EADDRNOTAVAIL, os.getpid(), "Cannot assign requested address"),
    ],
)
def test_who_has_a_port_is_named_where_this_user_may_know(code, pid, said, monkeypatch):
    found = [a_listener(9465, 1), a_listener(9464, 1, "TIME_WAIT"), a_listener(9464, pid)]
    monkeypatch.setattr(network.psutil, "net_connections", lambda kind: found)

    assert re.fullmatch(said, why_not_bound(OSError(code, os.strerror(code)), 9464))
