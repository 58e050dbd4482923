"""One launcher at a time on a run's folder."""

import os
import socket
import subprocess
import sys

import pytest

from omniload.base.errors import StateError
from trainer_integration.run.run_lock import LOCK_NAME, RunLock, running_or_cut_off


def test_a_folder_that_is_held_is_refused_with_the_holder(tmp_path):
    with (
        RunLock(tmp_path / "run"),
        pytest.raises(
            StateError, match=f"by a launcher, process {os.getpid()} on .*; wait for its end"
        ),
    ):
        RunLock(tmp_path / "run")


def test_a_folder_that_was_let_go_is_taken(tmp_path):
    with RunLock(tmp_path / "run"):
        pass

    with RunLock(tmp_path / "run"):
        assert (
            tmp_path / "run" / LOCK_NAME
        ).read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"


def test_a_refused_launcher_does_not_take_the_holders_name_away(tmp_path):
    with RunLock(tmp_path):
        (tmp_path / LOCK_NAME).write_text("4711\n")

        with pytest.raises(StateError, match="4711"):
            RunLock(tmp_path)

        assert (tmp_path / LOCK_NAME).read_text() == "4711\n"


def test_a_holder_that_was_killed_holds_no_longer(tmp_path):
    program = """
import os, sys
from pathlib import Path
from trainer_integration.run.run_lock import RunLock
RunLock(Path(sys.argv[1]))
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    left = (tmp_path / LOCK_NAME).read_text()

    with RunLock(tmp_path):
        assert left != (tmp_path / LOCK_NAME).read_text()


def test_a_run_without_an_end_is_told_to_run_or_to_be_cut_off_by_who_holds_its_folder(tmp_path):
    here = f"process {os.getpid()} on {socket.gethostname()}"
    assert running_or_cut_off(tmp_path) == "running or cut off"  # a copy without the lock
    with RunLock(tmp_path):
        assert running_or_cut_off(tmp_path) == f"running, in {here}"
        (tmp_path / LOCK_NAME).write_text("")  # taken this moment
        assert running_or_cut_off(tmp_path) == "running"
    (tmp_path / LOCK_NAME).write_text(f"{here}\n")
    assert running_or_cut_off(tmp_path) == f"cut off: {here} is gone"


def test_of_a_launcher_on_another_host_whose_lock_is_not_seen_neither_is_said(tmp_path):
    (tmp_path / LOCK_NAME).write_text("process 7 on elsewhere\n")

    assert running_or_cut_off(tmp_path) == "running or cut off, in process 7 on elsewhere"
