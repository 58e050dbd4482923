"""A process that is struck: when it ended, and when another one was in its place."""

import os
import signal
import subprocess
import threading

import pytest

from benchmarks.faults.striking import StruckProcess


@pytest.fixture
def process():
    with subprocess.Popen(["sleep", "3600"]) as process:
        yield process
        process.kill()


def test_one_that_is_killed_is_over_once_another_is_in_its_place(process):
    asked, is_replaced = threading.Event(), threading.Event()
    answers = iter([False, False])

    def looked():
        asked.set()
        return next(answers, True) and is_replaced.is_set()

    struck = StruckProcess(process.pid, signal.SIGKILL, looked)
    assert asked.wait(60)
    assert (struck.ended_s is not None, struck.is_over()) == (True, False)

    is_replaced.set()
    struck.wait()

    assert struck.is_over()
    assert 0 < struck.ended_s < struck.replaced_s


def test_one_that_is_stopped_has_ended_once_somebody_notices(process):
    struck = StruckProcess(process.pid, signal.SIGSTOP, lambda: True)
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
    assert struck.ended_s is None

    process.kill()
    struck.wait()

    assert struck.is_over()
