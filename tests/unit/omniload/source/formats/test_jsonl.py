"""Lines of JSON."""

import gzip
import os
import re
import shlex
import subprocess
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pytest
import xxhash
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omniload.base.errors import ConfigError, IntegrityError
from omniload.mix.sources import JsonlSource, ShuffleConfig
from omniload.source.formats import jsonl
from omniload.source.formats.jsonl import JsonlFormat
from omniload.source.formats.opening import open_format
from omniload.source.index import IndexCache
from omniload.source.parsing import compressed, cutting
from omniload.source.patterns import find_files
from omniload.source.spec import SourceSpec


@pytest.fixture
def opened(tmp_path):
    def open_format(data, unit_bytes=1 << 20, name="a.jsonl"):
        (tmp_path / name).write_bytes(data)
        files = find_files([name], tmp_path, source="web")
        return JsonlFormat(files, JsonlSource(type="jsonl", path=name, unit=unit_bytes))

    return open_format


def read_unit(reader, unit):
    """Read a unit; bad records are ``None``."""
    records = reader.read_unit(unit)
    return [
        None if records.bad_B[i] else records.column[i].tobytes().decode()
        for i in range(len(records.column))
    ]


def read(reader):
    """Read all units."""
    return [text for unit in range(len(reader.units())) for text in read_unit(reader, unit)]


GOOD = b'{"id": 1, "text": "one"}\n{"text": "zw\xc3\xb6lf\\n", "more": {"a": [1, null]}}\n'


def test_the_text_of_every_line_is_read(opened):
    assert read(opened(GOOD)) == ["one", "zwölf\n"]


def test_a_last_line_needs_no_newline(opened):
    assert read(opened(GOOD + b'{"text": "last"}')) == ["one", "zwölf\n", "last"]


def test_windows_line_ends_are_no_part_of_the_text(opened):
    assert read(opened(GOOD.replace(b"\n{", b"\r\n{"))) == ["one", "zwölf\n"]


def test_blank_lines_are_empty_texts(opened):
    reader = opened(b'{"text": "a"}\n\n  \n{"text": "b"}\n\n')

    assert read(reader) == ["a", "", "", "b", ""]
    assert reader.read_unit(0).reason == ""


def test_a_file_of_blank_lines_only_holds_empty_texts(opened):
    assert read(opened(b"\n\n")) == ["", ""]


def test_an_empty_file_has_no_unit(opened):
    assert len(opened(b"").units()) == 0


BAD_LINES = {
    "is not JSON": b"{'text': 1}",
    "is not JSON: unexpected end": b'{"text": "cut',
    r"is a JSON list, not an object; .*: jq -c '\.\[\]' FILE": b'["text"]',
    r"begins a list that goes over several lines; .*: jq -c '\.\[\]' FILE": b" [\r",
    "begins a list that goes over several lines; of a file": b'[{"text": "one"},\r',
    "begins an object that goes over several lines; .*: jq -c . FILE": b"{",
    "is compressed by gzip; give the file a name that ends in .gz": b"\x1f\x8b\x08\x00",
    "is compressed by zstd; give the file a name that ends in .zst": b"\x28\xb5\x2f\xfd\x00",
    "is a pointer of Git LFS, .*: git lfs pull": b"version https://git-lfs.github.com/spec/v1",
    "is not strict JSON .* nests 601 brackets deep: .* NaN, is read to 512; write null": (
        b'{"text": "x", "n": ' + b"[" * 600 + b"NaN" + b"]" * 600 + b"}"
    ),
    "nests 1,101 brackets deep, and a line is read to 1,024; write it flatter": (
        b'{"text": "x", "n": ' + b"[" * 1100 + b"]" * 1100 + b"}"
    ),
    "is a JSON str, not an object": b'"text"',
    "has no key 'text'; it has body, id": b'{"id": 1, "body": "x"}',
    "has no key 'text'; it has none": b"{}",
    "'text' is None, not a string": b'{"text": null}',
    "'text' is 12, not a string": b'{"text": 12}',
    r"'text' is \[5, 6\], not a string; token ids are read by tokens: text": b'{"text": [5, 6]}',
    "'text' holds half a surrogate pair at character 0": b'{"text": "\\ud800"}',
    "is not JSON: .*UTF-8": b'{"text": "\xff\xfe"}',
}


@pytest.mark.parametrize(("reason", "line"), BAD_LINES.items(), ids=BAD_LINES)
def test_a_bad_line_keeps_its_position_and_is_named(opened, reason, line):
    reader = opened(GOOD + line + b"\n" + GOOD)

    records = reader.read_unit(0)

    assert read(reader) == ["one", "zwölf\n", None, "one", "zwölf\n"]
    assert records.bad_B.tolist() == [False, False, True, False, False]
    assert re.search(rf"a\.jsonl:3: {reason}", records.reason)


