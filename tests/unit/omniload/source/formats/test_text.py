"""Plain text files."""

from pathlib import Path

import pytest

from omniload.base.errors import ConfigError, IntegrityError
from omniload.mix.schema.tokenizers import ByteTokenizer
from omniload.mix.sources import TextSource
from omniload.source.files import ShardFile
from omniload.source.formats import text
from omniload.source.formats.content import digest_of_ranges
from omniload.source.formats.text import TextFormat
from omniload.source.patterns import find_files
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec

BYTES = ByteTokenizer(type="bytes")


@pytest.fixture
def opened(tmp_path):
    def open_format(*contents, files_per_unit=2):
        for i, content in enumerate(contents):
            (tmp_path / f"{i}.txt").write_bytes(content)
        files = find_files(["*.txt"], tmp_path, source="web")
        config = TextSource(type="text", path="*.txt", files_per_unit=files_per_unit)
        return TextFormat(files, config)

    return open_format


def texts(records):
    return [records.column[i].tobytes().decode() for i in range(len(records.column))]


def test_a_file_is_a_record_and_files_are_read_in_groups(opened):
    reader = opened(b"a", "é\nb".encode(), b"c")

    assert reader.units().rows_U.tolist() == [2, 1]
    assert reader.units().shards_U.tolist() == [0, 1]
    assert texts(reader.read_unit(0)) == ["a", "é\nb"]
    assert texts(reader.read_unit(1)) == ["c"]


def test_a_shard_of_several_files_is_called_by_its_own_files_and_as_none_of_them(tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text("text")
    source = open_source(
        SourceSpec(
            "notes",
            TextSource(type="text", path="*.txt", files_per_unit=2),
            tokenizer=BYTES,
            base_dir=tmp_path,
        )
    )

    assert source.shards == (
        f"{tmp_path}/0.txt and 1 more",
        f"{tmp_path}/2.txt and 1 more",
        f"{tmp_path}/4.txt",
    )


def test_a_record_is_called_by_its_file_and_joined_ones_by_the_group_that_they_lie_in(tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.txt").write_bytes(f"text {i}".encode() if i != 3 else b"\xe9")

    def opened(**config):
        config |= {"type": "text", "path": "*.txt", "files_per_unit": 2}
        config |= {"on_error": {"policy": "skip", "limit": 2}}
        return open_source(
            SourceSpec(
                "notes", TextSource.model_validate(config), tokenizer=BYTES, base_dir=tmp_path
            )
        )

    source, joining = opened(), opened(transforms=[{"type": "concat", "tokens": 4}])
    samples = source.read(0, 5)

    drawn = [bytes(samples.tokens[i][:-1].tolist()).decode() for i in range(4)]
    files = [source.place_at(position)[0] for position in samples.table.positions_N.tolist()]
    assert drawn == [f"text {Path(file).stem}" for file in files]
    assert samples.table.places == (f"{tmp_path}/3.txt",)
    assert {joining.place_at(p) for p in range(5)} == {(shard, "") for shard in joining.shards}


def test_line_ends_are_kept_as_they_are(opened):
    assert texts(opened(b"a\r\nb\r").read_unit(0)) == ["a\r\nb\r"]


def test_a_byte_order_mark_is_no_letter_of_the_text_where_the_file_begins(opened):
    reader = opened(
        "\ufeffa\ufeffb".encode(), "\ufeff\ufeffc".encode(), "\ufeff".encode(), b"\xef\xbb"
    )

    assert texts(reader.read_unit(0)) == ["a\ufeffb", "\ufeffc"]
    assert reader.read_unit(1).bad_B.tolist() == [False, True]
    assert texts(reader.first_records()) == ["a\ufeffb"]


def test_a_file_with_a_mark_has_another_digest_than_releases_that_read_it_and_others_have_theirs(
    opened, tmp_path
):
    contents = opened("\ufeffa".encode(), b"a", files_per_unit=1).units().contents_F
    by_bytes = [
        digest_of_ranges(file, [(0, file.size_bytes)])
        for file in find_files(["*.txt"], tmp_path, source="web")
    ]

    assert contents[0] != by_bytes[0]
    assert contents[1] == by_bytes[1]


def test_which_texts_are_equal_is_found_anew_where_a_mark_was_a_letter(tmp_path, monkeypatch):
    (tmp_path / "0.txt").write_bytes(b"a")
    (tmp_path / "1.txt").write_bytes("\ufeffa".encode())

    def drawn():
        config = TextSource(type="text", path="*.txt", dedupe="content")
        tokenizer = ByteTokenizer(type="bytes")
        spec = SourceSpec(
            "web",
            config,
            seed=1,
            tokenizer=tokenizer,
            base_dir=tmp_path,
            cache_dir=tmp_path / "kept",
        )
        return len(open_source(spec).read(0, 2).table.positions_N)

    with monkeypatch.context() as release_before:
        release_before.setattr(text, "_MARK", "\0")
        assert drawn() == 2
    for index in set((tmp_path / "kept").iterdir()) - set((tmp_path / "kept").glob("*.distinct.*")):
        index.unlink()  # it has another type there

    assert list((tmp_path / "kept").iterdir())
    assert drawn() == 1


def test_a_file_that_is_not_utf_8_is_a_bad_record(opened):
    reader = opened(b"a", b"\xff", b"c", files_per_unit=3)

    records = reader.read_unit(0)

    assert records.bad_B.tolist() == [False, True, False]
    assert "1.txt: is not UTF-8" in records.reason
    assert texts(records) == ["a", "", "c"]


def test_a_unit_too_large_for_memory_is_refused(opened, monkeypatch):
    monkeypatch.setattr(text, "MAX_UNIT_BYTES", 5)

    with pytest.raises(ConfigError, match="unit 1 of 2 files holds 6 B, more than 5 B"):
        opened(b"a", b"b", b"ccc", b"ddd")


def test_a_file_that_gives_fewer_bytes_than_it_has_is_named(opened, monkeypatch):
    reader = opened(b"abc")
    whole = ShardFile.open
    monkeypatch.setattr(ShardFile, "open", lambda file: _at_end(whole(file)))

    with pytest.raises(IntegrityError, match=r"0\.txt: gave 1 bytes of 3"):
        reader.read_unit(0)


def _at_end(opened):
    opened.seek(2)
    return opened


BINARY = {
    "is a Parquet file": b"PAR1",
    "is compressed by gzip": b"\x1f\x8b\x08",
    "is compressed by zstd": b"\x28\xb5\x2f\xfd",
    "is a zip archive": b"PK\x03\x04",
    "is a tar archive": b"a.txt".ljust(257, b"0") + b"ustar",
    "holds a byte 0 at 3": b"abc\0def",
    "is not UTF-8": b"caf\xe9",
}


@pytest.mark.parametrize(("reason", "content"), BINARY.items(), ids=BINARY)
def test_what_is_no_text_is_a_bad_record_and_said_at_first_sight(opened, reason, content):
    reader = opened(content, b"good")

    records = reader.read_unit(0)

    assert records.bad_B.tolist() == [True, False]
    assert f"0.txt: {reason}" in records.reason
    assert f"0.txt: {reason}" in reader.first_records().reason


def test_a_character_that_is_cut_in_two_at_first_sight_is_no_fault(opened, monkeypatch):
    monkeypatch.setattr(text, "FIRST_BYTES", 2)

    assert opened("aé".encode()).first_records().reason == ""
