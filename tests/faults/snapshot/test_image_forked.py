"""Forked processes: what they report, how they end, and that they never go on as their parent."""

import io
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from fusefs.bridge.process.launch import failure_of, start_daemon
from omniload.base.errors import (
    ConfigError,
    DefectError,
    IntegrityError,
    StateError,
    UnavailableError,
)
from snapshot.image.start.run import DEFECT_CODE, check_alone, fork, start_forked


def started(serve, tmp_path):
    return start_forked(serve, str(tmp_path), log_path=str(tmp_path / "log"))


def test_a_child_ends_with_the_code_it_returns():
    process = fork(lambda: 7)

    assert process.wait() == 7
    assert process.wait() == 7, "asked twice it says the same"


def test_a_child_that_raises_ends_and_does_not_go_on_as_its_parent(tmp_path):
    witness = tmp_path / "went-on"

    def child():
        raise KeyError("defect")

    try:
        process = fork(child)
        assert process.wait() == DEFECT_CODE
    finally:
        with witness.open("a") as file:
            file.write(f"{os.getpid()}\n")

    assert witness.read_text() == f"{os.getpid()}\n"


class Interrupted(io.StringIO):
    def flush(self):
        raise KeyboardInterrupt


def full():
    """Return an output that takes what is written and cannot let go of it."""
    out = Path("/dev/full").open("w")  # noqa: SIM115 -- it ends with the process
    out.write("lost")
    return out


@pytest.mark.parametrize("output", [full, Interrupted])
def test_a_child_that_fails_at_its_last_words_does_not_go_on_as_its_parent(tmp_path, output):
    witness = tmp_path / "went-on"

    def child():
        sys.stdout = output()
        return 3

    try:
        process = fork(child)
        assert process.wait() == 3
    finally:
        with witness.open("a") as file:
            file.write(f"{os.getpid()}\n")

    assert witness.read_text() == f"{os.getpid()}\n"


def test_a_process_without_a_standard_output_forks(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)

    assert fork(lambda: 3).wait() == 3


def test_a_child_that_was_killed_is_told_by_its_signal():
    process = fork(lambda: signal.pause() or 0)

    os.kill(process.pid, signal.SIGKILL)

    assert process.wait() == -signal.SIGKILL
    process.terminate()  # of one that has ended it is nothing


def test_a_daemon_is_usable_when_it_was_started_and_ends_when_told(tmp_path):
    def serve(ready):
        (tmp_path / "usable").touch()
        ready()
        signal.pause()

    daemon = started(serve, tmp_path)

    assert (tmp_path / "usable").exists()
    daemon.terminate()
    assert daemon.wait() == -signal.SIGTERM


def test_a_daemon_is_of_no_terminal_and_says_what_it_says_to_its_log(tmp_path):
    def serve(ready):
        sys.stdout.write("to the log\n")
        (tmp_path / "session").write_text(f"{os.getsid(0)} {os.getpid()}")
        assert os.read(0, 1) == b""
        ready()

    daemon = started(serve, tmp_path)

    assert daemon.wait() == 0
    session, pid = (tmp_path / "session").read_text().split()
    assert session == pid == str(daemon.pid)
    assert (tmp_path / "log").read_text() == "to the log\n"


@pytest.mark.parametrize("kind", [ConfigError, UnavailableError, StateError])
def test_what_keeps_a_daemon_from_serving_is_raised_here(tmp_path, kind):
    def serve(_):
        raise kind("it cannot be")

    with pytest.raises(kind, match="it cannot be"):
        started(serve, tmp_path)

    assert "it cannot be" in (tmp_path / "log").read_text()


def test_other_errors_of_a_daemon_are_errors_of_state(tmp_path):
    def serve(_):
        raise IntegrityError("altered")

    with pytest.raises(StateError, match="altered"):
        started(serve, tmp_path)


def test_a_daemon_with_a_defect_leaves_its_traceback_in_the_log(tmp_path):
    def serve(_):
        raise KeyError("defect")

    with pytest.raises(
        DefectError, match=r"a fault of omniload itself in the .* KeyError: 'defect'"
    ):
        started(serve, tmp_path)

    assert "KeyError: 'defect'" in (tmp_path / "log").read_text()


def test_a_daemon_that_dies_without_a_word_is_told_so(tmp_path):
    def serve(_):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(
        StateError, match=r"was ended by SIGKILL before its mount was usable; its log is .*log"
    ):
        started(serve, tmp_path)


def test_no_process_is_forked_for_a_mount_point_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="is not there"):
        started(lambda ready: ready(), tmp_path / "none")

    assert not (tmp_path / "log").exists()


def test_no_process_is_forked_where_its_log_cannot_be_written(tmp_path):
    log = str(tmp_path / "none" / "log")

    with pytest.raises(ConfigError, match=r"log .*none/log' cannot be written: No such file"):
        start_forked(lambda _: None, str(tmp_path), log_path=log)


def test_a_process_with_another_thread_may_not_be_forked():
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait)
    thread.start()
    try:
        with pytest.raises(StateError, match=r"\d threads cannot be forked"):
            check_alone()
    finally:
        gate.set()
        thread.join()


@pytest.mark.parametrize("log", [None, os.devnull])
def test_no_log_is_named_where_there_is_none(log):
    told = str(failure_of(b"", -9, log))

    assert told == (
        "the daemon was ended by SIGKILL before its mount was usable; start it with --log FILE to see more"
    )
    assert "ended with 7 before" in str(failure_of(b"", 7, log))


def test_a_system_error_of_a_daemon_is_told_in_one_line(tmp_path):
    def serve(_):
        raise OSError(28, "No space left\non device", "/cache/x")

    with pytest.raises(UnavailableError) as caught:
        started(serve, tmp_path)

    assert "No space left on device" in str(caught.value)
    assert "/cache/x" in str(caught.value)
    assert "\n" not in str(caught.value)


BROKEN = """
import sys
from fusefs.bridge.process.launch import run_daemon

def serve(settings, ready):
    raise KeyError("defect")

def main():
    run_daemon(serve, role="broken")
"""


def test_a_daemon_of_its_own_interpreter_tells_its_defect_too(tmp_path, monkeypatch):
    (tmp_path / "broken_daemon.py").write_text(BROKEN + "main()\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[3]}")
    (tmp_path / "mnt").mkdir()

    with pytest.raises(DefectError, match="in the broken daemon: KeyError: 'defect'"):
        start_daemon("broken_daemon", b"", str(tmp_path / "mnt"), log_path=os.devnull)
