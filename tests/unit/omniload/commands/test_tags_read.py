"""A check of tags that a cost reads and cannot get: refused if no step can be planned, otherwise doubted."""

import json

import pytest
from click.testing import CliRunner

from omniload.base.errors import ConfigError
from omniload.base.settings.registry import Registered
from omniload.commands.check import check
from omniload.plan.costs import declared

MIX = """\
version: 1
seed: 1
tokenizer: {type: bytes}
sources:
  web:
    type: jsonl
    path: "*.jsonl"
    columns: {lang: {column: lang, dtype: text, of: samples, default: DEFAULT}}
mix: {stages: [{from_step: 0, weights: {web: 1}}]}
pack: {length: 16}
batch: {tokens: 64, micro_tokens: 64, columns: [lang]}
balance: {cost: COST}
"""
LONG, CUT = "x" * 65, "de\0"


@pytest.fixture(autouse=True)
def by_lang(monkeypatch):
    """Make the cost ``by_lang`` read the column ``lang`` of samples."""
    cost = lambda lengths_P, langs_P: lengths_P * (1.0 + (langs_P == "de"))  # noqa: E731 -- with an attribute of its own
    cost.of = ("lengths", "columns.lang")
    known = Registered(name="by_lang", function=cost, distribution="lab 1")
    monkeypatch.setattr(declared, "registered", lambda *_: known)


def checked(folder, *files, cost="by_lang", default="en"):
    """Check a mix of files whose records have these languages; return its exit code and its output."""
    for i, langs in enumerate(files):
        lines = (json.dumps({"text": "word " * 6, "lang": lang}) for lang in langs)
        (folder / f"{i}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    file = folder / "mix.yaml"
    file.write_text(MIX.replace("COST", cost).replace("DEFAULT", json.dumps(default)))
    shown = CliRunner().invoke(check, [str(file), "--cache-dir", str(folder / "cache")])
    said = str(shown.exception) if isinstance(shown.exception, ConfigError) else shown.output
    return shown.exit_code, said.replace(f"{file}:", "mix.yaml:")


@pytest.mark.parametrize(
    ("lang", "said"), [(LONG, "of 65 bytes, more than 64"), (CUT, "ends in NUL")]
)
def test_where_no_first_record_can_be_drawn_the_mix_is_refused(tmp_path, lang, said):
    code, shown = checked(tmp_path, [lang] * 100)

    assert code != 0
    begins = "mix.yaml:5: sources.web: no step can be planned of its first records: balance reads columns.lang of every"
    assert shown.startswith(begins)
    assert said in shown
    assert "valid" not in shown


@pytest.mark.parametrize("lang", [LONG, CUT])
def test_where_some_can_a_warning_tells_of_the_first_that_cannot(tmp_path, lang):
    code, shown = checked(tmp_path, ["de", lang, None] * 30)

    assert code == 0
    assert (
        "warning: mix.yaml:5: sources.web: balance reads columns.lang of every sample, and one of its"
        in shown
    )


def test_one_of_a_later_file_is_told_with_the_file(tmp_path):
    code, shown = checked(tmp_path, ["de"] * 9, ["de", LONG])

    assert code == 0
    assert (
        f"and one of {tmp_path / '1.jsonl'}'s first 2 records has '{'x' * 40}…' of 65 bytes"
        in shown
    )


def test_what_was_found_of_a_cost_that_reads_no_tag_does_not_stand_for_one_that_does(tmp_path):
    assert "of 65 bytes" not in checked(tmp_path, ["de", LONG], cost="quadratic")[1]

    # The files are as they were: nothing else has a check look at them again.
    assert "of 65 bytes" in checked(tmp_path)[1]
    assert "of 65 bytes" not in checked(tmp_path, cost="quadratic")[1]


def test_a_default_that_is_too_long_is_told_once_with_its_line_though_records_have_it(tmp_path):
    code, shown = checked(tmp_path, ["de", None], default=LONG)

    assert code != 0
    assert shown.startswith(
        "mix.yaml:8: sources.web.columns.lang.default: balance.cost 'by_lang' reads it, and"
    )
    assert len(shown.splitlines()) == 1
