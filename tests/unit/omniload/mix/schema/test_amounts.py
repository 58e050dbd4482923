"""Amounts in mix files: their meaning, and refusals with the line."""

import pytest
from pydantic import ValidationError

from omniload.base.config import parse_yaml
from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig
from omniload.mix.edits.edit import SetWeights
from omniload.mix.edits.history import History
from omniload.mix.schedule import amounts_S, draw_weights_at
from omniload.mix.schema.amounts import Amount
from omniload.mix.schema.caps import require_amounts
from omniload.mix.state import MixState
from tests.support.plane.builders import a_mix

NAMES = ("code", "web")
FILE = """\
version: 2
seed: 1
sources:
  code: {{type: parquet, path: code, tokens: t}}
  web: {{type: parquet, path: web, tokens: t}}
mix:
{mix}
pack: {{length: 32}}
batch: {{tokens: 128, micro_tokens: 64}}
"""


def with_amounts(amounts, *, total=None, **changes):
    mix = {"amounts": amounts} | ({"total": total} if total else {})
    return a_mix(sources=NAMES, mix=mix, **{"version": 2, **changes})


def refused(mix):
    with pytest.raises(ConfigError) as raised:
        parse_yaml(FILE.format(mix=mix), MixConfig, name="mix.yaml")
    return str(raised.value)


@pytest.mark.parametrize(
    ("epochs", "records", "units"),
    [(1, 7, 7), (0.5, 7, 3), (2.5, 4, 10), (0.29, 100, 29), (0.1, 30, 3), (1e-3, 999, 0)],
)
def test_epochs_are_records_rounded_down_exactly_as_they_are_written(epochs, records, units):
    assert Amount(epochs=epochs).units(records) == units


def test_units_of_a_mix_are_its_weights():
    mix = with_amounts({"web": {"epochs": 3}, "code": {"tokens": "6k"}})

    assert amounts_S(mix, [10, 1000]) == [6000, 3000]
    code, web = draw_weights_at(mix, MixState.start(2), [10, 1000])
    assert abs(code - 2 * web) <= 2


def test_a_group_is_split_by_weight_and_temperature_with_nothing_lost():
    mix = with_amounts({"both": {"tokens": 1001, "of": {"code": 9, "web": 1}, "temperature": 2}})

    assert mix.mix.amounts == {"code": Amount(tokens=751), "web": Amount(tokens=250)}


def test_what_is_dumped_is_what_was_written_and_a_mix_of_weights_dumps_as_ever():
    mix = with_amounts({"web": {"epochs": 1}, "code": {"samples": 5}})

    dumped = mix.model_dump()
    assert dumped["mix"] == {"amounts": {"web": {"epochs": 1}, "code": {"samples": 5}}}
    assert MixConfig.model_validate(dumped) == mix == MixConfig.model_validate(mix.declared())
    assert set(a_mix().model_dump()["mix"]) == {"level", "stop", "stages"}


@pytest.mark.parametrize(
    ("web", "code", "came_to"),
    [
        ({"weight": 3}, {"tokens": 10}, (10, 90)),
        ({"weight": 1.5}, {"weight": 3}, (67, 33)),
        ({"tokens": 99}, {"weight": 1e-9}, (1, 99)),
        ({"tokens": 60}, {"tokens": 40}, (40, 60)),
    ],
)
def test_weights_share_what_amounts_leave_of_a_total(web, code, came_to):
    mix = with_amounts({"web": web, "code": code}, total={"tokens": 100})

    assert tuple(amount.tokens for amount in mix.mix.amounts.values()) == came_to[::-1]
    assert mix.model_dump()["mix"] == {"amounts": mix.model_dump()["mix"]["amounts"]}


def test_a_group_takes_amounts_in_it_first_whether_it_has_a_weight_or_an_amount():
    inner = {"temperature": 2, "of": {"a": {"tokens": 20}, "b": 9, "c": {"weight": 1}}}
    names = ("a", "b", "c", "d")

    shared = a_mix(
        version=2,
        sources=names,
        mix={
            "total": {"tokens": 200},
            "amounts": {"g": {"weight": 1, **inner}, "d": {"weight": 1}},
        },
    )
    stated = a_mix(
        version=2,
        sources=names,
        mix={"amounts": {"g": {"tokens": 100, **inner}, "d": {"tokens": 100}}},
    )

    assert shared == stated
    assert {n: a.tokens for n, a in shared.mix.amounts.items()} == {
        "a": 20,
        "b": 60,
        "c": 20,
        "d": 100,
    }


