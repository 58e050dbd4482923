"""What a mount's one thread watches: descriptors, and a bell that other threads ring."""

import os
import signal
import threading

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fusefs.bridge.process import poller as pollers
from fusefs.bridge.process.poller import LOOKS, BusyPoll, Poller


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


def waits(busy, answers):
    """Carry out waits; in each the request is there while the loop looks, or not. Return the looks of each."""
    looks = []
    for comes_soon in answers:
        looks.append(busy.looks())
        if looks[-1]:
            (busy.found if comes_soon else busy.slept)()
    return looks


def test_a_loop_whose_requests_come_soon_always_looks():
    assert set(waits(BusyPoll(2), [True] * 1000)) == {LOOKS}


def test_a_pause_now_and_then_costs_no_look_of_the_requests_behind_it():
    assert set(waits(BusyPoll(2), [False, *[True] * 20] * 50)) == {LOOKS}


def test_a_loop_whose_requests_come_late_sleeps_at_once():
    looks = waits(BusyPoll(2), [False] * 10_000)

    assert sum(map(bool, looks)) < 120


def test_requests_that_come_soon_again_are_found_by_a_trial():
    busy = BusyPoll(2)
    waits(busy, [False] * 500)

    looks = waits(busy, [True] * 300)

    assert set(looks[150:]) == {LOOKS}


def test_on_a_single_core_nobody_could_ask_meanwhile():
    assert set(waits(BusyPoll(1), [True, False] * 100)) == {0}


@given(st.lists(st.booleans(), max_size=2000))
def test_looks_in_vain_are_few_beside_the_waits_and_the_looks_that_were_not(answers):
    busy = BusyPoll(2)
    looks = waits(busy, answers)

    paired = list(zip(looks, answers, strict=True))
    in_vain = sum(1 for looked, soon in paired if looked and not soon)
    not_in_vain = sum(1 for looked, soon in paired if looked and soon)

    assert in_vain <= 8 + len(answers) / 100 + 8 * not_in_vain


@pytest.mark.parametrize(("cores", "looks"), [(1, 0), (2, LOOKS)])
def test_a_quota_of_a_single_core_is_not_spent_on_looks(cores, looks, monkeypatch):
    monkeypatch.setattr(pollers, "cores_here", lambda: cores)

    assert BusyPoll().looks() == looks
