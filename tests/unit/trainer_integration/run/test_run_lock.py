"""One launcher at a time on a run's folder."""

import os
import socket
import subprocess
import sys

import pytest

from omniload.base.errors import StateError
from trainer_integration.run.run_lock import LOCK_NAME, RunLock


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
