"""Bytes of EROFS: checksums, inodes, attributes, directories."""

import struct

import pytest

from omniload.base.errors import ConfigError
from snapshot.image.erofs_format import (
    BLOCK_BYTES,
    FLAT_INLINE,
    Inode,
    Named,
    chunk_form,
    chunk_index,
    crc32c,
    device_slot,
    device_slots,
    directory_block,
    directory_bytes,
    directory_groups,
    encoded_device,
    encoded_inode,
    superblock,
    xattr_body,
)
from tests.support.erofs_reader import ErofsReader, inverted_crc32c


def an_inode(**changes):
    fields = {
        "mode": 0o100644,
        "uid": 1,
        "gid": 2,
        "mtime_ns": 3_000_000_004,
        "size_bytes": 5,
        "links": 1,
        "number": 6,
        "layout": FLAT_INLINE,
        "place": 0,
        "xattr_bytes": 0,
    }
    return Inode(**fields | changes)


@pytest.mark.parametrize(
    ("data", "known"),
    [(b"", 0), (b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)],
)
def test_the_checksum_is_the_one_of_rfc_3720(data, known):
    assert inverted_crc32c(data) == known


def test_a_checksum_can_be_continued():
    assert crc32c(b"789", crc32c(b"123456")) == crc32c(b"123456789")


def test_a_superblock_is_checked_and_keeps_what_lies_behind_it():
    first = bytearray(BLOCK_BYTES)
    first[2000:2005] = b"after"

    block = superblock(
        root_nid=36, inodes=7, blocks=9, devices=1, uuid=b"u" * 16, first_block=bytes(first)
    )

    reader = ErofsReader(block)
    assert (reader.magic, reader.root_nid, reader.inodes, reader.blocks) == (0xE0F5E1E2, 36, 7, 9)
    assert reader.checksum_is_right()
    assert block[2000:2005] == b"after"
    assert len(block) == BLOCK_BYTES
    changed = bytearray(block)
    changed[2000] ^= 1
    assert not ErofsReader(bytes(changed)).checksum_is_right()


@pytest.mark.parametrize(("devices", "features"), [(0, 0x4), (1, 0xC), (3, 0xC)])
def test_a_superblock_says_whether_there_are_devices(devices, features):
    block = superblock(
        root_nid=36,
        inodes=1,
        blocks=1,
        devices=devices,
        uuid=bytes(16),
        first_block=bytes(BLOCK_BYTES),
    )

    assert ErofsReader(block).incompatible == features


def test_a_device_has_a_name_and_its_blocks():
    assert struct.unpack("<64sII56x", device_slot(b"layer 0", 12)) == (
        b"layer 0".ljust(64, b"\0"),
        12,
        0,
    )
    assert len(device_slot(b"x" * 100, 1)) == 128


def test_the_blocks_of_devices_are_read_back():
    head = bytearray(BLOCK_BYTES)
    for number, blocks in enumerate((12, 0, 0xFFFFFFFE)):
        at = 1152 + 128 * number
        head[at : at + 128] = device_slot(b"d", blocks)

    block = superblock(
        root_nid=48, inodes=1, blocks=1, devices=3, uuid=bytes(16), first_block=bytes(head)
    )

    assert [blocks for _, blocks in device_slots(block)] == [12, 0, 0xFFFFFFFE]
    with pytest.raises(ValueError, match="1300 bytes for 3 devices"):
        device_slots(block[:1300])


@pytest.mark.parametrize("head", [b"", bytes(1200), bytes(BLOCK_BYTES)])
def test_what_is_no_image_has_no_devices(head):
    with pytest.raises(ValueError, match=f"{len(head)} bytes that begin no"):
        device_slots(head)


@pytest.mark.parametrize(
    ("mtime_ns", "seconds", "nanoseconds"),
    [(0, 0, 0), (3_000_000_004, 3, 4), (-1, -1, 999_999_999), (-1_000_000_000, -1, 0)],
)
def test_times_before_1970_have_nanoseconds_that_count_up(mtime_ns, seconds, nanoseconds):
    raw = encoded_inode(an_inode(mtime_ns=mtime_ns))

    assert struct.unpack_from("<qI", raw, 32) == (seconds, nanoseconds)


