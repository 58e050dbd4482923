"""The manifest: every byte has its place, and damage is never read as data."""

import hashlib
import struct
from dataclasses import replace

import orjson
import pytest
import zstandard

from omniload.base.errors import IntegrityError, StateError
from snapshot.env.format.entries import Entry, Kind
from snapshot.env.format.manifest import (
    HEADER_BYTES,
    Head,
    Manifest,
    Place,
    decode_manifest,
    encode_manifest,
)
from snapshot.env.format.packs import HEADER, Frame
from tests.support.snapshot.env_builders import TARGETS, a_file, a_folder, a_link

KEY = "0" * 64
DIGEST = hashlib.sha256(b"abc").digest()

HEAD = Head(
    key=KEY,
    document={"version": 1, "prefix": "/env"},
    targets=TARGETS,
    created_ns=7,
    packs=("ab" * 16,),
    distributions=("numpy==2",),
    install_s=1.5,
    stored_bytes=99,
    skipped=("/env/pipe",),
)
ENTRIES = (
    a_folder(""),
    a_file("tool", digest=DIGEST, mode=0o755),
    a_folder("", 1),
    Entry(1, "gone", Kind.DELETED),
    a_folder("p", 1),
    a_link("p/l", "../q", 1),
    a_file("p/na\udcffme", 1, digest=DIGEST, mtime_ns=-5),
)
FRAMES = ((Frame(len(HEADER), 12, 3),),)
MANIFEST = Manifest(head=HEAD, entries=ENTRIES, contents={DIGEST: Place(0, 0, 3)}, frames=FRAMES)


def remade(body):
    """Return a manifest of a body that somebody made up, header and digest in order."""
    stored = zstandard.ZstdCompressor().compress(body)
    digest = hashlib.sha256(body).digest()
    return struct.pack("<8sIIQQ32s", b"OMNIENV\0", 1, 0, len(body), len(stored), digest) + stored


def blocks_of(manifest):
    body = zstandard.ZstdDecompressor().decompress(encode_manifest(manifest)[HEADER_BYTES:])
    blocks, at = [], 0
    while at < len(body):
        (size,) = struct.unpack_from("<Q", body, at)
        blocks.append(body[at + 8 : at + 8 + size])
        at += 8 + size
    return blocks


def from_blocks(blocks):
    return remade(b"".join(struct.pack("<Q", len(block)) + block for block in blocks))


def test_a_manifest_reads_back_as_it_was():
    assert decode_manifest(encode_manifest(MANIFEST), name="m") == MANIFEST


def test_a_manifest_counts_its_files_and_bytes():
    assert (MANIFEST.num_files, MANIFEST.raw_bytes) == (2, 6)


def test_the_bytes_are_laid_out_as_written_down():
    data = encode_manifest(MANIFEST)
    magic, version, zero, raw, stored, digest = struct.unpack("<8sIIQQ32s", data[:64])
    body = zstandard.ZstdDecompressor().decompress(data[64:])

    assert (magic, version, zero) == (b"OMNIENV\0", 1, 0)
    assert (raw, stored) == (len(body), len(data) - 64)
    assert hashlib.sha256(body).digest() == digest
    head, names, links, entries, contents, frames = blocks_of(MANIFEST)
    assert orjson.loads(head)["key"] == KEY
    assert names == b"\0tool\0\0gone\0p\0p/l\0p/na\xffme\0"
    assert links == b"../q\0"
    assert struct.unpack("<BBHIqQ", entries[24:48]) == (2, 0, 0o755, 0, 1, 3)
    assert struct.unpack("<BBHIqQ", entries[72:96]) == (0, 1, 0, 0xFFFFFFFF, 0, 0)
    assert contents == struct.pack("<32sIIQQ", DIGEST, 0, 0, 0, 3)
    assert frames == struct.pack("<IIQII", 0, 0, 16, 12, 3)


def test_a_manifest_of_another_version_is_refused_with_a_remedy():
    data = bytearray(encode_manifest(MANIFEST))
    data[8] = 2

    with pytest.raises(
        StateError, match="version 2, this code reads 1; restore it with the release"
    ):
        decode_manifest(bytes(data), name="m")


@pytest.mark.parametrize("size", [0, 7, 63, 64, 200])
def test_a_manifest_cut_short_is_refused(size):
    with pytest.raises(IntegrityError):
        decode_manifest(encode_manifest(MANIFEST)[:size], name="m")


def test_something_else_is_no_manifest():
    with pytest.raises(IntegrityError, match="is no manifest"):
        decode_manifest(b"PK" + bytes(100), name="m")


