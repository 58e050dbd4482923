"""A process that is struck, or starves: when it ended, and when another was in its place. A host that is cut off."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.faults import starving
from benchmarks.faults.hosts import cut_for
from benchmarks.faults.starving import SHARE, short_for, starved_for
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


BUSY = "print(flush=True)\nwhile True: pass"
WANTS_MEMORY = "print(flush=True)\nkept = []\nwhile True: kept.append(bytearray(b'x') * (1 << 20))"


@pytest.fixture
def running(request):
    with subprocess.Popen([sys.executable, "-c", request.param], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield psutil.Process(process.pid)
        process.kill()


def may_make_groups():
    return any(os.access(f"/sys/fs/cgroup/{name}", os.W_OK) for name in ("cpu", "cpu.max"))


@pytest.mark.parametrize("running", [BUSY], indirect=True)
@pytest.mark.parametrize("in_group", [True, False])
def test_one_that_starves_gets_a_part_of_a_core_until_that_is_over(running, in_group, monkeypatch):
    if not in_group:
        monkeypatch.setattr(starving, "cpu_group", refuse)
    elif not may_make_groups():
        pytest.skip("no group of the kernel may be made here")
    group = Path(f"/proc/{running.pid}/cgroup").read_text()

    with starved_for(running.pid, 3600.0) as (how, is_over):
        taken_s, began_s = sum(running.cpu_times()[:2]), time.monotonic()
        time.sleep(1.0)
        share = (sum(running.cpu_times()[:2]) - taken_s) / (time.monotonic() - began_s)
        assert not is_over.is_set()

    assert ("group" in how, is_over.is_set()) == (in_group, True)
    assert share < 10 * SHARE  # who takes turns with it comes late on a busy machine
    assert Path(f"/proc/{running.pid}/cgroup").read_text() == group
    assert running.status() != psutil.STATUS_STOPPED


def test_a_group_that_stays_busy_is_over_in_time_and_ended_behind_it(monkeypatch):
    answers = iter([OSError(errno.EBUSY, "busy"), None])
    monkeypatch.setattr(starving, "cpu_group", lambda *_: lambda: answer(next(answers)))

    with starved_for(os.getpid(), 0.01) as (_, is_over):
        assert is_over.wait(60)

    assert next(answers, "ended") == "ended"


def answer(error):
    if error is not None:
        raise error


@pytest.mark.parametrize("running", [BUSY], indirect=True)
def test_turns_that_end_by_an_error_leave_no_process_stopped(running, monkeypatch):
    send, sent = psutil.Process.send_signal, []

    def fails_once(process, number):
        sent.append(number)
        if sent.count(signal.SIGCONT) == 1 and number == signal.SIGCONT:
            raise psutil.AccessDenied(process.pid)
        send(process, number)

    monkeypatch.setattr(psutil.Process, "send_signal", fails_once)
    monkeypatch.setattr(starving, "cpu_group", refuse)

    with starved_for(running.pid, 1.0) as (_, is_over):
        assert is_over.wait(60)

    assert sent == [signal.SIGSTOP, signal.SIGCONT, signal.SIGCONT]
    assert running.status() != psutil.STATUS_STOPPED


def refuse(*_):
    raise PermissionError("no group may be made")


@pytest.mark.parametrize("running", [WANTS_MEMORY], indirect=True)
def test_one_that_gets_no_more_memory_is_ended_once_it_wants_some(running):
    with short_for(running.pid, 3600.0):
        assert running.wait(60) is not None
