"""Columns of a user's own in a mix file: refusals, and the internal name of each."""

import re

import numpy as np
import pytest

from omniload.base.config import parse_yaml
from omniload.base.errors import ConfigError
from omniload.mix.columns import column_kind, name_outside
from omniload.mix.config import MixConfig
from omniload.mix.fingerprint import source_parts
from tests.support.plane.builders import some_facts

MIX = """\
version: 1
seed: 1
sources:
  a: {type: parquet, path: a.parquet, tokens: ids, columns: {COLUMNS_A}}
  b: {type: parquet, path: b.parquet, tokens: ids, columns: {COLUMNS_B}}
mix: {stages: [{from_step: 0, weights: {a: 1, b: 1}}]}
pack: {length: 8}
batch: {tokens: 16, micro_tokens: 16, columns: [BATCH]}
"""
WEIGHT = "weight: {column: w, dtype: float32, default: 1.0}"


def a_mix(a=WEIGHT, b="", batch="weight"):
    text = MIX.replace("COLUMNS_A", a).replace("COLUMNS_B", b).replace("BATCH", batch)
    return parse_yaml(text, MixConfig, name="mix.yaml")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"batch": "wieght"},
            r"mix.yaml:8: .*'wieght', which no source has.* scores, text, weight",
        ),
        ({"a": "weight: {column: w}"}, r"mix.yaml:8: .*'weight', which 'b' of the sources lack"),
        (
            {"b": "weight: {column: w, dtype: float64}"},
            r"mix.yaml:5: .*float64 of tokens, default None",
        ),
        ({"a": "weight: w"}, r"mix.yaml:4: .*write weight: {column: w, dtype: float32}"),
        (
            {"a": "loss_mask: {column: m}", "batch": ""},
            r"mix.yaml:4: .*is taken; of a table write loss_mask: m",
        ),
        (
            {"a": "labels: {column: m}", "batch": ""},
            r"mix.yaml:4: .*is taken; of a table write labels: m",
        ),
        ({"a": "grids: {column: m}", "batch": ""}, r"mix.yaml:4: .*is taken; give it another"),
        (
            {"a": "weight: {column: w, dtype: int8, default: 300}"},
            r"default is 300, which int8 does",
        ),
        (
            {"a": "weight: {column: w, dtype: int8, default: 0.5}"},
            r"default is 0.5, which int8 does",
        ),
        ({"a": "weight: {column: w, dtype: bool, default: 2}"}, r"default is 2, which bool does"),
        (
            {"a": "weight: {column: w, dtype: float16, default: 1e9}"},
            r"1000000000.0, which float16",
        ),
        (
            {"a": "weight: {column: w, dtype: float32, default: .nan}"},
            r"default: found nan; give a finite number",
        ),
        ({"a": "weight: {column: w, dtype: complex64}"}, r"mix.yaml:4: .*complex64"),
        ({"a": "weight: {column: w, dtype: text}"}, r"mix.yaml:4: .*say of: samples"),
        ({"a": "weight: {column: w, dtype: int8, of: samples}"}, r"is one of text, bool, int64"),
        (
            {"a": "weight: {column: w, dtype: text, of: samples, default: 1}"},
            r"default is 1, which text does",
        ),
        (
            {"a": f"weight: {{column: w, dtype: text, of: samples, default: {'x' * 4097}}}"},
            r"default is 'xxx.*, which text does",
        ),
        (
            {"a": "weight: {column: w, dtype: bool, of: samples, default: a}"},
            r"default is 'a', which bool does",
        ),
        ({"a": "Weight: {column: w}"}, r"mix.yaml:4: .*Weight"),
    ],
)
def test_a_column_that_is_none_is_refused_with_its_line(changes, said):
    with pytest.raises(ConfigError, match=said):
        a_mix(**changes)


@pytest.mark.parametrize(
    "transform", ["fim, prefix: 1, suffix: 2, middle: 3", "map, of: tokens, function: f"]
)
def test_what_makes_other_tokens_is_refused_beside_values_of_each(transform):
    with pytest.raises(ConfigError, match=r"columns\.weight with a value for each"):
        a_mix(a=f"{WEIGHT}}}, transforms: [{{type: {transform}}}], tags: {{k: v")


