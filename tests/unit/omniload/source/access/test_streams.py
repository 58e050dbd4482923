"""Compressed shards that are scanned for where they can be entered, and entered there."""

import gzip
import random
import struct
import sys
from itertools import pairwise

import pyarrow as pa
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omniload.base import extras
from omniload.source.access import streams
from omniload.source.access.streams import FrameStream, entered, points_of
from omniload.source.files import local_file
from omniload.source.parsing.compressed import scan_of

RANDOM = random.Random(17)
WORDS = [RANDOM.randbytes(RANDOM.randint(1, 12)) for _ in range(300)]
NOISE = RANDOM.randbytes(300_000)
TEXT = b" ".join(RANDOM.choices(WORDS, k=300_000))


def content(size):
    return TEXT[:size]


@st.composite
def frames(draw):
    """Draw a file of zstd as some tool writes it, and its contents."""
    packed, held = [], []
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(("text", "noise", "same", "none", "skipped")))
        if kind == "skipped":
            body = NOISE[: draw(st.integers(0, 40))]
            magic = 0x184D2A50 + draw(st.integers(0, 15))
            packed.append(struct.pack("<II", magic, len(body)) + body)
            continue
        size = draw(st.sampled_from((1, 100, 5_000, 300_000)))
        part = {
            "text": lambda size=size: content(size),
            "noise": lambda size=size: NOISE[:size],
            "same": lambda size=size: b"a" * size,
            "none": lambda: b"",
        }[kind]()
        writer = zstandard.ZstdCompressor(
            level=draw(st.integers(1, 5)),
            write_checksum=draw(st.booleans()),
            write_content_size=draw(st.booleans()),
        )
        if draw(st.booleans()):
            flowing = writer.compressobj()
            packed.append(flowing.compress(part) + flowing.flush())
        else:
            packed.append(writer.compress(part))
        held.append(part)
    return b"".join(packed), b"".join(held)


@pytest.fixture
def small(monkeypatch):
    """Places at the start of each frame, found by reads of few bytes."""
    monkeypatch.setattr(streams, "_GROUP_BYTES", 1)
    monkeypatch.setattr(streams, "_READ_BYTES", 37)


def all_of(stream, size):
    parts = []
    while len(part := stream.read_buffer(size)):
        parts.append(part.to_pybytes())
    return b"".join(parts)


def outcome(stream, size):
    """Return the contents of a stream, or its error."""
    try:
        with stream:
            return all_of(stream, size)
    except OSError:
        return "raises"


FIXTURES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
SIZES = st.sampled_from((7_001, 1 << 20))


@FIXTURES
@given(packed=frames(), size=SIZES)
def test_a_shard_is_scanned_as_it_is_read_and_is_entered_at_every_place(
    tmp_path, small, packed, size
):
    data, held = packed
    (tmp_path / "a.zst").write_bytes(data)
    file = local_file(str(tmp_path / "a.zst"))

    with scan_of(file) as scanned:
        assert isinstance(scanned, FrameStream)
        assert all_of(scanned, size) == held

    points = points_of(file, scanned, len(held))
    assert [point.place for point in points] == sorted(point.place for point in points)
    for point in points:
        assert all_of(entered(file, point), size) == held[point.place :]


def test_each_frame_that_holds_something_is_a_place(tmp_path, small):
    parts = [TEXT[at : at + 1_000] for at in range(0, 20_000, 1_000)]
    (tmp_path / "a.zst").write_bytes(b"".join(map(zstandard.compress, parts)))
    file = local_file(str(tmp_path / "a.zst"))

    with scan_of(file) as scanned:
        all_of(scanned, 1 << 20)

    assert [point.place for point in scanned.points] == list(range(1_000, 20_000, 1_000))


def test_places_of_a_shard_of_many_frames_are_thinned(tmp_path, small, monkeypatch):
    monkeypatch.setattr(streams, "_MOST_FRAMES", 10)
    (tmp_path / "a.zst").write_bytes(b"".join(zstandard.compress(content(50)) for _ in range(500)))
    file = local_file(str(tmp_path / "a.zst"))

    with scan_of(file) as scanned:
        held = all_of(scanned, 1 << 20)

    assert 5 <= len(scanned.points) <= 10
    for point in scanned.points:
        assert all_of(entered(file, point), 1 << 20) == held[point.place :]


@FIXTURES
@given(packed=frames(), size=SIZES, data=st.data())
def test_a_damaged_shard_is_refused_where_arrow_refuses_the_whole(
    tmp_path, small, packed, size, data
):
    whole, _ = packed
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = data.draw(
        st.sampled_from(
            (
                whole[:at],
                whole + b"\0" * (at % 30),
                whole + b"garbage behind",
                whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :],
                whole[:at] + b"xyz" + whole[at:],
            )
        )
    )
    path = tmp_path / "a.zst"
    path.write_bytes(damaged)

    found = outcome(scan_of(local_file(str(path))), size)

    assert found == outcome(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"), size)


GZIPS = {
    "one member": gzip.compress,
    "stored": lambda held: gzip.compress(held, 0),
    "members, as bgzip writes them": lambda held: b"".join(
        gzip.compress(held[at : at + 65_280]) for at in range(0, len(held) + 65_280, 65_280)
    ),
}


@pytest.mark.parametrize("pack", GZIPS.values(), ids=GZIPS)
def test_gzip_is_entered_at_places_some_way_apart(tmp_path, monkeypatch, pack):
    monkeypatch.setattr(streams, "_GZIP_BYTES", 100_000)
    held = content(1_000_000)
    (tmp_path / "a.gz").write_bytes(pack(held))
    file = local_file(str(tmp_path / "a.gz"))

    with scan_of(file) as scanned:
        assert all_of(scanned, 1 << 20) == held
    points = points_of(file, scanned, len(held))

    assert len(points) >= 3
    places = [0, *(point.place for point in points)]
    assert all(b - a >= 100_000 for a, b in pairwise(places))
    for point in points:
        assert all_of(entered(file, point), 70_001) == held[point.place :]


def test_places_of_large_gzip_lie_further_apart_and_small_gzip_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "_GZIP_BYTES", 50_000)
    monkeypatch.setattr(streams, "_MOST_PLACES", 4)
    held = content(1_000_000)
    (tmp_path / "a.gz").write_bytes(gzip.compress(held))
    file = local_file(str(tmp_path / "a.gz"))

    with scan_of(file) as scanned:
        all_of(scanned, 1 << 20)

    assert 2 <= len(points_of(file, scanned, len(held))) <= 4
    assert points_of(file, scanned, 50_000) == []


def test_without_the_package_that_finds_places_none_are_known(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "indexed_gzip", None)
    (tmp_path / "a.gz").write_bytes(gzip.compress(content(100)))
    file = local_file(str(tmp_path / "a.gz"))

    with caplog.at_level("INFO"), scan_of(file) as scanned:
        found = points_of(file, scanned, 1 << 30)

    assert found is None
    assert extras.install_line("gzip") in caplog.text
