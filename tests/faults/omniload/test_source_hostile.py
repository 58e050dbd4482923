"""Shards that say of themselves what cannot be: each is refused before it is followed, and says where and what."""

import io
import json
import struct
import tarfile
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
import zstandard

from omniload.base.errors import ConfigError, IntegrityError
from omniload.mix.config import ByteTokenizer
from omniload.mix.sources import NumpySource, OnError
from omniload.source.files import local_file
from omniload.source.formats.arrow import messages_of
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.plane.sources.source_contract import expected_tokens, samples, texts_of_shard
from tests.support.plane.sources.source_kinds import KINDS

BYTES = ByteTokenizer(type="bytes")


def opened(kind, folder, **changes):
    config = KINDS[kind]().config(folder).model_copy(update=changes)
    source = open_source(SourceSpec("web", config, seed=1, tokenizer=BYTES, base_dir=folder))
    return source.read(0, source.positions_per_epoch)


@pytest.fixture
def shard(tmp_path):
    """Write one shard of a kind; return its path."""

    def write(kind, texts=None):
        made = KINDS[kind]()
        path = tmp_path / f"part-0{made.suffix}"
        made.write(path, texts_of_shard(0) if texts is None else texts)
        return path

    return write


def patched(path, at, form, *values):
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, at, *values)
    path.write_bytes(data)


ARROW = {
    "no end": (lambda p: p.write_bytes(p.read_bytes()[:-8]), "the stream has not ended"),
    "metadata beyond the file": (lambda p: patched(p, 4, "<i", 2**31 - 8), "bytes of metadata"),
    "negative metadata": (lambda p: patched(p, 4, "<i", -16), "with -16 bytes of metadata"),
    "empty": (lambda p: p.write_bytes(b""), "is empty, without a schema"),
    "text": (lambda p: p.write_bytes(b"hello world, hello"), "bytes of metadata"),
    "a table out of itself": (lambda p: patched(p, 8, "<i", 10**6), "points out of itself"),
    "end before a schema": (lambda p: p.write_bytes(b"\xff" * 4 + b"\0" * 4), "no schema"),
}


@pytest.mark.parametrize("case", ARROW)
def test_a_stream_of_arrow(shard, case, tmp_path):
    damage, said = ARROW[case]
    damage(shard("arrow"))

    with pytest.raises(IntegrityError, match=rf"part-0\.arrow.*{said}"):
        opened("arrow", tmp_path)


@pytest.mark.parametrize("stated", [-8, 2**40])
def test_a_body_of_a_message_that_cannot_be(shard, tmp_path, stated):
    path = shard("arrow")
    batch = next(m for m in messages_of(local_file(str(path))) if m.kind == "batch")
    body = batch.stop - batch.start - 8 - len(batch.metadata)
    metadata = batch.metadata.replace(struct.pack("<q", body), struct.pack("<q", stated))
    path.write_bytes(path.read_bytes().replace(batch.metadata, metadata, 1))

    with pytest.raises(IntegrityError, match=f"a message with a body of {stated} bytes"):
        opened("arrow", tmp_path)


def test_other_bounds_of_the_same_tokens_are_other_content(shard, tmp_path):
    index = shard("megatron").with_suffix(".idx")
    config = KINDS["megatron"]().config(tmp_path)

    def content():
        source = open_source(SourceSpec("web", config, seed=1, tokenizer=None, base_dir=tmp_path))
        return source.facts.content_digest

    before = content()
    patched(index, 34 + 12 * SEQUENCES + 8, "<q", 1)

    assert content() != before


def test_the_name_of_a_column_that_is_not_utf8(shard, tmp_path):
    path = shard("arrow")
    data = path.read_bytes()
    assert data.count(b"text") == 1
    path.write_bytes(data.replace(b"text", b"te\x80t"))

    with pytest.raises(IntegrityError, match=r"part-0\.arrow.*cannot be decoded.*utf-8"):
        opened("arrow", tmp_path)