@pytest.mark.parametrize(
    ("mix", "said"),
    [
        (
            "  total: {tokens: 9}\n  amounts: {code: {epochs: 1}, web: {weight: 1}}",
            "mix.yaml:8: mix.amounts.code.epochs: epochs is 1, and total counts tokens: how many that is, only reading",
        ),
        (
            "  total: {tokens: 9}\n  amounts: {code: {samples: 1}, web: {weight: 1}}",
            "mix.yaml:8: mix.amounts.code.samples: samples is 1, and total counts tokens",
        ),
        (
            "  total: {tokens: 9}\n  amounts: {code: {tokens: 12}, web: {weight: 1}}",
            "mix.yaml:7: mix.total: total is 9 tokens, and the amounts in it come to 12; raise it to 12 or more",
        ),
        (
            "  total: {tokens: 9}\n  amounts: {code: {tokens: 9}, web: {weight: 1}}",
            "come to 9; nothing is left for 'web' and its weight",
        ),
        (
            "  total: {tokens: 9}\n  amounts: {code: {tokens: 4}, web: {tokens: 4}}",
            "come to 8; give a source a weight, for the other 1",
        ),
        (
            "  total: {tokens: 9}\n  amounts: {code: {weight: 0}, web: {weight: 1}}",
            "mix.yaml:8: mix.amounts.code: 'code' gets none of the 9 tokens",
        ),
        (
            "  total: {tokens: 9}\n  amounts: {code: {weight: -1}, web: {weight: 1}}",
            "mix.yaml:8: mix.amounts.code.weight: weight is -1; give a number of at least 0",
        ),
        (
            "  total: {tokens: 9}\n  amounts: {code: 2, web: {weight: 1}}",
            "mix.yaml:8: mix.amounts.code: 2 is no amount; write {weight: 2}",
        ),
        (
            "  total: {tokens: 9}\n  amounts: {code: {weight: 1, tokens: 2}, web: {weight: 1}}",
            "mix.yaml:8: mix.amounts.code.weight: the entry has tokens and weight; give one of",
        ),
        (
            "  total: {tokens: 9}\n  amounts: {code: {wait: 1}, web: {weight: 1}}",
            "mix.yaml:8: mix.amounts.code.wait: an entry has epochs, samples, tokens or weight, not 'wait'",
        ),
        (
            "  amounts:\n    all: {tokens: 9, of: {code: {tokens: 10}, web: 1}}",
            "mix.yaml:8: mix.amounts.all.of: all is 9 tokens, and the amounts in it come to 10",
        ),
        (
            "  amounts:\n    all: {tokens: 9, of: {code: {epochs: 1}, web: 1}}",
            "mix.yaml:8: mix.amounts.all.of.code.epochs: epochs is 1, and all counts tokens",
        ),
        (
            "  total: {epochs: 9}\n  amounts: {code: {weight: 1}, web: {weight: 1}}",
            "mix.yaml:7: mix.total.epochs: total is {'epochs': 9}, and how many tokens an epoch of each",
        ),
        (
            "  total: {epochs: 9, tokens: 9}\n  amounts: {code: {weight: 1}, web: {weight: 1}}",
            "mix.yaml:7: mix.total: total is {'epochs': 9, 'tokens': 9}; give one of tokens and samples",
        ),
        (
            "  total: {tokens: 0}\n  amounts: {code: {weight: 1}, web: {weight: 1}}",
            "mix.yaml:7: mix.total.tokens: tokens is 0; give a whole number from 1",
        ),
        (
            "  total: {tokens: 9}\n  stages: [{weights: {code: 1, web: 1}}]",
            "mix.yaml:7: mix.total: total is {'tokens': 9}, but the mix has no amounts",
        ),
        (
            "  amounts: {web: {epochs: 1}}",
            "mix.yaml:4: sources.code: 'code' has no amount; give it one",
        ),
        (
            "  amounts:\n    code: {epochs: 1}\n    web: {epochs: 1, tokens: 5}",
            "mix.yaml:9: mix.amounts.web.tokens: the amount has epochs 1 and tokens 5; give one",
        ),
        (
            "  amounts:\n    code: {epochs: 1}\n    web: {weight: 3}",
            "mix.yaml:9: mix.amounts.web.weight: weight is 3 among amounts",
        ),
        (
            "  amounts:\n    code: {epochs: 1}\n    wep: {epochs: 1}",
            "mix.yaml:9: mix.amounts.wep: 'wep' is not among the sources; did you mean 'web'?",
        ),
        (
            "  amounts:\n    all: {epochs: 2, of: {code: 1, web: 1}}",
            "mix.yaml:8: mix.amounts.all.epochs: epochs is 2 in a group",
        ),
        (
            "  amounts:\n    all: {samples: 2, of: {code: 9, web: 1}}",
            "mix.yaml:8: mix.amounts.all.of.web: 'web' gets none of 2 samples",
        ),
        (
            "  level: sample\n  amounts: {code: {epochs: 1}, web: {epochs: 1}}",
            "mix.yaml:7: mix.level: amounts and level are given; leave level out",
        ),
        (
            "  stages: [{weights: {code: 1, web: {epochs: 1}}}]",
            "mix.yaml:7: mix.stages.0.weights.web: {'epochs': 1} is an amount among weights",
        ),
        (
            "  level: sequence\n  stages: [{weights: {code: 1, web: 1}}]",
            "mix.yaml:7: mix.level: level is sequence, and sources.code has documents of any length",
        ),
        (
            "  stop: amounts\n  stages: [{weights: {code: 1, web: 1}}]",
            "mix.yaml:7: mix.stop: stop is amounts, but the mix has no amounts",
        ),
    ],
)
def test_what_is_no_amount_is_refused_with_its_line(mix, said):
    assert said in refused(mix)