def test_line_numbers_count_from_the_start_of_the_file(opened):
    reader = opened(GOOD * 5 + b"bad\n", unit_bytes=1)
    last = len(reader.units()) - 1

    assert ":11: is not JSON" in reader.read_unit(last).reason


def test_two_objects_on_a_line_are_a_bad_line(opened):
    assert read(opened(b'{"text": "a"}{"text": "b"}\n{"text": "c"}\n')) == [None, "c"]


def test_a_key_given_twice_counts_with_its_last_value(opened):
    assert read(opened(b'{"text": "a", "text": "b"}\n{"text": "c"}\n')) == ["b", "c"]


lines = st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"")), max_size=20)


@given(lines, st.booleans(), st.integers(1, 30), st.integers(1, 10))
def test_ranges_cover_the_file_and_end_at_newlines(content, ended, unit_bytes, chunk):
    data = b"\n".join(content) + (b"\n" if ended else b"")
    chunks = (pa.py_buffer(data[at : at + chunk]) for at in range(0, len(data), chunk))

    units = cutting.line_ranges(chunks, unit_bytes)

    pieces = [data[a:b] for a, b in zip(units.starts.tolist(), units.stops.tolist(), strict=True)]
    assert b"".join(pieces) == data
    assert all(piece.endswith(b"\n") for piece in pieces[:-1])
    assert all(len(piece) >= unit_bytes for piece in pieces[:-1])
    counted = [piece.count(b"\n") + (not piece.endswith(b"\n")) for piece in pieces]
    assert units.rows.tolist() == counted


COMPRESSED = pytest.mark.parametrize(
    ("name", "compress"),
    [
        ("a.jsonl.gz", gzip.compress),
        ("a.jsonl.zst", zstandard.compress),
        ("a.JSONL.GZ", gzip.compress),
    ],
)


def lines_of(numbers):
    return b"".join(b'{"text": "line %d"}\n' % i for i in numbers)


@COMPRESSED
def test_a_compressed_shard_is_cut_as_a_plain_one_whatever_frames_it_has(opened, name, compress):
    plain = opened(lines_of(range(40)), unit_bytes=100)

    reader = opened(
        compress(lines_of(range(17))) + compress(lines_of(range(17, 40))), unit_bytes=100, name=name
    )

    assert len(reader.units()) > 5
    for column in ("rows_U", "starts_U", "stops_U"):
        assert np.array_equal(getattr(reader.units(), column), getattr(plain.units(), column))
    assert read(reader) == [f"line {i}" for i in range(40)]


@COMPRESSED
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_units_of_a_compressed_shard_are_read_in_any_order(opened, name, compress, data):
    reader = opened(compress(lines_of(range(40))), unit_bytes=100, name=name)
    expected = [read_unit(opened(lines_of(range(40)), unit_bytes=100), u) for u in range(8)]

    for unit in data.draw(st.lists(st.integers(0, 7), max_size=12)):
        if data.draw(st.booleans()):
            reader.reach(unit)
        assert read_unit(reader, unit) == expected[unit]


@pytest.fixture
def begun(monkeypatch):
    """The shards that were decompressed from their first byte, one after the other."""
    begun = []
    stream_of = compressed.stream_of
    monkeypatch.setattr(compressed, "stream_of", lambda file: begun.append(1) or stream_of(file))
    return begun


def test_parts_of_small_compressed_shards_are_shuffled_over_all_shards_as_of_plain_ones(tmp_path):
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst"):
        packed = {"gz": gzip.compress, "zst": zstandard.compress}.get(
            name.rpartition(".")[2], bytes
        )
        (tmp_path / name).write_bytes(packed(GOOD))
    files = find_files(["*.jsonl*"], tmp_path, source="web")
    by_units = JsonlSource(type="jsonl", path="*.jsonl*", shuffle=ShuffleConfig(method="units"))

    assert read(JsonlFormat(files, by_units)) == ["one", "zwölf\n"] * 3


def test_more_units_than_a_block_may_have_are_not_shuffled_in_full(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines_of(range(4_097)))
    config = JsonlSource(type="jsonl", path="a.jsonl", unit=1, shuffle=ShuffleConfig(method="full"))

    with pytest.raises(
        ConfigError, match=r"sources\.web\.shuffle: full .* at most 4,096, and this one has 4,097"
    ):
        open_format(SourceSpec("web", config, base_dir=tmp_path))
    whole = config.model_copy(update={"unit": 1_000})
    assert len(open_format(SourceSpec("web", whole, base_dir=tmp_path)).format.units()) < 4_096


