"""The stand-in for an agent of Ray: it becomes the agent once it is asked, and nobody else gets the port meanwhile."""

import socket
import subprocess
import sys
import time

import pytest

from tests.house.modules import ROOT

WITHIN_S = 30
AGENT = """
import socket, sys

def bound(reuse):
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:
            one.bind(("127.0.0.1", int(sys.argv[1])))
            one.listen()
        except OSError as error:
            return error.strerror
        return "listens"

# As any other program binds it, and as asyncio, and so Ray's agent, does.
print(bound(0), "|", bound(1))
"""


@pytest.fixture
def stand_in():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-I", "-S", str(ROOT / "omniload/actors/ray/hosts/late_agent.py")]
    agent = [sys.executable, "-c", AGENT, str(port)]
    with subprocess.Popen(
        [*command, "127.0.0.1", str(port), *agent],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        process.port = port
        yield process
        process.kill()


def until_it_listens(port):
    """Connect to it once it is there; return the connection."""
    until_s = time.monotonic() + WITHIN_S
    while time.monotonic() < until_s:
        connection = socket.socket()
        connection.settimeout(WITHIN_S)
        if connection.connect_ex(("127.0.0.1", port)) == 0:
            return connection
        connection.close()
        time.sleep(0.01)
    raise AssertionError("it does not listen")


def test_the_port_stays_taken_until_the_agent_that_was_asked_for_has_bound_it(stand_in):
    with until_it_listens(stand_in.port) as connection:
        # Reset or ended, not kept: who asks tries again.
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
        out, _ = stand_in.communicate(timeout=WITHIN_S)

    assert out == "Address already in use | listens\n"


def test_it_ends_with_the_raylet_that_asked_for_nothing(stand_in):
    stand_in.stdin.close()

    assert stand_in.wait(WITHIN_S) == 0
    assert stand_in.stdout.read() == ""
