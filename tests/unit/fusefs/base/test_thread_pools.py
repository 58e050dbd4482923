"""Pools of threads where the system gives no further thread."""

import threading

import pytest

from fusefs.base.thread_pools import StorePool


def no_thread(_):
    raise RuntimeError("can't start new thread")


def test_a_call_that_is_refused_for_want_of_a_thread_is_not_made_later(monkeypatch):
    done = []
    with StorePool(1, "test") as pool:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(RuntimeError, match="new thread"):
                pool.submit(done.append, "refused")

        pool.submit(done.append, "taken").result(timeout=60)

    assert done == ["taken"]


def test_a_call_waits_for_the_threads_that_there_are(monkeypatch):
    began, go_on = threading.Event(), threading.Event()
    with StorePool(2, "test") as pool:
        pool.submit(lambda: (began.set(), go_on.wait(60)))
        assert began.wait(60)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", no_thread)
            waiting = pool.submit(threading.get_native_id)
        go_on.set()

        assert waiting.result(timeout=60)