def test_an_inode_counts_its_attributes_in_words():
    body = xattr_body([(b"user.a", b"12345")])

    raw = encoded_inode(an_inode(xattr_bytes=len(body)))

    count = struct.unpack_from("<H", raw, 2)[0]
    assert len(raw) == 64
    assert 12 + 4 * (count - 1) == len(body)


@pytest.mark.parametrize(
    ("major", "minor", "packed"),
    [(1, 3, 0x103), (0, 0, 0), (4095, 255, 0xFFFFF), (8, 256, 0x100800)],
)
def test_a_device_number_is_packed_as_linux_does(major, minor, packed):
    assert encoded_device(major, minor) == packed


@pytest.mark.parametrize(("major", "minor"), [(4096, 0), (0, 1 << 20)])
def test_a_device_number_that_linux_lacks_is_refused(major, minor):
    with pytest.raises(ConfigError, match=f"{major}:{minor}.*FUSE"):
        encoded_device(major, minor)


def test_chunks_are_addressed_by_device_and_block():
    assert chunk_index(2, 0x01020304) == bytes([0, 0, 2, 0, 4, 3, 2, 1])
    assert chunk_form(3) == 0x23


def test_no_attributes_take_no_room():
    assert xattr_body([]) == b""


@pytest.mark.parametrize(
    ("name", "index", "rest"),
    [
        (b"user.note", 1, b"note"),
        (b"trusted.overlay.opaque", 4, b"overlay.opaque"),
        (b"security.capability", 6, b"capability"),
        (b"system.posix_acl_access", 2, b""),
        (b"system.posix_acl_default", 3, b""),
    ],
)
def test_an_attribute_is_named_by_its_prefix(name, index, rest):
    body = xattr_body([(name, b"v")])

    assert struct.unpack_from("<BBH", body, 12) == (len(rest), index, 1)
    assert body[16 : 16 + len(rest) + 1] == rest + b"v"
    assert len(body) % 4 == 0


@pytest.mark.parametrize("name", [b"system.other", b"plain", b"user.", b"user." + b"n" * 256])
def test_an_attribute_that_the_kernel_would_not_show_is_refused(name):
    with pytest.raises(ConfigError, match="cannot be held by EROFS"):
        xattr_body([(name, b"")])


def test_attributes_that_are_too_large_are_refused():
    with pytest.raises(ConfigError, match="65536 bytes cannot"):
        xattr_body([(b"user.a", bytes(1 << 16))])
    many = [(b"user.%d" % number, bytes(60_000)) for number in range(5)]
    with pytest.raises(ConfigError, match="more than 262148"):
        xattr_body(many)


def test_a_directory_block_holds_records_then_names():
    block = directory_block([Named(b".", 36, 2), Named(b"..", 36, 2), Named(b"a", 40, 1)])

    assert struct.unpack_from("<QHBx", block, 0) == (36, 36, 2)
    assert struct.unpack_from("<QHBx", block, 24) == (40, 39, 1)
    assert block[36:] == b"...a"


def test_names_that_fill_a_block_to_its_last_byte_share_it():
    names = [b"%04d" % number for number in range(BLOCK_BYTES // 16)]

    assert list(directory_groups(names)) == [(0, 256)]
    assert directory_bytes(names) == BLOCK_BYTES
    assert list(directory_groups([*names, b"x"])) == [(0, 256), (256, 257)]
    assert directory_bytes([*names, b"x"]) == BLOCK_BYTES + 13


def test_the_longest_names_take_more_blocks():
    names = [bytes([65 + number]) * 255 for number in range(16)]

    groups = list(directory_groups(names))

    assert groups == [(0, 15), (15, 16)]
    assert directory_bytes(names) == BLOCK_BYTES + 267
