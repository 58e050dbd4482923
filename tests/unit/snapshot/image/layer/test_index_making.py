"""Indexes of layers: every format gives every byte, and no altered byte gets through."""

import errno
import gzip
import io
import os
import tarfile
import tempfile
import zlib
from functools import lru_cache

import numpy as np
import pytest

from omniload.base.errors import ConfigError, IntegrityError, StateError
from snapshot.image.layer import index_making
from snapshot.image.layer.index import BLOCK, LayerIndex
from snapshot.image.layer.index_cache import IndexCache, decode_index, encode_index
from snapshot.image.layer.index_making import index_gzip, index_image, index_layer
from snapshot.image.layer.toc import index_of_toc, zstd_place
from snapshot.oci.digest import digest_of
from snapshot.oci.layout import OciLayout
from tests.support.snapshot.image_builders import (
    BlobSource,
    a_layer,
    a_member,
    a_tar,
    an_image,
    read_stream,
    zran_friendly,
)

BIG = zran_friendly(5_000_000)
MEMBERS = (
    a_member("d", kind=tarfile.DIRTYPE, mode=0o755),
    a_member("d/big", BIG, xattrs={"user.x": b"\xff"}),
    a_member("d/empty"),
    a_member("d/link", kind=tarfile.SYMTYPE, linkname="big"),
    a_member("d/small", b"small", uid=5),
)
TAR = a_tar(*MEMBERS)


@pytest.fixture
def store(tmp_path):
    return OciLayout.create(tmp_path / "layout")


@pytest.fixture
def cache(tmp_path):
    return IndexCache(tmp_path / "indexes")


def in_members(data, size, level=4):
    return b"".join(gzip.compress(data[i : i + size], level) for i in range(0, len(data), size))


@lru_cache
def compressed(size, level):
    """Return the layer in members of a size; once, for it takes longer than most that is done with it."""
    return in_members(TAR, size, level)


FORMATS = {
    "tar": lambda store: a_layer(store, TAR, "tar"),
    "gzip": lambda store: a_layer(store, compressed(len(TAR), 6)),
    "gzip of many members": lambda store: a_layer(store, compressed(700_000, 4)),
    "gzip of tiny members": lambda store: a_layer(store, compressed(30_000, 4)),
    "gzip, stored": lambda store: a_layer(store, compressed(len(TAR), 0)),
}


@pytest.fixture(params=FORMATS)
def layer(request, store):
    return FORMATS[request.param](store)


def content(index, source, path):
    entry = next(entry for entry in index.entries if entry.path == path)
    return b"".join(
        read_stream(index, source, e.stream_offset, e.size_bytes) for e in entry.extents
    )


def test_every_format_gives_the_same_files(store, cache, layer):
    index = index_layer(store, layer, cache)
    source = BlobSource(store)

    assert {entry.path: entry.kind for entry in index.entries} == {
        "d": "directory",
        "d/big": "file",
        "d/empty": "file",
        "d/link": "symlink",
        "d/small": "file",
    }
    assert content(index, source, "d/big") == BIG
    assert content(index, source, "d/small") == b"small"
    assert next(e for e in index.entries if e.path == "d/big").xattrs == (("user.x", b"\xff"),)
    assert next(e for e in index.entries if e.path == "d/small").uid == 5


def test_a_small_read_fetches_little(store, cache, layer):
    index = index_layer(store, layer, cache)
    source = BlobSource(store)
    big = next(entry for entry in index.entries if entry.path == "d/big").extents

    for offset in (0, 1_234_567, 4_999_990):
        extent = next(e for e in reversed(big) if e.file_offset <= offset)
        at = extent.stream_offset + offset - extent.file_offset
        assert read_stream(index, source, at, 10) == BIG[offset : offset + 10]

    assert len(source.fetched) == 3
    assert all(size <= 1_300_000 for _, size in source.fetched)


def test_blocks_cover_the_stream_and_have_digests_of_their_own(store, cache, layer):
    index = index_layer(store, layer, cache)

    ends = index.blocks_B["stream_offset"] + index.blocks_B["size"]
    assert index.blocks_B["stream_offset"][0] == 0
    assert np.array_equal(ends[:-1], index.blocks_B["stream_offset"][1:])
    assert ends[-1] == index.stream_bytes


