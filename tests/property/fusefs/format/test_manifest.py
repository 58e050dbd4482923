"""Manifests: a written manifest is read back, and no damaged one passes for a sound one."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fusefs.format.layout import StripeLayout
from fusefs.format.manifest import (
    Manifest,
    Segment,
    decode_manifest,
    encode_manifest,
    unit_checksum,
)
from fusefs.format.manifest_header import (
    HEADER_BYTES,
    MAGIC,
    check_xattrs_fit,
    decode_header,
    has_manifest_size,
)
from omniload.base.errors import IntegrityError, StateError
from tests.support.examples import few


def a_segment(number=0, size=0, unit=4096, count=3):
    layout = StripeLayout(unit, count)
    sums = np.arange(layout.num_units(size), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return Segment(segment_id=f"{number:032x}", layout=layout, size_bytes=size, checksums_U=sums)


segments = st.builds(
    a_segment,
    st.integers(0, 2**128 - 1),
    st.integers(0, 1 << 20),
    st.integers(4096, 1 << 20),
    st.integers(1, 256),
)
attributes = st.fixed_dictionaries(
    {
        "mtime_ns": st.integers(-(2**62), 2**62),
        "mode": st.integers(0, 0o7777),
        "xattrs": st.dictionaries(st.text("abc.", min_size=1), st.binary(max_size=20), max_size=3),
    }
)


def same(a, b):
    plain = ("kind", "mtime_ns", "mode", "inline", "target", "xattrs")
    return all(getattr(a, n) == getattr(b, n) for n in plain) and [
        (s.segment_id, s.layout, s.size_bytes, s.checksums_U.tolist()) for s in a.segments
    ] == [(s.segment_id, s.layout, s.size_bytes, s.checksums_U.tolist()) for s in b.segments]


@given(attributes, st.lists(segments, max_size=4))
def test_a_manifest_reads_back_as_written(given_attributes, given_segments):
    manifest = Manifest(segments=tuple(given_segments), **given_attributes)

    data = encode_manifest(manifest)

    assert has_manifest_size(len(data))
    assert data.startswith(MAGIC)
    assert same(decode_manifest(data, name="m"), manifest)
    assert decode_header(data[:HEADER_BYTES], name="m").size == manifest.size_bytes


@given(attributes, st.binary(max_size=6000))
def test_inline_bytes_read_back_as_written(given_attributes, inline):
    manifest = Manifest(inline=inline, **given_attributes)

    assert decode_manifest(encode_manifest(manifest), name="m").inline == inline


@given(
    st.dictionaries(
        st.text("abc.é", min_size=1, max_size=30), st.integers(0, 60), min_size=1, max_size=20
    ),
    st.integers(-1, 1),
)
def test_extended_attributes_fit_as_the_page_says(sizes, off):
    def needed(sizes):
        return sum(len(name.encode()) + 6 + 2 * size for name, size in sizes.items())

    # One value brings the manifest to the limit, or as near to it as pairs of digits allow.
    first, left = next(iter(sizes)), 3834 + off - needed(sizes)
    sizes[first] += left // 2
    xattrs = {name: bytes(size) for name, size in sizes.items()}

    if needed(sizes) <= 3834:
        check_xattrs_fit(xattrs)
    else:
        with pytest.raises(ValueError, match="shorten"):
            check_xattrs_fit(xattrs)


@few(120, soak=3000)
@given(st.data())
def test_no_flipped_bit_changes_what_a_manifest_says(draw):
    manifest = Manifest(mtime_ns=7, segments=(a_segment(5, 100_000),), xattrs={"a": b"b"})
    data = bytearray(encode_manifest(manifest))
    bit = draw.draw(st.integers(0, len(data) * 8 - 1))
    data[bit // 8] ^= 1 << bit % 8

    try:
        found = decode_manifest(bytes(data), name="m")
    except IntegrityError:
        return
    # Only padding has no checksum, and flipping it changes no value.
    assert same(found, manifest)


@given(st.integers(0, 5460))
def test_a_manifest_cut_short_is_an_integrity_error(size):
    data = encode_manifest(Manifest(mtime_ns=0))

    with pytest.raises(IntegrityError, match="checksum"):
        decode_manifest(data[:size], name="m")


def test_a_link_is_as_long_as_its_target():
    link = Manifest(kind="symlink", mtime_ns=0, mode=0o777, target="../é")

    assert decode_manifest(encode_manifest(link), name="m").size_bytes == 5


def test_attributes_that_do_not_fit_are_refused_with_their_size():
    with pytest.raises(ValueError, match="more than 4078"):
        encode_manifest(Manifest(mtime_ns=0, xattrs={"user.big": bytes(4000)}))


def test_another_version_asks_for_the_release_that_wrote_it():
    data = bytearray(encode_manifest(Manifest(mtime_ns=0)))
    text = bytes(data[:4078]).replace(b'"omnifs":1', b'"omnifs":9')

    data[:4078] = text
    data[4079:4095] = xxhash.xxh3_64_hexdigest(text).encode()

    with pytest.raises(StateError, match="version 9"):
        decode_manifest(bytes(data), name="m")


def test_version_1_manifests_stay_readable():
    """The bytes of a version 1 header are kept here, so that no change of the code can change them too."""

    data = encode_manifest(
        Manifest(mtime_ns=1_700_000_000_000_000_000, segments=(a_segment(1, 10_000),))
    )

    assert len(data) == 5461
    assert hashlib.sha256(data).hexdigest() == VERSION_1_SHA256


VERSION_1_SHA256 = "f6809d1bba4986f745417bfe679f321bcfb2728aeb7e05b51bd24ab8d0a2db3b"


@given(segments.filter(lambda s: s.size_bytes), st.data())
def test_a_range_of_a_segment_reads_back_with_the_checksums_of_its_units(segment, draw):
    start = draw.draw(st.integers(0, segment.size_bytes - 1))
    size = draw.draw(st.integers(1, segment.size_bytes - start))
    part = segment.part(start, size)
    unit = segment.layout.unit_bytes

    read = decode_manifest(encode_manifest(Manifest(mtime_ns=0, segments=(part,))), name="m")

    (found,) = read.segments
    assert (found.before_bytes, found.size_bytes) == (start, size)
    assert found.stored_bytes == segment.stored_bytes
    assert found.object_paths() == segment.object_paths()
    touched = segment.checksums_U[start // unit : (start + size - 1) // unit + 1]
    assert found.checksums_U.tolist() == touched.tolist()


def test_a_file_of_whole_segments_is_version_1_and_one_of_ranges_version_2():
    whole = a_segment(1, 10_000)

    one = encode_manifest(Manifest(mtime_ns=0, segments=(whole,)))
    two = encode_manifest(Manifest(mtime_ns=0, segments=(whole.part(5000, 300),)))

    assert decode_header(one, name="m").omnifs == 1
    assert decode_header(two, name="m").omnifs == 2
    assert hashlib.sha256(two).hexdigest() == VERSION_2_SHA256


VERSION_2_SHA256 = "326633e1ecaef54a9c951edb4356e4eddfd0fe41e20d60f13767fb32bbf64786"


def test_a_range_that_leaves_its_segment_is_damage():
    part = a_segment(1, 10_000).part(5000, 300)
    beyond = replace(part, after_bytes=-1)

    with pytest.raises(IntegrityError, match="range 5000\\+300 is not within"):
        decode_manifest(encode_manifest(Manifest(mtime_ns=0, segments=(beyond,))), name="m")


def test_unit_checksums_are_xxh3_of_64_bits():
    assert unit_checksum(b"") == 0x2D06800538D394C2
