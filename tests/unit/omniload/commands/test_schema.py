"""The JSON schema agrees with the models, according to a validator that is not ours."""

import json
from pathlib import Path

import pytest
import yaml

from omniload.base.config import parse_yaml
from omniload.commands.corpus.sample import SCHEMA_NAME, sample_mix
from omniload.mix.config import MixConfig
from omniload.mix.schema.json_schema import mix_schema
from omniload.source.sample_data.corpus import build_sample_corpus
from tests.support.plane.edits.mix_commands import run_mix

ROOT = Path(__file__).parents[4]
TEXT = """
version: 2
seed: 1
splits: {eval: 0.01}
sources:
  web: {type: jsonl, path: "web/*.jsonl", unit: 8MiB, key: id}
  code: {type: parquet, path: code, tokens: ids}
tokenizer: {type: bytes}
mix: {stages: [{from_step: 1k, weights: {web: 1, all: {weight: 2, of: {code: 1}}}}]}
pack: {length: 16Ki}
batch: {tokens: 1Mi, micro_tokens: 16Ki}
runtime: {batch_timeout: 30s}
"""


@pytest.fixture(scope="module")
def validator():
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(mix_schema())
    return jsonschema.Draft202012Validator(mix_schema())


def faults(validator, text):
    return [error.message for error in validator.iter_errors(yaml.safe_load(text))]


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/**/*.yaml")), ids=lambda p: p.name)
def test_what_the_models_take_the_schema_takes(validator, path):
    text = path.read_text()
    if "sources:" not in text:
        pytest.skip("no mix file")
    parse_yaml(text, MixConfig, name=path.name)

    assert faults(validator, text) == []


def test_quantities_and_groups_are_written_as_people_write_them(validator):
    parse_yaml(TEXT.replace("1k", "0"), MixConfig, name="mix.yaml")

    assert faults(validator, TEXT) == []


@pytest.mark.parametrize(
    "mix",
    [
        "{amounts: {web: {epochs: 1}, code: {tokens: 5M}}}",
        "{amounts: {all: {tokens: 5M, of: {web: {tokens: 1M}, code: {weight: 2}}}}}",
        "{total: {tokens: 5M}, amounts: {web: {weight: 1}, all: {weight: 2, of: {code: 1}}}}",
    ],
)
def test_amounts_stand_in_place_of_stages(validator, mix):
    head, _, tail = TEXT.partition("mix: {")
    text = f"{head}mix: {mix}\n{tail.partition(chr(10))[2]}"
    parse_yaml(text, MixConfig, name="mix.yaml")

    assert faults(validator, text) == []
    assert faults(validator, text.replace(mix, "{level: token}"))


def test_a_source_says_how_it_is_packed(validator):
    text = TEXT.replace("key: id}", "key: id, overlong: refuse, pack: {cut: never, rows: own}}")
    parse_yaml(text.replace("1k", "0"), MixConfig, name="mix.yaml")

    assert faults(validator, text) == []
    assert faults(validator, text.replace("cut: never", "cut: newer"))


def test_what_a_file_leaves_out_is_there_in_one_that_it_includes(validator):
    part = "version: 2\nseed: 1\nmix: {stages: [{weights: {web: 1}}]}\n"

    assert faults(validator, part + "include: common.yaml\n") == []
    assert any("'sources' is a required" in said for said in faults(validator, part))
    assert faults(validator, part + "include: []\n")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("seed: 1", "seed: ${SEED:-1}"),
        ("{web: 1,", '{web: "${WEB}",'),
        ("0.01", '"${HELD_OUT:-0.01}"'),
        ("seed: 1", "seed: 1\nbalance: {method: '${METHOD}'}\nruntime: {elastic: '${ELASTIC}'}"),
    ],
)
def test_a_variable_of_the_environment_may_stand_for_any_value(validator, old, new):
    text = TEXT.replace("runtime: {batch_timeout: 30s}\n", "")
    assert faults(validator, text.replace(old, new)) == []


def test_no_variable_stands_for_a_type_which_says_what_keys_there_are(validator):
    assert faults(validator, TEXT.replace("type: jsonl", 'type: "${TYPE}"'))


def test_every_key_of_the_schema_has_its_meaning():
    held = mix_schema()
    models = [held, *held["$defs"].values()]

    silent = [
        key
        for model in models
        for key, said in model["properties"].items()
        if key != "type" and not said.get("description")
    ]

    assert silent == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("seed: 1", "sead: 1"),
        ("type: jsonl", "type: jsnl"),
        ("weight: 2", "wieght: 2"),
        ("0.01", "2"),
    ],
)
def test_what_the_models_refuse_the_schema_refuses(validator, old, new):
    assert faults(validator, TEXT.replace(old, new))


def test_the_mix_of_the_sample_names_its_schema_for_editors(validator, tmp_path):
    run_mix("sample", tmp_path, "--size", "64KiB")

    first = (tmp_path / "mix.yaml").read_text().splitlines()[0]
    assert first == f"# yaml-language-server: $schema={SCHEMA_NAME}"
    written = json.loads((tmp_path / SCHEMA_NAME).read_text())
    assert written == mix_schema()
    assert written["$id"] == "urn:omniload:mix:2"
    corpus = build_sample_corpus(tmp_path, size=64 << 10)
    assert faults(validator, yaml.safe_dump(sample_mix(corpus))) == []
