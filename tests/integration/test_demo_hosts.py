"""The demo on two hosts: the hosts themselves, what is said where there can be none, and in soak all of it."""

import os
import signal
import sys
from pathlib import Path

import pytest

from examples.two_hosts import ADDRESSES, NAMES, HostsError, TwoHosts
from tests.house.modules import ROOT
from tests.support.every_process import every_process
from tests.support.programs import finished

LIMIT_S = 60
LISTENS = """
import socket
with socket.create_server(("0.0.0.0", 5000)) as server:
    connection, (address, _) = server.accept()
    connection.sendall(f"{socket.gethostname()} hears {address}".encode())
"""
ASKS = """
import socket, sys, time
for _ in range(1_000):
    try:
        connection = socket.create_connection(("one", 5000), timeout=20)
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
print(socket.gethostname(), connection.recv(100).decode())
"""


@pytest.fixture(scope="module")
def can_be_made(tmp_path_factory):
    try:
        with TwoHosts(tmp_path_factory.mktemp("etc")):
            pass
    except HostsError as error:
        pytest.skip(str(error))


def test_two_hosts_have_names_and_a_wire_and_leave_nothing(can_be_made, tmp_path):
    with TwoHosts(tmp_path / "etc") as hosts:
        spaces = {Path(f"/proc/{pid}/ns/net").readlink() for pid in (*hosts.holders(), os.getpid())}
        with (tmp_path / "said").open("wb") as said:
            listening = hosts.start(0, [sys.executable, "-c", LISTENS])
            asking = hosts.start(1, [sys.executable, "-c", ASKS], said)
            sleeping = hosts.start(1, ["sleep", "3600"])
            codes = [each.wait(LIMIT_S) for each in (listening, asking)]
        assert hosts.processes() == hosts.processes(1) == [sleeping.pid]

    assert (codes, len(spaces)) == ([0, 0], 3)
    assert (tmp_path / "said").read_text().split() == [
        *(NAMES[1], NAMES[0], "hears", ADDRESSES[1]),
    ]
    assert not hosts.processes()
    assert sleeping.returncode == -signal.SIGTERM


def test_where_there_can_be_none_is_said_why_and_what_to_do(tmp_path, monkeypatch):
    refusing = tmp_path / "unshare"
    refusing.write_text(
        "#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n"
    )
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    with (
        pytest.raises(
            HostsError, match=r"Operation not permitted: .*sudo make demo-hosts.*--privileged"
        ),
        TwoHosts(tmp_path / "etc"),
    ):
        pass


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.ray
def test_the_demo_on_two_hosts_has_the_samples_of_an_unbroken_run(can_be_made):
    done = finished([sys.executable, "-m", "examples.demo_hosts"], limit_s=1200, cwd=ROOT)

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "kill -9 " in done.stdout
    assert "proved: steps 0 to 59" in done.stdout
    names = [" ".join(process.cmdline()) for process in every_process() if process.is_running()]
    assert not [name for name in names if "demo/hosts/train.yaml" in name]
