"""A user's reader must agree with its description of its shards."""

import gzip
import json
import sys
from pathlib import Path

import pytest

import omniload
from omniload.base.errors import ConfigError, IntegrityError, StateError
from omniload.base.settings import registry
from tests.support.plane.edits.mix_commands import json_of
from tests.support.plane.sources.lab_reader import READER, install, write_frames

TEXTS = [f"d{i}" for i in range(60)]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path)
    write_frames(tmp_path / "a.frames", TEXTS)
    yield tmp_path
    sys.modules.pop("lab_of_readers", None)
    registry.registered.cache_clear()


def a_mix(**source):
    declared = {"type": "registered", "reader": "frames", "path": "*.frames", **source}
    return {
        "version": 1,
        "seed": 1,
        "tokenizer": {"type": "bytes"},
        "sources": {"own": declared},
        "mix": {"stages": [{"from_step": 0, "weights": {"own": 1}}], "stop": "each_once"},
        "pack": {"length": 16},
        "batch": {"tokens": 64, "micro_tokens": 32},
    }


def drawn(mix, **words):
    with omniload.open(mix, arrays="numpy", **words) as loader:
        texts = [bytes(batch.tokens[batch.tokens < 256].tolist()) for batch in loader]
    return sorted(b"".join(texts).replace(b"\0", b"").decode().split("d")[1:], key=int)


def with_code(folder, before, after, version="1.0"):
    assert before in READER
    install(folder, version, code=READER.replace(before, after))


def test_every_record_comes_once_with_the_options_of_the_file():
    found = drawn(a_mix(options={"frames": 7}))

    assert found == [text[1:] for text in TEXTS]


def test_a_null_is_a_bad_record(folder):
    with_code(folder, "texts.append(data", "texts.append(None if not at else data")

    with pytest.raises(IntegrityError, match=r"a\.frames: 0 to .*: row 0: .*is null"):
        drawn(a_mix())
    assert len(drawn(a_mix(on_error={"policy": "skip", "limit": 1}))) == 59


@pytest.mark.parametrize(
    "unit",
    [
        "map(np.int64, (begin, at, count))",
        "np.array([begin, at, count])",
        "[begin, at, count]",
    ],
)
def test_a_unit_may_be_told_in_numbers_of_numpy(folder, unit):
    with_code(folder, "yield begin, at, count", f"import numpy as np; yield {unit}")

    assert len(drawn(a_mix(options={"frames": 7}))) == 60


@pytest.mark.parametrize("given", ["pa.binary()", "pa.string_view()"])
def test_texts_may_be_of_other_types_of_arrow(folder, given):
    with_code(folder, "return pa.array(texts, pa.string())", f"return pa.array(texts, {given})")

    assert len(drawn(a_mix())) == 60


def test_a_unit_without_records_may_stand_at_the_place_of_another(folder):
    with_code(folder, "yield begin, at, count", "yield begin, at, 0; yield begin, at, count")

    assert len(drawn(a_mix())) == 60


def test_a_shard_may_begin_as_those_of_other_formats_do(folder):
    """A reader decompresses its own data, and the refusal of a shard has the reader's message."""
    (folder / "a.frames").write_bytes(gzip.compress(b"frames"))

    with pytest.raises(IntegrityError, match=r"reader frames of lab 1\.0 fails: .*; replace the"):
        drawn(a_mix())


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            "return pa.array(texts, pa.string())",
            "return pa.array([1.5] * len(texts))",
            "gives double, not large_string",
        ),
        ("return pa.array(texts, pa.string())", "return texts", "gives a list, no array of Arrow"),
        (
            "return pa.array(texts, pa.string())",
            "return pa.array(texts[1:])",
            "gives 59 records, and has said that",
        ),
        (
            "return pa.array(texts, pa.string())",
            "return pa.array([[1]] * len(texts))",
            "gives list<.*>, not large_string",
        ),
        (
            "yield begin, at, count",
            "yield begin, at, -1",
            r"unit 0: .* says \(0, \d+, -1\); a unit is \(start",
        ),
        ("yield begin, at, count", "yield at, begin - 1, count", "a unit is"),
        ("yield begin, at, count", "yield begin, at", "a unit is"),
        (
            "yield begin, at, count",
            "yield begin, at, count; yield begin, at, count",
            r"unit 1: .* says \(0, \d+, 60\), which it has said before; say each unit once",
        ),
        (
            "file.seek(start)",
            "1 / 0",
            "reader frames of lab 1.0 fails: ZeroDivisionError.*fix the reader",
        ),
        ("file.seek(start)", "raise SystemExit", "reader frames of lab 1.0 fails: SystemExit"),
        ("size, at, begin", "raise SystemExit; size, at, begin", "its units: .* SystemExit"),
    ],
)
def test_what_does_not_fit_is_told_with_shard_reader_and_version(folder, before, after, said):
    with_code(folder, before, after)

    with pytest.raises(
        IntegrityError, match=rf"a\.frames: .*reader frames of lab 1\.0.*{said}|{said}"
    ):
        drawn(a_mix())


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"reader": "frame"}, "did you mean 'frames'.*registered: \\['frames'\\]"),
        ({"options": {"frame": 1}}, r"does not take the options \['frame'\]: TypeError"),
        ({"holds": "images"}, "'text' or 'tokens'"),
        ({"where": {"a": 1}}, "where reads columns, and the source is of type registered"),
        ({"path": "."}, r"type \(any name, by a glob\); it holds .*a\.frames.*: name the files"),
    ],
)
def test_what_the_mix_says_wrong_is_refused(source, said):
    with pytest.raises(ConfigError, match=said):
        drawn(a_mix(**source))


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("import struct", "cannot be imported: SystemExit"),
        ("self._frames, self._as_ids", "options"),
    ],
)
def test_a_reader_that_ends_the_process_before_it_reads_is_refused(folder, before, said):
    with_code(folder, before, f"raise SystemExit; {before}")

    with pytest.raises(ConfigError, match=said):
        drawn(a_mix())