def test_any_altered_byte_of_what_is_fetched_is_refused(store, cache, layer):
    index = index_layer(store, layer, cache)

    for block in range(0, len(index.blocks_B), max(1, len(index.blocks_B) // 4)):
        offset, size = index.blob_range(block)
        raw = bytearray(store.blob_range(layer.digest, offset, size))
        # The bytes of a gzip block that its neighbours share are not its own.
        raw[size // 2] ^= 0x55
        with pytest.raises(IntegrityError, match="not what was stored"):
            index.decode(block, bytes(raw))
        with pytest.raises(IntegrityError, match="not what was stored"):
            index.decode(block, b"")


def test_a_range_outside_the_stream_is_refused(store, cache, layer):
    index = index_layer(store, layer, cache)

    with pytest.raises(ValueError, match="leaves its layer"):
        list(index.ranges(index.stream_bytes - 1, 2))
    assert list(index.ranges(0, 0)) == []


def test_an_index_reads_back_as_it_was_written(store, cache, layer):
    index = index_layer(store, layer, cache)

    again = decode_index(encode_index(index), name="it")

    assert again.entries == index.entries
    assert np.array_equal(again.blocks_B, index.blocks_B)
    for name in LayerIndex.__slots__:
        if name not in {"blocks_B", "entries"}:
            assert getattr(again, name) == getattr(index, name)


def test_an_index_is_kept_and_the_layer_not_read_again(store, cache, layer, tmp_path):
    index_layer(store, layer, cache)
    for path in (tmp_path / "layout/blobs/sha256").iterdir():
        path.unlink()

    assert index_layer(store, layer, cache).blob_digest == layer.digest


def test_a_broken_index_is_built_anew(store, cache, layer, tmp_path):
    index_layer(store, layer, cache)
    (path,) = (tmp_path / "indexes").iterdir()
    good = path.read_bytes()
    for bad in (b"", good[: len(good) // 2], good[:-1] + b"?", good.replace(b"index", b"xedni")):
        path.write_bytes(bad)

        assert index_layer(store, layer, cache).blob_digest == layer.digest
        assert path.read_bytes() == good


def test_an_index_of_another_version_is_named_as_such(store, cache):
    data = encode_index(index_layer(store, FORMATS["tar"](store), cache))

    with pytest.raises(StateError, match="version 9, this code reads 1"):
        decode_index(data.replace(b'_index":1', b'_index":9'), name="it")


def test_a_kept_index_that_claims_another_layer_is_not_used(store, cache, tmp_path):
    index_layer(store, FORMATS["tar"](store), cache)
    (path,) = (tmp_path / "indexes").iterdir()
    other = digest_of(b"other")
    path.rename(path.with_name(path.name.replace(path.name[7:71], other[7:])))

    assert cache.get(other) is None


def test_a_layer_whose_bytes_are_altered_is_never_indexed(store, cache, tmp_path):
    layer = FORMATS["gzip"](store)
    path = tmp_path / "layout/blobs" / layer.digest.replace(":", "/")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

    with pytest.raises(IntegrityError, match="has altered it"):
        index_layer(store, layer, cache)
    assert cache.get(layer.digest) is None


@pytest.mark.parametrize("cut", [5, 1000, 400_000])
def test_a_gzip_cut_short_is_refused(tmp_path, cut):
    path = tmp_path / "blob"
    path.write_bytes(gzip.compress(TAR, 6)[:-cut])

    with pytest.raises(IntegrityError, match="layer sha256:it"):
        index_gzip(path, "sha256:it")


@pytest.mark.parametrize(
    "data",
    [b"", b"plain", gzip.compress(b"no tar" * 200), os.urandom(5000)],
    ids=["empty", "plain", "gzip of no tar", "noise"],
)
def test_what_is_no_gzip_of_a_tar_is_refused(tmp_path, data):
    path = tmp_path / "blob"
    path.write_bytes(data)

    with pytest.raises(IntegrityError, match="layer sha256:it"):
        index_gzip(path, "sha256:it")


def test_a_span_that_does_not_decode_alone_is_named_with_its_layer(tmp_path, monkeypatch):
    path = tmp_path / "blob"
    path.write_bytes(gzip.compress(TAR, 6))

    def broken(*_):
        raise zlib.error("Error -3 while decompressing data: invalid stored block lengths")

    monkeypatch.setattr(index_making, "inflate", broken)

    with pytest.raises(
        IntegrityError, match=r"layer sha256:it: span 0, .* stored block lengths.*convert"
    ):
        index_gzip(path, "sha256:it")


def test_an_empty_tar_in_gzip_has_an_index(tmp_path):
    path = tmp_path / "blob"
    path.write_bytes(gzip.compress(bytes(1024)))

    index = index_gzip(path, "sha256:it")

    assert (index.entries, index.stream_bytes) == ((), 1024)


def test_an_image_whose_layers_unpack_to_something_else_is_refused(store, cache):
    image = an_image(store, [(FORMATS["gzip"](store), b"another tar")])

    with pytest.raises(IntegrityError, match="the configuration says"):
        index_image(store, image, cache)


def test_the_indexes_of_an_image_come_lowest_first(store, cache):
    layers = [(FORMATS[name](store), TAR) for name in ("tar", "gzip")]

    indexes = index_image(store, an_image(store, layers), cache)

    assert [index.format for index in indexes] == ["tar", "gzip"]


def test_zstd_without_a_table_is_refused_with_the_remedy(store, cache):
    with pytest.raises(ConfigError, match="omniload image convert"):
        index_layer(store, a_layer(store, b"zstd", "zstd"), cache)


@pytest.mark.parametrize("position", ["", "1:2:3", "1:2:3:x", "-1:2:3:1", "0:9999:5:1", "0:1:9:2"])
def test_a_table_in_an_impossible_place_is_refused(store, position):
    prefix = "io.github.containers.zstd-chunked.manifest-"
    notes = {f"{prefix}position": position, f"{prefix}checksum": digest_of(b"")}

    with pytest.raises(IntegrityError, match="table"):
        zstd_place(a_layer(store, b"zstd" * 10, "zstd", **notes))


def items(**changes):
    return [
        {"type": "reg", "name": "f", "size": 4, "offset": 1, "digest": digest_of(b"data")} | changes
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"size": -1},
        {"size": 1 << 50},
        {"type": "what"},
        {"name": "../f"},
        {"name": None, "type": None},
        {"offset": 99},
        {"digest": "sha256:x"},
        {"chunkOffset": 3},
        {"chunkSize": 3},
        {"chunkSize": -1},
        {"mode": "x"},
        {"xattrs": {"a": "%"}},
        {"modtime": "yesterday"},
        {"uid": -1},
    ],
)
def test_a_table_that_contradicts_itself_is_refused(store, changes):
    with pytest.raises(IntegrityError):
        index_of_toc(items(**changes), a_layer(store, bytes(100)), 50)


@pytest.mark.parametrize("changes", [{"digest": None}, {"size": 1 << 30, "chunkSize": 1 << 30}])
def test_a_table_that_says_what_is_not_read_here_is_refused_with_the_remedy(store, changes):
    with pytest.raises(ConfigError, match="run 'omniload image convert'"):
        index_of_toc(items(**changes), a_layer(store, bytes(100)), 50)


def test_holes_of_a_table_are_holes_of_the_file(store):
    parts = [
        *items(size=104, chunkSize=100, chunkType="zeros"),
        {"type": "chunk", "name": "f", "offset": 20, "chunkOffset": 100, "chunkSize": 4}
        | {"chunkDigest": digest_of(b"data")},
    ]

    index = index_of_toc(parts, a_layer(store, bytes(100)), 50)

    ((extent,),) = [entry.extents for entry in index.entries]
    assert (extent.file_offset, extent.stream_offset, extent.size_bytes) == (100, 0, 4)
    assert index.stream_bytes == 4


def test_a_record_of_a_block_has_the_size_the_format_says():
    assert BLOCK.itemsize == 64


def test_a_sparse_read_of_nothing_is_nothing(store, cache):
    index = index_layer(store, FORMATS["tar"](store), cache)

    assert read_stream(index, BlobSource(store), 7, 0) == b""
    assert io.BytesIO(TAR).read(5) == read_stream(index, BlobSource(store), 0, 5)


def test_a_disk_that_fills_while_a_gzip_is_indexed_is_no_fault_of_the_layer(tmp_path, monkeypatch):
    store = OciLayout.create(tmp_path / "layout")
    layer = a_layer(store, gzip.compress(TAR), "gzip")
    made = tempfile.NamedTemporaryFile

    def full_for_the_second(prefix):
        if prefix == "omniload-":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return made(prefix=prefix)

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", full_for_the_second)

    with pytest.raises(StateError, match="no room for it"):
        index_layer(store, layer, IndexCache(tmp_path / "cache"))
