"""Processes of other members: their end is reported at once, and only to watchers that have not released them."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import psutil
import pytest

pytest.importorskip("ray")

from omniload.actors.ray import cluster
from omniload.actors.ray.cluster import PrivateCluster
from omniload.actors.ray.hosts.member_processes import EndWatch
from omniload.actors.ray.hosts.node_plan import Listening
from omniload.actors.ray.processes import HeldProcess, Opener, Process
from omniload.base.errors import ConfigError, UnavailableError
from omniload.base.linux.cores import TaskRoom

LIMIT_S = 120.0
WITH_A_THREAD = """
import sys, threading
begun = threading.Thread(target=sys.stdin.readline)
begun.start()
print(begun.native_id, flush=True)
begun.join()
threading.Event().wait()
"""
"""Ends its thread when it reads a line, and continues."""
WITHOUT_HUGE_PAGES = """
from pathlib import Path
from omniload.base.linux.calls import forgo_huge_pages
forgo_huge_pages()
print(Path("/proc/self/status").read_text())
"""


def wait_until(done):
    until_s = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def are_threads_watched():
    """Return whether this Linux reports the end of a single thread."""
    begun = threading.Event()
    thread = threading.Thread(target=begun.wait)
    thread.start()
    try:
        os.close(os.pidfd_open(thread.native_id, os.O_EXCL))
    except OSError:
        return False
    finally:
        begun.set()
    return True


@pytest.fixture
def started():
    """Start processes that end with their input."""
    made = []

    def start():
        command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        made.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        return made[-1], HeldProcess(Process(made[-1].pid, Process.own().place))

    yield start
    for process in made:
        process.kill()
        process.communicate()


@pytest.fixture
def watch():
    made = EndWatch()
    yield made
    made.close()


def test_each_end_is_told_once_whoever_ends_the_process(started, watch):
    told = queue.Queue()
    (_, held), (second, held_too) = started(), started()
    watch.add(held, lambda: told.put("first"))
    watch.add(held_too, lambda: told.put("second"))
    assert not held.has_ended()

    held.kill()
    found = [told.get(timeout=LIMIT_S)]
    second.stdin.close()
    found.append(told.get(timeout=LIMIT_S))

    assert found == ["first", "second"]
    assert held.has_ended()
    assert held_too.has_ended()
    assert told.empty()
    for each in (held, held_too):
        watch.forget(each)
        each.close()


def test_one_that_is_stopped_is_told_from_one_that_is_let_run_now_and_then(started):
    process, held = started()

    def stop():
        process.send_signal(signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])

    def go_on():
        process.send_signal(signal.SIGCONT)
        assert os.WIFCONTINUED(os.waitpid(process.pid, os.WCONTINUED)[1])

    assert not held.is_stopped()
    stop()
    assert [held.is_stopped() for _ in range(3)] == [True] * 3
    seen = []
    for _ in range(3):  # as cpulimit does; every look finds the process stopped
        go_on()
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING)
        stop()
        seen.append(held.is_stopped())

    assert seen == [False] * 3
    assert held.is_stopped()
    go_on()
    wait_until(lambda: not held.is_stopped())


def test_of_a_process_that_was_let_go_of_nobody_hears_though_another_one_has_its_descriptor(
    started, watch
):
    told = queue.Queue()
    (_, held), (_, held_too) = started(), started()
    watch.add(held, lambda: told.put("first"))
    watch.forget(held)
    number = held.descriptor
    held.close()
    _, third = started()
    assert third.descriptor == number

    watch.add(third, lambda: told.put("third"))
    watch.add(held_too, lambda: told.put("second"))
    held_too.kill()
    assert told.get(timeout=LIMIT_S) == "second"
    third.kill()

    assert told.get(timeout=LIMIT_S) == "third"
    for each in (held_too, third):
        watch.forget(each)
        each.close()


@pytest.mark.skipif(not are_threads_watched(), reason="Linux before 6.9 tells of processes alone")
def test_the_end_of_the_thread_that_ends_with_a_process_is_told_while_that_frees_its_memory(watch):
    told, command = queue.Queue(), [sys.executable, "-c", WITH_A_THREAD]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process, ExitStack() as ended:
        ended.callback(process.kill)
        thread = int(process.stdout.readline())
        held = HeldProcess(Process(process.pid, Process.own().place, thread=thread))
        watch.add(held, lambda: told.put("thread"))
        assert not held.has_ended()

        print(file=process.stdin, flush=True)

        assert told.get(timeout=LIMIT_S) == "thread"
        assert held.has_ended()
        assert process.poll() is None
        held.kill()  # the process, to which the thread belonged
        assert process.wait(LIMIT_S) != 0
        watch.forget(held)
        held.close()


def test_a_number_that_a_thread_of_another_process_has_got_tells_nothing(started, watch):
    told = queue.Queue()
    (first, held), (other, _) = started(), started()
    held.close()
    held = HeldProcess(Process(first.pid, Process.own().place, thread=other.pid))
    watch.add(held, lambda: told.put("first"))
    other.kill()
    other.wait()
    assert not held.has_ended()

    first.kill()

    assert told.get(timeout=LIMIT_S) == "first"
    watch.forget(held)
    held.close()


def test_a_process_is_given_no_huge_pages_where_it_forgoes_them():
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_HUGE_PAGES], capture_output=True, text=True, check=True
    )

    status = dict(line.split(":\t", 1) for line in found.stdout.splitlines() if ":\t" in line)
    assert status.get("THP_enabled", "0") == "0"


def test_the_end_of_an_opener_is_seen_on_its_own_machine_alone(started):
    process, held = started()
    there, elsewhere = Opener(process.pid, Process.own().place), Opener(process.pid, "elsewhere")
    there.check()

    process.kill()
    process.wait()

    assert held.has_ended()
    elsewhere.check()
    with pytest.raises(UnavailableError, match="opened the data plane has ended"):
        there.check()
    with pytest.raises(UnavailableError, match="opened the data plane has ended"):
        Opener(process.pid, Process.own().place)
    there.close()
    there.check()


def test_no_ray_is_started_where_its_processes_could_not_meet_or_would_stand_in_no_folder(
    tmp_path, monkeypatch
):
    own = {"object_store_bytes": 100 << 20, "workers": 1}
    nowhere = Listening(address="192.0.2.1")  # an address for documentation: no host has it
    with pytest.raises(ConfigError, match=r"cannot reach each other at 192\.0\.2\.1"):
        PrivateCluster(**own, listening=nowhere)

    gone = tmp_path / "scratch"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match=r"scratch\) is gone; start it in one that stays"):
        PrivateCluster(**own)


@pytest.mark.parametrize("left", [179, 180])
def test_a_ray_that_may_get_too_few_threads_is_told_of_before_it_starts(monkeypatch, caplog, left):
    monkeypatch.setattr(cluster, "task_room", lambda: TaskRoom("ulimit -u of user 7", 400, left))
    monkeypatch.setattr(PrivateCluster, "_start", lambda _: None)

    PrivateCluster(object_store_bytes=100 << 20, workers=3)

    told = "ulimit -u of user 7 is 400 processes and threads, of which at most 179 are left; a data plane of 3 roles"
    assert (told in caplog.text) == (left == 179)
