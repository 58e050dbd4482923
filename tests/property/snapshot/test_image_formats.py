"""Every way to store a tar gives back every range of it, however it was compressed."""

import contextlib
import gzip
import hashlib
import io
import tarfile
import zlib

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from snapshot.image.layer import index_making
from snapshot.image.layer.convert import write_chunked
from snapshot.image.layer.index import LayerIndex, inflate
from snapshot.image.layer.index_making import index_gzip
from snapshot.image.layer.tar import read_table
from snapshot.image.layer.toc import index_of_toc, zstd_place, zstd_toc
from snapshot.oci.digest import digest_of
from snapshot.oci.manifest import Descriptor
from tests.support.snapshot.image_builders import a_member, a_tar, read_stream, zran_friendly

NOISE = hashlib.shake_256(b"noise").digest(60_000)
TEXT = zran_friendly(100_000) + NOISE + zran_friendly(540_000)
"""Bytes that compress, and bytes that writers store unchanged."""
SIZES = st.lists(st.integers(0, 300_000), min_size=1, max_size=4)
LAYER = "application/vnd.oci.image.layer.v1.tar+zstd"


class Held:
    """Blocks of a blob in memory."""

    def __init__(self, blob):
        self.blob = blob

    def block(self, index: LayerIndex, number):
        offset, size = index.blob_range(number)
        return index.decode(number, self.blob[offset : offset + size])


@pytest.fixture(autouse=True)
def small_spans(monkeypatch):
    """Many places in little data; the least spacing that the library allows is above its window."""
    monkeypatch.setattr(index_making, "SPAN_BYTES", 40_000)


def tar_of(sizes):
    members = [a_member(f"f{number}", TEXT[:size]) for number, size in enumerate(sizes)]
    return a_tar(a_member("d", kind=tarfile.DIRTYPE), *members)


def compressed(tar, cuts, level, strategy):
    """Compress in members that end at ``cuts``."""
    ends = sorted({min(cut, len(tar)) for cut in cuts} | {len(tar)})
    parts, start = [], 0
    for end in ends:
        packer = zlib.compressobj(level, wbits=31, strategy=strategy)
        parts.append(packer.compress(tar[start:end]) + packer.flush())
        start = end
    return b"".join(parts)


@given(
    SIZES,
    st.lists(st.integers(0, 900_000), max_size=3),
    st.sampled_from([0, 1, 6, 9]),
    st.sampled_from([zlib.Z_DEFAULT_STRATEGY, zlib.Z_HUFFMAN_ONLY, zlib.Z_FIXED]),
    st.data(),
)
def test_any_range_of_any_gzip_is_what_gunzip_gives(
    tmp_path_factory, sizes, cuts, level, strategy, draw
):
    tar = tar_of(sizes)
    blob = compressed(tar, cuts, level, strategy)
    path = tmp_path_factory.getbasetemp() / "range.gz"
    path.write_bytes(blob)

    index = index_gzip(path, digest_of(blob))

    assert gzip.decompress(blob) == tar
    assert (index.stream_bytes, index.diff_id) == (len(tar), digest_of(tar))
    for _ in range(4):
        offset = draw.draw(st.integers(0, len(tar)))
        size = draw.draw(st.integers(0, len(tar) - offset))
        assert read_stream(index, Held(blob), offset, size) == tar[offset : offset + size]


@given(SIZES, st.integers(1, 9))
def test_a_converted_layer_is_the_same_tar_to_others_and_the_same_files_to_us(sizes, level):
    tar = tar_of(sizes)
    entries = list(read_table(io.BytesIO(tar), layer="it"))
    out = io.BytesIO()

    notes = write_chunked(io.BytesIO(tar), entries, out, level=level)

    blob = out.getvalue()
    reader = zstandard.ZstdDecompressor().stream_reader(blob, read_across_frames=True)
    assert reader.read() == tar
    layer = Descriptor(media_type=LAYER, digest=digest_of(blob), size=len(blob), annotations=notes)
    place = zstd_place(layer)
    table = zstd_toc(blob[place.offset :][: place.size_bytes], place, layer="it")
    index = index_of_toc(table, layer, place.offset)
    assert [(e.path, e.kind, e.mode, e.size_bytes) for e in index.entries] == [
        (e.path, e.kind, e.mode, e.size_bytes) for e in entries
    ]
    for entry, size in zip(index.entries[1:], sizes, strict=True):
        data = b"".join(
            read_stream(index, Held(blob), e.stream_offset, e.size_bytes) for e in entry.extents
        )
        assert data == TEXT[:size]


@given(
    st.integers(0, 7),
    st.binary(min_size=1, max_size=2000),
    st.binary(max_size=500),
    st.integers(1, 255),
    st.sampled_from([1, 6]),
)
def test_a_deflate_stream_is_entered_at_any_bit(shift, data, window, before, level):
    """Write a stored block ``shift`` bits after the end of other data, then more of the stream.

    RFC 1951, section 3.2.4: three bits of header, then bytes from the next boundary on.
    """
    header = before & ((1 << shift) - 1)  # not final, stored: three zeros
    stored = header.to_bytes(1 if shift <= 5 else 2, "little")
    stored += len(data).to_bytes(2, "little") + (len(data) ^ 0xFFFF).to_bytes(2, "little") + data
    known = (window + data)[-(32 << 10) :]
    packer = zlib.compressobj(level, wbits=-15, zdict=known)
    raw = stored + packer.compress(data + window) + packer.flush()

    bits = (8 - shift) % 8

    assert inflate(raw, bits, window, 2 * len(data) + len(window)) == data + data + window


@given(st.integers(0, 7), st.binary(max_size=60), st.integers(0, 255))
def test_what_is_no_stream_ends_in_an_error_of_zlib_at_any_bit(bits, raw, window):
    with contextlib.suppress(zlib.error):
        assert len(inflate(raw, bits, bytes(window), 1000)) <= 1000


def test_the_footer_points_to_the_table_where_the_annotations_do():
    out = io.BytesIO()
    tar = tar_of([1000])

    notes = write_chunked(io.BytesIO(tar), list(read_table(io.BytesIO(tar), layer="it")), out)

    footer = out.getvalue()[-64:]
    numbers = [int.from_bytes(footer[i : i + 8], "little") for i in range(0, 56, 8)]
    (position,) = (text for name, text in notes.items() if name.endswith("position"))
    assert ":".join(map(str, numbers[:4])) == position
    assert numbers[4:] == [0, 0, 0]
    assert footer[56:] == b"GNUlInUx"
    assert out.getvalue()[-72:-64] == b"\x50\x2a\x4d\x18" + (64).to_bytes(4, "little")
