"""Arguments of ``omniload mix set``."""

from pathlib import Path

import pytest

from omniload.base.errors import ConfigError
from omniload.commands.edits.arguments import (
    declared_in,
    what_is_set,
    with_absolute_paths,
    with_real_paths,
)
from omniload.mix.config import JsonlSource
from omniload.mix.edits.edit import SetAmounts, SetWeights
from omniload.mix.schema.amounts import Amount

FOLDER = Path("/data/more")


def test_numbers_are_weights_and_what_has_a_unit_is_an_amount():
    weights = what_is_set(("web=0.2", "code=8e-1"))
    amounts = what_is_set(("web=1epoch", "code=5Btokens", "chat=50ksamples", "ids=1.5epochs"))

    assert weights == SetWeights(weights={"web": 0.2, "code": 0.8})
    assert amounts == SetAmounts(
        amounts={
            "web": Amount(epochs=1),
            "code": Amount(tokens=5_000_000_000),
            "chat": Amount(samples=50_000),
            "ids": Amount(epochs=1.5),
        }
    )


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (("web",), "NAME=NUMBER"),
        (("=2",), "NAME=NUMBER"),
        (("web=nan",), "NAME=NUMBER"),
        (("web=2pochs",), "web=2epochs"),
        (("web=-1epochs",), "NAME=AMOUNT"),
        (("web=1", "web=2"), "two weights, 1 and 2"),
        (("web=1epoch", "web=2"), "two weights, 1 epoch and 2"),
        (("web=1", "code=2epochs"), "a run has one or the other"),
        (("web=0epochs",), "found 0.0; give more than 0"),
        (("web=5xtokens",), "not a quantity"),
        (("web=0tokens",), "found '0'; give at least 1"),
        (("web=-1",), r"web: found -1.0; give at least 0"),
    ],
)
def test_what_is_neither_is_refused_with_what_to_say(texts, said):
    with pytest.raises(ConfigError, match=said):
        what_is_set(texts)


def test_relative_paths_start_at_the_file_and_others_stay():
    source = JsonlSource(type="jsonl", path=("a/*.jsonl", "/b.jsonl", "s3://bucket/c.jsonl"))

    assert with_absolute_paths(source, FOLDER).paths == (
        "/data/more/a/*.jsonl",
        "/b.jsonl",
        "s3://bucket/c.jsonl",
    )


@pytest.mark.parametrize("kind", ["chat", "completion", "preference"])
def test_a_template_starts_at_the_file(kind):
    source = JsonlSource(
        type="jsonl", path="a.jsonl", transforms=({"type": kind, "template": "t.jinja"},)
    )

    assert with_absolute_paths(source, FOLDER).transforms[0].template == "/data/more/t.jinja"


def test_a_path_has_one_spelling_up_to_its_pattern_and_a_url_its_own(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data")
    (tmp_path / "circle").symlink_to("circle")
    given = ("link/../data/a.jsonl", "link/{0..9}/../*.jsonl", "gone/./a.jsonl", "circle/a.jsonl")
    paths = (*(f"{tmp_path}/{path}" for path in given), "s3://bucket/../c.jsonl")

    source = with_real_paths(JsonlSource(type="jsonl", path=paths))

    real = ("data/a.jsonl", "data/{0..9}/../*.jsonl", "gone/a.jsonl", "circle/a.jsonl")
    assert source.paths == (*(f"{tmp_path}/{path}" for path in real), "s3://bucket/../c.jsonl")


def test_the_records_that_others_had_drawn_start_at_the_file():
    source = JsonlSource(type="jsonl", path="a.jsonl", drawn_before="web.arrow")

    assert with_absolute_paths(source, FOLDER).drawn_before == "/data/more/web.arrow"
    assert (
        with_absolute_paths(source.model_copy(update={"drawn_before": None}), FOLDER).drawn_before
        is None
    )


@pytest.mark.parametrize(
    "text",
    [
        '{"text": "a"}\n{"text": "b"}\n',
        "version: 1\nsources: {web: {type: jsonl, path: a.jsonl}}\n",
    ],
    ids=["the data itself", "a whole mix file"],
)
def test_a_file_that_declares_no_source_is_told_with_what_one_does(tmp_path, text):
    file = tmp_path / "web.yaml"
    file.write_text(text)

    with pytest.raises(ConfigError) as refused:
        declared_in(file, "web")

    (note,) = refused.value.__notes__
    assert "and nothing else: sources: {web: {type: jsonl, path: data/*.jsonl}}" in note


def test_a_source_is_taken_by_its_name_from_those_of_a_file(tmp_path):
    file = tmp_path / "web.yaml"
    file.write_text("sources: {web: {type: jsonl, path: a.jsonl}}\n")

    assert declared_in(file, "web").paths == ("a.jsonl",)
    with pytest.raises(ConfigError, match="sources has web, not 'books'"):
        declared_in(file, "books")
