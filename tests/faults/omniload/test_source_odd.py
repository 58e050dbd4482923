"""Shards as other tools leave them, odd and not damaged: nothing of theirs is lost without a word."""

import bz2
import gzip
import io
import json
import lzma
import subprocess
import tarfile

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
import zstandard
from pyarrow import feather
from pydantic import TypeAdapter

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.log import ONCE
from omniload.commands.opening import find_sources, open_spec
from omniload.mix.config import ByteTokenizer
from omniload.mix.sources import (
    ArrowSource,
    CsvSource,
    JsonlSource,
    MdsSource,
    OnError,
    SourceConfig,
    TextSource,
    WebDatasetSource,
)
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.plane.sources.source_contract import expected_tokens, samples
from tests.support.plane.sources.source_kinds import KINDS

SKIP = OnError(policy="skip")
SOURCE = TypeAdapter(SourceConfig)
TARS = WebDatasetSource(type="webdataset", path="*.tar", text="txt", on_error=SKIP)
LINES = JsonlSource(type="jsonl", path="*.jsonl*", on_error=SKIP)


def block_of(folder, config):
    tokenizer = ByteTokenizer(type="bytes")
    source = open_source(SourceSpec("web", config, seed=1, tokenizer=tokenizer, base_dir=folder))
    return source.read(0, source.positions_per_epoch)


