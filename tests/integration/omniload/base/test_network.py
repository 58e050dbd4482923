"""Ports that are found free for a server to come."""

import socket

import pytest

from omniload.base.errors import ConfigError
from omniload.base.linux.network import LOOPBACK, free_ports
from tests.support.ports import free_port


def test_a_port_is_free_once_nobody_listens_though_the_kernel_remembers_its_connections():
    port = free_port()  # none that the kernel gives to a connection of somebody else meanwhile
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
        held.close()  # the server's end first: the kernel keeps it for a minute
        assert client.recv(1) == b""

    assert free_ports(LOOPBACK, range(port, port + 1), 1, setting="runtime.ports") == [port]