def test_a_manifest_that_claims_too_much_is_refused_before_it_is_inflated():
    data = bytearray(encode_manifest(MANIFEST))
    data[16:24] = struct.pack("<Q", 1 << 40)

    with pytest.raises(IntegrityError, match="more than"):
        decode_manifest(bytes(data), name="m")


@pytest.mark.parametrize(
    "changes",
    [
        {"entries": ENTRIES[::-1]},
        {"entries": (ENTRIES[0], *ENTRIES)},
        {"contents": {}},
        {"contents": {DIGEST: Place(0, 0, 4)}},
        {"contents": {DIGEST: Place(0, 1, 3)}},
        {"contents": {DIGEST: Place(1, 0, 3)}},
        {"frames": ()},
        {"frames": ((Frame(0, 12, 3),),)},
        {"head": replace(HEAD, packs=("../../etc",))},
        {"head": replace(HEAD, packs=())},
        {"head": replace(HEAD, version=2)},
    ],
    ids=[
        "out of order", "twice", "no content", "content of another size", "content past the pack",
        "no such pack", "no frames", "frame in the header", "pack that leads out", "pack missing",
        "head of another version",
    ],
)  # fmt: skip
def test_a_manifest_that_contradicts_itself_is_refused(changes):
    with pytest.raises(IntegrityError):
        decode_manifest(encode_manifest(replace(MANIFEST, **changes)), name="m")


def test_an_unknown_key_in_the_head_is_refused():
    head, *rest = blocks_of(MANIFEST)
    head = orjson.dumps({**orjson.loads(head), "extra": 1})

    with pytest.raises(IntegrityError, match="contradicts itself"):
        decode_manifest(from_blocks([head, *rest]), name="m")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("created_ns", "7"),
        ("created_ns", -1),
        ("created_ns", 1 << 63),
        ("install_s", "1.5"),
        ("stored_bytes", None),
        ("stored_bytes", -1),
        ("key", 5),
        ("document", []),
        ("document", {"command": "pip install"}),
        ("document", {"command": [1]}),
        ("document", {"base": {"image": ""}}),
        ("document", {"base": {"image": "", "installed": 7}}),
        ("targets", [["a", "/a"]]),
        ("targets", [{"name": 5, "path": "/a"}]),
    ],
)
def test_a_field_of_the_head_that_is_of_another_type_is_refused(field, value):
    head, *rest = blocks_of(MANIFEST)
    head = orjson.dumps({**orjson.loads(head), field: value})

    with pytest.raises(IntegrityError, match="contradicts itself"):
        decode_manifest(from_blocks([head, *rest]), name="m")


@pytest.mark.parametrize("head", [b"5", b"[]", b'"text"'])
def test_a_head_that_is_no_object_is_refused(head):
    _, *rest = blocks_of(MANIFEST)

    with pytest.raises(IntegrityError, match="contradicts itself"):
        decode_manifest(from_blocks([head, *rest]), name="m")


def test_an_entry_that_names_a_content_beyond_the_table_is_refused():
    blocks = blocks_of(MANIFEST)
    blocks[3] = blocks[3][:28] + struct.pack("<I", 9) + blocks[3][32:]

    with pytest.raises(IntegrityError, match="contradicts itself"):
        decode_manifest(from_blocks(blocks), name="m")


def test_a_link_without_a_text_is_refused():
    blocks = blocks_of(MANIFEST)
    blocks[2] = b""

    with pytest.raises(IntegrityError, match="contradicts itself"):
        decode_manifest(from_blocks(blocks), name="m")


@pytest.mark.parametrize("number", range(6))
def test_a_table_that_lost_a_byte_is_refused(number):
    blocks = blocks_of(MANIFEST)
    blocks[number] = blocks[number][:-1]

    with pytest.raises(IntegrityError):
        decode_manifest(from_blocks(blocks), name="m")


def test_a_missing_table_is_refused():
    with pytest.raises(IntegrityError, match="5 blocks, not 6"):
        decode_manifest(from_blocks(blocks_of(MANIFEST)[:-1]), name="m")


def test_an_unknown_kind_of_entry_is_refused():
    blocks = blocks_of(MANIFEST)
    blocks[3] = b"\x07" + blocks[3][1:]

    with pytest.raises(IntegrityError):
        decode_manifest(from_blocks(blocks), name="m")


def test_every_flipped_bit_is_noticed():
    data = encode_manifest(MANIFEST)
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 1
        try:
            read = decode_manifest(bytes(broken), name="m")
        except (IntegrityError, StateError):
            continue
        # Bytes 12 to 15 are reserved and mean nothing; zstd's checksum flag may too.
        assert read == MANIFEST
