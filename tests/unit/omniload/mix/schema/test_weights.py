"""Groups of weights: the share of each source, compared with a plain recursion, and refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.config import parse_yaml
from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig, Stage
from omniload.mix.schedule import weights_at
from tests.support.plane.builders import a_mix

TEXT = """version: 2
seed: 1
sources:
  web: {type: parquet, path: web, tokens: ids}
  python: {type: parquet, path: web, tokens: ids}
  rust: {type: parquet, path: web, tokens: ids}
mix:
  stages:
    - from_step: 0
      weights:
        web: 6
        code:
          weight: 4
          temperature: 2
          of: {python: 9, rust: 1}
pack: {length: 8}
batch: {tokens: 64, micro_tokens: 64}
"""

weights = st.integers(1, 50)
trees = st.recursive(
    weights,
    lambda inner: st.fixed_dictionaries(
        {
            "weight": weights,
            "temperature": st.sampled_from((0.5, 1, 2.0, 10)),
            "of": st.lists(inner, min_size=1, max_size=3),
        }
    ),
    max_leaves=8,
)


def named(tree, names):
    """Give every source and group below a name of its own."""
    if not isinstance(tree, dict):
        return tree
    members = {}
    for member in tree["of"]:
        name = f"n{len(names)}"
        names.append(name)
        members[name] = named(member, names)
    return {**tree, "of": members}


def shares_of(members, temperature):
    """Return the share of each source below, one group at a time."""
    heated = {
        name: (m["weight"] if isinstance(m, dict) else m) ** (1 / temperature)
        for name, m in members.items()
    }
    found = {}
    for name, member in members.items():
        share = heated[name] / sum(heated.values())
        inside = (
            shares_of(member["of"], member["temperature"])
            if isinstance(member, dict)
            else {name: 1.0}
        )
        found |= {inner: share * part for inner, part in inside.items()}
    return found


@given(st.lists(trees, min_size=1, max_size=4))
def test_a_source_has_its_share_of_the_group_around_it(roots):
    names = []
    nested = named({"of": roots}, names)["of"]
    stage = Stage.model_validate({"from_step": 0, "weights": nested})

    wanted = shares_of(nested, 1.0)

    found = dict(zip(wanted, weights_at([stage], tuple(wanted), 0), strict=True))
    assert set(stage.weights) == set(wanted)
    assert found == pytest.approx(wanted)


def test_a_mix_with_groups_is_the_mix_with_their_weights_written_out():
    grouped = parse_yaml(TEXT, MixConfig, name="mix.yaml")

    assert grouped.mix.stages[0].weights == {"web": 6.0, "python": 3.0, "rust": 1.0}
    assert MixConfig.model_validate(grouped.model_dump()) == grouped


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "version: 2",
            "version: 1",
            ":10: mix.stages.0.weights: weights hold a group, and the file",
        ),
        (
            "weight: 4",
            "wieght: 4",
            ":13: mix.stages.0.weights.code.wieght: a group has weight, of and",
        ),
        (
            "weight: 4",
            "weight: -4",
            ":13: mix.stages.0.weights.code.weight: weight is -4; give a number",
        ),
        ("rust: 1}", "rust: .nan}", ":15: mix.stages.0.weights.code.of.rust: weight is nan; give"),
        (
            "python: 9, rust: 1",
            "python: 0, rust: 0",
            ":15: mix.stages.0.weights.code.of: weights of the",
        ),
        (
            "ature: 2",
            "ature: 0",
            ":14: mix.stages.0.weights.code.temperature: temperature is 0; give",
        ),
        (
            "temperature: 2\n          of: {python: 9,",
            "temperature: 0.001\n          of: {python: 9,",
            ":15: mix.stages.0.weights.code.of.rust: weight 1 beside 9 is nothing at temperature 0.001",
        ),
        ("web: 6", "web: -6", ":11: mix.stages.0.weights.web: found -6; give at least 0"),
        ("python: 9", "web: 9", ":15: mix.stages.0.weights.code.of.web: 'web' has a weight in two"),
        ("of: {python: 9, rust: 1}", "of: []", ":12: mix.stages.0.weights.code: of is []; name"),
        (
            "rust: 1}",
            "rust: {of: {x: 1}}}",
            ":15: mix.stages.0.weights.code.of.rust: the group has no",
        ),
    ],
)
def test_a_group_that_cannot_be_is_refused_with_its_line(old, new, said):
    with pytest.raises(ConfigError) as caught:
        parse_yaml(TEXT.replace(old, new), MixConfig, name="mix.yaml")

    assert f"mix.yaml{said}" in str(caught.value)


def test_groups_within_groups_end_somewhere():
    deep = {"web": 1}
    for _ in range(12):
        deep = {"g": {"weight": 1, "of": deep}}

    with pytest.raises(ValueError, match="groups nest deeper than 8"):
        a_mix(version=2, mix={"stages": [{"from_step": 0, "weights": deep}]})
