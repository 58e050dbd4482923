"""Watches of many ranks at one server that counts connections, by the test's clock; and the end of a raylet."""

import random
import socket
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress

import pytest

pytest.importorskip("ray")

from omniload.actors.ray.head_watch import HeadWatch, Raylet, raylet_here
from omniload.base.errors import UnavailableError

WATCHES = 64
SECONDS = 100
LIMIT_S = 60


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def taken(server):
    """Accept all waiting connections; return their number."""
    count = 0
    with suppress(BlockingIOError):
        while True:
            server.accept()[0].close()
            count += 1
    return count


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0), backlog=2 * WATCHES) as server:
        server.setblocking(False)
        yield server


def address_of(server):
    return "{}:{}".format(*server.getsockname())


def seconds_of(server, watches, clock):
    """Let watches look for a while; return the connections to the server in each second."""
    found = Counter()
    for tick in range(10 * SECONDS):
        clock.now_s = tick / 10
        for watch in watches:
            watch.look()
        found[tick // 10] += taken(server)
    return [found[second] for second in range(SECONDS)]


@pytest.mark.parametrize(("ranks", "looks_a_second"), [(WATCHES, 12.8), (4_096, 2.56)])
def test_a_head_has_few_connections_of_many_ranks_and_never_all_at_once(
    server, ranks, looks_a_second
):
    draw = random.Random(1).random
    clock, address = Clock(), address_of(server)
    watches = [HeadWatch(address, ranks, clock, draw=draw) for _ in range(WATCHES)]

    found = seconds_of(server, watches, clock)

    assert sum(found) / SECONDS == pytest.approx(looks_a_second, rel=0.1)
    assert max(found) < WATCHES // 2


def test_a_head_whose_process_has_ended_is_lost(server):
    clock = Clock()
    watch = HeadWatch(address_of(server), 8, clock)
    clock.now_s = 5.0
    watch.look()
    server.close()

    for second in range(10, 55, 5):
        clock.now_s = float(second)
        watch.look()
        watch.check()
    clock.now_s = 55.0
    watch.look()

    with pytest.raises(
        UnavailableError, match=r"head of .* at 127\.0\.0\.1:\d+ has accepted no conn"
    ):
        watch.check()


def test_a_watch_looks_in_a_thread_of_its_own_until_its_rank_has_left():
    looked, left, before = threading.Event(), threading.Event(), set(threading.enumerate())

    def answers(*_):
        looked.set()
        return True

    HeadWatch("10.0.0.1:1", 8, draw=lambda: 0.0, answers=answers).watch(left)
    (thread,) = set(threading.enumerate()) - before

    assert looked.wait(LIMIT_S)
    left.set()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_a_raylet_that_is_killed_is_named_at_once():
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    raylet = Raylet(process.pid)
    raylet.check()

    process.kill()
    process.communicate()

    with pytest.raises(UnavailableError, match=f"its raylet, process {process.pid}, was killed"):
        raylet.check()
    raylet.close()
    Raylet(process.pid).check()  # a raylet that cannot be seen is not reported


def test_a_process_without_a_ray_has_no_raylet():
    assert raylet_here() == 0
    Raylet(0).check()
