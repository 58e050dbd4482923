"""The gate before libfuse's reading: a closed one leaves requests with the kernel, and nothing is lost."""

import os

import pytest
import trio
import trio.testing

from fusefs.bridge.libfuse.gate import Gate


class Worker:
    """Reads requests as pyfuse3's workers do: at once when ``wait_readable`` returns."""

    def __init__(self, gate, device):
        self.gate, self.device = gate, device
        self.num_read = 0
        self.has_ended = False

    async def run(self):
        try:
            while True:
                await self.gate.lowlevel.wait_readable(self.device)
                os.eventfd_read(self.device)
                self.num_read += 1
        except self.gate.ClosedResourceError:
            self.has_ended = True


def with_worker(play):
    """Run ``play(gate, worker, device)`` beside a worker that waits for requests."""

    async def run():
        gate, device = Gate(), os.eventfd(0, os.EFD_NONBLOCK)
        worker = Worker(gate, device)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(worker.run)
                await trio.testing.wait_all_tasks_blocked()
                await play(gate, worker, device)
                nursery.cancel_scope.cancel()
        finally:
            os.close(device)

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


def test_the_descriptor_is_known_once_it_was_waited_for():
    async def play(gate, _, device):
        assert gate.device == device

    assert Gate().device is None
    with_worker(play)


def test_a_closed_gate_leaves_requests_where_they_are_and_an_open_one_lets_them_in():
    async def play(gate, worker, device):
        for turn in range(3):
            gate.close()
            os.eventfd_write(device, 1)
            await trio.testing.wait_all_tasks_blocked()
            assert worker.num_read == turn

            gate.open()
            await trio.testing.wait_all_tasks_blocked()
            assert worker.num_read == turn + 1

    with_worker(play)


@pytest.mark.parametrize("steps", range(6))
def test_one_whose_request_comes_in_the_step_that_closes_the_gate_reads_before_it_or_not_at_all(
    steps,
):
    async def play(gate, worker, device):
        os.eventfd_write(device, 1)
        for _ in range(steps):
            await trio.lowlevel.checkpoint()
        gate.close()
        read_before = worker.num_read
        await trio.testing.wait_all_tasks_blocked()
        assert worker.num_read == read_before

        gate.open()
        await trio.testing.wait_all_tasks_blocked()
        assert worker.num_read == 1
        assert not worker.has_ended

    with_worker(play)


def test_a_gate_that_is_closed_and_opened_at_once_stops_nobody():
    async def play(gate, worker, device):
        gate.close()
        gate.open()
        os.eventfd_write(device, 1)
        await trio.testing.wait_all_tasks_blocked()
        assert worker.num_read == 1

    with_worker(play)


@pytest.mark.parametrize("is_open", [True, False])
def test_the_end_lets_workers_go_without_a_request(is_open):
    async def play(gate, worker, device):
        if not is_open:
            gate.close()
            os.eventfd_write(device, 1)
            await trio.testing.wait_all_tasks_blocked()

        gate.lowlevel.notify_closing(device)  # as pyfuse3.terminate does

        await trio.testing.wait_all_tasks_blocked()
        assert worker.has_ended
        assert worker.num_read == 0

    with_worker(play)


def test_requests_under_way_are_waited_for():
    async def play(gate, *_):
        answers = trio.Event()

        async def request():
            with gate.answering():
                await answers.wait()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(request)
            nursery.start_soon(request)
            await trio.testing.wait_all_tasks_blocked()
            assert not await gate.finish(5.0)

            answers.set()
            assert await gate.finish(5.0)
        assert await gate.finish(0.0)

    with_worker(play)


def test_a_request_that_fails_is_under_way_no_more():
    async def play(gate, *_):
        with pytest.raises(OSError, match="of the handler"), gate.answering():
            raise OSError("of the handler")
        assert await gate.finish(5.0)

    with_worker(play)


def test_whatever_else_pyfuse3_asks_of_trio_is_trios():
    gate = Gate()

    assert gate.Lock is trio.Lock
    assert gate.open_nursery is trio.open_nursery
    assert gate.ClosedResourceError is trio.ClosedResourceError
    assert gate.lowlevel.current_task is trio.lowlevel.current_task
    with pytest.raises(AttributeError):
        _ = gate.nothing_of_the_kind