def tar_of(*members, kind=tarfile.PAX_FORMAT):
    """Return an archive of names with what they hold, what they link to, or pax headers beside that."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as archive:
        for name, held, *headers in members:
            info = tarfile.TarInfo(name)
            if isinstance(held, bytes):
                info.size = len(held)
            else:
                info.type, info.linkname = tarfile.LNKTYPE, held
            info.pax_headers = dict(*headers)
            archive.addfile(info, io.BytesIO(held if isinstance(held, bytes) else b""))
    return out.getvalue()


def packed_by(write):
    """Return what a writer of tables makes of one text."""
    out = io.BytesIO()
    write(pa.table({"text": ["one"]}), out)
    return out.getvalue()


def test_a_hard_link_of_an_archive_is_a_bad_record_as_its_bytes_lie_elsewhere(tmp_path):
    members = ("a.txt", b"one"), ("b.txt", "a.txt"), ("c.json", "a.txt"), ("c.txt", b"three")
    (tmp_path / "a.tar").write_bytes(tar_of(*members))

    block = block_of(tmp_path, TARS)

    assert sorted(samples(block)) == [expected_tokens("one"), expected_tokens("three")]
    assert block.skipped == 1
    assert "sample 'b'" in block.table.reason
    assert ".txt is a hard link" in block.table.reason
    assert "--hard-dereference" in block.table.reason


def test_a_symbolic_link_of_an_archive_is_a_bad_record_until_tar_packs_what_it_leads_to(tmp_path):
    (tmp_path / "store").write_bytes(b"one")
    (tmp_path / "b.txt").write_bytes(b"two")
    (tmp_path / "a.txt").symlink_to("store")
    (tmp_path / "b.json").symlink_to("store")
    pack = ["tar", "--create", "--file", "a.tar", "--sort=name", "a.txt", "b.txt", "b.json"]
    subprocess.run(pack, cwd=tmp_path, check=True)
    before = block_of(tmp_path, TARS)

    option = before.table.reason.rpartition("pack it with tar ")[2]
    subprocess.run([*pack, option], cwd=tmp_path, check=True)

    assert (samples(before), before.skipped) == ([expected_tokens("two")], 1)
    assert "sample 'a' at byte 0: .txt is a symbolic link, " in before.table.reason
    again = sorted(samples(block_of(tmp_path, TARS)))
    assert again == sorted([expected_tokens("one"), expected_tokens("two")])


def test_a_file_that_was_packed_twice_is_read_once(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one")
    subprocess.run(
        ["tar", "--create", "--file", "a.tar", "a.txt", "./a.txt"], cwd=tmp_path, check=True
    )

    block = block_of(tmp_path, TARS)

    assert (samples(block), block.skipped) == ([expected_tokens("one")], 0)


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_archives_that_lie_behind_each_other_are_refused(tmp_path, kind):
    (tmp_path / "a.tar").write_bytes(
        tar_of(("a.txt", b"one"), kind=kind) + tar_of(("b.txt", b"two"))
    )

    with pytest.raises(
        IntegrityError, match=r"a\.tar: byte 1024 of .*: the archive ends, but more bytes follow"
    ):
        block_of(tmp_path, TARS)


def test_zeros_behind_the_end_of_an_archive_are_none(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar_of(("a.txt", b"one")) + bytes(100_000))

    assert samples(block_of(tmp_path, TARS)) == [expected_tokens("one")]


def test_a_sparse_member_is_refused_in_the_form_of_pax_too(tmp_path):
    sparse = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"}
    (tmp_path / "a.tar").write_bytes(tar_of(("b.txt", b"two"), ("a.txt", b"1\n0\n3\n", sparse)))

    with pytest.raises(IntegrityError, match=r"a sparse member \('GNU\.sparse\.major'\)"):
        block_of(tmp_path, TARS)


def test_zstd_of_a_large_window_is_told_as_that_with_what_writes_it_anew(tmp_path):
    def write(window_log):
        form = zstandard.ZstdCompressionParameters.from_level(1, window_log=window_log)
        # As a stream: of what it knows the size of, zstd asks for no larger window than that.
        stream = zstandard.ZstdCompressor(compression_params=form).compressobj()
        packed = stream.compress(b'{"text": "one"}\n') + stream.flush()
        (tmp_path / "a.jsonl.zst").write_bytes(packed)

    write(window_log=27)
    found = samples(block_of(tmp_path, LINES))
    write(window_log=28)

    with pytest.raises(
        IntegrityError, match=r"a window of more than 128 MiB .* zstd -dc --long=31 "
    ):
        block_of(tmp_path, LINES)
    assert found == [expected_tokens("one")]


def test_gzip_in_several_members_is_read_and_zeros_behind_them_are_told_with_what_to_do(tmp_path):
    parts = [gzip.compress(part) for part in (b'{"text": "o', b'ne"}\n', b"", b'{"text": "two"}')]
    shard = tmp_path / "a.jsonl.gz"
    shard.write_bytes(b"".join(parts))
    whole = samples(block_of(tmp_path, LINES))
    shard.write_bytes(b"".join(parts) + bytes(512))

    with pytest.raises(IntegrityError, match=r"it ends in zeros, .* gzip -dc .* \| gzip"):
        block_of(tmp_path, LINES)

    assert sorted(whole) == sorted([expected_tokens("one"), expected_tokens("two")])
    again = subprocess.run(["gzip", "-dc", shard], capture_output=True, check=False).stdout
    shard.write_bytes(gzip.compress(again))
    assert samples(block_of(tmp_path, LINES)) == whole


def test_gzip_that_is_cut_short_is_not_taken_for_one_that_was_filled_up(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n')[:-6])

    with pytest.raises(IntegrityError, match="cut short or corrupt, replace it"):
        block_of(tmp_path, LINES)


def test_a_null_that_a_dictionary_holds_is_a_null(tmp_path):
    texts = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 0]), pa.array(["one", None]))
    schema = pa.schema([("text", texts.type)])
    with pa.ipc.new_stream(tmp_path / "a.arrow", schema) as stream:
        stream.write_batch(pa.record_batch([texts], schema=schema))

    block = block_of(
        tmp_path, ArrowSource(type="arrow", path="*.arrow", text="text", on_error=SKIP)
    )

    assert (samples(block), block.skipped) == ([expected_tokens("one")] * 2, 2)


def test_bad_records_are_told_of_once_however_often_their_source_is_opened(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_bytes(b'{"title": "no text"}\n')

    assert [block_of(tmp_path, LINES).skipped for _ in range(2)] == [1, 1]

    # A program of somebody's hears of each; where a command has set up standard error, of the first alone.
    first, again = caplog.records
    assert first.getMessage() == again.getMessage()
    assert first.__dict__.items() >= ONCE.items()


def test_a_null_among_token_ids_spoils_its_own_record_alone(tmp_path):
    rows = pa.array([[1, 2], [3, None], [4]], pa.list_(pa.int32()))
    schema = pa.schema([("ids", rows.type)])
    with pa.ipc.new_stream(tmp_path / "a.arrow", schema) as stream:
        stream.write_batch(pa.record_batch([rows], schema=schema))
    source = {"type": "arrow", "path": "*.arrow", "tokens": "ids"}

    block = block_of(tmp_path, ArrowSource(**source, on_error=SKIP))

    assert (sorted(samples(block)), block.skipped) == ([(1, 2), (4,)], 1)
    with pytest.raises(IntegrityError, match=r"row 1: column 'ids' holds a null .*policy: skip"):
        block_of(tmp_path, ArrowSource(**source))


def test_dictionaries_that_grow_from_batch_to_batch_are_read_whole(tmp_path):
    kind = pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema([("text", kind)])
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with pa.ipc.new_stream(tmp_path / "a.arrow", schema, options=options) as stream:
        for indices, texts in (([0, 1], "ab"), ([2, 0], "abc"), ([3, 1], "abcd")):
            column = pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), list(texts))
            stream.write_batch(pa.record_batch([column], schema=schema))

    block = block_of(tmp_path, ArrowSource(type="arrow", path="*.arrow", text="text"))

    assert sorted(samples(block)) == sorted(map(expected_tokens, "abcadb"))


def test_a_column_that_an_index_of_mds_names_twice_is_refused(tmp_path):
    kind = KINDS["mds"]()
    kind.write(tmp_path / "part-0.mds", ["a", "b"])
    index = json.loads((tmp_path / "index.json").read_text())
    names = index["shards"][0]["column_names"]
    index["shards"][0]["column_names"] = ["text" if name != "text" else name for name in names]
    (tmp_path / "index.json").write_text(json.dumps(index))

    with pytest.raises(ConfigError, match="has more than one column 'text'; it has text, text"):
        block_of(tmp_path, MdsSource(type="mds", path=".", text="text"))


@pytest.mark.parametrize("by_another", [False, True])
def test_a_shard_that_is_listed_twice_is_refused_with_who_lists_it(tmp_path, by_another):
    kind, part = KINDS["mds"](), tmp_path / "part"
    part.mkdir()
    kind.write(part / "part-0.mds", ["a", "b"])
    shards = json.loads((part / "index.json").read_text())["shards"]
    index = tmp_path / "index.json"
    for shard in shards:
        shard["raw_data"]["basename"] = f"part/{shard['raw_data']['basename']}"
    index.write_text(json.dumps({"version": 2, "shards": shards * (1 if by_another else 2)}))
    paths = ["index.json", "part/index.json"] if by_another else ["index.json"]

    said = r"part/index\.json: lists .* too, as .*/index\.json does" if by_another else "twice, and"
    with pytest.raises(ConfigError, match=said):
        block_of(tmp_path, MdsSource(type="mds", path=paths, text="text"))


def test_a_shard_that_is_listed_with_its_compressed_file_and_without_is_refused(tmp_path):
    kind, part = KINDS["mds-tokens"](), tmp_path / "part-0.mds"
    kind.write(part, ["a", "b"])
    part.write_bytes(kind.shard([kind.sample(i, text) for i, text in enumerate("ab")]))
    index = tmp_path / "index.json"
    (zipped,) = json.loads(index.read_text())["shards"]
    plain = zipped | {"compression": None, "zip_data": None}
    index.write_text(json.dumps({"version": 2, "shards": [zipped, plain]}))

    with pytest.raises(ConfigError, match=r"lists part-0\.mds twice, and a shard is read once"):
        block_of(tmp_path, MdsSource(type="mds", path=".", tokens="tokens"))


def test_the_remedy_for_a_byte_order_mark_mends_every_line(tmp_path):
    shard = tmp_path / "a.jsonl"
    # As `cat` leaves files of some editors.
    shard.write_bytes(b'{"text": "one"}\n' + b'\xef\xbb\xbf{"text": "two"}\r\n' * 2)
    before = block_of(tmp_path, LINES)

    command = before.table.reason.partition("take it off: ")[2].replace("FILE", "a.jsonl")
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)

    assert before.skipped == 2
    assert block_of(tmp_path, LINES).skipped == 0


@pytest.mark.parametrize("coding", ["utf-16", "utf-16-le"])
def test_the_remedy_for_lines_in_another_coding_mends_every_line(tmp_path, coding):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "tö"}\n', encoding=coding)
    before = block_of(tmp_path, LINES)

    what, _, command = before.table.reason.partition("; write it as UTF-8: ")
    command = command.replace("FILE", "a.jsonl").replace("NEW", "b.jsonl")
    subprocess.run(f"{command} && rm a.jsonl", shell=True, cwd=tmp_path, check=True)

    assert what.endswith(f"a.jsonl:1: is {coding.upper().replace('-LE', 'LE')}")
    assert before.skipped >= 2
    block = block_of(tmp_path, LINES)
    assert sorted(samples(block)) == sorted([expected_tokens("one"), expected_tokens("tö")])


def test_lines_that_bzip2_has_packed_are_told_as_that_with_what_unpacks_them(tmp_path):
    (tmp_path / "a.jsonl.bz2").write_bytes(bz2.compress(b'{"text": "one"}\n'))

    with pytest.raises(IntegrityError, match=r"is compressed by bzip2, .* unpack it: bunzip2 FILE"):
        block_of(tmp_path, JsonlSource(type="jsonl", path="a.jsonl.bz2"))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("text\none\n".encode("utf-16"), "is UTF-16; write it as UTF-8: iconv"),
        ("text\none\n".encode("utf-32"), "is UTF-32; write it as UTF-8: iconv"),
        (bz2.compress(b"text\none\n"), "is compressed by bzip2, which is not read; unpack it"),
        (lzma.compress(b"text\none\n"), "is compressed by xz, which is not read; unpack it"),
    ],
)
def test_tables_and_texts_of_another_coding_are_told_by_its_name(tmp_path, written, said):
    (tmp_path / "a.csv").write_bytes(written)
    (tmp_path / "a.txt").write_bytes(written)

    with pytest.raises(ConfigError, match=said):
        block_of(tmp_path, CsvSource(type="csv", path="a.csv", text="text"))
    assert (
        said
        in block_of(tmp_path, TextSource(type="text", path="a.txt", on_error=SKIP)).table.reason
    )


SHARDS = {
    "webdataset": (tar_of(("a.txt", b"one")), "tar"),
    "parquet": (packed_by(pq.write_table), "parquet"),
    "arrow": (packed_by(feather.write_feather), "arrow"),
    "numpy": (packed_by(lambda _, out: np.save(out, np.arange(4))), "npy"),
    "jsonl": (b'{"text": "one"}\n', "jsonl"),
    "csv": (b"text\none\n", "csv"),
}
KEYS = {
    "parquet": {"text": "text"},
    "arrow": {"text": "text"},
    "numpy": {"row_tokens": 2},
}


@pytest.mark.parametrize(
    ("kind", "pack", "suffix", "said"),
    [
        ("webdataset", gzip.compress, "", "is compressed by gzip; give .* ends in .gz"),
        ("webdataset", bz2.compress, "", "is compressed by bzip2, .*: bunzip2 FILE"),
        ("webdataset", bytes, ".gz", "is not compressed by gzip, although its name says so"),
        ("jsonl", bytes, ".zst", "is not compressed by zstd, although its name says so"),
        ("csv", gzip.compress, ".zst", "is compressed by gzip; give .* ends in .gz"),
        (
            "parquet",
            gzip.compress,
            "",
            "is compressed by gzip, as no file .*: gzip -dc < FILE > NEW",
        ),
        ("parquet", gzip.compress, ".gz", "is compressed by gzip, as no file .*: gzip -dc"),
        ("arrow", lzma.compress, "", "is compressed by xz, .*: unxz FILE"),
        ("numpy", gzip.compress, "", "is compressed by gzip, as no file .*: gzip -dc"),
        ("arrow", lambda _: b"FEA1" + bytes(64), "", "is Feather of version 1, .*write_feather"),
        ("parquet", lambda _: b"<HTML>no", "", "is a page of HTML, .* fetch the file anew"),
        (
            "parquet",
            lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "",
            "is a pointer of Git LFS, .*: git lfs pull",
        ),
    ],
)
def test_a_shard_that_is_sound_and_something_else_is_told_as_that_behind_a_good_one_too(
    tmp_path, kind, pack, suffix, said
):
    held, name = SHARDS[kind]
    (tmp_path / f"a.{name}").write_bytes(held)
    (tmp_path / f"b.{name}{suffix}").write_bytes(pack(held))
    config = SOURCE.validate_python(
        {"type": kind, "path": [f"a.{name}", f"b.{name}{suffix}"], **KEYS.get(kind, {})}
    )

    with pytest.raises(IntegrityError, match=rf"/b\.{name}{suffix}: {said}"):
        block_of(tmp_path, config)


def test_a_shard_that_begins_as_one_of_its_kind_is_told_as_damaged(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n' * 99)[:-9])

    with pytest.raises(IntegrityError, match="cut short or corrupt"):
        block_of(tmp_path, LINES)


def found_in(folder, rows, **source):
    (folder / "a.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    (folder / "t.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    )
    mix = {
        "version": 1,
        "seed": 1,
        "tokenizer": {"type": "bytes"},
        "sources": {"web": {"type": "jsonl", "path": "a.jsonl", **source}},
        "mix": {"stages": [{"from_step": 0, "weights": {"web": 1}}]},
        "pack": {"length": 64},
        "batch": {"tokens": 128, "micro_tokens": 64},
    }
    (folder / "mix.yaml").write_text(yaml.safe_dump(mix))
    (found,) = find_sources(open_spec(folder / "mix.yaml", dp=1, cache_dir=None))
    return found


def test_a_check_counts_conversations_that_no_sample_can_be_made_of(tmp_path):
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": messages} for messages in (said, [], said, None, [None], said)]
    chat = {"text": "messages", "transforms": [{"type": "chat", "template": "t.jinja"}]}

    found = found_in(tmp_path, rows, **chat, on_error={"policy": "skip"})

    assert ["3 of its first 6 records are left out" in said for said in found.doubts] == [True]


def test_a_source_that_skips_is_not_told_to_skip(tmp_path):
    with pytest.raises(ConfigError, match="none of its first records can be used: ") as caught:
        found_in(tmp_path, [{"title": "no text"}] * 3, on_error={"policy": "skip"})

    assert "on_error" not in str(caught.value)