def test_a_reader_that_is_edited_cuts_shards_anew_though_its_version_stays(folder):
    # From a file, so its index is kept.
    Path("mix.yaml").write_text(json.dumps(a_mix(options={"frames": 30})))
    assert len(drawn("mix.yaml")) == 60

    with_code(folder, "yield begin, at, count", "if begin: yield begin, at, count")

    assert drawn("mix.yaml") == [str(i) for i in range(30, 60)]


def test_a_reader_that_is_edited_while_it_is_imported_leaves_no_index_for_what_it_became(folder):
    Path("mix.yaml").write_text(json.dumps(a_mix(options={"frames": 30})))
    assert len(drawn("mix.yaml")) == 60
    edited = READER.replace("yield begin, at, count", "if begin: yield begin, at, count")
    Path("lab_of_readers.py").write_text(edited)
    assert len(drawn("mix.yaml")) == 60  # a notebook continues with the module that it imported

    install(folder, code=edited)

    assert drawn("mix.yaml") == [str(i) for i in range(30, 60)]


@pytest.mark.parametrize("ids", ["[[0.0]] * len(texts)", "[[True]] * len(texts)"])
def test_ids_are_whole_numbers(folder, ids):
    with_code(folder, "return pa.array(texts, pa.string())", f"return pa.array({ids})")

    with pytest.raises(IntegrityError, match=r"gives list<item: (double|bool)>, not large_list"):
        drawn(a_mix(holds="tokens"))


def test_memory_that_is_lacking_is_no_fault_of_the_shard(folder):
    with_code(folder, "file.seek(start)", "raise MemoryError")

    with pytest.raises(
        ConfigError, match=r"frames of lab 1\.0 has no memory left; give the process"
    ):
        drawn(a_mix())


def test_a_class_without_what_is_asked_of_it_is_refused(folder):
    with_code(folder, "def read(self", "def decode(self")

    with pytest.raises(
        ConfigError, match=r"makes a Frames, which has no read; give it units\(file\)"
    ):
        drawn(a_mix())


def test_a_resume_under_another_version_of_the_reader_is_refused(folder):
    with omniload.open(a_mix(), arrays="numpy") as loader:
        loader.next_batch()
        state = loader.state_dict()
    assert drawn(a_mix(), state=state)

    install(folder, "1.1")

    with pytest.raises(StateError, match=r"sources\.own\.content"):
        drawn(a_mix(), state=state)


def test_equal_records_are_those_of_this_version_of_the_reader(folder):
    # From a file, so the findings are kept next to its index.
    Path("mix.yaml").write_text(json.dumps(a_mix(dedupe="content")))
    assert len(drawn("mix.yaml")) == 60

    alike = 'texts[1:] = ["d1"] * 59; return pa.array(texts,'
    with_code(folder, "return pa.array(texts,", alike, version="1.1")

    assert drawn("mix.yaml") == ["0", "1"]


def test_a_check_calls_the_reader_each_time_it_is_asked(folder):
    Path("mix.yaml").write_text(json.dumps(a_mix()))
    assert json_of("check", "mix.yaml")

    with_code(folder, "file.seek(start)", "1 / 0", version="1.1")

    with pytest.raises(IntegrityError, match="ZeroDivisionError"):
        json_of("check", "mix.yaml")