def test_offsets_of_a_batch_that_lead_out_of_it_are_not_followed(shard, tmp_path):
    path = shard("arrow", ["aa", "bb", "cc"])
    data = path.read_bytes()
    offsets = np.array([0, 2, 4, 6], np.int32).tobytes()
    wrong = np.array([0, 2, 2**30, 6], np.int32).tobytes()
    assert data.count(offsets) == 1
    path.write_bytes(data.replace(offsets, wrong))

    with pytest.raises(IntegrityError, match=r"part-0\.arrow: batch 0: cannot be decoded"):
        opened("arrow", tmp_path)


@pytest.mark.parametrize("footer", [0, -1, 2**31 - 1])
def test_a_footer_of_arrow_that_cannot_be(shard, tmp_path, footer):
    path = shard("arrow-tokens")
    patched(path, path.stat().st_size - 10, "<i", footer)

    with pytest.raises(IntegrityError, match=f"a footer of {footer} bytes"):
        opened("arrow-tokens", tmp_path)


def test_streams_older_than_the_mark_of_messages_are_read(shard, tmp_path):
    path = tmp_path / "part-0.arrow"
    table = KINDS["arrow"]().table(["one", "two"])
    options = pa.ipc.IpcWriteOptions(use_legacy_format=True)
    with path.open("wb") as out, pa.ipc.new_stream(out, table.schema, options=options) as writer:
        writer.write_table(table)

    assert sorted(samples(opened("arrow", tmp_path))) == [
        expected_tokens("one"),
        expected_tokens("two"),
    ]


SEQUENCES = 80  # two for each of forty documents
MEGATRON = {
    "another file": (0, "<8s", (b"TNTIDX\0\0",), IntegrityError, "oldest kind"),
    "version": (9, "<Q", (2,), ConfigError, "is of version 2"),
    "floats": (17, "<B", (7,), ConfigError, r"type 7 \(float32\); integers"),
    "sequences": (18, "<Q", (2**62,), IntegrityError, "says 4611686018427387904 sequences"),
    "boundaries": (26, "<Q", (2**63,), IntegrityError, "boundaries of documents, which make"),
    "negative length": (34, "<i", (-4,), IntegrityError, "sequence 0 has the length -4"),
    "long length": (34, "<i", (2**30,), IntegrityError, "sequence 1 starts at byte"),
    "negative pointer": (34 + 4 * SEQUENCES, "<q", (-2,), IntegrityError, "starts at byte -2"),
    "document": (34 + 12 * SEQUENCES + 8, "<q", (2**40,), IntegrityError, "document 1 starts at"),
    "falling": (34 + 12 * SEQUENCES + 8, "<q", (70,), IntegrityError, "before the one before"),
    "first": (34 + 12 * SEQUENCES, "<q", (1,), IntegrityError, "reach from sequence 1 to 80"),
}


@pytest.mark.parametrize("case", MEGATRON)
def test_an_index_of_megatron(shard, case, tmp_path):
    at, form, values, error, said = MEGATRON[case]
    patched(shard("megatron").with_suffix(".idx"), at, form, *values)

    with pytest.raises(error, match=rf"part-0\.idx.*{said}"):
        opened("megatron", tmp_path)


@pytest.mark.parametrize("size", [0, 1, 8, 9, 30, 33])
def test_an_index_of_megatron_that_ends_within_its_head_is_cut_short_and_no_other_kind(
    shard, size, tmp_path
):
    index = shard("megatron").with_suffix(".idx")
    index.write_bytes(index.read_bytes()[:size])

    said = rf"part-0\.idx: has {size} bytes, and the head of an index alone has 34: it is cut short"
    with pytest.raises(IntegrityError, match=said):
        opened("megatron", tmp_path)

    index.write_bytes(b"TNTIDX\0\0"[:size].ljust(min(size, 30), b"\0"))
    with pytest.raises(IntegrityError, match="oldest kind" if size else "cut short"):
        opened("megatron", tmp_path)


