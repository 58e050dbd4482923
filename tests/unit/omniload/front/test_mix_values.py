"""The differences of two ranks' mixes: the first keys, both values, and no secret."""

import pytest

from omniload.base.config import checked
from omniload.front.mix_values import MixValues
from omniload.mix.config import MixConfig
from tests.support.plane.builders import a_mix


def values_of(**keys):
    return MixValues.of(a_mix(**keys))


def test_keys_that_differ_are_told_with_both_values_and_what_was_left_out_as_that():
    mine = values_of(seed=5, runtime={"prefetch_steps": 8, "bind": "eth0"})
    theirs = values_of(seed=17, runtime={"bind": "10.0.0.0/8"})

    said = mine.said_beside(theirs)

    assert said == "seed is 5, on rank 0 17; runtime.prefetch_steps is 8, on rank 0 not given"
    assert theirs.said_beside(mine).endswith("prefetch_steps is not given, on rank 0 8")


def test_of_many_keys_the_first_are_named_in_the_order_of_the_file_and_how_many_more_there_are():
    keys = ("seed", "mix.stages.0.from_step", "batch.tokens", "a", "b")
    mine, theirs = (MixValues(values=dict.fromkeys(keys, value)) for value in "12")

    said = mine.said_beside(theirs)

    assert said == (
        "seed is 1, on rank 0 2; mix.stages.0.from_step is 1, on rank 0 2; batch.tokens is 1, on rank 0 2; and 2 more "
        "keys differ"
    )


def test_weights_of_stages_and_items_of_lists_have_keys_of_their_own():
    stages = [{"from_step": 0, "weights": {"web": 1, "code": 2}}]

    values = values_of(mix={"stages": stages}).values

    assert values["mix.stages.0.weights.code"] == "2.0"
    assert values["sources.web.path"] == "'web/*.parquet'"


@pytest.mark.parametrize("same", [True, False])
def test_a_secret_of_a_url_is_in_no_value_and_one_that_differs_is_told_as_that(same):
    def with_password(password, name):
        mix = a_mix().model_dump(mode="json", exclude_defaults=True)
        mix["sources"]["web"]["path"] = f"s3://KEY:{password}@bucket/{name}.jsonl"
        return MixValues.of(checked(mix, MixConfig, name="the mix"))

    mine, theirs = with_password("hunter2x", "a"), with_password("swordfish", "a" if same else "b")
    said = mine.said_beside(theirs)

    told = said + mine.model_dump_json() + theirs.model_dump_json()
    assert "hunter2x" not in told
    assert "swordfish" not in told
    if same:
        assert "in what is secret, such as a password in a URL" in said
    else:
        assert said == (
            "sources.web.path is 's3://***@bucket/a.jsonl', on rank 0 's3://***@bucket/b.jsonl'"
        )


def test_a_long_value_is_cut_in_what_is_said_alone():
    mine, theirs = (MixValues(values={"a": letter * 500}) for letter in "xy")

    said = mine.said_beside(theirs)

    assert len(said) < 200
    assert said.count("…") == 2