def test_a_compressed_shard_that_is_read_on_is_decompressed_once(opened, begun):
    reader = opened(gzip.compress(lines_of(range(40))), unit_bytes=100, name="a.jsonl.gz")
    begun.clear()

    for unit in (0, 1, 2, 5, 7):
        reader.read_unit(unit)
    assert len(begun) == 1

    reader.read_unit(3)
    assert len(begun) == 2


def test_shards_that_are_decompressed_in_part_are_no_more_than_a_process_holds(
    opened, begun, monkeypatch
):
    monkeypatch.setattr(compressed, "_MOST_BEGUN", 2)
    packed = gzip.compress(lines_of(range(40)))
    readers = [opened(packed, unit_bytes=100, name=f"{i}.jsonl.gz") for i in range(3)]
    begun.clear()

    for unit in (0, 1):
        for reader in readers:
            assert read_unit(reader, unit) == [f"line {unit * 6 + i}" for i in range(6)]
    # Each was evicted by the next two.
    assert len(begun) == 6


def test_a_forked_process_does_not_read_on_in_a_file_that_its_parent_reads(opened):
    reader = opened(gzip.compress(lines_of(range(4000)), 0), unit_bytes=100, name="a.jsonl.gz")
    expected = [read_unit(reader, unit) for unit in range(len(reader.units()))]
    reader.read_unit(0)

    child = os.fork()
    if not child:  # pragma: no cover -- in the child
        as_expected = False
        with suppress(BaseException):
            as_expected = all(read_unit(reader, u) == expected[u] for u in range(1, len(expected)))
        os._exit(0 if as_expected else 1)
    mine = [read_unit(reader, unit) for unit in range(1, len(expected))]

    assert mine == expected[1:]
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("name", "compress"), [("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstandard.compress)]
)
def test_a_compressed_shard_without_lines_has_no_records(opened, name, compress):
    assert opened(compress(b""), name=name).units().rows_U.sum() == 0


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_shard_that_is_not_compressed_at_all_is_named(opened, name):
    with pytest.raises(
        IntegrityError, match=f"{name}: is not compressed by .*, although its name says so"
    ):
        opened(GOOD, name=name)


def test_a_compressed_shard_may_be_larger_than_a_unit(opened, monkeypatch):
    monkeypatch.setattr("omniload.source.parsing.compressed.MAX_UNIT_BYTES", 100)
    monkeypatch.setattr(jsonl, "MAX_UNIT_BYTES", 100)

    reader = opened(gzip.compress(GOOD * 10), unit_bytes=50, name="a.jsonl.gz")

    assert read(reader) == ["one", "zwölf\n"] * 10


def test_a_line_too_large_for_memory_is_refused(opened, monkeypatch):
    monkeypatch.setattr(jsonl, "MAX_UNIT_BYTES", 100)

    with pytest.raises(ConfigError, match="more than 100 B; lower unit, or split the line"):
        opened(b'{"text": "' + b"x" * 200 + b'"}\n')


@pytest.mark.parametrize("stop", [10, 10_000])
def test_an_index_of_another_file_is_an_integrity_error(opened, stop):
    reader = opened(gzip.compress(GOOD), name="a.jsonl.gz")
    reader.units().stops_U[0] = stop

    with pytest.raises(IntegrityError, match="not the one that was indexed"):
        reader.read_unit(0)


def test_many_lines_are_cut_into_units_of_about_the_size_asked_for(opened):
    reader = opened(GOOD * 1000, unit_bytes=4000)

    sizes = reader.units().stops_U - reader.units().starts_U

    assert np.all(sizes[:-1] >= 4000)
    assert np.all(sizes < 4000 + len(GOOD))
    assert len(read(reader)) == 2000


def test_first_records_are_those_of_the_first_shard_that_holds_any(tmp_path):
    for name, data in (("a", b""), ("b", b'{"text": "one"}\n')):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(data))
    files = find_files(["*.jsonl.gz"], tmp_path, source="web")
    config = JsonlSource(type="jsonl", path="*.jsonl.gz")

    first = JsonlFormat(files, config).first_records()

    assert first.column[0].tobytes() == b"one"
    assert len(JsonlFormat(files[:1], config).first_records().column) == 0


def test_a_file_that_begins_with_zeros_is_refused_by_its_first_bytes(tmp_path):
    with (tmp_path / "a.jsonl").open("wb") as hole:
        hole.truncate(1 << 41)
    files = find_files(["a.jsonl"], tmp_path, source="web")

    with pytest.raises(
        ConfigError, match=r"a.jsonl: begins with 1 MiB of zero bytes, which no line"
    ):
        JsonlFormat(files, JsonlSource(type="jsonl", path="a.jsonl"))


