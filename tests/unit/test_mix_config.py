"""The mix file: what it says when it is wrong, and what follows from it when it is right."""

import pytest
import yaml

from omniload.base.config import parse_yaml
from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig, load_mix
from tests.support.builders import a_mix

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


def with_changes(changes):
    """Return the good file with values at dotted keys replaced, or taken away where they are None."""
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
    assert mix.names == ("web", "code")
    assert (mix.rows_per_step, mix.rows_per_microbatch) == (16, 2)
    assert mix.sources["web"].paths == ("web/*.jsonl",)
    assert mix.sources["code"].paths == ("a.parquet", "b.parquet")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version: Input should be 1"),
        ({"seed": -1}, "seed: "),
        ({"seeds": 3}, "seeds: Extra inputs"),
        ({"sources.web.type": "csv"}, "sources.web: Input tag 'csv'"),
        ({"sources.web.colour": "x"}, "sources.web.colour: Extra inputs"),
        ({"sources.code.tokens": "ids"}, "name exactly one column"),
        ({"sources.code.text": None}, "text is None and tokens is None"),
        ({"mix.stages.0.weights.web": -1}, "mix.stages.0.weights.web: "),
        ({"mix.stages.0.weights.web": float("inf")}, "mix.stages.0.weights.web: "),
        ({"mix.stages.0.weights": {"web": 0, "code": 0}}, "weights are all 0"),
        ({"mix.stages.0.weights.books": 1}, r"names \['books'\], not among sources"),
        ({"mix.stages.0.weights.web": 0}, r"sources \['web'\] have no weight in any stage"),
        ({"mix.stages.0.from_step": 5}, "the first stage starts at step 0"),
        ({"mix.stages.0.ramp_steps": 5}, "nothing comes before the first stage"),
        ({"batch.tokens": 65_000}, "not a multiple of pack.length 4000; use 64000"),
        ({"batch.micro_tokens": 128_000}, "more than tokens 64000; lower it"),
        ({"pack.length": "4 kib"}, "pack.length: '4 kib' is not a quantity"),
        ({"balance": {"linear": 0, "quadratic": 0}}, "give a cost to balance"),
        ({"tokenizer": None}, "sources.web holds text and there is no tokenizer"),
        ({"runtime": {"prefetch_steps": 0}}, "runtime.prefetch_steps: "),
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


def test_a_source_of_token_ids_needs_no_tokenizer():
    assert a_mix().tokenizer is None


def test_faults_in_several_parts_are_reported_together():
    found = fault_of({"version": 2, "pack.length": 1, "sources.web.type": "csv"}).splitlines()

    assert len(found) == 3
