"""What peers say to each other, and what of it is refused."""

import orjson
import pytest

from snapshot.image.peer.wire import (
    ABSENT,
    FRAME_BYTES,
    MAX_BLOCKS,
    MAX_REQUEST_BYTES,
    WAITING,
    BlocksAsked,
    block_frame,
    frame_size,
    parse_request,
    request_body,
)

BLOB, BLOCK = "sha256:" + "ab" * 32, "sha256:" + "cd" * 32


def test_a_request_arrives_as_it_was_sent():
    body = request_body(BLOB, [(3, BLOCK), (0, BLOB)], waits=True)

    assert body == orjson.dumps({"blob": BLOB, "wait": True, "blocks": [[3, BLOCK], [0, BLOB]]})
    assert parse_request(body) == BlocksAsked(BLOB, True, ((3, BLOCK), (0, BLOB)))


def test_the_largest_request_fits_its_limit():
    long = "sha512:" + "ab" * 64
    body = request_body(long, [((1 << 40) - 1, long)] * MAX_BLOCKS, waits=False)

    assert len(body) <= MAX_REQUEST_BYTES
    assert len(parse_request(body).blocks) == MAX_BLOCKS


def a_request(**changes):
    return orjson.dumps({"blob": BLOB, "wait": True, "blocks": [[0, BLOCK]]} | changes)


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
        a_request(wait=1),
        a_request(wait="yes"),
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
