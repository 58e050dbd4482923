"""One run for all threads that want its result at once: what they share, what they do not, and what remains."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from omniload.base.concurrency import single_flight
from omniload.base.concurrency.single_flight import SingleFlight

LIMIT_S = 60


class Slow:
    """A function that runs until it may end."""

    def __init__(self, error=None):
        self.error = error
        self.begun, self.may_end, self.runs = threading.Event(), threading.Event(), 0

    def __call__(self):
        self.runs += 1
        self.begun.set()
        assert self.may_end.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        return "theirs"


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def waiting(monkeypatch):
    """Released once by each call that begins to wait for another's run."""
    begun, wait = threading.Semaphore(0), single_flight.wait

    def announced(futures, timeout):
        begun.release()
        return wait(futures, timeout)

    monkeypatch.setattr(single_flight, "wait", announced)
    return begun


def test_calls_that_come_while_one_runs_share_its_result(pool, waiting):
    flight, slow = SingleFlight(), Slow()
    first = pool.submit(flight.call, "k", slow)
    assert slow.begun.wait(LIMIT_S)
    others = [pool.submit(flight.call, "k", slow) for _ in range(4)]
    for _ in others:
        assert waiting.acquire(timeout=LIMIT_S)

    slow.may_end.set()

    assert {call.result(LIMIT_S) for call in (first, *others)} == {"theirs"}
    assert slow.runs == 1


def test_a_call_after_the_end_runs_anew():
    flight, runs = SingleFlight(), iter("ab")

    assert [flight.call("k", lambda: next(runs)) for _ in range(2)] == ["a", "b"]


def test_keys_have_runs_of_their_own(pool):
    flight, slow = SingleFlight(), Slow()
    first = pool.submit(flight.call, "k", slow)
    assert slow.begun.wait(LIMIT_S)

    assert flight.call("other", lambda: "own") == "own"
    slow.may_end.set()
    assert first.result(LIMIT_S) == "theirs"


def test_an_error_reaches_its_own_caller_alone(pool, waiting):
    flight, slow = SingleFlight(), Slow(OSError(5, "broken"))
    first = pool.submit(flight.call, "k", slow)
    assert slow.begun.wait(LIMIT_S)
    other = pool.submit(flight.call, "k", lambda: "own")
    assert waiting.acquire(timeout=LIMIT_S)

    slow.may_end.set()

    with pytest.raises(OSError, match="broken"):
        first.result(LIMIT_S)
    assert other.result(LIMIT_S) == "own"
    assert flight.call("k", lambda: "next") == "next"


def test_a_run_that_takes_too_long_is_not_waited_for(pool):
    flight, slow = SingleFlight(), Slow()
    first = pool.submit(flight.call, "k", slow)
    assert slow.begun.wait(LIMIT_S)

    assert flight.call("k", lambda: "own", within_s=0.0) == "own"
    slow.may_end.set()
    assert first.result(LIMIT_S) == "theirs"


def test_of_several_keys_each_is_claimed_by_one_and_resolved_for_all(pool):
    flight = SingleFlight()
    assert flight.claim("ab") == (["a", "b"], {})

    mine, theirs = flight.claim("abc")
    assert (mine, list(theirs)) == (["c"], ["a", "b"])
    waiting = pool.submit(flight.call, "b", lambda: "own")
    for key in "abc":
        flight.resolve(key, key.upper())

    assert [theirs[key].result(LIMIT_S) for key in "ab"] == ["A", "B"]
    assert waiting.result(LIMIT_S) in {"B", "own"}  # it may have come when all was over
    assert flight.claim("a") == (["a"], {})
