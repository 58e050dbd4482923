"""The loop that stands where pyfuse3 expects trio: workers as pyfuse3's, over a descriptor in place of /dev/fuse."""

import os
from concurrent.futures import Future

import pytest

from fusefs.bridge.api.waiting import result_of
from fusefs.bridge.libfuse.loop import Loop

MOST_WORKERS = 3


class Session:
    """pyfuse3's workers, as they use trio: each request is read in the step in which a wait returns."""

    def __init__(self, lock=None):
        self.loop = Session.loop_in_use = Loop(self.terminate, lambda: Session.loop_in_use)
        self.trio = self.loop.as_trio
        self.lock = lock or self.trio.Lock()
        # Like libfuse's: what is read without a request would block for ever, here it is an error.
        self.device = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        self.handlers = []
        """Of the requests to come, in order; those without one are answered at once."""
        self.log = []
        self.num_readers = self.num_workers = self.most_workers = 0
        self.exited = False
        self.whole = self.main()
        self.loop.start(self.whole)

    def run(self):
        self.loop.run(self.whole)

    async def main(self):
        async with self.trio.open_nursery() as nursery:
            self.started(nursery)
        self.log.append("left")

    def started(self, nursery):
        self.num_workers += 1
        self.most_workers = max(self.most_workers, self.num_workers)
        nursery.start_soon(self.worker, nursery, name="worker")

    async def worker(self, nursery):
        assert self.trio.lowlevel.current_task().name
        while self.num_readers <= 1 and await self.readable():
            try:
                os.eventfd_read(self.device)
            except BlockingIOError:
                raise AssertionError("read without a request: libfuse would wait here") from None
            if not self.num_readers and self.num_workers < MOST_WORKERS:
                self.started(nursery)
            await self.answer()
        self.num_workers -= 1

    async def readable(self):
        self.num_readers += 1
        try:
            async with self.lock:
                if self.exited:
                    return False
                await self.trio.lowlevel.wait_readable(self.device)
        except self.trio.ClosedResourceError:
            return False
        finally:
            self.num_readers -= 1
        return True

    async def answer(self):
        if self.handlers and (handler := self.handlers.pop(0)) is not None:
            self.log.append(await result_of(handler))
        else:
            self.log.append("at once")

    def terminate(self):
        self.exited = True
        self.trio.lowlevel.notify_closing(self.device)

    def ask(self, count=1):
        os.eventfd_write(self.device, count)

    def turn(self, count=1):
        for _ in range(count):
            self.loop.once(0)


@pytest.fixture
def session():
    session = Session()
    session.turn()
    yield session
    session.loop.close()
    os.close(session.device)


def test_requests_that_wait_for_nothing_are_answered_one_a_turn_by_one_worker(session):
    session.ask(5)
    session.turn(5)

    assert session.log == ["at once"] * 5
    assert session.loop.reader.device == session.device


def test_a_request_that_waits_keeps_no_other_waiting(session):
    slow = Future()
    session.handlers = [slow]
    session.ask(3)
    session.turn(3)
    assert session.log == ["at once"] * 2

    slow.set_result("slow")
    session.turn()
    assert session.log == ["at once"] * 2 + ["slow"]


def test_where_all_workers_wait_the_next_request_does_until_one_is_free(session):
    waiting = [Future() for _ in range(MOST_WORKERS)]
    session.handlers = list(waiting)
    session.ask(MOST_WORKERS + 1)
    session.turn(MOST_WORKERS + 3)
    assert session.log == []
    assert session.most_workers == MOST_WORKERS
    # Nor is the processor kept busy by a request that nobody can take.
    with pytest.raises(KeyError):
        session.loop.unwatch(session.device)

    waiting[1].set_result("second")
    session.turn(2)
    assert session.log == ["second", "at once"]


def test_requests_are_left_where_they_are_until_they_are_wanted_again(session):
    session.loop.take_requests(on=False)
    session.ask()
    session.turn(2)
    assert session.log == []

    session.loop.take_requests(on=True)
    session.turn()
    assert session.log == ["at once"]


def test_a_call_of_the_same_wait_that_stops_requests_leaves_none_read(session):
    bell = os.eventfd(1)
    session.loop.watch(bell, lambda: session.loop.take_requests(on=False))
    session.ask()
    session.loop.take_requests(on=False)  # registered anew, so that the bell comes first
    session.loop.take_requests(on=True)
    session.turn()
    assert session.log == []
    os.close(bell)


def test_requests_under_way_are_waited_for_and_no_longer_than_told(session):
    slow = Future()
    session.handlers = [slow]
    session.ask()
    session.turn()
    session.loop.take_requests(on=False)
    assert not session.loop.finish_tasks(0.01)

    slow.set_result("slow")
    assert session.loop.finish_tasks(5.0)
    assert session.log == ["slow"]


def test_the_end_lets_workers_go_once_their_requests_are_answered(session):
    slow = Future()
    session.handlers = [slow]
    session.ask()
    session.turn()
    session.loop.end()
    session.turn()
    session.ask()
    session.turn()
    assert session.log == []

    slow.set_result("slow")
    session.run()

    assert session.log == ["slow", "left"]
    assert session.num_workers == 0


def test_the_end_waits_for_no_task_beside_the_workers():
    session = Session()
    outside = Future()
    session.loop.start(result_of(outside))
    session.turn()
    session.loop.end()

    session.run()

    assert session.log == ["left"]
    assert session.num_workers == 0
    session.loop.close()
    outside.set_result("too late")  # wakes nobody
    os.close(session.device)


def test_what_a_worker_raises_ends_the_loop(session):
    failing = Future()
    failing.set_exception(OSError("libfuse could not read"))
    session.handlers = [failing]
    session.ask()

    with pytest.raises(OSError, match="libfuse could not read"):
        session.run()


def test_what_still_waits_is_dropped_when_the_loop_is_closed():
    session = Session()
    waiting = Future()
    session.handlers = [waiting]
    session.ask()
    session.turn(2)

    session.loop.close()
    waiting.set_result("too late")  # wakes nobody

    assert session.log == []
    os.close(session.device)


@pytest.mark.timeout(20)
def test_a_later_mount_of_the_process_is_served_with_the_lock_of_the_first():
    """pyfuse3 makes its lock once a process."""
    first = Session()
    first.loop.end()
    first.run()
    first.loop.close()
    os.close(first.device)

    second, slow = Session(first.lock), Future()
    second.handlers = [slow]
    second.ask(2)
    second.turn(3)
    assert second.log == ["at once"]

    slow.set_result("slow")
    second.loop.end()
    second.run()
    assert second.log == ["at once", "slow", "left"]
    second.loop.close()
    os.close(second.device)