@pytest.mark.parametrize(
    ("epochs", "amounts", "own", "rest"),
    [
        (
            "9",
            "{code: {weight: 1}, web: {weight: 1}}",
            "each 9 times write amounts: {code: {epochs: 9}, web: {epochs: 9}} without total",
            "N is 18 times what omniload mix stats FILE then says of an epoch of code, which has 0.5 of the weights",
        ),
        (
            "0.5",
            "{all: {weight: 1, of: {code: 1, x: {weight: 2, of: {y: 1, z: 1, w: 1}}}}, web: {weight: 3}}",
            "write amounts: {code: {epochs: 0.5}, y: {epochs: 0.5}, z: {epochs: 0.5}, and 2 more} without total",
            "0.666667 times what omniload mix stats FILE then says of an epoch of web, which has 0.75 of the weights",
        ),
        (
            "2",
            "{code: {tokens: 1}, web: {weight: 1}}",
            "each 2 times write amounts: {code: {epochs: 2}, web: {epochs: 2}} without total",
            None,
        ),
        (
            "many",
            "{code: {weight: 1}, web: {weight: 1}}",
            "give each source its own under amounts, as web: {epochs: 2}, without total and weights",
            None,
        ),
    ],
)
def test_a_total_in_epochs_is_answered_with_what_to_write(epochs, amounts, own, rest):
    said = refused(f"  total: {{epochs: {epochs}}}\n  amounts: {amounts}")

    assert own in said
    assert ("to keep the weights, write total: {tokens: N}, where N is" in said) == bool(rest)
    assert rest is None or rest in said


def test_a_file_of_version_1_has_no_amounts():
    with pytest.raises(ValidationError, match="amounts came with version 2"):
        with_amounts({"web": {"epochs": 1}, "code": {"epochs": 1}}, version=1)


@pytest.mark.parametrize(
    ("cap", "said"),
    [
        ({"max_repetition": 2}, "web wants 3 epochs, and its max_repetition is 2"),
        ({"max_fraction": 0.5}, "web has max_fraction 0.5, a cap on shares"),
    ],
)
def test_an_amount_beyond_a_cap_is_refused(cap, said):
    table = {"type": "parquet", "tokens": "t", "path": "p"}

    with pytest.raises(ValidationError, match=said):
        a_mix(
            version=2,
            sources={"web": {**table, **cap}},
            mix={"amounts": {"web": {"epochs": 3}}},
        )


def test_less_than_a_record_is_refused_when_records_are_counted():
    mix = with_amounts({"web": {"epochs": 0.01}, "code": {"epochs": 1}})

    with pytest.raises(ConfigError, match=r"mix.amounts.web: 0.01 epochs of 99 records are less"):
        amounts_S(mix, [5, 99])


def test_too_few_steps_are_refused_with_wanted_and_got():
    amounts = {"web": Amount(epochs=2), "code": Amount(tokens=1000)}

    require_amounts("mix.yaml:7", amounts, 0.995, 60)
    with pytest.raises(ConfigError) as raised:
        require_amounts("mix.yaml:7", amounts, 0.25, 60)
    assert str(raised.value) == (
        "mix.yaml:7: mix.amounts: 60 steps draw 25.0% of each amount: wanted is web 2 epochs and gets 0.5, "
        "code 1,000 tokens and gets 250; train for 240 steps, or ask for less"
    )


def test_weights_are_not_set_where_amounts_are_drawn():
    history = History(with_amounts({"web": {"epochs": 1}, "code": {"epochs": 1}}))

    with pytest.raises(
        ConfigError, match=r"the run draws amounts, and web=2 is a weight; say .* web=2epochs"
    ):
        history.edited(SetWeights(weights={"web": 2}), 4)
