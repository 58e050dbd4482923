"""Tasks one after the other on threads of others: what becomes of them where no thread is left."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fusefs.base.serial_executor import SerialExecutor
from omniload.base.errors import StateError


class Refusing(ThreadPoolExecutor):
    """As a pool of the process that this one was forked off."""

    refuses = True

    def submit(self, *task, **named):
        if self.refuses:
            raise StateError("forked off")
        return super().submit(*task, **named)


def joined(executor):
    """Return whether a join comes to an end."""
    thread = threading.Thread(target=executor.join, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


def test_what_a_pool_refuses_is_not_waited_for():
    done = []
    with Refusing(1) as pool:
        executor = SerialExecutor(pool)
        with pytest.raises(StateError):
            executor.submit(lambda: done.append("refused"))

        assert joined(executor)
        pool.refuses = False
        executor.submit(lambda: done.append("taken"))
        assert joined(executor)

    assert done == ["taken"]


def test_what_was_queued_before_a_pool_ends_is_run():
    began, go_on, done = threading.Event(), threading.Event(), []
    pool = ThreadPoolExecutor(1)
    executor = SerialExecutor(pool)
    executor.submit(lambda: (began.set(), go_on.wait(60)))
    for number in range(3):
        executor.submit(lambda number=number: done.append(number))
    assert began.wait(60)
    pool.shutdown(wait=False)
    go_on.set()

    assert joined(executor)
    assert done == [0, 1, 2]


def test_a_process_forked_off_in_mid_task_does_not_wait_for_it(monkeypatch):
    began, go_on, done, here = threading.Event(), threading.Event(), [], os.getpid()
    with Refusing(1) as pool:
        pool.refuses = False
        executor = SerialExecutor(pool)
        executor.submit(lambda: (began.set(), go_on.wait(60)))
        assert began.wait(60)
        with monkeypatch.context() as patched:
            patched.setattr(os, "getpid", lambda: here + 1)
            pool.refuses = True
            with pytest.raises(StateError):
                executor.submit(lambda: done.append("in the child"))
            assert joined(executor)
        pool.refuses = False
        executor.submit(lambda: done.append("in the parent"))
        go_on.set()

        assert joined(executor)
    assert done == ["in the parent"]
