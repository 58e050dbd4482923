"""Packs: frames, and the reads that bring what is wanted."""

import pytest
import zstandard

from omniload.base.errors import IntegrityError
from snapshot.env.format.packs import (
    HEADER,
    Frame,
    check_frames,
    frames_of,
    inflate,
    read_units,
)

START = len(HEADER)


def test_the_header_is_magic_version_and_zero():
    assert HEADER == b"OMNIPACK\x02\x00\x00\x00\x00\x00\x00\x00"


@pytest.mark.parametrize(
    "frame",
    [
        Frame(START - 1, 10, 10),
        Frame(START, 0, 10),
        Frame(START, 10, 0),
        Frame(START, 10, (16 << 20) + 1),
        Frame(START, 70_000, 10),
    ],
    ids=["in the header", "no stored bytes", "no bytes", "too large", "stored in too many"],
)
def test_a_frame_that_cannot_be_is_refused(frame):
    with pytest.raises(IntegrityError):
        check_frames([frame], name="p")


def test_frames_that_overlap_are_refused():
    with pytest.raises(IntegrityError, match="begins before"):
        check_frames([Frame(START, 10, 10), Frame(START + 9, 10, 10)], name="p")


def test_a_frame_never_inflates_past_its_claim():
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))

    with pytest.raises(IntegrityError, match="holds 16777216 bytes, 1000 are due"):
        inflate(bomb, 1000, name="p")


def test_a_frame_that_lies_about_its_size_is_refused():
    without = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))

    with pytest.raises(IntegrityError):
        inflate(without, 1000, name="p")


@pytest.mark.parametrize("stored", [b"", b"no frame at all", b"\x28\xb5\x2f\xfd"])
def test_what_is_no_frame_is_refused(stored):
    with pytest.raises(IntegrityError):
        inflate(stored, 10, name="p")


def test_frames_cut_a_stream_without_regard_to_its_pieces():
    pieces = iter([b"abc", b"", b"defgh", b"ij"])

    assert list(frames_of(pieces, 4)) == [b"abcd", b"efgh", b"ij"]


def test_an_empty_stream_has_no_frames():
    assert list(frames_of(iter([b"", b""]), 4)) == []


def some_frames(count):
    return [Frame(START + 10 * n, 10, 100) for n in range(count)]


def test_neighbouring_frames_come_in_one_read():
    units = read_units(some_frames(5), {50: 100, 180: 200}, unit_bytes=10_000)

    assert [(unit.offset, unit.stored_bytes, unit.raw_offset, unit.raw_end) for unit in units] == [
        (START, 40, 0, 400)
    ]


def test_frames_that_nobody_wants_are_not_read():
    units = read_units(some_frames(5), {0: 10, 410: 5}, unit_bytes=10_000)

    assert [(unit.raw_offset, len(unit.frames)) for unit in units] == [(0, 1), (400, 1)]


def test_a_read_is_no_larger_than_asked_by_more_than_a_frame():
    units = read_units(some_frames(10), {0: 1000}, unit_bytes=250)

    assert [len(unit.frames) for unit in units] == [3, 3, 3, 1]


def test_a_content_that_ends_with_a_frame_does_not_ask_for_the_next():
    units = read_units(some_frames(3), {0: 100}, unit_bytes=250)

    assert [len(unit.frames) for unit in units] == [1]


def test_empty_contents_need_no_read():
    assert read_units(some_frames(3), {100: 0}, unit_bytes=250) == []