def test_data_of_megatron_that_its_index_does_not_tell_of(shard, tmp_path):
    path = shard("megatron")
    path.write_bytes(path.read_bytes() + b"\0\0")

    with pytest.raises(IntegrityError, match=r"part-0\.bin: holds \d+ bytes, but its index"):
        opened("megatron", tmp_path)
    path.with_suffix(".idx").unlink()
    with pytest.raises(IntegrityError, match=r"names part-0\.idx, which is not there"):
        opened("megatron", tmp_path)


def test_multimodal_data_of_megatron_is_refused_by_name(shard, tmp_path):
    index = shard("megatron").with_suffix(".idx")
    index.write_bytes(index.read_bytes() + bytes(SEQUENCES))

    with pytest.raises(ConfigError, match="has a mode for each of its 80 sequences"):
        opened("megatron", tmp_path)


def npy(header, data=b"\0" * 80):
    text = header.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(text)) + text + data


NPY = {
    "objects": ("{'descr': '|O', 'fortran_order': False, 'shape': (10,)}", "is an array of object"),
    "floats": ("{'descr': '<f8', 'fortran_order': False, 'shape': (10,)}", "array of float64"),
    "columns": ("{'descr': '<i4', 'fortran_order': True, 'shape': (4, 5)}", "in Fortran order"),
    "a cube": ("{'descr': '<i4', 'fortran_order': False, 'shape': (2, 2, 5)}", "3 dimensions"),
    "too long": ("{'descr': '<i4', 'fortran_order': False, 'shape': (21,)}", "cut short or corr"),
    "beyond": ("{'descr': '<i4', 'fortran_order': False, 'shape': (2**70,)}", "cannot be read"),
    "huge": (f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({2**70},)}}", "end at byte"),
    "negative": ("{'descr': '<i4', 'fortran_order': False, 'shape': (-20,)}", "shape is"),
    "code": ("__import__('os').abort()", "cannot be read"),
    "deep": ("[" * 110, "cannot be read"),
    "no rows": ("{'descr': '<i4', 'fortran_order': False, 'shape': (20, 0)}", "its shape is"),
}


@pytest.mark.parametrize("case", NPY)
def test_a_header_of_numpy(tmp_path, case):
    header, said = NPY[case]
    (tmp_path / "part-0.npy").write_bytes(npy(header))

    with pytest.raises((ConfigError, IntegrityError), match=rf"part-0\.npy.*{said}"):
        opened("numpy", tmp_path)


def numpy_source(folder, **keys):
    config = NumpySource(type="numpy", path="x.*", **keys)
    return open_source(SourceSpec("web", config, seed=1, tokenizer=None, base_dir=folder))


def test_rows_of_a_matrix_and_rows_of_a_length_are_records(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(12, dtype=np.int64).reshape(3, 4))
    assert sorted(samples(numpy_source(tmp_path).read(0, 3))) == [
        *((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    ]
    np.save(tmp_path / "x.npy", np.arange(12, dtype=">u2"))
    assert sorted(samples(numpy_source(tmp_path, row_tokens=5).read(0, 3))) == [
        *((0, 1, 2, 3, 4), (5, 6, 7, 8, 9), (10, 11))
    ]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "is a flat file; state dtype"),
        ({"dtype": "uint16"}, "is one run of 10 ids; set end_of_document"),
        ({"dtype": "int64", "row_tokens": 4}, "from byte 0 on end at byte 16, but the file has 20"),
        (
            {"dtype": "uint16", "header": "64KiB", "row_tokens": 4},
            "from byte 65536 on end at byte 65536",
        ),
    ],
)
def test_what_a_flat_file_does_not_say_is_asked_for(tmp_path, keys, said):
    (tmp_path / "x.bin").write_bytes(b"\1\0" * 10)

    with pytest.raises((ConfigError, IntegrityError), match=said.replace("; and", ", and")):
        numpy_source(tmp_path, **keys)


