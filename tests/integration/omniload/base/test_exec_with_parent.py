"""Processes and commands that end with their parent, also if the parent is process 1 of a container."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from omniload.base.linux import exec_with_parent

CHILD = """
import os, signal, sys
from omniload.base.linux.exec_with_parent import end_with_parent
if not end_with_parent(signal.SIGKILL, int(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
print("alive")
"""
COMMAND = [sys.executable, "-I", exec_with_parent.__file__]


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

    assert (done.returncode, done.stderr) == (exec_with_parent.CANNOT_RUN, f"{words[0]}: {why}\n")


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


def a_child(parent):
    words = [sys.executable, "-c", CHILD, str(parent)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)


def test_a_process_lives_while_its_parent_is_the_one_it_was_told_of():
    child = a_child(os.getpid())

    assert (child.returncode, child.stdout) == (0, "alive\n"), child.stderr


def test_a_process_of_another_parent_than_it_was_told_of_ends():
    child = a_child(os.getppid())

    assert (child.returncode, child.stdout) == (-signal.SIGKILL, "")


def test_a_process_ends_with_its_parent():
    parent = """
import os, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1] + "sys.stdout.flush(); signal.pause()", str(os.getpid())],
    stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), flush=True)
os._exit(0)
"""
    # The child keeps the parent's standard error open, and the test waits for its end.
    ended = subprocess.run(
        [sys.executable, "-c", parent, CHILD],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert ended.stdout == "alive\n"
