"""The relay of throttled data nodes over real sockets: every byte, both directions, both ends."""

import socket
import subprocess
import sys
import threading

import pytest

from tests.support.hdfs.cluster import ROOT
from tests.support.ports import free_port

DATA = bytes(range(256)) * 2000


@pytest.fixture
def target():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def relay(target):
    port = free_port()
    where = ["127.0.0.2", str(port), *map(str, target.getsockname())]
    command = [sys.executable, "-m", "tests.support.hdfs.throttle", *where, "100e6"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert process.stdout.readline() == b"up\n"
        yield "127.0.0.2", port
    finally:
        process.kill()
        process.communicate()


def received(end):
    parts = []
    while data := end.recv(1 << 16):
        parts.append(data)
    return b"".join(parts)


def test_all_bytes_pass_in_both_directions_and_the_ends_are_told(target, relay):
    def answer():
        peer, _ = target.accept()
        with peer:
            peer.sendall(received(peer)[::-1])

    answering = threading.Thread(target=answer)
    answering.start()
    with socket.create_connection(relay, timeout=60) as client:
        client.sendall(DATA)
        client.shutdown(socket.SHUT_WR)
        found = received(client)
    answering.join()

    assert found == DATA[::-1]


def test_a_target_that_is_gone_ends_the_connection(target, relay):
    target.close()

    with socket.create_connection(relay, timeout=60) as client:
        assert client.recv(1) == b""
