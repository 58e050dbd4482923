"""Processes of other members: their end is told at once, and to nobody who has let go of them."""

import queue
import subprocess
import sys

import pytest

pytest.importorskip("ray")

from omniload.actors.ray.processes import EndWatch, HeldProcess, Opener, Process
from omniload.base.errors import UnavailableError

LIMIT_S = 20.0


@pytest.fixture
def started():
    """Start processes that end once their input does."""
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
