"""Retrying and time that is handed in."""

import threading
import time

import pytest

from omniload.base.clock import LONGEST_WAIT_S, Deadline, FakeClock, SystemClock, TimeOfDay, wait_of
from omniload.base.errors import ConfigError, IntegrityError, StateError, UnavailableError
from omniload.base.retry import backoff_s, with_retries


def scripted(*outcomes):
    """Return a function that returns the outcomes one after another, raising those that are errors."""
    left = list(outcomes)

    def attempt():
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    attempt.left = left
    return attempt


def test_waits_grow_and_are_capped():
    assert list(backoff_s(first_s=1, longest_s=5, attempts=6)) == [1, 2, 4, 5, 5]


def test_one_attempt_waits_for_nothing():
    assert list(backoff_s(attempts=1)) == []


def test_an_answer_is_returned_after_the_waits_that_it_took():
    clock = FakeClock()
    attempt = scripted(UnavailableError("outage"), UnavailableError("outage"), "data")

    assert with_retries(attempt, [0.1, 0.2, 0.4], clock.sleep) == "data"
    assert clock.slept_s == [0.1, 0.2]
    assert attempt.left == []


def test_the_last_error_is_raised_and_says_how_many_attempts_there_were():
    clock = FakeClock()
    attempt = scripted(*[UnavailableError(f"outage {i}") for i in range(3)])

    with pytest.raises(UnavailableError, match="outage 2") as caught:
        with_retries(attempt, [0.5, 1.0], clock.sleep)

    assert caught.value.__notes__ == ["gave up after 3 attempts over 1.5 s of waiting"]
    assert clock.slept_s == [0.5, 1.0]


def test_every_repetition_is_told_with_its_reason_and_wait():
    told = []
    attempt = scripted(*[UnavailableError(f"outage {i}") for i in range(3)], "data")

    with_retries(
        attempt,
        [0.1, 0.2, 0.4],
        FakeClock().sleep,
        lambda error, wait_s: told.append((str(error), wait_s)),
    )

    assert told == [("outage 0", 0.1), ("outage 1", 0.2), ("outage 2", 0.4)]


@pytest.mark.parametrize("kind", [ConfigError, StateError, IntegrityError, ValueError])
def test_what_would_be_the_same_again_is_not_retried(kind):
    clock = FakeClock()
    attempt = scripted(kind("no"), "data")

    with pytest.raises(kind):
        with_retries(attempt, [1.0], clock.sleep)

    assert attempt.left == ["data"]
    assert clock.slept_s == []


def test_without_waits_there_is_one_attempt():
    attempt = scripted(UnavailableError("outage"), "data")

    with pytest.raises(UnavailableError, match="outage"):
        with_retries(attempt, [], FakeClock().sleep)

    assert attempt.left == ["data"]


def test_a_fake_clock_moves_only_when_told_to():
    clock = FakeClock(5.0)

    clock.advance(2.0)
    clock.sleep(0.5)

    assert clock.now_s() == 7.5
    assert clock.slept_s == [0.5]


def test_the_system_clock_never_runs_back():
    clock = SystemClock()

    assert clock.now_s() <= clock.now_s()


@pytest.mark.parametrize(
    ("timeout_s", "waited_s"),
    [(0.5, 0.5), (7, 7.0), (1e300, LONGEST_WAIT_S), (10**90, LONGEST_WAIT_S)],
)
def test_a_wait_is_as_long_as_allowed_or_as_any_wait_bears(timeout_s, waited_s):
    assert wait_of(timeout_s) == waited_s
    assert waited_s < threading.TIMEOUT_MAX


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan"), "7", None])
def test_what_is_no_finite_length_of_time_is_no_wait(timeout_s):
    assert wait_of(timeout_s) is None


def test_time_in_which_the_process_is_stopped_is_none_of_a_limit():
    clock = FakeClock()
    deadline = Deadline(60.0, clock.now_s)

    deadline.wait(clock.sleep, 1.0)
    deadline.wait(lambda turn_s: clock.sleep(turn_s + 3_600.0), 1.0)

    assert deadline.left_s() == 58.0


def test_a_limit_that_began_anew_while_its_process_went_on_is_no_longer_than_itself():
    clock = FakeClock()
    deadline = Deadline(30.0, clock.now_s)

    def stopped(turn_s):
        clock.sleep(turn_s + 3_600.0)
        deadline.renew()  # by the call's own thread, which ran first

    deadline.wait(stopped, 1.0)

    assert deadline.left_s() == 30.0


def test_a_wait_within_a_limit_is_no_longer_than_what_is_left_and_late_turns_of_a_busy_machine_count():
    clock = FakeClock()
    deadline = Deadline(1.0, clock.now_s)

    deadline.wait(lambda turn_s: clock.sleep(turn_s + 0.5), 5.0)
    deadline.wait(clock.sleep, 5.0)

    assert clock.slept_s == [1.5, 0.0]
    assert deadline.left_s() == -0.5


def test_a_time_of_day_is_not_put_ahead_by_a_pause_between_two_looks_at_clocks(monkeypatch):
    """Else what another process tells a moment later would seem to be from before."""
    now_s, pauses = [1000.0], [0.0, 5.0, 0.0, 0.0]

    def looked():
        seen_s = now_s[0]
        now_s[0] += pauses.pop(0)
        return seen_s

    told = TimeOfDay()
    monkeypatch.setattr(time, "time", looked)
    monkeypatch.setattr(time, "monotonic", looked)
    pauses.insert(0, 5.0)  # after the first look
    told.now_s()
    told.now_s()

    pauses[:] = [0.0, 0.0]
    assert told.now_s() == now_s[0]
