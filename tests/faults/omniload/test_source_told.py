"""What is told of shards that cannot be read: what was found, and what mends it; damage where there is some."""

import gzip
import io
import json
import subprocess
import sys
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
import zstandard

from omniload.base.errors import ConfigError, IntegrityError
from omniload.mix.config import ByteTokenizer
from omniload.mix.sources import CsvSource, JsonlSource, ParquetSource, WebDatasetSource
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec

TARS = WebDatasetSource(type="webdataset", path="a.tar*", text="txt")


def opened(folder, config):
    tokenizer = ByteTokenizer(type="bytes")
    return open_source(SourceSpec("web", config, seed=1, tokenizer=tokenizer, base_dir=folder))


def tar_of(name="a.txt", *, kind=tarfile.REGTYPE, headers=None, of_all=None):
    """Return an archive of one member with its pax headers, behind those of all members."""
    out = io.BytesIO()
    with tarfile.open(
        fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers=of_all
    ) as archive:
        info = tarfile.TarInfo(name)
        info.size, info.type, info.pax_headers = 3, kind, headers or {}
        archive.addfile(info, io.BytesIO(b"one"))
    return out.getvalue()


def tar_with_a_name_of_latin_1():
    out = io.BytesIO()
    with tarfile.open(
        fileobj=out, mode="w", format=tarfile.USTAR_FORMAT, encoding="latin-1"
    ) as archive:
        archive.addfile(tarfile.TarInfo("é.txt"))
    return out.getvalue()


SOUND = {
    "leads out": (tar_of("../a.txt"), "leads out of the archive or is none; give the file another"),
    "absolute": (tar_of("/a.txt"), "leads out of the archive or is none; give the file another"),
    "long": (tar_of(f"{'a' * 5_000}.txt"), "of 5,004 letters, more than 4,096; give the file"),
    "not UTF-8": (tar_with_a_name_of_latin_1(), r"not UTF-8: .*; give the file another name"),
    "sparse of GNU": (
        tar_of(kind=tarfile.GNUTYPE_SPARSE),
        "a sparse member.*anew without .*--sparse",
    ),
    "sparse of pax": (
        tar_of(headers={"GNU.sparse.major": "1"}),
        "a sparse member.*anew without .*--sparse",
    ),
    "label": (tar_of(kind=b"V"), "type b'V', which is not read; pack the files anew"),
    "one path": (
        tar_of(of_all={"path": "b.txt"}),
        "one path or size for all.*without --pax-option",
    ),
}


@pytest.mark.parametrize("case", SOUND)
def test_an_archive_that_is_sound_and_not_read_is_told_with_what_mends_it_and_not_as_damaged(
    tmp_path, case
):
    held, said = SOUND[case]
    (tmp_path / "a.tar").write_bytes(held)

    with pytest.raises(IntegrityError, match=rf"a\.tar: byte \d+ of \d+: .*{said}") as caught:
        opened(tmp_path, TARS)
    assert "cut short" not in str(caught.value)


def test_a_member_of_a_type_that_nobody_knows_is_told_as_damage(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar_of(kind=b"~"))

    with pytest.raises(
        IntegrityError, match=r"type b'~', which is not read; .* cut short or corrupt"
    ):
        opened(tmp_path, TARS)


PACKED_TWICE = {
    "webdataset": (TARS, "a.tar", tar_of()),
    "csv": (CsvSource(type="csv", path="a.csv*"), "a.csv", b"text\none\n"),
    "jsonl": (JsonlSource(type="jsonl", path="a.jsonl*"), "a.jsonl", b'{"text": "one"}\n'),
}
PACKERS = {"gzip": (gzip.compress, ".gz"), "zstd": (zstandard.compress, ".zst")}


