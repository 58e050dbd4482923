"""Any bytes of a stranger give a table or an integrity error, never another error or a path outside."""

import contextlib
import gzip
import io
import tarfile

import numpy as np
import orjson
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import ConfigError, IntegrityError, OmniloadError
from snapshot.image.layer.index import BLOCK, Entry, Extent, LayerIndex
from snapshot.image.layer.index_cache import decode_index, encode_index
from snapshot.image.layer.index_making import index_gzip
from snapshot.image.layer.tar import read_table
from snapshot.image.layer.toc import TocPlace, index_of_toc, zstd_toc
from snapshot.image.tree.merge import merge
from snapshot.oci.digest import digest_of
from snapshot.oci.manifest import MANIFEST_TYPE, Descriptor, parse_manifest
from tests.support.snapshot.image_builders import a_member, a_tar

NAMES = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\0/"), min_size=1, max_size=40
).filter(lambda name: name not in {".", ".."} and len(name.encode()) <= 100)
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
KINDS = st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE])
MEMBERS = st.builds(
    lambda path, kind, data, mode, xattr: a_member(
        path,
        data if kind == tarfile.REGTYPE else b"",
        kind,
        mode=mode,
        linkname="target" if kind == tarfile.SYMTYPE else "",
        xattrs={"user.x": xattr} if xattr else {},
    ),
    PATHS,
    KINDS,
    st.binary(max_size=1500),
    st.integers(0, 0o7777),
    st.binary(max_size=20),
)
FORMATS = st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
SAMPLE = a_tar(
    a_member("d", kind=tarfile.DIRTYPE),
    a_member("d/" + "long" * 60, b"data" * 200, xattrs={"user.x": b"\xff" * 30}),
    a_member("link", kind=tarfile.SYMTYPE, linkname="t" * 150),
    a_member("hard", kind=tarfile.LNKTYPE, linkname="d/" + "long" * 60),
) + a_tar(a_member("gnu" * 60, b"x"), tar_format=tarfile.GNU_FORMAT)
LAYER = Descriptor(media_type="application/x", digest=digest_of(b""), size=1000)


def table(data):
    return list(read_table(io.BytesIO(data), layer="it"))


def is_inside(path):
    return not path.startswith("/") and ".." not in path.split("/") and "\0" not in path


@given(st.lists(MEMBERS, max_size=6), FORMATS)
def test_any_tar_reads_as_it_was_written(members, tar_format):
    data = a_tar(*members, tar_format=tar_format)

    entries = table(data)

    assert [entry.path for entry in entries] == [member.name for member, _ in members]
    for entry, (member, content) in zip(entries, members, strict=True):
        assert entry.mode == member.mode
        assert b"".join(data[e.stream_offset :][: e.size_bytes] for e in entry.extents) == content
        if tar_format == tarfile.PAX_FORMAT:
            assert dict(entry.xattrs) == {
                key.removeprefix("SCHILY.xattr."): value.encode("utf-8", "surrogateescape")
                for key, value in member.pax_headers.items()
            }


@given(st.data())
def test_an_altered_tar_is_a_table_or_an_integrity_error(draw):
    data = bytearray(SAMPLE)
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.integers(0, len(data) - 1))
        piece = draw.draw(st.binary(min_size=1, max_size=12))
        data[at : at + len(piece)] = piece
    data = bytes(data[: draw.draw(st.integers(0, len(data)))])

    with contextlib.suppress(IntegrityError):
        for entry in table(data):
            assert is_inside(entry.path)
            assert is_inside(entry.target) or entry.kind == "symlink"
            assert all(e.stream_offset + e.size_bytes <= len(data) for e in entry.extents)


@given(st.binary(max_size=1600))
def test_any_bytes_at_all_are_a_table_or_an_integrity_error(data):
    with contextlib.suppress(IntegrityError):
        table(data)


@given(st.data())
def test_an_altered_gzip_is_never_indexed_as_something_else(tmp_path_factory, draw):
    blob = bytearray(gzip.compress(SAMPLE[:10240], mtime=0))
    at = draw.draw(st.integers(0, len(blob) - 1))
    blob[at] ^= draw.draw(st.integers(1, 255))
    path = tmp_path_factory.getbasetemp() / "altered.gz"
    path.write_bytes(blob)

    with contextlib.suppress(IntegrityError):
        index = index_gzip(path, "sha256:it")

        # Only bytes that do not describe the content may have changed.
        assert index.diff_id == digest_of(SAMPLE[:10240])


