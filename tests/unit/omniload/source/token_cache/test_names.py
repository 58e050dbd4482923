"""Names of entries of a token cache."""

import pytest
from pydantic import TypeAdapter

from omniload.mix.config import BpeTokenizer, SourceConfig
from omniload.mix.schema.transforms import ChatTransform, PreferenceTransform
from omniload.mix.sources import JsonlSource, TextSource
from omniload.source.formats.opening import open_format
from omniload.source.spec import SourceSpec
from omniload.source.token_cache import source_tokens
from omniload.source.token_cache.source_tokens import folder_of_source, names_of_units

TEXTS = TextSource(type="text", path="*.txt", files_per_unit=3)
LINES = JsonlSource(type="jsonl", path="*.jsonl", unit=1)


def names_in(folder, config):
    opened = open_format(SourceSpec("notes", config, base_dir=folder))
    return names_of_units(opened.format.units(), opened.files, digests_all=opened.digests_all)


@pytest.mark.parametrize(("number", "changed"), [(0, 0), (2, 0), (3, 1), (4, 1), (6, 2)])
def test_a_unit_of_texts_has_another_name_once_any_of_its_files_is_another(
    tmp_path, number, changed
):
    for i in range(7):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
    before = names_in(tmp_path, TEXTS)

    (tmp_path / f"{number}.txt").write_text("other")

    differ = [was != now for was, now in zip(before, names_in(tmp_path, TEXTS), strict=True)]
    assert differ == [unit == changed for unit in range(3)]


def test_units_of_one_file_have_names_of_their_own_that_the_other_files_do_not_decide(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"text": "x"}\n{"text": "y"}\n')
    before = names_in(tmp_path, LINES)

    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": "z"}\n')
    after = names_in(tmp_path, LINES)

    assert len({*before, *after}) == 4  # both files were the same, and shared their entries
    assert before[2:] == after[2:]


LANG = {"column": "meta.lang", "dtype": "text", "of": "samples", "default": ""}
MEMBER = LANG | {"column": ".lang"}
CHAT = (ChatTransform(type="chat"),)
PAIRS = (PreferenceTransform(type="preference"),)


@pytest.mark.parametrize(
    ("version", "transforms", "changes"),
    [
        ("CHAT_MAKING_VERSION", (), False),
        ("CHAT_MAKING_VERSION", CHAT, True),
        ("CHAT_MAKING_VERSION", PAIRS, False),
        ("ANSWER_MAKING_VERSION", (), False),
        ("ANSWER_MAKING_VERSION", CHAT, False),
        ("ANSWER_MAKING_VERSION", PAIRS, True),
    ],
)
def test_entries_of_others_stay_where_conversations_or_answers_are_made_otherwise(
    monkeypatch, version, transforms, changes
):
    config = JsonlSource(type="jsonl", path="*.jsonl", transforms=transforms)

    def folder():
        of_run = {"tokenizer": None, "tokenizer_digest": "", "pipeline_digest": "", "seal": "s"}
        return folder_of_source(config, **of_run)

    before = folder()
    monkeypatch.setattr(source_tokens, version, getattr(source_tokens, version) + 1)

    assert (folder() != before) == changes


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ({}, False),
        ({"text": "meta.text"}, True),
        ({"where": {"meta.lang": "en"}}, True),
        ({"columns": {"lang": LANG}}, True),
        ({"columns": {"lang": LANG | {"column": "lang"}}}, False),
        ({"type": "webdataset", "path": "a.tar", "columns": {"lang": LANG}}, True),
        ({"type": "webdataset", "path": "a.tar", "columns": {"lang": MEMBER}}, False),
    ],
)
def test_entries_stay_but_of_lines_of_which_something_stands_inside_another(
    monkeypatch, said, changes
):
    config = TypeAdapter(SourceConfig).validate_python({"type": "jsonl", "path": "a.jsonl"} | said)

    def folder():
        of_run = {"tokenizer": None, "tokenizer_digest": "", "pipeline_digest": "", "seal": "s"}
        return folder_of_source(config, **of_run)

    before = folder()
    monkeypatch.setattr(source_tokens, "INSIDE_MAKING_VERSION", 4)

    assert (folder() != before) == changes


def test_a_tokenizer_that_begins_documents_has_entries_of_its_own():
    of_run = {"tokenizer_digest": "", "pipeline_digest": "", "seal": "s"}
    plain = BpeTokenizer(type="bpe", path="t", end_of_document="<eos>")
    begun = plain.model_copy(update={"begin_of_document": "<bos>"})

    assert folder_of_source(LINES, tokenizer=plain, **of_run) != folder_of_source(
        LINES, tokenizer=begun, **of_run
    )
