"""Streams of deflate that are entered in their middle."""

import gzip
import random
import zlib
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.compression.gzip_places import BrokenGzipError, indexed_gzip, places_of
from omniload.base.compression.streams import WINDOW_BYTES, Inflater, inflate

RANDOM = random.Random(13)
WORDS = [RANDOM.randbytes(RANDOM.randint(1, 40)) for _ in range(500)]
DATA = b" ".join(RANDOM.choices(WORDS, k=20_000))


def places(packed):
    exported = BytesIO()
    with indexed_gzip(BytesIO(packed), spacing_bytes=40_000, what="a test") as opened:
        opened.build_full_index()
        opened.export_index(fileobj=exported)
    return list(places_of(exported.getvalue(), len(packed)))


def in_members(sizes, level=6, filled=b""):
    """Compress members of some sizes, the last with the whole rest, and ``filled`` after each."""
    at, packed = 0, []
    for size in [*sizes, len(DATA)]:
        packed.append(gzip.compress(DATA[at : at + size], level) + filled)
        at += size
    return b"".join(packed)


PACKED = {
    "one member": in_members([]),
    "stored": in_members([], level=0),
    "members of all sizes": in_members([1, 0, 100_000, 70_000, 0, 40_000]),
    "members filled up with zeroes": in_members([100_000], filled=bytes(40_000)),
}


@pytest.mark.parametrize("packed", PACKED.values(), ids=PACKED)
@given(data=st.data())
def test_a_stream_that_is_entered_anywhere_gives_what_follows_in_reads_of_any_size(packed, data):
    place = data.draw(st.sampled_from(places(packed)))
    early = 1 if place.bits else 0
    inflater = Inflater(
        BytesIO(packed[place.raw_offset - early :]).read, bits=place.bits, window=place.window
    )

    at = place.offset
    for size in data.draw(st.lists(st.integers(1, 200_000), min_size=1, max_size=8)):
        assert inflater.read(size) == DATA[at : at + size]
        at = min(len(DATA), at + size)


def test_places_are_apart_and_have_the_window_that_lies_before_them():
    found = [place for place in places(PACKED["one member"]) if place.window]

    assert len(found) >= 2
    for place in found:
        assert place.window == DATA[max(0, place.offset - WINDOW_BYTES) : place.offset]


def test_a_stream_that_is_cut_short_gives_what_it_holds():
    cut = PACKED["one member"][10:50_000]

    found = inflate(cut, 0, b"", len(DATA))

    assert 0 < len(found) < len(DATA)
    assert DATA.startswith(found)


def test_a_wrong_window_or_another_bit_is_no_stream_or_gives_other_bytes():
    packed = PACKED["one member"]
    place = next(place for place in places(packed) if place.window)
    raw = packed[place.raw_offset - 1 :]
    size = len(DATA) - place.offset

    whole = raw if place.bits else raw[1:]
    assert inflate(whole, place.bits, bytes(WINDOW_BYTES), size) != DATA[place.offset :]
    for bits in {*range(1, 8)} - {place.bits}:
        try:
            assert inflate(raw, bits, place.window, size) != DATA[place.offset :]
        except zlib.error:
            continue


def test_what_is_no_whole_gzip_is_told_as_that():
    with pytest.raises(BrokenGzipError):
        places(b"no gzip at all" * 100)


class StoreError(OSError):
    """Raised by a client of a store, without a number."""


@pytest.mark.parametrize(
    "fault", [ConnectionError("dropped"), StoreError("gone"), OSError(5, "disk")]
)
def test_what_a_store_or_the_system_says_is_told_as_it_is(fault):
    class Failing(BytesIO):
        def read(self, size=-1):
            raise fault

    with (
        pytest.raises(type(fault)) as told,
        indexed_gzip(Failing(PACKED["one member"]), spacing_bytes=40_000, what="a test") as opened,
    ):
        opened.build_full_index()
    assert told.value is fault
