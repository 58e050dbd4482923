"""Stages that are dated by tokens."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from omniload.base.errors import ConfigError
from omniload.front.spec import with_settings
from omniload.mix.config import MixConfig, load_mix
from omniload.mix.schedule import boundaries, weights_at
from tests.support.plane.builders import a_mix

FILE = """version: {version}
seed: 7
sources:
  web: {{type: parquet, path: "web/*.parquet", tokens: tokens}}
  code: {{type: parquet, path: "code/*.parquet", tokens: tokens}}
mix:
  stages:
    - {{weights: {{web: 1}}}}
    - {stage}
pack: {{length: 32}}
batch: {{tokens: 128, micro_tokens: 64}}
"""


def stages_of(tmp_path, stage, version=2):
    (tmp_path / "mix.yaml").write_text(FILE.format(version=version, stage=stage))
    mix, _ = load_mix(tmp_path / "mix.yaml")
    return mix.mix.stages


@given(tokens=st.integers(1, 10**15), rows=st.integers(1, 64))
def test_a_stage_begins_with_the_first_step_before_which_its_tokens_were_taken(tokens, rows):
    stages = [{"weights": {"web": 1}}, {"from_tokens": tokens, "weights": {"code": 1}}]
    per_step = 32 * rows
    if math.ceil(tokens / per_step) > 10**9:
        return
    mix = a_mix(rows=rows, micro_rows=1, version=2, mix={"stages": stages})

    step = mix.mix.stages[1].from_step

    assert (step - 1) * per_step < tokens <= step * per_step


def test_tokens_are_written_as_counts_are_and_a_ramp_has_its_own(tmp_path):
    later = stages_of(tmp_path, "{from_tokens: 1Ki, ramp_tokens: 1300, weights: {code: 1}}")[1]

    assert (later.from_step, later.ramp_steps) == (8, 11)


def test_a_mix_by_tokens_is_the_mix_by_the_steps_that_they_come_to():
    by_tokens = [{"weights": {"web": 1}}, {"from_tokens": 1024, "weights": {"code": 1}}]
    by_steps = [{"from_step": 0, "weights": {"web": 1}}, {"from_step": 8, "weights": {"code": 1}}]
    one, other = (a_mix(version=2, mix={"stages": each}) for each in (by_tokens, by_steps))

    assert one.model_dump() == other.model_dump()
    assert MixConfig.model_validate_json(one.model_dump_json()) == other


def test_a_larger_step_takes_the_tokens_in_fewer():
    stages = [
        {"weights": {"web": 1}},
        {"from_tokens": 1024, "ramp_tokens": 512, "weights": {"code": 1}},
    ]
    mix = a_mix(version=2, mix={"stages": stages})

    larger = with_settings(mix, {"batch_tokens": 256}).mix.stages[1]

    assert (mix.mix.stages[1].from_step, mix.mix.stages[1].ramp_steps) == (8, 4)
    assert (larger.from_step, larger.ramp_steps) == (4, 2)


@pytest.mark.parametrize(
    ("stage", "version", "said"),
    [
        (
            "{from_tokens: 1Ki, from_step: 3, weights: {code: 1}}",
            2,
            ":9: mix.stages.1.from_tokens: from_tokens is '1Ki' and from_step is 3; give one of them",
        ),
        ("{from_tokens: 1Ki, weights: {code: 1}}", 1, ":9: .* is of version 1; write version: 2"),
        (
            "{from_step: 3, ramp_steps: 2, ramp: cosine, weights: {code: 1}}",
            1,
            ":9: mix.stages.1.ramp: .* is of version 1; write version: 2",
        ),
        (
            "{from_step: 3, ramp: cosine, weights: {code: 1}}",
            2,
            ":9: mix.stages.1.ramp: ramp is cosine and ramp_steps is 0, which changes at once; give",
        ),
        (
            "{from_step: 3, ramp_steps: 2, ramp_done: 1, weights: {code: 1}}",
            2,
            ":9: mix.stages.1.ramp_done: ramp_done is 1, of a linear ramp",
        ),
        (
            "{from_epochs: 1, weights: {code: 1}}",
            2,
            ":9: mix.stages.1.from_epochs: from_epochs is 1, .* as from_epochs: {web: 2}; of several,",
        ),
        (
            "{from_step: 3, ramp_epochs: 0.5, weights: {code: 1}}",
            2,
            ":9: mix.stages.1.ramp_epochs: ramp_epochs is 0.5, .* write ramp_tokens",
        ),
        (
            "{from_epochs: {wob: 1}, weights: {code: 1}}",
            2,
            ":9: mix.stages.1.from_epochs.wob: stages.1. waits until 'wob' was gone through once, and",
        ),
        (
            "{from_epochs: {code: 1}, weights: {code: 1}}",
            2,
            ":9: mix.stages.1.from_epochs.code: .* gives it no weight: it would wait for ever",
        ),
        ("{from_epochs: {web: 0}, weights: {code: 1}}", 2, ":9: mix.stages.1.from_epochs.web: "),
        (
            "{from_epochs: {web: 1}, from_step: 4, weights: {code: 1}}",
            2,
            ":9: .* from_epochs and from_step 4 are given",
        ),
        (
            "{from_epochs: {web: 1}, from_tokens: 4K, weights: {code: 1}}",
            2,
            ":9: mix.stages.1.from_epochs: from_epochs and from_tokens '4K' are given; give one",
        ),
        (
            "{from_epochs: null, weights: {code: 1}}",
            2,
            ":9: mix.stages.1.from_epochs: from_epochs names no source; name the one that counts",
        ),
        (
            "{from_epochs: {web: 1}, weights: {code: 1}}\n    - {from_step: 4, weights: {code: 1}}",
            2,
            ":10: mix.stages.2.from_step: stages.2. begins at step 4, after a stage that waits",
        ),
        (
            "{from_epochs: {web: 1}, weights: {code: 1}}",
            1,
            ":9: mix.stages.1.from_epochs: the stage is dated by epochs, and the file is of version 1",
        ),
        ("{from_step: 4G, weights: {code: 1}}", 2, ":9: .* from_step is 4000000000; a run has"),
        ("{from_tokens: -1, weights: {code: 1}}", 2, ":9: mix.stages.1.from_tokens: found -1"),
        ("{from_tokens: many, weights: {code: 1}}", 2, ":9: mix.stages.1.from_tokens: .*many"),
        ("{from_tokens: 1E, weights: {code: 1}}", 2, ":9: mix.stages.1"),
        ("{from_tokens: 0, weights: {code: 1}}", 2, ":9: .*before the end of stage 0"),
    ],
)
def test_a_stage_that_says_too_much_or_nothing_is_refused_by_line(tmp_path, stage, version, said):
    with pytest.raises(ConfigError) as refused:
        stages_of(tmp_path, stage, version)

    assert re.search(said, str(refused.value)), refused.value


@pytest.mark.parametrize(
    "ramp", [{"ramp_steps": 16}, {"ramp_tokens": 1000}, {"ramp_tokens": "1Ki"}]
)
def test_a_stage_by_epochs_is_ramped_to_by_steps_or_tokens(ramp):
    stage = {"from_epochs": {"web": 1}, "ramp": "cosine", "weights": {"code": 1}, **ramp}

    mix = a_mix(version=2, rows=4, length=16, mix={"stages": [{"weights": {"web": 1}}, stage]})

    assert (mix.mix.stages[1].ramp_steps, mix.mix.stages[1].waits) == (16, True)


def test_the_first_stage_waits_for_nothing():
    with pytest.raises(ValidationError, match="the first stage starts at step 0; leave it out"):
        a_mix(version=2, mix={"stages": [{"from_epochs": {"web": 1}, "weights": {"web": 1}}]})


@pytest.mark.parametrize(
    ("stop", "epochs", "most", "said"),
    [
        ("each_once", 1, None, None),
        ("each_once", 1.5, None, "gone through 1.5 times, and stop is each_once, .* at most 1"),
        ("first_exhausted", 0.9, None, None),
        ("first_exhausted", 1, None, "gone through once, and stop is first_.* less than 1"),
        ("all_exhausted", 5, None, None),
        ("never", 2, 2.5, None),
        ("never", 2, 2, "gone through 2 times, and its max_repetition is 2: .* raise max_rep"),
    ],
)
@pytest.mark.parametrize("grouped", [False, True])
def test_a_stage_that_would_wait_for_ever_is_refused(stop, epochs, most, said, grouped):
    cap = {"max_repetition": most} if most else {}
    web = {"type": "parquet", "path": "web", "tokens": "t"} | ({} if grouped else cap)
    sources = {"web": web, "code": {"type": "parquet", "path": "code", "tokens": "t"}}
    weights = {"web": 1, "code": 1}
    if grouped:
        weights = {"all": {"weight": 1, "of": weights, **cap}}
        said = said and said.replace("its", "group all's")
    stages = [{"weights": weights}, {"from_epochs": {"web": epochs}, "weights": weights}]

    def declared():
        return a_mix(version=2, sources=sources, mix={"stages": stages, "stop": stop})

    if said is None:
        assert declared().mix.waits
        return
    with pytest.raises(ValidationError, match=said):
        declared()


def test_a_stage_that_waits_is_behind_all_steps_and_survives_settings():
    stages = [{"weights": {"web": 1}}, {"from_epochs": {"web": 1.5}, "weights": {"code": 1}}]
    mix = a_mix(version=2, mix={"stages": stages})

    changed = with_settings(mix, {"seed": 8})

    assert changed.mix == mix.mix == MixConfig.model_validate(mix.model_dump()).mix
    assert weights_at(mix.mix.stages, mix.names, 10**9) == (0, 1)
    assert boundaries(mix) == (0,)
    plain = a_mix(version=2, mix={"stages": stages[:1]}, sources=("web",))
    assert set(plain.mix.model_dump()["stages"][0]) == {"from_step", "ramp_steps", "weights"}
