"""Calls that may never return."""

import threading
from concurrent.futures import Future

import pytest

from omniload.base.concurrency import time_limit
from omniload.base.concurrency.threads import DaemonPool, was_given_up
from omniload.base.concurrency.time_limit import LimitedCalls, call_within
from omniload.base.errors import UnavailableError


def test_an_answer_is_returned():
    assert call_within(60, lambda: 3, what="a store") == 3


@pytest.mark.parametrize("error", [ValueError("wrong"), TimeoutError("slow"), KeyboardInterrupt()])
def test_what_the_call_raises_is_raised(error):
    def fail():
        raise error

    with pytest.raises(type(error)) as caught:
        call_within(60, fail, what="a store")

    assert caught.value is error


def test_an_answer_that_comes_just_behind_a_wait_is_returned(monkeypatch):
    class Late(Future):
        def result(self, timeout=None):
            if self.done():
                return super().result(timeout)
            self.set_result(3)
            raise TimeoutError

    class Pool(DaemonPool):
        def submit(self, call):
            return Late()

    monkeypatch.setattr(time_limit, "DaemonPool", Pool)

    assert call_within(60, lambda: None, what="a store") == 3


def test_a_call_that_does_not_return_is_left_behind_and_named(monkeypatch, caplog):
    release = threading.Event()
    told = []
    monkeypatch.setattr(time_limit, "_TOLD_EVERY_S", 0.02)
    monkeypatch.setattr(time_limit._LOG, "info", lambda text, *given: told.append(text % given))

    with pytest.raises(UnavailableError, match=r"s3://b: no answer within 0\.05 s"):
        call_within(0.05, release.wait, what="s3://b")

    release.set()
    assert told
    assert all(line.startswith("s3://b: no answer for") for line in told)


def test_short_calls_share_a_thread_and_one_that_does_not_return_holds_up_no_other():
    release, ended = threading.Event(), threading.Event()
    with LimitedCalls("a-test") as calls:
        first, second = (calls.call(60, threading.current_thread, what="a store") for _ in range(2))
        with pytest.raises(UnavailableError, match=r"s3://b: no answer within 0\.05 s"):
            calls.call(0.05, lambda: (release.wait(), ended.set()), what="s3://b")
        third = calls.call(60, threading.current_thread, what="a store")

    release.set()
    assert first is second is not third
    assert ended.wait(60)
    assert not third.is_alive()


def test_a_read_that_waits_for_an_answer_can_be_given_up(monkeypatch):
    monkeypatch.setattr(time_limit, "_LOOK_S", 0.01)
    begun, release = threading.Event(), threading.Event()
    pool = DaemonPool(1, "a-test", reads=True)

    def asked():
        return call_within(600, lambda: (begun.set(), release.wait()), what="s3://b")

    read = pool.submit(asked)
    assert begun.wait(60)
    assert pool.close(60)
    release.set()
    assert was_given_up(read)
