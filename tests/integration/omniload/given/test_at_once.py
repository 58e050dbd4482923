"""Threads of one process that open and close planes of a given Ray at once: they connect one after another."""

import sys

import pytest

from tests.support.programs import finished

pytestmark = [pytest.mark.ray, pytest.mark.scripts_start_warm]
SETUP = """
import sys, threading, time, omniload, ray
from concurrent.futures import ThreadPoolExecutor

settings = {"arrays": "numpy", "rank": 0, "world_size": 1, "steps": 6}

def opened(seed):
    return omniload.open(sys.argv[1], seed=seed, **settings)

def rows(seed):
    with opened(seed) as loader:
        return [loader.next_batch().tokens.tolist() for _ in range(6)]
"""
OPENED = """
with ThreadPoolExecutor(2) as threads:
    at_once = list(threads.map(rows, (7, 9)))
assert not ray.is_initialized(), "all planes are closed"
assert at_once == [rows(7), rows(9)]
assert at_once[0] != at_once[1]
"""
OPENED_AS_ANOTHER_IS_CLOSED = """
leaves, leave = threading.Event(), ray.shutdown

def slow():
    leaves.set()
    time.sleep(1.0)  # as where Ray is busy: time enough to open a plane
    leave()

alone = rows(9)
with ThreadPoolExecutor(1) as threads:
    for shutdown in (leave, slow):
        other = opened(7)
        other.next_batch()
        ray.shutdown = shutdown
        closing = threads.submit(other.close)
        leaves.wait(0.0 if shutdown is leave else 60.0)
        ray.shutdown = leave
        assert rows(9) == alone
        closing.result()
        assert not ray.is_initialized(), "all planes are closed"
"""


# Four and five planes take 10 s each on an idle machine.
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(OPENED, id="both opened"),
        pytest.param(OPENED_AS_ANOTHER_IS_CLOSED, id="opened as another is closed"),
    ],
)
def test_threads_that_open_and_close_planes_at_once_have_the_samples_of_each_and_leave_the_ray(
    given, mix, program
):
    words = [sys.executable, "-c", SETUP + program, str(mix)]
    done = finished(words, limit_s=280, env=given)

    assert done.returncode == 0, done.stderr[-3000:]