def changed_index(folder, **changes):
    path = folder / "index.json"
    value = json.loads(path.read_text())
    value["shards"][0] |= changes
    path.write_text(json.dumps(value))


MDS = {
    "up": ({"raw_data": {"basename": "../x", "bytes": 1}}, "names the file '../x'; a name stays"),
    "root": ({"raw_data": {"basename": "/etc/passwd", "bytes": 1}}, "names the file '/etc/passwd'"),
    "no name": ({"raw_data": {"basename": 3, "bytes": 1}}, "basename is 3"),
    "samples": ({"samples": 2**40}, "samples is 1099511627776"),
    "more samples": ({"samples": 50}, "its samples lie from byte"),
    "fewer samples": ({"samples": 3}, "its samples end at byte"),
    "negative": ({"samples": -1}, "samples is -1"),
    "sizes": ({"column_sizes": [8]}, "column_sizes has 1 entries for 3 columns"),
    "no sizes": ({"column_sizes": 8}, "column_sizes is 8"),
    "encodings": ({"column_encodings": ["int"]}, "column_encodings has 1 entries for 3 columns"),
    "wide": ({"column_sizes": [8, 999, None]}, "sample 0: its columns end at byte"),
    "format": ({"format": "xsv"}, "format 'xsv'"),
    "version": ({"version": 3}, "version 3"),
    "packed": ({"compression": "gz", "zip_data": {"basename": "a"}}, "compressed by 'gz'; zstd"),
    "column": ({"column_names": ["id", "words", "z"]}, "no column 'text'; it has id, words, z"),
    "kind": ({"column_encodings": ["int", "pkl", "bytes"]}, "column 'text' is pkl, not str"),
    "size": ({"raw_data": {"basename": "part-0.mds", "bytes": 9}}, "bytes, but 9 by its index"),
}


@pytest.mark.parametrize("case", MDS)
def test_an_index_of_mds(shard, case, tmp_path):
    changes, said = MDS[case]
    shard("mds")
    changed_index(tmp_path, **changes)

    with pytest.raises((ConfigError, IntegrityError), match=said):
        opened("mds", tmp_path)


