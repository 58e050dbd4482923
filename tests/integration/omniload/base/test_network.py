"""Free ports for a future server, and addresses at which a host reaches itself."""

import errno
import socket

import pytest

from omniload.base.errors import ConfigError
from omniload.base.linux.network import LOOPBACK, free_ports, require_reachable
from tests.support.ports import free_port


def test_a_port_is_free_once_nobody_listens_though_the_kernel_remembers_its_connections():
    port = free_port()  # a port that the kernel gives to no other connection meanwhile
    with (
        socket.create_server((LOOPBACK, port)) as server,
        socket.create_connection((LOOPBACK, port)) as client,
    ):
        held, _ = server.accept()
        with pytest.raises(ConfigError, match=r"0 ports of runtime\.ports.*needed, by rank 3;"):
            free_ports(
                LOOPBACK, range(port, port + 1), 1, setting="runtime.ports", why=", by rank 3"
            )
        server.close()
        held.close()  # the server's end closes first: the kernel keeps it for a minute
        assert client.recv(1) == b""

    assert free_ports(LOOPBACK, range(port, port + 1), 1, setting="runtime.ports") == [port]


def test_a_host_that_does_not_reach_itself_is_refused_with_what_to_bring_up(monkeypatch):
    require_reachable(LOOPBACK)

    with pytest.raises(
        ConfigError, match=r"each other at 192\.0\.2\.1 \(Cannot assign.*its interface"
    ):
        require_reachable("192.0.2.1")  # an address for documentation: no host has it

    def refuse(*_):
        raise OSError(errno.ENETUNREACH, "as where the loopback interface is down")

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1 \(Network is unreachable\).*lo up.*local"):
        require_reachable(LOOPBACK)
