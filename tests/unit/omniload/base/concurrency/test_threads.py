"""Threads that do not hold up the end of a process, and the calls that are under way in it."""

import _thread
import logging
import os
import threading
from concurrent.futures import CancelledError
from contextlib import suppress
from types import SimpleNamespace

import pytest

from omniload.base.clock import FakeClock
from omniload.base.concurrency import calls_under_way as calls
from omniload.base.concurrency import threads
from omniload.base.concurrency.calls_under_way import (
    ENDED_CALLS,
    RECENT_CALL,
    USUAL_CALL,
    calls_under_way,
    figures_of_calls,
    under_way,
)
from omniload.base.concurrency.threads import (
    DaemonPool,
    close_dropped,
    ending,
    start_thread,
    wait_for_dropped,
    was_given_up,
)
from omniload.base.errors import UnavailableError

_LONG_S = 60


def test_results_come_in_the_order_of_the_items_and_the_first_error_is_raised():
    with DaemonPool(3, "test") as pool:
        assert pool.map(lambda n: n * n, range(20)) == [n * n for n in range(20)]
        with pytest.raises(ZeroDivisionError):
            pool.map(lambda n: 1 // n, [2, 0, 1])


@pytest.fixture
def no_threads():
    """Make the system refuse threads, by a stack larger than the address space; yield a function that undoes it."""
    before = threading.stack_size(1 << 46)
    yield lambda: threading.stack_size(before)
    threading.stack_size(before)


def test_a_thread_that_the_system_refuses_is_told_with_the_limits_to_raise(no_threads):
    thread = threading.Thread(target=lambda: None, name="omniload-heartbeat")

    with pytest.raises(
        UnavailableError,
        match=r"omniload-heartbeat \(can't start new thread.*ulimit -u.*pids.max.*ulimit -v",
    ):
        start_thread(thread)


def test_a_pool_without_a_thread_says_so_and_can_be_asked_again_and_closed(no_threads):
    with DaemonPool(3, "test") as pool:
        with pytest.raises(UnavailableError, match="no thread for test_0"):
            pool.map(abs, [-1])
        no_threads()
        assert pool.submit(lambda: 5).result(_LONG_S) == 5


def test_a_pool_that_gets_no_further_thread_goes_on_with_those_it_has():
    with DaemonPool(3, "test") as pool:
        assert pool.submit(threading.get_ident).result(_LONG_S)
        before = threading.stack_size(1 << 46)
        try:
            calls = [pool.submit(threading.get_ident) for _ in range(5)]
        finally:
            threading.stack_size(before)
        assert len({call.result(_LONG_S) for call in calls}) == 1


def test_threads_are_daemons_and_no_more_than_asked_for():
    names = {"all": threading.Barrier(3)}
    pool = DaemonPool(3, "test")

    def meet(_):
        names["all"].wait(_LONG_S)  # each call needs two others at the same time
        thread = threading.current_thread()
        return thread.name, thread.daemon

    found = pool.map(meet, range(9))

    assert set(found) == {(f"test_{n}", True) for n in range(3)}
    assert pool.close(_LONG_S)


def test_calls_that_wait_for_nothing_share_one_thread(monkeypatch):
    monkeypatch.setattr(threads, "_LOOK_S", _LONG_S)  # however slow the machine is
    told = []
    with DaemonPool(8, "test") as pool:
        found = pool.map(lambda _: threading.get_ident(), range(1_000), advance=told.append)

    assert len(set(found)) == 1
    assert sum(told) == 1_000


def test_what_a_closed_pool_has_not_begun_is_told_as_cancelled():
    pool = DaemonPool(1, "test")

    def close(_):
        pool.close(0.0)

    with pytest.raises(CancelledError):
        pool.map(close, range(2))


def test_what_has_not_begun_is_cancelled_and_what_is_stuck_is_left():
    begun, gone_on = threading.Event(), threading.Event()
    pool = DaemonPool(1, "test")

    def stuck():
        begun.set()
        return gone_on.wait(_LONG_S)

    first, second = pool.submit(stuck), pool.submit(stuck)
    assert begun.wait(_LONG_S)
    closed = pool.close(0.0)
    late = pool.submit(stuck)
    gone_on.set()

    assert not closed
    assert first.result(_LONG_S)
    assert pool.close(_LONG_S)
    assert second.cancelled()
    assert late.cancelled()


def test_calls_under_way_are_listed_the_oldest_first():
    before = len(calls_under_way())
    with under_way("reads a"), under_way("reads b"):
        inside = calls_under_way()[before:]

    assert [what for what, _ in inside] == ["reads a", "reads b"]
    assert inside[0][1] <= inside[1][1]
    assert len(calls_under_way()) == before


def test_what_the_last_calls_took_is_told_of_a_few_sooner_than_of_many(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=clock.now_s))

    def after(count, took_s):
        for _ in range(count):
            with under_way("reads a"):
                clock.advance(took_s)
        return figures_of_calls()

    before = after(0, 0.0)[ENDED_CALLS]
    after(64, 1.0)
    found = after(5, 20.0)

    assert (found[USUAL_CALL], found[RECENT_CALL]) == (1.0, 20.0)
    assert found[ENDED_CALLS] == before + 69
    assert after(30, 20.0)[USUAL_CALL] == 20.0


