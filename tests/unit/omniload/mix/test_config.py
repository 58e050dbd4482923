"""The mix file: messages for a wrong one, and the values of a right one."""

import pytest
import yaml
from pydantic import ValidationError

from fusefs.config import FilesConfig
from omniload.base.config import parse_yaml
from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig, load_mix
from tests.support.plane.builders import a_mix
from trainer_integration.config import TrainConfig

GOOD = """\
version: 1
seed: 1
sources:
  web: {type: jsonl, path: "web/*.jsonl"}
  code: {type: parquet, path: [a.parquet, b.parquet], text: content}
mix:
  stages:
  - {from_step: 0, weights: {web: 3, code: 1}}
pack: {length: 4k}
batch: {tokens: 64k, micro_tokens: 8k}
tokenizer: {type: bytes}
"""


LONG_ROWS = {
    "pack.lookahead_rows": 1 << 20,
    "pack.length": 16_000,
    "batch.micro_tokens": 16_000,
}
"""More tokens that wait for a row than there may be, though each number alone is small enough."""


def with_changes(changes):
    """Return the good file with values at dotted keys replaced, or removed if they are None."""
    tree = yaml.safe_load(GOOD)
    for key, value in changes.items():
        *path, last = [int(part) if part.isdigit() else part for part in key.split(".")]
        node = tree
        for part in path:
            node = node[part]
        if value is None:
            del node[last]
        else:
            node[last] = value
    return yaml.safe_dump(tree, sort_keys=False)


def fault_of(changes):
    with pytest.raises(ConfigError) as caught:
        parse_yaml(with_changes(changes), MixConfig, name="mix.yaml")
    return str(caught.value)


def test_a_good_file_says_what_a_step_holds(tmp_path):
    (tmp_path / "mix.yaml").write_text(GOOD, encoding="utf-8")

    mix, folder = load_mix(tmp_path / "mix.yaml")

    assert folder == tmp_path.resolve()
    assert mix.names == ("code", "web")
    assert (mix.rows_per_step, mix.rows_per_microbatch) == (16, 2)
    assert mix.sources["web"].paths == ("web/*.jsonl",)
    assert mix.sources["code"].paths == ("a.parquet", "b.parquet")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 3}, "version: found 3; give 1 or 2"),
        ({"seed": -1}, "seed: "),
        ({"seeds": 3}, "seeds: no such key; did you mean 'seed'"),
        ({"sources.web.type": "tsv"}, "sources.web: type is 'tsv'; did you mean 'csv'?"),
        ({"sources.web.colour": "x"}, "sources.web.colour: no such key"),
        ({"sources.web.path": ""}, r"sources.web.path: path is empty; name files, or \."),
        ({"sources.web.path": []}, r"sources.web.path: found \[\]; give a list that is not empty"),
        ({"sources.web.shuffle": "none"}, "give a mapping, as {method: none}"),
        ({"sources.web.on_error": "skip"}, "found 'skip'; give a mapping, as {policy: skip}"),
        ({"balance": "greedy_swap"}, "balance: found 'greedy_swap'; give a mapping, as {method: g"),
        ({"loader": {"token_cache": "kept"}}, "found 'kept'; give a mapping, as {path: kept}"),
        ({"sources.web.on_error": "leave"}, "found 'leave'; give a mapping, as {key: value}"),
        ({"sources.web.where": {"q": {"above": 1}}}, "sources.web.where.q.above: no such key"),
        ({"sources.code.tokens": "ids"}, "name exactly one column"),
        (
            {"sources.code.text": None},
            "has neither text nor tokens; name exactly one: text: COLUMN",
        ),
        ({"mix.stages.0.weights.web": -1}, "mix.stages.0.weights.web: "),
        ({"mix.stages.0.weights.web": float("inf")}, "mix.stages.0.weights.web: "),
        ({"mix.stages.0.weights": {"web": 0, "code": 0}}, "weights are all 0"),
        ({"mix.stages.0.weights.books": 1}, r"weights\.books: 'books' is not among sources"),
        ({"loader": {"readers": {"books": 2}}}, r"loader\.readers\.books: 'books' is not among"),
        ({"loader": {"readers": {"web": 0}}}, r"loader\.readers\.web: found 0; give at least 1"),
        ({"mix.stages.0.weights.web": 0}, "sources.web: 'web' has no weight in any stage"),
        ({"mix.stages.0.from_step": 5}, "the first stage starts at step 0"),
        ({"mix.stages.0.ramp_steps": 5}, "nothing comes before the first stage"),
        ({"batch.tokens": 65_000}, "not a multiple of pack.length 4000; use 64000"),
        ({"batch.micro_tokens": 128_000}, "more than tokens 64000; lower it"),
        ({"pack.length": "4 kib"}, "pack.length: '4 kib' is not a quantity"),
        ({"balance": {"linear": 0, "quadratic": 0}}, "give a cost to balance"),
        ({"balance": {"cost": "own", "fit_every": 9}}, "alone has coefficients to fit, leave"),
        ({"tokenizer": None}, "sources.code holds text and there is no tokenizer"),
        ({"runtime": {"prefetch_steps": -1}}, "runtime.prefetch_steps: "),
    ],
)
def test_a_fault_is_named_with_its_key_and_remedy(changes, message):
    found = fault_of(changes)

    assert found.startswith("mix.yaml:")
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(found)


