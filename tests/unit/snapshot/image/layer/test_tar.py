"""The table of a tar: every kind of entry, and every kind of nonsense."""

import io
import tarfile

import pytest

from omniload.base.errors import IntegrityError
from snapshot.image.layer.index import Entry, Extent, check_entry, clean_path
from snapshot.image.layer.tar import ForwardStream, read_table
from tests.support.snapshot.image_builders import a_member, a_tar


def table(data):
    return list(read_table(io.BytesIO(data), layer="it"))


def refused(data, message):
    with pytest.raises(IntegrityError, match=message):
        table(data)


def test_every_kind_of_entry_is_read_with_all_it_has():
    data = a_tar(
        a_member("d/", kind=tarfile.DIRTYPE, mode=0o1777, uid=7, gid=8),
        a_member("./d/file", b"content", mode=0o4755, mtime=12.0),
        a_member("d/link", kind=tarfile.SYMTYPE, linkname="/etc/../file"),
        a_member("d/hard", kind=tarfile.LNKTYPE, linkname="./d/file"),
        a_member("d/null", kind=tarfile.CHRTYPE, devmajor=1, devminor=3),
        a_member("d/disk", kind=tarfile.BLKTYPE, devmajor=8, devminor=1),
        a_member("d/pipe", kind=tarfile.FIFOTYPE),
    )

    found = {entry.path: entry for entry in table(data)}

    assert found["d"] == Entry(path="d", kind="directory", mode=0o1777, uid=7, gid=8)
    assert found["d/file"].mode == 0o4755
    assert found["d/file"].mtime_ns == 12_000_000_000
    assert data[found["d/file"].extents[0].stream_offset :][:7] == b"content"
    assert found["d/link"].target == "/etc/../file"
    assert found["d/hard"].target == "d/file"
    assert found["d/null"].device == (1, 3)
    assert [found[f"d/{name}"].kind for name in ("disk", "pipe")] == ["block", "fifo"]


def test_pax_keeps_nanoseconds_and_bytes_of_attributes_exactly():
    member, data = a_member("f", b"x", xattrs={"user.raw": b"\x00\xff=\n", "user.a": b""})
    member.pax_headers["mtime"] = "1700000000.123456789"

    (entry,) = table(a_tar((member, data)))

    assert entry.mtime_ns == 1_700_000_000_123_456_789
    assert entry.xattrs == (("user.a", b""), ("user.raw", b"\x00\xff=\n"))


@pytest.mark.parametrize("text", ["nan", "1e999999", "x", "9" * 40, ""])
def test_a_time_that_is_none_reads_as_the_epoch(text):
    member, data = a_member("f")
    member.pax_headers["mtime"] = text

    assert table(a_tar((member, data)))[0].mtime_ns == 0


@pytest.mark.parametrize("tar_format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_targets_are_read_in_both_formats(tar_format):
    name, target = "/".join(["n" * 200] * 5), "t" * 1500

    data = a_tar(
        a_member(name, b"x"),
        a_member("link", kind=tarfile.SYMTYPE, linkname=target),
        tar_format=tar_format,
    )

    assert [(entry.path, entry.target) for entry in table(data)] == [(name, ""), ("link", target)]


def test_names_that_are_no_utf8_survive():
    name = b"caf\xe9/\xff".decode("utf-8", "surrogateescape")

    assert table(a_tar(a_member(name), tar_format=tarfile.GNU_FORMAT))[0].path == name


@pytest.mark.parametrize("data", [b"", bytes(512), bytes(10240)])
def test_a_layer_of_nothing_has_no_entries(data):
    assert table(data) == []


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "a/..", "a\0b"])
def test_a_path_that_leaves_the_root_is_refused(name):
    with pytest.raises(IntegrityError, match="not used"):
        clean_path(name, layer="it")
    if "\0" not in name:
        refused(a_tar(a_member(name)), "not used")
        refused(a_tar(a_member("h", kind=tarfile.LNKTYPE, linkname=name)), "not used")


