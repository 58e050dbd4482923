"""Who fails is left alone, longer each time, tried by one, and welcome back."""

import pytest

from snapshot.image.peer.peer_tier import (
    CircuitBreaker,
    PeerAnswered,
    PeerBack,
    PeerCorrupt,
    PeerFailed,
    PeerLeft,
    PeerTried,
)

A, B = "a:1", "b:1"


def failing(breaker, peer, times, now_s=0.0):
    """Fail so often, each time on trial; return when the last failure was."""
    for _ in range(times):
        while peer in breaker.away(now_s):
            now_s += 0.5
        breaker.handle(PeerTried(peer, now_s))
        breaker.handle(PeerFailed(peer, now_s))
    return now_s


def test_nobody_is_away_at_first():
    breaker = CircuitBreaker()

    assert breaker.handle(PeerTried(A, 0.0)) == ()
    assert breaker.handle(PeerAnswered(A, 0.1)) == ()
    assert breaker.away(0.1) == frozenset()


def test_a_peer_that_fails_is_left_alone_for_a_second_and_others_are_not():
    breaker = CircuitBreaker()

    assert breaker.handle(PeerFailed(A, 10.0)) == (PeerLeft(A, 1.0),)

    assert breaker.away(10.9) == {A}
    assert breaker.away(11.0) == frozenset()


def test_requests_that_fail_together_count_once():
    breaker = CircuitBreaker()
    breaker.handle(PeerFailed(A, 0.0))

    assert [breaker.handle(PeerFailed(A, 0.1)) for _ in range(15)] == [()] * 15
    assert breaker.away(1.0) == frozenset()


def test_each_failure_doubles_the_time_up_to_a_limit():
    breaker = CircuitBreaker(longest_s=6.0)
    lengths, now_s = [], 0.0
    for _ in range(5):
        breaker.handle(PeerTried(A, now_s))
        ((left),) = breaker.handle(PeerFailed(A, now_s))
        lengths.append(left.for_s)
        now_s += left.for_s

    assert lengths == [1.0, 2.0, 4.0, 6.0, 6.0]


def test_failures_without_end_overflow_nothing():
    assert failing(CircuitBreaker(longest_s=0.5, first_s=0.5), A, 3000) > 0.0


def test_one_request_tries_a_peer_whose_time_is_over_and_others_wait_for_it():
    breaker = CircuitBreaker(trial_s=5.0)
    breaker.handle(PeerFailed(A, 0.0))

    breaker.handle(PeerTried(A, 1.0))

    assert breaker.away(1.1) == {A}
    assert breaker.handle(PeerAnswered(A, 1.2)) == (PeerBack(A),)
    assert breaker.away(1.2) == frozenset()
    assert breaker.handle(PeerFailed(A, 2.0)) == (PeerLeft(A, 1.0),)  # counted anew


def test_a_trial_without_an_outcome_holds_nobody_up_for_long():
    breaker = CircuitBreaker(trial_s=5.0)
    breaker.handle(PeerFailed(A, 0.0))
    breaker.handle(PeerTried(A, 1.0))

    assert breaker.away(5.9) == {A}
    assert breaker.away(6.0) == frozenset()


def test_an_answer_to_an_earlier_question_brings_nobody_back():
    breaker = CircuitBreaker()
    breaker.handle(PeerFailed(A, 0.0))

    assert breaker.handle(PeerAnswered(A, 0.5)) == ()
    assert breaker.away(0.5) == {A}


@pytest.mark.parametrize("failed_before", [False, True])
def test_a_peer_that_lied_is_left_alone_for_long_whatever_it_answers(failed_before):
    breaker = CircuitBreaker()
    if failed_before:
        breaker.handle(PeerFailed(A, 0.0))

    assert breaker.handle(PeerCorrupt(A, 0.0)) == (PeerLeft(A, 300.0),)
    breaker.handle(PeerAnswered(A, 1.0))
    breaker.handle(PeerFailed(A, 2.0))

    assert breaker.away(299.0) == {A}
    assert breaker.away(300.0) == frozenset()


def test_peers_are_counted_apart():
    breaker = CircuitBreaker()
    failing(breaker, A, 4)

    assert breaker.handle(PeerFailed(B, 100.0)) == (PeerLeft(B, 1.0),)