@pytest.fixture
def going_on(monkeypatch):
    """Is set by the first line that threads log."""
    said, logger = threading.Event(), logging.getLogger(threads.__name__)

    class Hearing(logging.Handler):
        def emit(self, _record):
            said.set()

    monkeypatch.setattr(logger, "handlers", [Hearing()])
    return said


def test_of_a_thread_that_ends_at_once_nothing_is_said(caplog):
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, daemon=True)
    thread.start()

    with caplog.at_level(logging.WARNING, logger=threads.__name__):
        ending(thread, ended, _LONG_S, "the last status in run")()

    assert not thread.is_alive()
    assert caplog.messages == []


def test_of_a_thread_that_does_not_end_the_log_says_what_is_waited_for_and_how_long(
    caplog, monkeypatch, going_on
):
    monkeypatch.setattr(threads, "_SILENT_S", 0.0)
    thread = threading.Thread(target=going_on.wait, daemon=True)
    thread.start()

    with caplog.at_level(logging.WARNING, logger=threads.__name__):
        ending(thread, threading.Event(), _LONG_S, "the last status in run")()

    assert not thread.is_alive()
    assert caplog.messages == ["closing waits up to 60 s more for the last status in run"]


def waiting_for_a_store(begun):
    """Wait as clients of stores do: from second to second, so that an interrupt is noticed."""
    begun.set()
    while True:
        threading.Event().wait(0.01)


def test_a_read_that_does_not_end_is_given_up_and_what_follows_it_is_cancelled():
    begun = threading.Event()
    pool = DaemonPool(1, "test", reads=True)
    first, second = pool.submit(lambda: waiting_for_a_store(begun)), pool.submit(int)
    assert begun.wait(_LONG_S)

    assert pool.close(_LONG_S)
    assert was_given_up(first)
    assert second.cancelled()


def test_a_read_that_asks_its_store_once_more_is_given_up_again(monkeypatch):
    monkeypatch.setattr(threads, "_AGAIN_S", 0.01)
    waits = threading.Event()

    class Pool(DaemonPool):
        """Cancels its read once it waits again; if it does not wait, nothing prevents the cancellation."""

        def give_up(self):
            if waits.is_set():
                waits.clear()
                super().give_up()

    def stubborn():
        for _ in range(3):
            with suppress(BaseException):
                waiting_for_a_store(waits)
        return "ended"

    pool = Pool(1, "test", reads=True)
    read = pool.submit(stubborn)
    assert waits.wait(_LONG_S)

    assert pool.close(_LONG_S)
    assert read.result(0) == "ended"


def test_reads_of_a_pool_that_a_read_waits_for_are_given_up_with_it():
    begun, inner = threading.Event(), []

    def outer():
        with DaemonPool(2, "inner", reads=True) as pool:
            inner.append(pool)
            pool.map(lambda _: waiting_for_a_store(begun), range(2))

    pool = DaemonPool(1, "outer", reads=True)
    read = pool.submit(outer)
    assert begun.wait(_LONG_S)

    assert pool.close(_LONG_S)
    assert was_given_up(read)
    assert inner[0].close(0.0)


def test_a_call_that_does_more_than_read_is_never_given_up():
    begun, gone_on = threading.Event(), threading.Event()

    def writing():
        begun.set()
        return gone_on.wait(_LONG_S)

    pool = DaemonPool(1, "test")
    written = pool.submit(writing)
    assert begun.wait(_LONG_S)

    assert not pool.close(threads._PATIENT_S + 0.1)
    gone_on.set()
    assert written.result(_LONG_S)
    assert pool.close(_LONG_S)


def test_a_wait_for_what_was_dropped_ends_once_all_is_closed_even_if_a_close_fails(monkeypatch):
    closed, told, may_begin = [], threading.Event(), _thread.allocate_lock()
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: told.set())

    def fails():
        with may_begin:
            closed.append("failed")
            raise OSError("it cannot be closed")

    with may_begin:
        close_dropped(os.getpid(), fails)
        close_dropped(os.getpid(), lambda: closed.append("closed"))
        close_dropped(os.getpid() + 1, lambda: closed.append("of a fork"))
    wait_for_dropped("a plane")

    assert sorted(closed) == ["closed", "failed"]
    assert told.wait(_LONG_S)


def test_what_was_dropped_and_no_thread_can_close_holds_up_nobody(monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without_threads:
        without_threads.setattr("_thread.start_new_thread", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            close_dropped(os.getpid(), print)

    wait_for_dropped("a plane")


def test_a_wait_for_what_was_dropped_says_for_what_once_it_takes_too_long(monkeypatch):
    monkeypatch.setattr(threads, "_DROPPED_S", 0.01)
    hangs = _thread.allocate_lock()
    with hangs:
        close_dropped(os.getpid(), hangs.acquire)
        with pytest.raises(UnavailableError, match="a plane is still being closed after 0 s; see"):
            wait_for_dropped("a plane")

    monkeypatch.undo()
    wait_for_dropped("a plane")