@pytest.mark.parametrize("name", ["x" * 256, "/".join(["y" * 255] * 17)[:4200]])
def test_a_name_longer_than_a_file_system_holds_is_refused(name):
    refused(a_tar(a_member(name)), "longer than")


def test_a_tar_cut_short_is_refused_wherever_it_is_cut():
    data = a_tar(a_member("a", b"x" * 1000), a_member("b", b"y" * 3000))
    for cut in (100, 511, 700, 1500, 2100, 2600, 5000):
        refused(data[:cut], "layer it: ")


def test_a_broken_header_in_the_middle_does_not_pass_for_the_end():
    data = bytearray(a_tar(a_member("a", b"x"), a_member("b", b"y")))
    data[1024] ^= 1  # the name in the second header: its checksum is wrong now

    refused(bytes(data), "no valid header")


def test_bytes_after_the_end_are_refused():
    data = a_tar(a_member("a", b"x"))

    refused(data + a_tar(a_member("hidden")), "two readers would see two different layers")


def test_an_extension_header_of_absurd_size_is_refused_before_it_is_read():
    member = tarfile.TarInfo("././@PaxHeader")
    member.type, member.size = tarfile.XHDTYPE, 1 << 40

    refused(member.tobuf(tarfile.GNU_FORMAT) + bytes(4096), "more than 8388608")


def test_endless_extension_headers_are_refused():
    member = tarfile.TarInfo("././@LongLink")
    member.type, member.size = tarfile.GNUTYPE_LONGNAME, 0

    refused(member.tobuf(tarfile.GNU_FORMAT) * 3000, "layer it: ")


def test_a_negative_size_leads_nowhere():
    member, data = a_member("f", b"x")
    member.pax_headers["size"] = "-1024"

    refused(a_tar((member, data)) + bytes(1024), "layer it: ")


def test_an_unknown_kind_is_refused():
    refused(a_tar(a_member("f", kind=b"V")), "unknown kind")


def test_a_stream_goes_forward_only():
    stream = ForwardStream(io.BytesIO(b"0123456789"), layer="it")
    assert stream.read(4) == b"0123"
    assert stream.seek(6) == 6
    assert (stream.read(2), stream.tell()) == (b"67", 8)

    with pytest.raises(IntegrityError, match="leads back to 3"):
        stream.seek(3)
    with pytest.raises(IntegrityError, match="header of -1 bytes"):
        stream.read(-1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size_bytes": 1 << 45}, "size"),
        ({"uid": -1}, "owner"),
        ({"gid": 1 << 33}, "owner"),
        ({"mode": 0o10000}, "mode"),
        ({"device": (1 << 21, 0)}, "device"),
        ({"mtime_ns": 1 << 64}, "time"),
        ({"xattrs": (("user.x", bytes(2 << 20)),)}, "1 MiB"),
        ({"target": "t" * 5000}, "target"),
        ({"target": "a\0b"}, "zero byte"),
        ({"path": ""}, "root"),
        ({"extents": (Extent(0, 0, 5), Extent(3, 5, 5)), "size_bytes": 20}, "overlap"),
        ({"extents": (Extent(0, 0, 30),), "size_bytes": 20}, "up to 30"),
    ],
)
def test_an_entry_out_of_range_is_refused(changes, message):
    entry = Entry(**{"path": "f", "kind": "file"} | changes)

    with pytest.raises(IntegrityError, match=message):
        check_entry(entry, layer="it")


def test_zeroes_that_fill_the_last_block_may_be_missing_but_no_byte_of_its_file():
    data = a_tar(a_member("a", b"x" * 1000), a_member("b", b"y" * 700))
    end = 512 + 1024 + 512 + 700

    for cut in (end, end + 1, end + 323):
        assert [entry.path for entry in table(data[:cut])] == ["a", "b"]
    for cut in (end - 1, end - 188, end - 189, end - 700):
        refused(data[:cut], "layer it: ")
