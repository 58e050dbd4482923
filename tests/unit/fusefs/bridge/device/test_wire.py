"""The kernel's protocol as numbers: what is encoded, what is decoded, what is agreed upon."""

import stat
import struct

import pytest

from fusefs.bridge.api.protocol import Change, Entry, Space
from fusefs.bridge.device.binding import agreement
from fusefs.bridge.device.wire import (
    ENTRY_BYTES,
    IN_HEADER,
    OUT_HEADER,
    STRUCTS,
    Init,
    attr_reply,
    batch_forgets,
    change_of,
    directory_line,
    entry_reply,
    names_of,
    open_reply,
    outdated_notice,
    space_reply,
)
from omniload.base.errors import StateError

FILE = Entry(
    inode=5,
    mode=stat.S_IFREG | 0o640,
    size_bytes=1000,
    nlink=3,
    uid=7,
    gid=8,
    mtime_ns=2_500_000_001,
    block_bytes=1 << 20,
    entry_timeout_s=1.5,
    attr_timeout_s=0.25,
    generation=9,
)


def init_request(*, minor=45, flags=0xFFFFFFFF, flags2=0xFFFFFFFF, major=7):
    return memoryview(struct.pack("<6I40x", major, minor, 1 << 17, flags, flags2, 0))


def test_the_structs_have_the_sizes_of_linux():
    assert STRUCTS == {
        "fuse_in_header": 40,
        "fuse_out_header": 16,
        "fuse_attr": 88,
        "fuse_entry_out": 128,
        "fuse_attr_out": 104,
        "fuse_dirent": 24,
        "fuse_init_out": 64,
        "fuse_open_out": 16,
        "fuse_statfs_out": 80,
        "fuse_setattr_in": 88,
        "fuse_forget_one": 16,
        "fuse_notify_inval_inode_out": 24,
    }
    assert (IN_HEADER.size, OUT_HEADER.size) == (40, 16)


def test_an_entry_says_how_long_name_and_attributes_may_be_believed():
    reply = entry_reply(FILE)

    assert len(reply) == ENTRY_BYTES
    assert struct.unpack_from("<4Q2I", reply) == (5, 9, 1, 0, 500_000_000, 250_000_000)


def test_attributes_hold_size_blocks_times_mode_and_owner():
    reply = attr_reply(FILE)

    inode, size, blocks, *times = struct.unpack_from("<3Q3q", reply, 16)
    assert (inode, size, blocks, times) == (5, 1000, 2, [2, 2, 2])
    assert struct.unpack_from("<9I", reply, 64) == (
        *(500_000_001,) * 3,
        stat.S_IFREG | 0o640,
        3,
        7,
        8,
        0,
        1 << 20,
    )


def test_times_of_their_own_are_kept_apart_and_those_before_1970_stay_there():
    reply = attr_reply(FILE._replace(atime_ns=-1, ctime_ns=7))

    assert struct.unpack_from("<3q3I", reply, 40) == (-1, 2, 0, 999_999_999, 500_000_001, 7)


def test_a_line_of_a_directory_is_filled_up_to_eight_bytes():
    line = directory_line(b"abc", FILE, 4, plus=False)

    assert len(line) == 32
    assert struct.unpack_from("<2Q2I", line) == (5, 4, 3, stat.S_IFREG >> 12)
    assert line[24:] == b"abc" + bytes(5)
    assert directory_line(b"abc", FILE, 4, plus=True) == entry_reply(FILE) + line


def test_an_opened_file_names_its_handle_and_backing():
    assert struct.unpack("<QIi", open_reply(3, 1 << 7, 2)) == (3, 128, 2)


def test_space_fills_the_struct():
    reply = space_reply(Space(4096, 100, 40, 10, 5, 255))

    assert struct.unpack_from("<5Q3I", reply) == (100, 40, 40, 10, 5, 4096, 255, 4096)


def setattr_request(valid, **given):
    fields = {
        "fh": 0,
        "size": 0,
        "mtime": 0,
        "mtimensec": 0,
        "mode": 0,
        "uid": 0,
        "gid": 0,
        **given,
    }
    return memoryview(
        struct.pack(
            "<2I3Q3q8I",
            *(valid, 0, fields["fh"], fields["size"], 0),
            *(0, fields["mtime"], 0, 0, fields["mtimensec"], 0),
            *(fields["mode"], 0, fields["uid"], fields["gid"], 0),
        )
    )


def test_only_the_fields_that_count_become_a_change():
    request = setattr_request(1 | 8 | 64, fh=11, size=500, mode=0o600, uid=99, mtime=5)

    assert change_of(request, 0) == (Change(size_bytes=500, mode=0o600), 11, False)


def test_times_are_those_given_or_those_of_now():
    given = setattr_request(32, mtime=3, mtimensec=4)
    now = setattr_request(32 | 256 | 16 | 128, mtime=3)

    assert change_of(given, 0) == (Change(mtime_ns=3_000_000_004), None, False)
    assert change_of(now, 77) == (Change(mtime_ns=77, atime_ns=77), None, False)


def test_names_end_at_their_zero_bytes_and_values_may_hold_some():
    assert names_of(memoryview(b"....old\0new\0"), 4, 2) == [b"old", b"new", b""]
    assert names_of(memoryview(b"user.a\0v\0w"), 0, 1) == [b"user.a", b"v\0w"]


def test_a_batch_of_forgets_is_one_each():
    batch = struct.pack("<2I4Q", 2, 0, 5, 1, 6, 300)

    assert list(batch_forgets(memoryview(batch))) == [(5, 1), (6, 300)]


def test_all_that_is_wanted_and_offered_is_agreed_upon():
    found = agreement(init_request(), max_background=64, pass_through=True)

    assert Init.PASSTHROUGH in found.flags
    assert Init.DO_READDIRPLUS in found.flags
    numbers = struct.unpack("<4I2H2I2H2I24x", found.reply)
    assert numbers[:2] == (7, 40)
    assert numbers[4:] == (64, 48, 1 << 20, 1, 256, 0, found.flags >> 32, 1)
    assert len(found.reply) == STRUCTS["fuse_init_out"]


def test_nothing_is_agreed_upon_that_the_kernel_did_not_offer():
    found = agreement(init_request(flags=1 | 1 << 13), max_background=1, pass_through=True)

    assert found.flags == Init.ASYNC_READ | Init.DO_READDIRPLUS
    assert struct.unpack_from("<2I", found.reply, 36) == (0, 0)


def test_only_root_hands_local_copies_to_the_kernel():
    assert (
        Init.PASSTHROUGH
        not in agreement(init_request(), max_background=1, pass_through=False).flags
    )


def test_a_kernel_that_is_too_old_is_told_apart_with_the_way_out():
    with pytest.raises(StateError, match=r"7\.26.*bridge=pyfuse3"):
        agreement(init_request(minor=26), max_background=1, pass_through=True)


def test_a_notice_names_an_inode_whose_attributes_alone_are_outdated():
    notice = outdated_notice(77)

    assert struct.unpack("<IiQQqq", notice) == (40, 2, 0, 77, -1, 0)
