"""Ending with one's parent: also when that is process 1 of a container."""

import os
import signal
import subprocess
import sys

_CHILD = """
import os, sys
from trainer_integration.run.parent_death import die_with
die_with(int(sys.argv[1]))
print("alive")
"""


def a_child(parent_pid):
    return subprocess.run(
        [sys.executable, "-c", _CHILD, str(parent_pid)], capture_output=True, text=True, check=False
    )


def test_a_child_lives_while_its_parent_is_the_one_it_was_told_of():
    child = a_child(os.getpid())

    assert child.returncode == 0, child.stderr
    assert child.stdout == "alive\n"


def test_a_child_of_another_process_than_it_was_told_of_ends():
    child = a_child(os.getppid())

    assert child.returncode == -signal.SIGKILL
    assert child.stdout == ""


def test_a_child_ends_with_its_parent():
    parent = """
import os, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1] + "import signal; sys.stdout.flush(); signal.pause()", str(os.getpid())],
    stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), flush=True)
os._exit(0)
"""
    # The child holds the parent's standard error, whose end is waited for here.
    ended = subprocess.run(
        [sys.executable, "-c", parent, _CHILD],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert ended.stdout == "alive\n"