@pytest.mark.parametrize("kind", PACKED_TWICE)
@pytest.mark.parametrize("within", PACKERS)
@pytest.mark.parametrize("codec", PACKERS)
def test_a_shard_that_is_compressed_twice_is_told_as_that_and_read_once_it_is_unpacked_once(
    tmp_path, kind, codec, within
):
    config, name, held = PACKED_TWICE[kind]
    (pack, suffix), (pack_within, suffix_within) = PACKERS[codec], PACKERS[within]
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(pack(pack_within(held)))

    said = (
        rf"{path.name}: is compressed twice, by {codec} and within that by {within}; .*{codec} -dc"
    )
    with pytest.raises(IntegrityError, match=said):
        opened(tmp_path, config)

    path.unlink()
    (tmp_path / f"{name}{suffix_within}").write_bytes(pack_within(held))
    assert opened(tmp_path, config).positions_per_epoch == 1


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["title", "body"], "write text: title or text: body, or name the delimiter"),
        (["", "a: b", "no"], 'write text: "a: b" or text: "no", or name the delimiter'),
        ([*"abcd"], "write text: a or text: b or text: c, or another of them, or name the"),
        (["", "a", "a"], "name another column, or name the delimiter"),
    ],
)
def test_a_table_without_the_column_shows_the_line_to_write_of_each_that_it_has(
    tmp_path, names, said
):
    (tmp_path / "a.csv").write_text(f"{','.join(names)}\n", encoding="utf-8")

    with pytest.raises(ConfigError, match=r"a\.csv: has no column 'text'; its first row") as caught:
        opened(tmp_path, CsvSource(type="csv", path="a.csv"))
    assert said in str(caught.value)


def test_a_line_that_is_shown_of_a_column_is_one_that_reads_it(tmp_path):
    (tmp_path / "a.csv").write_text("a: b,note\none,1\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path, CsvSource(type="csv", path="a.csv"))

    line = str(caught.value).partition("write ")[2].partition(" or text: note")[0]
    config = CsvSource(type="csv", path="a.csv", **yaml.safe_load(line))

    assert opened(tmp_path, config).positions_per_epoch == 1


def test_a_table_with_types_shows_lines_of_the_columns_that_hold_what_is_read(tmp_path):
    table = pa.table({"id": [1], "title": ["a"], "ids": [[1]], "body": ["b"]})
    pq.write_table(table, tmp_path / "a.parquet")
    keys = {"type": "parquet", "path": "a.parquet"}

    with pytest.raises(
        ConfigError, match=r"has id, title, ids, body: write text: title or text: body$"
    ):
        opened(tmp_path, ParquetSource(**keys, text="text"))
    with pytest.raises(ConfigError, match=r"has id, title, ids, body: write tokens: ids$"):
        opened(tmp_path, ParquetSource(**keys, tokens="tokens"))


WITH_LITTLE_MEMORY = """
import json, resource, sys
from pathlib import Path
from omniload.base.errors import OmniloadError
from omniload.mix.sources import JsonlSource
from omniload.source.files import local_file
from omniload.source.formats.jsonl import JsonlFormat
from omniload.source.parsing.shard_lists import read_json

text = "x" * (24 << 20)
deep = "[" * 600 + "]" * 600
lines = {
    "sound": '{"text": "%s"}' % text,
    "deep": '{"text": "%s", "a": %s}' % (text, deep),
    "broken": '{"text": "%s",}' % text,
}
formats = {}
for name, line in lines.items():
    path = Path(sys.argv[1], f"{name}.jsonl")
    path.write_text(line)
    formats[name] = JsonlFormat(
        [local_file(str(path))], JsonlSource(type="jsonl", path="*", on_error={"policy": "skip"})
    )
held = next(int(each.split()[1]) << 10 for each in open("/proc/self/status") if "VmSize" in each)
resource.setrlimit(resource.RLIMIT_AS, (held + (200 << 20), resource.RLIM_INFINITY))
told = {}
for name, opened in formats.items():
    try:
        records = opened.read_unit(0)
        told[name] = [records.bad_B.tolist(), len(records.column.values_V), records.reason]
    except OmniloadError as error:
        told[name] = [type(error).__name__, str(error)]
try:
    read_json(local_file(str(Path(sys.argv[1], "sound.jsonl"))))
except OmniloadError as error:
    told["list"] = [type(error).__name__, str(error)]
print(json.dumps(told))
"""


@pytest.mark.scripts_start_warm
def test_what_memory_is_lacking_to_read_is_told_as_that_and_no_line_is_bad_for_it(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITH_LITTLE_MEMORY, tmp_path],
        capture_output=True,
        text=True,
        check=True,
    )

    told = json.loads(done.stdout)
    takes = "24 MiB, and reading it takes 12 times as much memory, which is not free; give"
    assert told["sound"] == [[False], 24 << 20, ""]
    assert (told["deep"][0], takes in told["deep"][1]) == ("ConfigError", True)
    assert f"{tmp_path}/deep.jsonl:1: the line holds " in told["deep"][1]
    assert told["broken"][0] == [True]
    assert "is not JSON: Expecting property name" in told["broken"][2]
    assert (told["list"][0], takes in told["list"][1]) == ("ConfigError", True)
