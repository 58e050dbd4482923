"""A command that is told to end with its parent."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from snapshot.env.flow import exec_with_parent as leashed

COMMAND = [sys.executable, "-I", leashed.__file__]


def become(*words, parent=None):
    words = [*COMMAND, str(parent or os.getpid()), *words]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)


def test_the_command_takes_the_place_of_the_process_with_its_exit_code_and_input():
    done = become("sh", "-c", "echo $0 $1; exit 7", "a b", "c")

    assert (done.returncode, done.stdout) == (7, "a b c\n")


@pytest.mark.parametrize(
    ("words", "why"),
    [(["no-such-program"], "No such file or directory"), (["/etc/passwd"], "Permission denied")],
)
def test_what_cannot_be_run_is_said_with_an_exit_code_of_its_own(words, why):
    done = become(*words)

    assert (done.returncode, done.stderr) == (leashed.CANNOT_RUN, f"{words[0]}: {why}\n")


def test_a_parent_that_is_gone_already_runs_nothing():
    done = become("echo", "ran", parent=1)

    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "")


def test_a_closed_pipe_ends_the_command_as_in_a_shell():
    done = become("sh", "-c", "kill -PIPE $$")

    assert done.returncode == -signal.SIGPIPE


def test_the_command_is_told_to_end_when_its_parent_is_killed():
    script = (
        "import os, subprocess, sys; "
        "child = subprocess.Popen([*sys.argv[1:], str(os.getpid()), 'sleep', '600']); "
        "print(child.pid, flush=True); child.wait()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-I", "-c", script, *COMMAND], stdout=subprocess.PIPE, text=True
    )
    with parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()

    psutil.wait_procs([child], timeout=60)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
