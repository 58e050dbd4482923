"""The stand-in for an agent of Ray: it becomes the agent on the first request, and keeps its port until then."""

import socket
import subprocess
import sys
import time

import psutil
import pytest

from tests.house.modules import ROOT

WITHIN_S = 120
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
    with socket.socket() as held:
        # The port is bound until the agent listens there, because a released port may be given to any process.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        program = ROOT / "omniload/actors/ray/hosts/late_agent.py"
        agent = [sys.executable, "-c", AGENT, str(port)]
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(program), "127.0.0.1", str(port), *agent],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        process.port = port
        wait_until_it_listens(process)
    with process:
        yield process
        process.kill()


def wait_until_it_listens(process):
    """Wait without a connection, because it becomes the agent at the first connection."""
    until_s = time.monotonic() + WITHIN_S
    while time.monotonic() < until_s:
        assert process.poll() is None, "it has ended"
        of_it = psutil.Process(process.pid).net_connections("tcp")
        if any(each.status == psutil.CONN_LISTEN for each in of_it):
            return
        time.sleep(0.01)
    process.kill()
    raise AssertionError("it does not listen")


def test_the_port_stays_taken_until_the_agent_that_was_asked_for_has_bound_it(stand_in):
    # A very early connection is reset or closed, not kept open, so the caller tries again.
    with (
        pytest.raises(ConnectionResetError),
        socket.create_connection(("127.0.0.1", stand_in.port), WITHIN_S) as connection,
    ):
        connection.recv(1)
    out, _ = stand_in.communicate(timeout=WITHIN_S)

    assert out == "Address already in use | listens\n"


def test_it_ends_with_the_raylet_that_asked_for_nothing(stand_in):
    stand_in.stdin.close()

    assert stand_in.wait(WITHIN_S) == 0
    assert stand_in.stdout.read() == ""
