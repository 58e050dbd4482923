"""A process that is struck: when it ended, and when another one was in its place. A host that is cut off."""

import os
import signal
import subprocess
import threading

import pytest

from benchmarks.faults.hosts import cut_for
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


def way_from(host):
    """Return the way that leads out of a host; empty while it is cut off."""
    words = ["ip", "-n", host, "route", "show", "default"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("seconds", [0.01, 3600.0])
def test_a_host_is_cut_off_for_a_while_or_until_all_is_over(hosts, seconds):
    before = way_from(hosts[1])
    assert before

    with cut_for(hosts[1], seconds) as is_mended:
        if seconds < 1:
            assert is_mended.wait(60)
        else:
            assert (way_from(hosts[1]), is_mended.is_set()) == ("", False)

    assert is_mended.is_set()
    assert way_from(hosts[1]) == before
