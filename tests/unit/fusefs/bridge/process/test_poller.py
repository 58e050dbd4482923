"""What a mount's one thread watches: descriptors, and a bell that other threads ring."""

import os
import signal
import threading

import pytest

from fusefs.bridge.process.poller import Poller


@pytest.fixture
def pipes():
    ends = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
    yield ends
    for pair in ends:
        for end in pair:
            os.close(end)


def test_each_descriptor_with_something_to_read_has_its_call_made(pipes):
    (first, into), (second, _) = pipes
    poller, calls = Poller(lambda: calls.append("woken")), []
    poller.watch(first, lambda: calls.append("first"))
    poller.watch(second, lambda: calls.append("second"))
    os.write(into, b"x")

    poller.wait(None)
    poller.unwatch(first)
    poller.wait(0)

    assert calls == ["first"]
    poller.close()


@pytest.mark.parametrize("num_waits", [1, 500])
def test_a_wait_ends_after_its_time_whether_the_loop_looked_before_or_not(pipes, num_waits):
    (end, _), _ = pipes
    poller, calls = Poller(lambda: calls.append("woken")), []
    poller.watch(end, lambda: calls.append("read"))

    for _ in range(num_waits):
        poller.wait(0)

    assert calls == []
    poller.close()


def test_a_call_keeps_another_from_being_made_by_the_same_wait(pipes):
    poller, calls = Poller(lambda: None), []
    for here, (end, into) in enumerate(pipes):
        poller.watch(
            end, lambda here=here: (calls.append(here), poller.unwatch(pipes[1 - here][0]))
        )
        os.write(into, b"x")

    poller.wait(None)

    assert len(calls) == 1
    poller.close()


def test_another_thread_ends_a_wait_once():
    calls = []
    poller = Poller(lambda: calls.append("woken"))
    other = threading.Thread(target=poller.wake)
    other.start()

    poller.wait(None)
    other.join()
    poller.wait(0)

    assert calls == ["woken"]
    poller.close()


def test_a_signal_that_comes_while_the_bell_is_rung_may_ring_it():
    calls, rung = [], []
    poller = Poller(lambda: calls.append("woken"))
    before = signal.signal(signal.SIGALRM, lambda *_: (rung.append(1), poller.wake()))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        while len(rung) < 100:
            poller.wake()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    poller.wait(None)

    assert calls == ["woken"]
    poller.close()


def test_a_closed_one_is_silent():
    calls = []
    poller = Poller(lambda: calls.append("woken"))
    poller.close()

    poller.wake()

    assert calls == []
