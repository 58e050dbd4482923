"""Opening a mix: everything that is wrong is said at once, and indexes have a place of their own."""

import pytest
import yaml

from omniload.base.errors import (
    ConfigError,
    IntegrityError,
    OmniloadError,
    StateError,
    UnavailableError,
)
from omniload.commands.opening import find_sources, open_spec, raise_together
from omniload.mix.config import BpeTokenizer
from tests.support.plane.corpora import a_mixed_corpus


def a_file(folder, mix):
    path = folder / "mix.yaml"
    path.write_text(yaml.safe_dump(mix.model_dump(mode="json")), encoding="utf-8")
    return path


def test_no_error_is_no_error():
    raise_together([])


def test_one_error_stays_itself():
    error = UnavailableError("no answer")

    with pytest.raises(UnavailableError) as raised:
        raise_together([error])

    assert raised.value is error


def test_several_errors_are_one_with_a_line_for_each():
    with pytest.raises(ConfigError) as raised:
        raise_together([ConfigError("first"), ConfigError("second")])

    assert str(raised.value) == "first\nsecond"


@pytest.mark.parametrize(
    ("kinds", "gravest"),
    [
        ([UnavailableError, ConfigError], ConfigError),
        ([ConfigError, IntegrityError], IntegrityError),
        ([StateError, UnavailableError], StateError),
    ],
)
def test_together_they_are_what_is_least_likely_to_go_away(kinds, gravest):
    with pytest.raises(OmniloadError) as raised:
        raise_together([kind("wrong") for kind in kinds])

    assert type(raised.value) is gravest


def test_sources_are_found_in_the_order_of_the_file(tmp_path):
    spec = open_spec(a_file(tmp_path, a_mixed_corpus(tmp_path)), dp=2, cache_dir=tmp_path / "cache")

    found = find_sources(spec)

    assert [(s.name, s.format, s.shards, s.records) for s in found] == [
        ("ids", "parquet", 2, 120),
        ("text", "jsonl", 1, 120),
    ]
    assert all(source.size_bytes > 0 and source.units > 0 for source in found)


def test_all_that_is_missing_is_reported_at_once(tmp_path):
    tokenizer = BpeTokenizer(type="bpe", path="none.json")
    mix = a_mixed_corpus(tmp_path).model_copy(update={"tokenizer": tokenizer})
    (tmp_path / "text" / "0.jsonl").unlink()
    path = a_file(tmp_path, mix)

    with pytest.raises(ConfigError) as raised:
        find_sources(open_spec(path, dp=99, cache_dir=tmp_path / "cache"))

    lines = str(raised.value).splitlines()
    assert len(lines) == 3
    assert "99 data-parallel ranks" in lines[0]
    assert "none.json" in lines[1]
    assert "sources.text.path" in lines[2]


def test_a_source_without_records_is_refused(tmp_path):
    mix = a_mixed_corpus(tmp_path)
    (tmp_path / "text" / "0.jsonl").write_bytes(b"")

    with pytest.raises(ConfigError, match=r"sources\.text: .* holds no record"):
        find_sources(open_spec(a_file(tmp_path, mix), dp=1, cache_dir=tmp_path / "cache"))


def test_planning_ahead_may_be_set_apart_from_the_file(tmp_path):
    path = a_file(tmp_path, a_mixed_corpus(tmp_path))

    assert open_spec(path, dp=1, cache_dir=None, ahead=1).mix.runtime.prefetch_steps == 1
    assert open_spec(path, dp=1, cache_dir=None).mix.steps_ahead == 4


def test_a_fault_of_a_source_has_the_line_of_its_key(tmp_path):
    file = tmp_path / "mix.yaml"
    file.write_text(
        "version: 1\nseed: 1\n"
        "sources:\n"
        "  web: {type: jsonl, path: web.jsonl, text: body}\n"
        "  books:\n"
        "    type: jsonl\n"
        "    path: none-*.jsonl\n"
        "    text: text\n"
        "mix: {stages: [{from_step: 0, weights: {web: 1, books: 1}}]}\n"
        "tokenizer: {type: bytes}\n"
        "pack: {length: 16}\n"
        "batch: {tokens: 64, micro_tokens: 64}\n"
    )
    (tmp_path / "web.jsonl").write_text('{"text": "a"}\n')
    spec = open_spec(file, dp=1, cache_dir=tmp_path / "cache")

    with pytest.raises(ConfigError) as caught:
        find_sources(spec, file)

    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{file}:7: sources.books.path: ")
    assert lines[1].startswith(f"{file}:4: sources.web: ")
