"""Splits in a mix file, and the mix of an evaluation."""

import pytest

import omniload
from omniload.base.config import parse_yaml
from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig
from omniload.mix.edits.edit import AddSource
from omniload.mix.edits.history import History
from omniload.mix.fingerprint import SourceFacts, source_parts
from omniload.mix.held_out import held_out
from omniload.mix.sources import ParquetSource
from tests.support.plane.builders import a_mix

FACTS = SourceFacts(positions_per_epoch=3, order_digest="o", shards_digest="s", content_digest="c")
TEXT = """version: 1
seed: 1
splits: {eval: 0.01}
sources:
  web: {type: parquet, path: web, tokens: ids}
  code: {type: parquet, path: code, tokens: ids, splits: {eval: 0.2, dev: 0.1}}
  own: {type: parquet, path: own, tokens: ids, splits: {}}
mix: {stages: [{from_step: 0, weights: {web: 1, code: 1, own: 1}}]}
pack: {length: 8}
batch: {tokens: 64, micro_tokens: 64}
"""


def parsed(old="", new=""):
    return parse_yaml(TEXT.replace(old, new), MixConfig, name="mix.yaml")


def test_a_source_has_the_splits_of_its_mix_unless_it_has_its_own():
    sources = parsed().sources

    assert {name: source.splits for name, source in sources.items()} == {
        "code": {"eval": 0.2, "dev": 0.1},
        "own": {},
        "web": {"eval": 0.01},
    }
    assert sources["web"].share_drawn == 0.99
    assert sources["own"].share_drawn == 1


def test_a_mix_of_what_is_held_out_has_the_sources_that_hold_something_out():
    assert held_out(parsed(), "eval").names == ("code", "web")
    mix = held_out(parsed(), "dev")
    assert mix.names == ("code",)
    assert mix.mix.stop == "each_once"
    assert mix.sources["code"].share_drawn == 0.1
    assert mix.pack == parsed().pack


def test_sources_that_hold_something_out_keep_their_readers():
    mix = parsed("pack:", "loader: {readers: {web: 2, code: 3}}\npack:")

    assert held_out(mix, "dev").loader.readers == {"code": 3}


def test_columns_that_only_sources_which_are_left_out_have_are_not_brought():
    columns = "columns: {lang: {column: lang, dtype: text, of: samples, default: ''}}"
    mix = parse_yaml(
        TEXT.replace("ids, splits: {}", f"ids, splits: {{}}, {columns}").replace(
            "micro_tokens: 64", "micro_tokens: 64, columns: [lang, scores]"
        ),
        MixConfig,
        name="mix.yaml",
    )

    assert held_out(mix, "eval").batch.columns == ("scores",)


def test_what_serves_training_and_not_an_evaluation_is_refused_by_its_key():
    mix = parsed()
    mix = mix.model_copy(update={"batch": mix.batch.model_copy(update={"tokens": 63})})

    with pytest.raises(
        ConfigError, match=r"split 'eval': batch.micro_tokens: .* more than tokens 63; "
    ):
        held_out(mix, "eval")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("0.01", "1.5", "mix.yaml:3: splits.eval: found 1.5; give less than 1"),
        ("dev: 0.1", "dev: 0.9", "mix.yaml:6: sources.code.splits: shares sum to 1.1"),
        ("eval: 0.01", "train: 0.9", "mix.yaml:3: splits.train: train is 0.9, and train is what"),
        (
            "splits: {eval",
            "split: {eval",
            "mix.yaml:3: split: found {'eval': 0.01}, but split is the name of the split to draw;",
        ),
        ("seed: 1", "seed: 1\nsplit: test", "mix.yaml:3: split: sources.code.split is 'test'"),
        (
            "path: own, ",
            "path: own, split: test, ",
            "mix.yaml:7: sources.own.split: sources.own.split is 'test', and the source has train;",
        ),
    ],
)
def test_a_split_that_cannot_be_is_refused_with_its_line(old, new, said):
    with pytest.raises(ConfigError) as caught:
        parsed(old, new)

    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("mix", "split", "said"),
    [
        (parsed(), "evil", "split is 'evil', and the mix holds out dev, eval; declare it"),
        (parsed(), "train", "train is what is trained on: open the mix without split"),
        (
            a_mix(),
            "eval",
            "split is 'eval', and the mix holds out nothing; declare it, as in splits",
        ),
    ],
)
def test_a_split_that_no_source_has_is_refused(mix, split, said):
    with pytest.raises(ConfigError, match=said):
        held_out(mix, split)


def test_a_source_that_is_added_to_a_run_holds_out_what_the_mix_does():
    added = ParquetSource(type="parquet", path="more", tokens="ids")
    change = AddSource(name="more", source=added, weight=1)

    mix = History(parsed()).edited(change, 5).latest

    assert mix.sources["more"].splits == {"eval": 0.01}
    wrong = change.model_copy(update={"source": added.model_copy(update={"split": "evil"})})
    with pytest.raises(ConfigError, match="source 'more': split is 'evil'"):
        History(parsed()).edited(wrong, 5)


def test_splits_are_part_of_the_fingerprint_with_their_order_and_leave_that_of_others_as_it_was():
    plain = ParquetSource(type="parquet", path="web", tokens="ids")

    def print_of(**changes):
        return source_parts("web", plain.model_copy(update=changes), FACTS)["sources.web"]

    assert print_of() == print_of(splits={}, split=None, key=None) == "2e2fed5aacca"
    assert (
        len(
            {
                print_of(),
                print_of(splits={"a": 0.1, "b": 0.2}, split="train"),
                print_of(splits={"b": 0.2, "a": 0.1}, split="train"),
                print_of(splits={"a": 0.1, "b": 0.2}, split="a"),
                print_of(splits={"a": 0.1, "b": 0.2}, split="train", key="id"),
            }
        )
        == 5
    )


def test_an_evaluation_keeps_no_run(tmp_path):
    with pytest.raises(ConfigError, match="split is 'eval' and run_dir is"):
        omniload.open(parsed(), split="eval", run_dir=tmp_path)


def test_caps_are_of_training_and_not_of_what_is_held_out():
    mix = parsed(
        "{type: parquet, path: web,",
        "{max_fraction: 0.4, max_repetition: 2, type: parquet, path: web,",
    )

    web = held_out(mix, "eval").sources["web"]

    assert (web.max_fraction, web.max_repetition) == (None, None)