def test_a_stage_may_not_start_inside_the_ramp_of_the_one_before():
    stages = [
        {"from_step": 0, "weights": {"web": 1, "code": 1}},
        {"from_step": 10, "weights": {"web": 1}, "ramp_steps": 5},
        {"from_step": 14, "weights": {"code": 1}},
    ]

    found = fault_of({"mix.stages": stages})

    assert "stages[2].from_step is 14, before the end of stage 1 and its ramp at step 15" in found


def test_a_source_name_cannot_leave_a_folder():
    with pytest.raises(ValueError, match="should match pattern"):
        a_mix(sources={"../web": {"type": "parquet", "path": "x", "tokens": "t"}})


@pytest.mark.parametrize(
    ("name", "near"),
    [("web crawl (v2)", ", as 'web-crawl-v2'"), ("../web", ", as 'web'"), ("табл", "")],
)
def test_a_name_with_other_characters_is_told_which_it_may_have_and_one_that_would_do(name, near):
    found = fault_of({"sources": {name: {"type": "parquet", "path": "x", "tokens": "t"}}})

    assert (
        f"found {name!r}; give a name of the letters a to z and A to Z, digits, _, - and ." in found
    )
    assert f"begins with a letter or a digit{near}\n" in found + "\n"


def test_a_source_of_token_ids_needs_no_tokenizer():
    assert a_mix().tokenizer is None


def test_faults_in_several_parts_are_reported_together():
    found = fault_of({"version": 3, "pack.length": 1, "sources.web.type": "tsv"}).splitlines()

    assert len(found) == 3


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"mix.stages.0.weights.books": 1}, "books: 1"),
        ({"mix.stages.0.weights.web": 0}, "web:"),
        ({"mix.stages.0.from_step": 5}, "from_step: 5"),
        ({"mix.stages.0.ramp_steps": 5}, "ramp_steps: 5"),
        ({"batch.tokens": 65_000}, "tokens: 65000"),
        ({"batch.micro_tokens": 128_000}, "micro_tokens: 128000"),
        (LONG_ROWS, "lookahead_rows: 1048576"),
        (
            {"batch.tokens": 1 << 32, "batch.micro_tokens": 4, "pack.length": 4},
            "tokens: 4294967296",
        ),
        ({"balance": {"linear": 0, "quadratic": 0}}, "linear: 0"),
        ({"sources.code.tokens": "ids"}, "tokens: ids"),
        ({"tokenizer": None}, "code:"),
    ],
)
def test_a_fault_that_spans_keys_carries_the_line_of_one_of_them(changes, line):
    text = with_changes(changes).splitlines()

    number = int(fault_of(changes).splitlines()[0].split(":")[1])

    assert number > 1
    assert text[number - 1].strip().removeprefix("- ") == line


_BOUNDS = {"maximum", "exclusiveMaximum", "le", "const", "enum"}


def unbounded(schema, path=""):
    """Yield the numbers of a JSON schema that have no largest value."""
    if isinstance(schema, list):
        for inner in schema:
            yield from unbounded(inner, path)
    elif isinstance(schema, dict):
        numeric = any(schema.get("type") == kind for kind in ("integer", "number"))
        if numeric and not _BOUNDS & schema.keys():
            yield path
        for key, inner in schema.items():
            yield from unbounded(inner, f"{path}.{key}")


@pytest.mark.parametrize("model", [MixConfig, TrainConfig, FilesConfig])
def test_every_number_of_a_file_has_a_largest_value(model):
    free = {
        ".properties.clip_norm",
        ".$defs.OptimizerConfig.properties.clip_norm",
    }  # .inf never clips
    # Only the user's function knows the meaning of its numbers.
    named = {
        *("$defs.OptimizerConfig.properties.betas", "$defs.MapTransform.properties.options"),
        "$defs.RegisteredSource.properties.options",
    }

    found = {path for path in unbounded(model.model_json_schema()) if path not in free}

    assert {path for path in found if not any(part in path for part in named)} == set()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pack.length": "1T"}, "pack.length: found 1000000000000; give at most 16777216"),
        ({"pack.lookahead_rows": 10**12}, "found 1000000000000; give at most 1048576"),
        (
            {"batch.tokens": 10**15},
            "batch.tokens: found 1000000000000000; give at most 4294967296",
        ),
        ({"mix.stages.0.weights.web": 1e308}, "weights.web: found 1e+308; give at most 1e+12"),
        ({"seed": True}, "seed: Input should be a number, not a truth"),
        ({"mix.stages.0.weights.web": True}, "web: Input should be a number, not a truth"),
        ({"mix.stages.0.weights.web": "1:30"}, "web: found '1:30'; give a number"),
        (LONG_ROWS, "lower it to 268435 or less"),
        (
            {"batch.tokens": 1 << 32, "batch.micro_tokens": 4, "pack.length": 4},
            "is 1073741824 rows of pack.length 4, more than 1048576",
        ),
    ],
)
def test_a_number_beyond_its_limit_is_refused_with_both(changes, message):
    assert message in fault_of(changes)