def test_text_has_no_column_of_tokens():
    text = MIX.replace("tokens: ids, columns: {COLUMNS_A", f"text: t, columns: {{{WEIGHT}")
    text = text.replace("COLUMNS_B", "").replace("BATCH", "")

    with pytest.raises(
        ConfigError, match=r"columns\.weight has a value for each token and the source holds text"
    ):
        parse_yaml(text, MixConfig, name="mix.yaml")


@pytest.mark.parametrize(
    ("said", "dtype", "fill"),
    [
        ("dtype: int64, default: 9007199254740993", "int64", 2**53 + 1),
        ("dtype: bool, default: true", "bool", True),
        ("dtype: float32, default: 0.1", "float32", float(np.float32(0.1))),
        ("dtype: float16, of: labels, default: -2", "float16", -2),
    ],
)
def test_a_name_inside_says_the_kind(said, dtype, fill):
    mix = a_mix(a=f"weight: {{column: w, {said}}}")

    inside = mix.columns_used[-1]

    kind = column_kind(inside)
    assert name_outside(inside) == "weight"
    assert (kind.dtype, kind.fill, kind.of_labels) == (dtype, fill, "labels" in said)
    assert list(mix.sources["a"].using(mix.columns_used).columns_read) == [inside]
    assert mix.sources["a"].using(()).columns == {}


@pytest.mark.parametrize(
    ("said", "dtype", "default"),
    [
        ("dtype: text, default: 'a:b \"ü'", "uint8", 'a:b "ü'),
        ("dtype: text, default: ''", "uint8", ""),
        ("dtype: text", "uint8", None),
        ("dtype: int64, default: -9223372036854775808", "int64", -(2**63)),
        ("dtype: bool, default: true", "bool", True),
        ("dtype: float32, default: 0.1", "float32", float(np.float32(0.1))),
    ],
)
def test_a_name_inside_says_the_kind_of_a_value_of_whole_records(said, dtype, default):
    columns = f"lang: {{column: language, of: samples, {said}}}"
    mix = a_mix(a=columns, b=columns, batch="lang")

    inside = mix.columns_used[-1]

    kind = column_kind(inside)
    assert name_outside(inside) == "lang"
    assert (kind.dtype, kind.default, kind.aligned, kind.is_tag) == (dtype, default, False, True)
    assert mix.sources["a"].using(mix.columns_used).columns_read == {inside: "language"}


LANG = "lang: {column: language, dtype: text, of: samples, default: ''}"


def test_values_of_whole_records_stay_where_tokens_become_others():
    text = f"{LANG}}}, transforms: [{{type: fim, prefix: 1, suffix: 2, middle: 3}}], tags: {{k: v"

    assert len(a_mix(a=text, batch="lang").sources["a"].transforms) == 1


def test_values_of_whole_records_are_refused_where_records_are_joined():
    text = f"{LANG}}}, transforms: [{{type: concat, tokens: 64}}], tags: {{k: v"

    with pytest.raises(ConfigError, match=r"the source has columns\.lang, which belongs to"):
        a_mix(a=text, batch="lang")


def test_only_columns_that_are_written_are_part_of_what_a_source_is():
    facts = some_facts([5])[0]
    without, with_one = (a_mix(b=b, batch="").sources["b"] for b in ("", WEIGHT))

    assert (
        source_parts("b", without, facts)["sources.b"]
        == source_parts("b", type(without)(type="parquet", path="b.parquet", tokens="ids"), facts)[
            "sources.b"
        ]
    )
    assert source_parts("b", without, facts) != source_parts("b", with_one, facts)


@pytest.mark.parametrize(
    "name",
    [
        *("weight", "weight:float32", "a:object:tokens:0", "a:int8:rows:0"),
        *("a:int8:samples:0", "a:text:samples:b", "a:text:tokens:0"),
    ],
)
def test_a_name_of_no_kind_is_no_column(name):
    with pytest.raises(KeyError, match=re.escape(name)):
        column_kind(name)
