"""What peers say to each other, and what of it is refused; who fails is left alone, longer each time."""

import orjson
import pytest

from snapshot.image.peer.protocol import (
    ABSENT,
    FRAME_BYTES,
    MAX_BLOCKS,
    MAX_REQUEST_BYTES,
    WAITING,
    CircuitBreaker,
    PeerAnswered,
    PeerBack,
    PeerCorrupt,
    PeerFailed,
    PeerLeft,
    PeerTried,
    block_frame,
    frame_size,
    parse_request,
    request_body,
)

BLOB, BLOCK = "sha256:" + "ab" * 32, "sha256:" + "cd" * 32


def test_a_request_arrives_as_it_was_sent():
    body = request_body(BLOB, [(3, BLOCK), (0, BLOB)])

    assert body == orjson.dumps({"blob": BLOB, "blocks": [[3, BLOCK], [0, BLOB]]})
    assert parse_request(body) == (BLOB, [(3, BLOCK), (0, BLOB)])


def test_the_largest_request_fits_its_limit():
    long = "sha512:" + "ab" * 64
    body = request_body(long, [((1 << 40) - 1, long)] * MAX_BLOCKS)

    assert len(body) <= MAX_REQUEST_BYTES
    assert len(parse_request(body)[1]) == MAX_BLOCKS


def a_request(**changes):
    return orjson.dumps({"blob": BLOB, "blocks": [[0, BLOCK]]} | changes)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"[]",
        b"{}",
        a_request(more=1),
        a_request(blob="../../etc/passwd"),
        a_request(blob=7),
        a_request(wait=True),
        a_request(blocks=[]),
        a_request(blocks={}),
        a_request(blocks=[[0, BLOCK]] * (MAX_BLOCKS + 1)),
        a_request(blocks=[[-1, BLOCK]]),
        a_request(blocks=[[1 << 40, BLOCK]]),
        a_request(blocks=[[True, BLOCK]]),
        a_request(blocks=[[0.0, BLOCK]]),
        a_request(blocks=[[0, "sha256:../x"]]),
        a_request(blocks=[[0, BLOCK + "\n"]]),
        a_request(blocks=[[0, BLOCK.upper()]]),
        a_request(blocks=[[0, BLOCK, 1]]),
        a_request(blocks=[0]),
    ],
    ids=lambda body: repr(body[:90]),
)
def test_what_is_no_request_is_refused(body):
    with pytest.raises(ValueError, match=r"request|blocks|number|digest|line 1"):
        parse_request(body)


def test_frames_say_size_absence_and_patience():
    assert frame_size(block_frame(0)) == 0
    assert frame_size(block_frame((1 << 32) - 1)) == (1 << 32) - 1
    assert frame_size(ABSENT) is None
    assert frame_size(WAITING) == -1
    assert {len(block_frame(5)), len(ABSENT), len(WAITING)} == {FRAME_BYTES}


@pytest.mark.parametrize("head", [b"", b"B", b"X\0\0\0\0", b"N\1\0\0\0", b"W\0\0\0\1", b"B" * 6])
def test_what_is_no_frame_is_refused(head):
    with pytest.raises(ValueError, match="no frame"):
        frame_size(head)


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
def test_a_peer_that_sent_corrupt_bytes_is_left_alone_for_long_whatever_it_answers(failed_before):
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