def test_more_sources_than_a_batch_can_number_are_refused():
    with pytest.raises(ValidationError, match="at most 32767 items"):
        a_mix(sources=[f"s{i}" for i in range(32_768)])


@pytest.mark.parametrize(
    ("tokens", "asked", "ahead", "at_once"),
    [
        (8_192, 0, 64, 32),
        (131_072, 0, 32, 16),
        (1 << 19, 0, 8, 4),
        (1 << 20, 0, 4, 2),
        (1 << 21, 0, 4, 1),
        (1 << 22, 0, 4, 1),
        (8_192, 1, 1, 1),
        (8_192, 4, 4, 2),
        (8_192, 1024, 1024, 32),
        (1 << 22, 64, 64, 1),
    ],
)
def test_small_steps_are_made_further_ahead_and_several_at_once(tokens, asked, ahead, at_once):
    mix = a_mix(rows=tokens // 1024, length=1024, micro_rows=1, runtime={"prefetch_steps": asked})

    assert (mix.steps_ahead, mix.steps_at_once) == (ahead, at_once)


@pytest.mark.parametrize(
    ("patch", "merge", "memory", "ahead"),
    [
        # Half of the text that exists, if memory allows it.
        (14, 1, "4GiB", 16),
        # A token takes 588 bytes, or four times that; a step is of 131,072.
        (14, 1, "256MiB", 3),
        (14, 1, "512MiB", 6),
        (14, 2, "2GiB", 6),
        # One is built while ranks have the other.
        (14, 2, "1MiB", 2),
    ],
)
def test_no_more_steps_with_images_are_made_ahead_than_memory_holds(patch, merge, memory, ahead):
    images = {"type": "images", "patch": patch, "merge": merge, "placeholder": 7}
    source = {"type": "parquet", "path": "x", "text": "t", "images": "i", "transforms": [images]}
    mixes = [
        a_mix(
            sources={"web": {"type": "parquet", "path": "w", "tokens": "t"}} | more,
            rows=128,
            length=1024,
            tokenizer={"type": "bytes"},
            runtime={"prefetch_steps": asked},
            loader={"memory": memory},
        )
        for more, asked in (({}, 0), ({"seen": source}, 0), ({"seen": source}, 9))
    ]

    assert [mix.steps_ahead for mix in mixes] == [32, ahead, 9]


def test_what_keys_ask_of_each_other_is_reported_together_each_with_its_line():
    text = """\
version: 2
seed: 1
sources:
  web: {type: jsonl, path: "web/*.jsonl", split: held}
  code: {type: parquet, path: a.parquet, text: content}
  idle: {type: parquet, path: b.parquet, tokens: ids}
mix:
  stages:
  - weights:
      web: 3
      books: 1
      programs:
        weight: 2
        of:
          cod: 1
          more: {weight: 1, of: {rust: 1, code: 1}}
pack: {length: 4k}
batch:
  tokens: 64001
  micro_tokens: 8001
"""
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, MixConfig, name="mix.yaml")

    assert [fault.split(" ", 2)[:2] for fault in str(caught.value).splitlines()] == [
        ["mix.yaml:4:", "sources.web.split:"],
        ["mix.yaml:5:", "sources.code:"],  # no tokenizer
        ["mix.yaml:6:", "sources.idle:"],  # no weight
        ["mix.yaml:11:", "mix.stages.0.weights.books:"],
        ["mix.yaml:15:", "mix.stages.0.weights.programs.of.cod:"],
        ["mix.yaml:16:", "mix.stages.0.weights.programs.of.more.of.rust:"],
        ["mix.yaml:19:", "batch.tokens:"],
        ["mix.yaml:20:", "batch.micro_tokens:"],
    ]


def test_a_thousand_names_that_are_not_sources_are_told_in_little_time_and_few_lines():
    weights = {f"s{i}": 1 for i in range(1000)}

    found = fault_of({"version": 2, "mix.stages.0.weights": weights}).splitlines()

    assert len(found) == 51
    assert found[-1] == "and 952 more faults"


def test_a_url_where_a_file_is_read_is_refused_without_its_password():
    path = "https://me:SECRET-WORD@host/tokenizer.json"

    found = fault_of({"tokenizer": {"type": "bpe", "path": path}})

    assert "tokenizer.path: https://***@host/tokenizer.json is a URL" in found
    assert "SECRET-WORD" not in found
