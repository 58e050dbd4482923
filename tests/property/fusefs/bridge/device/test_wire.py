"""Every entry and every change survives the kernel's structs."""

import struct

from hypothesis import given
from hypothesis import strategies as st

from fusefs.bridge.api.protocol import Entry
from fusefs.bridge.device.wire import attr_reply, batch_forgets, directory_line, entry_reply

numbers_64 = st.integers(0, 2**63 - 1)
numbers_32 = st.integers(0, 2**32 - 1)
times = st.integers(-(2**40) * 10**9, 2**40 * 10**9)
entries = st.builds(
    Entry,
    inode=numbers_64,
    mode=numbers_32,
    size_bytes=numbers_64,
    nlink=numbers_32,
    uid=numbers_32,
    gid=numbers_32,
    rdev=numbers_32,
    mtime_ns=times,
    atime_ns=st.none() | times,
    ctime_ns=st.none() | times,
    block_bytes=numbers_32,
    entry_timeout_s=st.floats(0, 1e6),
    attr_timeout_s=st.floats(0, 1e6),
    generation=numbers_64,
)


@given(entries)
def test_an_entry_is_found_again_in_its_reply(entry):
    inode, size, _, atime, mtime, ctime, *rest = struct.unpack_from(
        "<3Q3q10I", entry_reply(entry), 40
    )
    atime_ns, mtime_ns, ctime_ns, mode, nlink, uid, gid, rdev, block_bytes, _ = rest

    assert (inode, size, mode, nlink, uid, gid, rdev, block_bytes) == (
        entry.inode,
        entry.size_bytes,
        entry.mode,
        entry.nlink,
        entry.uid,
        entry.gid,
        entry.rdev,
        entry.block_bytes,
    )
    assert mtime * 10**9 + mtime_ns == entry.mtime_ns
    assert atime * 10**9 + atime_ns == (
        entry.mtime_ns if entry.atime_ns is None else entry.atime_ns
    )
    assert ctime * 10**9 + ctime_ns == (
        entry.mtime_ns if entry.ctime_ns is None else entry.ctime_ns
    )
    assert attr_reply(entry)[16:] == entry_reply(entry)[40:]


@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=255), entries), max_size=20), st.booleans()
)
def test_a_directory_is_read_back_line_by_line(lines, plus):
    packed = b"".join(
        directory_line(name, entry, i + 1, plus=plus) for i, (name, entry) in enumerate(lines)
    )

    at, found = 0, []
    while at < len(packed):
        at += 128 if plus else 0
        inode, next_line, size, _ = struct.unpack_from("<2Q2I", packed, at)
        found.append((packed[at + 24 : at + 24 + size], inode, next_line))
        at += (24 + size + 7) // 8 * 8

    assert found == [(name, entry.inode, i + 1) for i, (name, entry) in enumerate(lines)]


@given(st.lists(st.tuples(numbers_64, numbers_64), max_size=50))
def test_forgets_are_counted_by_their_head(forgets):
    packed = struct.pack("<2I", len(forgets), 0) + b"".join(struct.pack("<2Q", *f) for f in forgets)

    assert list(batch_forgets(memoryview(packed + b"left over"))) == forgets