def test_a_shard_that_unpacks_to_more_than_its_index_says_is_not_unpacked(shard, tmp_path):
    path = shard("mds-tokens")
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    assert len(bomb) < 1 << 17
    path.with_suffix(".mds.zstd").write_bytes(bomb)
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError, match="holds more bytes when decompressed"):
            opened("mds-tokens", tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def tar_of(name="a.txt", data=b"text", kind=tarfile.REGTYPE, **fields):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        info = tarfile.TarInfo(name)
        info.size, info.type = len(data), kind
        archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def resealed(header_at, change, archive):
    """Change a header, and make its checksum right again."""
    data = bytearray(archive)
    at, value = change
    data[header_at + at : header_at + at + len(value)] = value
    data[header_at + 148 : header_at + 156] = b" " * 8
    total = sum(data[header_at : header_at + 512])
    data[header_at + 148 : header_at + 156] = b"%06o\0 " % total
    return bytes(data)


TARS = {
    "up": (tar_of("../a.txt"), "the name '../a.txt', which leads out"),
    "root": (tar_of("/a.txt"), "the name '/a.txt', which leads out"),
    "inside up": (tar_of("a/../../b.txt"), "which leads out"),
    "large": (resealed(0, (124, b"77777777777\0"), tar_of()), "a member of 8 GiB, and"),
    "base 256": (
        resealed(0, (124, b"\x80" + b"\0" * 3 + b"\x7f" * 8), tar_of()),
        "beyond any file",
    ),
    "negative": (resealed(0, (124, b"\xff" * 12), tar_of()), "a number that is negative"),
    "letters": (resealed(0, (124, b"0000000abc9\0"), tar_of()), "a number in octal belongs"),
    "eights": (resealed(0, (124, b"00000000009\0"), tar_of()), "a number in octal belongs"),
    "sparse": (resealed(0, (156, b"S"), tar_of()), "a sparse member, whose bytes"),
    "long name": (
        resealed(0, (156, b"L"), tar_of(data=b"x" * 9_000))[:9_728] + tar_of(),
        "a name of 9,000 letters, more than 4,096",
    ),
    "pax": (resealed(0, (156, b"x"), tar_of(data=b"99 path=a\n")), "a pax record that is none"),
    "pax size": (
        resealed(0, (156, b"x"), tar_of(data=b"19 size=-5000000000\n"[:20])) + tar_of(),
        "pax record that is none|a size of",
    ),
    "global": (resealed(0, (156, b"g"), tar_of(data=b"12 path=abc\n")), "one path or size for all"),
    "huge header": (
        resealed(0, (124, b"77777777777\0"), resealed(0, (156, b"x"), tar_of())),
        "head",
    ),
    "not UTF-8": (resealed(0, (0, b"\xff\xfe"), tar_of()), "a name that is not UTF-8"),
    "checksum": (tar_of()[:148] + b"000000\0 " + tar_of()[156:], "a header whose checksum is"),
    "no end": (tar_of()[:1024], "a header of 512 bytes, and 0 are left"),
    "no padding": (tar_of(data=b"x")[:600], "a header of 512 bytes, and 0 are left"),
    "text": (b"no archive " * 100, "a number in octal belongs|whose checksum"),
}


@pytest.mark.parametrize("case", TARS)
def test_a_tar(tmp_path, case):
    archive, said = TARS[case]
    (tmp_path / "part-0.tar").write_bytes(archive)

    with pytest.raises(IntegrityError, match=rf"part-0\.tar.*({said})"):
        opened("webdataset", tmp_path)


def test_a_sample_without_the_member_is_a_bad_record(tmp_path):
    with tarfile.open(tmp_path / "part-0.tar", "w") as archive:
        for name, data in (("a.txt", b"one"), ("b.cls", b"2"), ("c.txt", b"\xff"), ("d.txt", b"4")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))

    block = opened("webdataset", tmp_path, on_error=OnError(policy="skip"))
    assert block.skipped == 2
    assert sorted(samples(block)) == [expected_tokens("4"), expected_tokens("one")]
    with pytest.raises(
        IntegrityError, match=r"sample 'b' at byte 1024: has no member \.txt; it has"
    ):
        opened("webdataset", tmp_path)


CSVS = {
    "a quote inside": ('id,text\n1,five" long\n', "byte 14: a quote in the middle of a field"),
    "open at the end": ('id,text\n1,"five\n', "in the middle of a quoted field"),
    "a lone return": ("id,text\r1,five\r", "a carriage return alone"),
    "a return at the end": ("id,text\n1,five\r", "byte 14: a carriage return alone"),
    "no column": ("id,words\n1,a\n", "no column 'text'; its first row has 'id', 'words'"),
    "twice": ("text,text\n1,a\n", "more than one column 'text'"),
    "no line": ("", "is empty, without a header"),
    "no header": ("x" * (2 << 20), "more than a header of"),
}


@pytest.mark.parametrize("case", CSVS)
def test_a_csv(tmp_path, case):
    content, said = CSVS[case]
    (tmp_path / "part-0.csv").write_text(content, newline="")

    with pytest.raises((ConfigError, IntegrityError), match=rf"part-0\.csv.*{said}"):
        opened("csv", tmp_path)


def test_rows_of_too_few_or_too_many_fields_are_bad_records(tmp_path):
    rows = b'id,text\n1,one\n2\n3,"th\nree"\n4,four,4\n5,f\xffive\n\n6,six\n'
    (tmp_path / "part-0.csv").write_bytes(rows)

    block = opened("csv", tmp_path, on_error=OnError(policy="skip"))
    assert block.skipped == 3
    assert sorted(samples(block)) == sorted(map(expected_tokens, ("one", "th\nree", "six")))
    with pytest.raises(IntegrityError, match=r"part-0\.csv: row 1: has 1 fields, not 2"):
        opened("csv", tmp_path)