def an_index():
    blocks = [(i * 10, 10, 7, i * 7, -1, 0, b"", bytes([i] * 32)) for i in range(3)]
    return LayerIndex(
        blob_digest=digest_of(b""),
        blob_bytes=21,
        format="gzip",
        stream_bytes=30,
        diff_id=digest_of(b""),
        blocks_B=np.array(blocks, BLOCK),
        windows_W=(b"window", b""),
        entries=(
            Entry(path="a\udcff", kind="file", size_bytes=9, extents=(Extent(0, 5, 9),)),
            Entry(path="b", kind="symlink", target="é", xattrs=(("user.x", b"\xff"),)),
        ),
    )


@given(st.data())
def test_an_altered_index_is_refused(draw):
    data = bytearray(encode_index(an_index()))
    at = draw.draw(st.integers(0, len(data) - 1))
    data[at] ^= draw.draw(st.integers(1, 255))

    with contextlib.suppress(OmniloadError):
        found = decode_index(bytes(data), name="it")

        assert (
            found.entries == an_index().entries
        )  # the line before the body changed, without effect
        assert np.array_equal(found.blocks_B, an_index().blocks_B)


VALUES = st.none() | st.integers(-5, 1 << 40) | st.text(max_size=8) | st.just(digest_of(b"x"))
ITEMS = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["reg", "chunk", "dir", "hardlink", "what"]),
        "name": st.text(max_size=6),
    },
    optional=dict.fromkeys(
        (
            *("size", "offset", "endOffset", "chunkSize", "chunkOffset", "chunkDigest", "digest"),
            *("mode", "uid", "modtime", "linkName", "devMajor", "xattrs", "chunkType"),
        ),
        VALUES,
    ),
)


@given(st.lists(ITEMS, max_size=6))
def test_any_table_of_contents_is_an_index_that_stays_in_its_blob_or_an_error(items):
    with contextlib.suppress(IntegrityError, ConfigError):
        index = index_of_toc(items, LAYER, 900)

        for number in range(len(index.blocks_B)):
            offset, size = index.blob_range(number)
            assert 0 <= offset < offset + size <= 900
        assert all(is_inside(entry.path) for entry in index.entries)
        assert index.stream_bytes == int(index.blocks_B["size"].sum())


@given(
    st.recursive(
        st.none() | st.integers(-9, 1 << 62) | st.text(max_size=9),
        lambda v: (
            st.dictionaries(
                st.sampled_from(
                    [
                        "schemaVersion",
                        "mediaType",
                        "config",
                        "layers",
                        "manifests",
                        "digest",
                        "size",
                    ]
                ),
                v,
            )
            | st.lists(v, max_size=3)
        ),
        max_leaves=12,
    )
)
def test_any_json_is_a_manifest_or_an_error_of_ours(value):
    with contextlib.suppress(OmniloadError):
        parse_manifest(
            orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_DATACLASS), MANIFEST_TYPE, name="it"
        )


@given(
    st.lists(
        st.tuples(PATHS, st.sampled_from(["file", "directory", "symlink", "hardlink"]), PATHS),
        max_size=8,
    )
)
def test_any_entries_merge_to_a_tree_or_an_integrity_error(items):
    entries = [Entry(path=path, kind=kind, target=target) for path, kind, target in items]

    with contextlib.suppress(IntegrityError):
        tree = merge([entries, entries])

        assert all(is_inside(path) for path, _ in tree.walk())


def test_a_bomb_of_a_header_is_refused_in_little_memory():
    member = tarfile.TarInfo("././@LongLink")
    member.type, member.size = tarfile.GNUTYPE_LONGNAME, 9 << 20

    with pytest.raises(IntegrityError, match="more than 8388608"):
        table(member.tobuf(tarfile.GNU_FORMAT) + bytes(1024))


def test_a_table_that_is_longer_than_its_manifest_says_is_not_inflated():
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))

    with pytest.raises(IntegrityError, match="longer than the 1000 bytes"):
        zstd_toc(bomb, TocPlace(0, len(bomb), 1000, digest_of(bomb)), layer="it")