def test_a_few_zeros_are_one_bad_record(opened):
    assert read(opened(b"\0" * 100 + b"\n" + GOOD)) == [None, "one", "zwölf\n"]


@pytest.mark.parametrize("fill", [b"\0", b"x", b"\n"])
def test_a_bomb_is_decompressed_to_a_multiple_of_its_size_and_no_further(opened, monkeypatch, fill):
    seen = []
    chunks_of = jsonl.chunks_of
    monkeypatch.setattr("omniload.source.parsing.compressed.MAX_UNIT_BYTES", 1 << 20)
    monkeypatch.setattr("omniload.source.parsing.compressed._SCAN_BYTES", 1 << 18)
    monkeypatch.setattr(jsonl, "FIRST_BYTES", 1 << 18)

    def counted(stream, file):
        for chunk in chunks_of(stream, file):
            seen.append(len(chunk))
            yield chunk

    monkeypatch.setattr(jsonl, "chunks_of", counted)
    bomb = zstandard.compress(fill * (64 << 20))
    with pytest.raises(
        ConfigError, match=r"begins with .* zero bytes|over 500 times as many, which no text does"
    ):
        opened(bomb, name="a.jsonl.zst")

    assert sum(seen) <= max(1 << 20, 500 * len(bomb)) + (1 << 18)


def test_the_command_in_the_message_takes_a_byte_order_mark_off(opened, tmp_path):
    lines = ['{"text": "\ufeffone"}\n', '{"text": "two"}\n']
    reader = opened("\ufeff".join(lines).encode())
    said = reader.read_unit(0).reason

    assert read_unit(reader, 0) == ["\ufeffone", None]
    assert "a.jsonl:2: begins with a byte-order mark; " in said
    command = said.partition("take it off: ")[2].replace("FILE", "a.jsonl")
    subprocess.run(shlex.split(command), cwd=tmp_path, check=True)
    assert (tmp_path / "a.jsonl").read_text() == "".join(lines)


MARK = b"\xef\xbb\xbf"
PACKED = {"a.jsonl": bytes, "a.jsonl.gz": gzip.compress, "a.jsonl.zst": zstandard.compress}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("unit_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (GOOD, ["one", "zw\u00f6lf\n"]),
        (b'{"text": "last"}', ["last"]),
        (b"\n" + GOOD, ["", "one", "zw\u00f6lf\n"]),
        (MARK + GOOD, [None, "zw\u00f6lf\n"]),  # a second one
        (b"", [""]),
    ],
)
def test_a_byte_order_mark_at_the_beginning_of_a_file_is_left_out(
    opened, name, unit_bytes, data, texts
):
    reader = opened(PACKED[name](MARK + data), unit_bytes, name)

    assert read(reader) == texts
    first = opened(PACKED[name](MARK + data), unit_bytes, name).first_records()
    assert len(first.column) == len(texts)
    assert first.column[0].tobytes().decode() == (texts[0] or "")


def kept_index(folder, data):
    """Open lines with an index that is kept, and return the reader and the index."""
    if not (folder / "a.jsonl").exists():
        (folder / "a.jsonl").write_bytes(data)
    files = find_files(["a.jsonl"], folder, source="web")
    cache = IndexCache(folder=folder / "cache", source="web")
    reader = JsonlFormat(files, JsonlSource(type="jsonl", path="a.jsonl"), cache)
    (index,) = (folder / "cache").glob("*.index.arrow")
    return reader, index


def test_a_file_with_a_mark_is_another_than_to_releases_that_read_a_bad_line(tmp_path, opened):
    """For such a release the content is its bytes; an index of that release names that content, and is not used."""
    marked, index = kept_index(tmp_path, MARK + GOOD)
    (content,) = marked.units().contents_F
    assert content.endswith("/unmarked")
    assert opened(GOOD, name="b.jsonl").units().contents_F == (xxhash.xxh3_128_hexdigest(GOOD),)

    table = pa.ipc.open_file(index.read_bytes()).read_all()
    earlier = pa.array([content.removesuffix("/unmarked")])
    table = table.set_column(table.schema.get_field_index("content"), "content", earlier)
    with pa.ipc.new_file(index, table.schema) as out:
        out.write_table(table)
    reader, _ = kept_index(tmp_path, MARK + GOOD)
    with pytest.raises(IntegrityError, match=r"begins with a byte-order mark. .* index is removed"):
        reader.read_unit(0)

    assert read(kept_index(tmp_path, MARK + GOOD)[0]) == ["one", "zw\u00f6lf\n"]
