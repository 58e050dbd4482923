"""A start that is given up: interrupted, or with nobody left who waits for it. Nothing stays mounted."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fusefs.bridge.process import launch
from fusefs.bridge.process.launch import run_daemon, start_daemon
from fusefs.mounts import supervisor
from fusefs.mounts.lifecycle import MountConfig
from fusefs.mounts.supervisor import watch
from omniload.base.errors import StateError
from tests.support.fusefs.proof import NO_MOUNT, WHY_NO_MOUNT

DAEMON = "tests.support.fusefs.interrupting_daemon"


@pytest.fixture
def signals():
    """Have SIGINT be Python's own, and put back what the test changes."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def is_alive(process):
    return Path(f"/proc/{process}").exists()


@pytest.mark.parametrize("stubborn", [(), ("stubborn",)])
def test_a_daemon_whose_start_is_interrupted_is_told_to_end_and_gone(
    signals, tmp_path, monkeypatch, stubborn
):
    monkeypatch.setattr(launch, "_GIVEN_UP_WITHIN_S", 0.2 if stubborn else 60.0)
    said = tmp_path / "said"

    with pytest.raises(KeyboardInterrupt):
        start_daemon(DAEMON, b"", str(tmp_path), words=(str(said), *stubborn))

    process, *told = said.read_text(encoding="utf-8").split()
    assert told == ["told", "to", "end", "by", str(int(signal.SIGTERM))]
    assert not is_alive(process)


def test_a_daemon_that_ends_before_it_took_its_settings_is_told_by_how_it_ended(tmp_path):
    settings = bytes(1 << 20)  # more than a pipe holds: nobody reads them

    with pytest.raises(StateError, match="the daemon ended with 1 before its mount was usable"):
        start_daemon("no_such_module", settings, str(tmp_path), log_path=os.devnull)


def test_a_daemon_that_is_ready_when_its_starter_has_gone_ends_as_by_a_signal(signals, monkeypatch):
    waits, told = os.pipe()
    os.close(waits)
    ended = []

    def serve(settings, ready):
        signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
        ready()

    monkeypatch.setattr(sys, "argv", ["daemon", str(told)])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO()))
    monkeypatch.setattr(launch.gc, "freeze", lambda: None)
    monkeypatch.setattr(launch, "set_up_logging", lambda *_, **__: None)
    run_daemon(serve, role="test")

    assert ended == [signal.SIGTERM]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(told)


def test_a_watch_that_is_told_to_end_while_its_daemon_starts_ends(signals, monkeypatch, tmp_path):
    def start(config, **chosen):
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the signal ended nothing")

    monkeypatch.setattr(supervisor, "start", start)

    with pytest.raises(SystemExit) as ended:
        watch(MountConfig(store="mem:", mountpoint=str(tmp_path)), lambda: None)

    assert ended.value.code == 128 + signal.SIGTERM


STARTER = """
import os, sys
from fusefs.bridge.process import launch
from fusefs.mounts.lifecycle import MountConfig, start


class Killed:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def read(self):
        os._exit(0)  # as killed, with the daemon on its way


launch.os.fdopen = lambda *_: Killed()
store, mountpoint, log, bridge, watched = sys.argv[1:]
config = MountConfig(store=store, mountpoint=mountpoint, bridge=bridge)
start(config, log_path=log, watched=watched == "True")
"""


@pytest.mark.fuse
@pytest.mark.scripts_start_warm
@pytest.mark.skipif(NO_MOUNT, reason=WHY_NO_MOUNT)
@pytest.mark.parametrize(
    ("bridge", "watched"), [("device", False), ("device", True), ("pyfuse3", False)]
)
def test_a_mount_whose_starter_was_killed_takes_itself_away(tmp_path, bridge, watched):
    store, mountpoint, log = (tmp_path / name for name in ("store", "mnt", "log"))
    store.mkdir()
    mountpoint.mkdir()
    os.mkfifo(log)
    reading = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reading, True)

    subprocess.run(
        [sys.executable, "-c", STARTER, store, mountpoint, log, bridge, str(watched)], check=True
    )
    with os.fdopen(reading, encoding="utf-8") as pipe:
        said = pipe.read()  # ends with the last process that logs there

    assert "has gone before it was ready" in said
    assert "Traceback" not in said
    assert not os.path.ismount(mountpoint)
