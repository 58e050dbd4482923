"""Who fails is left alone, longer each time, tried by one, and welcome back."""

import pytest

from snapshot.image.peer.circuit_breaker import (
    PeerAnswered,
    PeerBack,
    PeerFailed,
    PeerLeft,
    PeerLied,
    PeerStanding,
    PeerTried,
)

A, B = "a:1", "b:1"


def failing(standing, peer, times, now_s=0.0):
    """Fail so often, each time on trial; return when the last failure was."""
    for _ in range(times):
        while peer in standing.away(now_s):
            now_s += 0.5
        standing.handle(PeerTried(peer, now_s))
        standing.handle(PeerFailed(peer, now_s))
    return now_s


def test_nobody_is_away_at_first():
    standing = PeerStanding()

    assert standing.handle(PeerTried(A, 0.0)) == ()
    assert standing.handle(PeerAnswered(A, 0.1)) == ()
    assert standing.away(0.1) == frozenset()


def test_a_peer_that_fails_is_left_alone_for_a_second_and_others_are_not():
    standing = PeerStanding()

    assert standing.handle(PeerFailed(A, 10.0)) == (PeerLeft(A, 1.0),)

    assert standing.away(10.9) == {A}
    assert standing.away(11.0) == frozenset()


def test_requests_that_fail_together_count_once():
    standing = PeerStanding()
    standing.handle(PeerFailed(A, 0.0))

    assert [standing.handle(PeerFailed(A, 0.1)) for _ in range(15)] == [()] * 15
    assert standing.away(1.0) == frozenset()


def test_each_failure_doubles_the_time_up_to_a_limit():
    standing = PeerStanding(longest_s=6.0)
    lengths, now_s = [], 0.0
    for _ in range(5):
        standing.handle(PeerTried(A, now_s))
        ((left),) = standing.handle(PeerFailed(A, now_s))
        lengths.append(left.for_s)
        now_s += left.for_s

    assert lengths == [1.0, 2.0, 4.0, 6.0, 6.0]


def test_failures_without_end_overflow_nothing():
    assert failing(PeerStanding(longest_s=0.5, first_s=0.5), A, 3000) > 0.0


def test_one_request_tries_a_peer_whose_time_is_over_and_others_wait_for_it():
    standing = PeerStanding(trial_s=5.0)
    standing.handle(PeerFailed(A, 0.0))

    standing.handle(PeerTried(A, 1.0))

    assert standing.away(1.1) == {A}
    assert standing.handle(PeerAnswered(A, 1.2)) == (PeerBack(A),)
    assert standing.away(1.2) == frozenset()
    assert standing.handle(PeerFailed(A, 2.0)) == (PeerLeft(A, 1.0),)  # counted anew


def test_a_trial_without_an_outcome_holds_nobody_up_for_long():
    standing = PeerStanding(trial_s=5.0)
    standing.handle(PeerFailed(A, 0.0))
    standing.handle(PeerTried(A, 1.0))

    assert standing.away(5.9) == {A}
    assert standing.away(6.0) == frozenset()


def test_an_answer_to_an_earlier_question_brings_nobody_back():
    standing = PeerStanding()
    standing.handle(PeerFailed(A, 0.0))

    assert standing.handle(PeerAnswered(A, 0.5)) == ()
    assert standing.away(0.5) == {A}


@pytest.mark.parametrize("failed_before", [False, True])
def test_a_peer_that_lied_is_left_alone_for_long_whatever_it_answers(failed_before):
    standing = PeerStanding()
    if failed_before:
        standing.handle(PeerFailed(A, 0.0))

    assert standing.handle(PeerLied(A, 0.0)) == (PeerLeft(A, 300.0),)
    standing.handle(PeerAnswered(A, 1.0))
    standing.handle(PeerFailed(A, 2.0))

    assert standing.away(299.0) == {A}
    assert standing.away(300.0) == frozenset()


def test_peers_are_counted_apart():
    standing = PeerStanding()
    failing(standing, A, 4)

    assert standing.handle(PeerFailed(B, 100.0)) == (PeerLeft(B, 1.0),)
