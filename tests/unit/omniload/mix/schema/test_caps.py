"""Caps: no stage, edit or run gives a source more than it may have."""

import math

import pytest
from pydantic import ValidationError

from omniload.base.errors import ConfigError
from omniload.front.spec import with_settings
from omniload.machine.queue import end_of
from omniload.mix.config import load_mix
from omniload.mix.edits.edit import AddSource, RetireSource, SetAmounts, SetWeights, Undo
from omniload.mix.edits.history import History
from omniload.mix.fingerprint import SourceFacts, fingerprint_of, source_parts
from omniload.mix.schema.caps import (
    group_fractions_at,
    group_fractions_from,
    require_repetitions,
)
from tests.support.plane.builders import a_mix
from tests.support.plane.simulation import Simulation

NAMES = ("code", "web")
FACTS = SourceFacts(positions_per_epoch=1, order_digest="", shards_digest="", content_digest="")
WORLD = {"dp": 2, "num_loaders": 1, "num_constructors": 1, "seed": 1}


def capped(stages=None, stop="never", **caps):
    source = {"type": "parquet", "tokens": "tokens"}
    return a_mix(
        version=2,
        sources={
            name: {**source, "path": name, **(caps if name == "code" else {})} for name in NAMES
        },
        mix={"stages": stages or [{"weights": {"code": 1, "web": 1}}], "stop": stop},
    )


@pytest.mark.parametrize("weights", [{"code": 1, "web": 2.3}, {"code": 3, "web": 7}, {"web": 1}])
def test_shares_up_to_the_cap_are_taken(weights):
    later = [{"from_step": 5, "ramp_steps": 3, "weights": {"code": 0.2, "web": 1}}]

    capped([{"weights": weights}, *later], max_fraction=0.3031)


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        (
            {"weights": {"code": 1, "web": 1}},
            "from step 9 on, more than its max_fraction 25.00%: give it at most 0.333333 there",
        ),
        (
            {"weights": {"code": 1}},
            "more than its max_fraction 25.00%: no other source has a weight",
        ),
    ],
)
def test_a_share_above_the_cap_is_refused_with_the_weight_that_is_allowed(stage, said):
    first = {"weights": {"code": 1, "web": 3}}

    with pytest.raises(ValidationError, match=said):
        capped([first, {"from_step": 9, **stage}], max_fraction=0.25)

    stage["weights"]["code"] = 1 / 3
    stage["weights"]["web"] = 1
    capped([first, {"from_step": 9, **stage}], max_fraction=0.25)


def test_an_edit_keeps_to_the_cap():
    history = History(capped([{"weights": {"code": 1, "web": 3}}], max_fraction=0.4))

    history.edited(SetWeights(weights={"code": 2}), 4)
    for change in (SetWeights(weights={"code": 3}), RetireSource(name="web")):
        with pytest.raises(
            ConfigError, match=r"code has .* from step 4 on, more than its max_fraction 40"
        ):
            history.edited(change, 4)


def test_a_run_stops_before_the_step_that_asks_for_more_than_the_cap():
    mix, free = capped(max_repetition=2.5), capped()
    lengths = [[[16]] * 8, [[16]] * 100]
    unbound = Simulation(mix=free, epochs=lengths, num_steps=12, **WORLD)
    unbound.run()
    simulation = Simulation(mix=mix, epochs=lengths, num_steps=12, **WORLD)

    said = (
        r"sources.code: step (\d+) asks for more than 2.5 times its 8 records, its max_repetition"
    )
    with pytest.raises(ConfigError, match=said) as stopped:
        simulation.run()

    # 2.5 times 8 records of 16 tokens; a step of 128 draws half of them there, and one row is drawn ahead.
    step = int(str(stopped.value).split("step ")[1].split()[0])
    assert 4 <= step <= 5
    assert simulation.journal == unbound.journal[:step]


def test_a_source_that_is_added_keeps_to_its_cap():
    source = {"type": "parquet", "path": "a", "tokens": "tokens", "max_repetition": 1.5}
    change = AddSource(name="books", source=source, weight=1)
    simulation = Simulation(
        mix=capped(),
        epochs=[[[16]] * 90, [[16]] * 90, [[16]] * 8],
        num_steps=12,
        changes=[(change, 3)],
        **WORLD,
    )

    with pytest.raises(ConfigError, match=r"sources.books: step .* 1.5 times its 8 records"):
        simulation.run()

    assert end_of(History(capped()), "unknown", 8) == float("inf")


def test_a_share_that_grows_as_others_end_has_no_cap():
    with pytest.raises(ValidationError, match=r"stop is each_once, .* code has a max_fraction"):
        capped(stop="each_once", max_fraction=0.9)


@pytest.mark.parametrize(
    ("stop", "cap", "end"),
    [
        ("never", 2.5, 20),
        ("never", None, float("inf")),
        ("each_once", 2.5, 8),
        ("all_exhausted", 1, 8),
    ],
)
def test_nothing_behind_the_cap_is_read(stop, cap, end):
    history = History(capped(stop=stop, max_repetition=cap))

    assert end_of(history, "code", 8) == end


def test_caps_are_no_part_of_what_a_run_is():
    mixes = capped(), capped(max_repetition=2, max_fraction=0.9)

    assert len({str(source_parts("code", mix.sources["code"], FACTS)) for mix in mixes}) == 1


def test_a_plan_that_wants_more_than_the_cap_is_refused():
    sources = capped(max_repetition=4).sources
    require_repetitions(sources, {"code": 4.02, "web": 9}, 500)

    with pytest.raises(ConfigError, match=r"500 steps want its records 5.20 times, .* is 4; give"):
        require_repetitions(sources, {"code": 5.2, "web": 9}, 500)


CODE = {"weight": 4, "of": {"python": 9, "old": {"weight": 1, "of": {"cobol": 1, "rust": 3}}}}
FIVE = ("cobol", "python", "rust", "web", "wiki")


def grouped(code=None, old=None, *, later=(), version=2, **mix):
    """Return five sources of weights web 4, wiki 2 and the group code 4, of which the group old is a tenth."""
    inner = {**CODE["of"]["old"], **(old or {})}
    code = {**CODE, "of": {**CODE["of"], "old": inner}, **(code or {})}
    stages = [{"weights": {"web": 4, "wiki": 2, "code": code}}, *later]
    return a_mix(version=version, sources=FIVE, mix={"stages": stages, **mix})


def test_a_group_may_have_up_to_its_cap():
    free, held = grouped(), grouped({"max_fraction": 0.4}, {"max_fraction": 0.04})

    assert held.mix.stages == free.mix.stages
    assert held.mix.model_dump() == free.mix.model_dump()


@pytest.mark.parametrize(
    ("code", "old", "said"),
    [
        (
            {"max_fraction": 0.3},
            {},
            "group code has 40.00% .* max_fraction 30.00%: give it at most 2.5",
        ),
        ({}, {"max_fraction": 0.03}, "group code.old has 4.00% of .* its max_fraction 3.00%"),
        ({"max_fraction": 0}, {}, "max_fraction is 0; give a number above 0 and at most 1"),
        ({}, {"max_fraction": "a"}, "max_fraction is 'a'; give a number above 0 and at most 1"),
        ({}, {"max_repetition": 0.5}, "max_repetition is 0.5; give a number from 1 to 1e6"),
    ],
)
def test_a_group_above_its_cap_is_refused_at_its_line(code, old, said):
    with pytest.raises(ValidationError, match=said):
        grouped(code, old)


def test_the_line_of_a_group_that_has_too_much_is_named(tmp_path):
    (tmp_path / "mix.yaml").write_text(
        """version: 2
seed: 1
sources:
  web: {type: parquet, path: a, tokens: t}
  python: {type: parquet, path: b, tokens: t}
mix:
  stages:
    - weights:
        web: 1
        code:
          weight: 1
          max_fraction: 0.3
          of: {python: 1}
pack: {length: 32}
batch: {tokens: 64, micro_tokens: 64}
"""
    )

    said = r"mix.yaml:12: mix.stages.0.weights.code.max_fraction: group code has 50.00% of the mix"
    with pytest.raises(ConfigError, match=said):
        load_mix(tmp_path / "mix.yaml")


def test_a_cap_holds_in_its_own_stage_and_a_ramp_has_what_either_allows():
    later = {"from_step": 10, "ramp_steps": 5, "weights": {"web": 9, "code": {**CODE, "weight": 1}}}
    later["weights"]["code"]["max_fraction"] = 0.2
    mix = grouped({"max_fraction": 0.4}, later=[later])

    caps = {
        step: [cap.max_fraction for cap in group_fractions_at(mix.mix, step)]
        for step in (0, 9, 10, 13, 14, 99)
    }

    assert caps == {0: [0.4], 9: [0.4], 10: [0.4], 13: [0.4], 14: [0.2], 99: [0.2]}
    # In the middle of the ramp the group has more than the next stage allows, as declared.
    retired = History(mix).edited(RetireSource(name="rust"), 11)
    assert retired.shares_at(11)["python"] > 0.2 * 0.9
    free = grouped(later=[later])
    assert not group_fractions_at(free.mix, 0)
    assert not group_fractions_at(free.mix, 13)


@pytest.mark.parametrize("dated", [{"from_step": 10}, {"from_epochs": {"web": 1}}])
@pytest.mark.parametrize("before", [{}, {"max_fraction": 0.9}])
def test_a_stage_behind_a_ramp_gives_a_group_no_more_than_its_cap(dated, before):
    later = {**dated, "ramp_steps": 5, "weights": {"web": 1, "code": {**CODE, "max_fraction": 0.5}}}

    begins = "from step 10" if "from_step" in dated else "from where web was gone through once"
    said = f"group code has 80.00% of the mix {begins} on, .* max_fraction 50.00%"
    with pytest.raises(ValidationError, match=said):
        grouped(before, later=[later])


def test_what_an_edit_or_a_policy_sets_within_a_ramp_is_held_to_the_cap_behind_it():
    later = {"from_step": 10, "ramp_steps": 5, "weights": {"web": 9, "code": {**CODE, "weight": 1}}}
    later["weights"]["code"]["max_fraction"] = 0.2
    history = History(grouped({"max_fraction": 0.4}, later=[later]))

    for step in (10, 11, 14, 15):
        assert [c.max_fraction for c in group_fractions_from(history.base.mix, step)] == [0.2]
        with pytest.raises(ConfigError, match=r"group code has .* from step \d+ on, .* 20.00%"):
            history.edited(SetWeights(weights={"web": 3, "wiki": 0, "python": 1}), step)
    assert [c.max_fraction for c in group_fractions_from(history.base.mix, 9)] == [0.4]
    # A stage that the ramp makes no room for is not reached by an edit before it either.
    with pytest.raises(ConfigError, match=r"group code has 100.00% of the mix from step 10 on"):
        History(grouped(later=[later])).edited(RetireSource(name="web"), 4)


def test_edits_keep_to_the_caps_of_groups_whatever_is_added_and_retired():
    history = History(grouped({"max_fraction": 0.45}, {"max_fraction": 0.05}))
    source = {"type": "parquet", "path": "a", "tokens": "tokens"}

    for change, said in [
        (SetWeights(weights={"python": 5}), "group code has .* from step 4 on, .* 45.00%: give it"),
        (SetWeights(weights={"rust": 1}), "group code.old has .* from step 4 on, .* 5.00%"),
        (RetireSource(name="wiki"), "group code has 50.00% of the mix from step 4 on"),
    ]:
        with pytest.raises(ConfigError, match=said):
            history.edited(change, 4)

    # With one more source the group has less, and there is room for the earlier excess.
    wider = history.edited(AddSource(name="books", source=source, weight=2), 4)
    wider.edited(RetireSource(name="wiki"), 6)
    with pytest.raises(ConfigError, match=r"group code has 50.00% of the mix from step 6 on"):
        wider.edited(Undo(), 5).edited(RetireSource(name="wiki"), 6)
    # The rest of a group still has its cap.
    left = history.edited(RetireSource(name="cobol"), 4)
    with pytest.raises(ConfigError, match=r"group code.old has "):
        left.edited(SetWeights(weights={"rust": 0.6}), 6)


def test_no_source_of_a_group_comes_more_often_than_the_group_allows():
    mix = grouped({"max_repetition": 3}, {"max_repetition": 2})
    history = History(mix)

    ends = {name: end_of(history, name, 10) for name in FIVE}

    assert ends == {"cobol": 20, "rust": 20, "python": 30, "web": math.inf, "wiki": math.inf}
    assert history.base.mix.model_dump() == grouped().mix.model_dump()


def test_a_run_stops_before_a_source_comes_more_often_than_its_group_allows():
    lengths = [[[16]] * 100, [[16]] * 8, *[[[16]] * 100] * 3]
    free = Simulation(mix=grouped(), epochs=lengths, num_steps=16, **WORLD)
    free.run()
    mix = grouped({"max_repetition": 2})
    simulation = Simulation(mix=mix, epochs=lengths, num_steps=16, **WORLD)

    said = r"sources.python: step (\d+) asks for more than 2 times its 8 records, max_repetition of group code"
    with pytest.raises(ConfigError, match=said) as stopped:
        simulation.run()

    step = int(str(stopped.value).split("step ")[1].split()[0])
    assert 4 <= step <= 6
    assert simulation.journal == free.journal[:step]


def test_a_plan_that_wants_more_than_a_group_allows_is_refused_at_its_line():
    mix = grouped({"max_repetition": 4})
    groups = {name: ("mix.yaml:9: key", cap) for name, cap in mix.mix.repetition_caps.items()}
    wanted = dict.fromkeys(FIVE, 4.02)
    require_repetitions(mix.sources, wanted, 500, groups)

    said = "mix.yaml:9: key: 500 steps want the records of rust 5.20 times, and max_repetition of group code is 4"
    with pytest.raises(ConfigError, match=said):
        require_repetitions(mix.sources, wanted | {"rust": 5.2}, 500, groups)
    assert mix.mix.place_of(mix.mix.repetition_caps["rust"]) == (
        *("mix", "stages", 0, "weights", "code", "max_repetition"),
    )


def test_a_group_has_no_cap_on_a_share_that_grows_as_others_end():
    with pytest.raises(ValidationError, match=r"stop is each_once, .* group code has a max_frac"):
        grouped({"max_fraction": 0.9}, stop="each_once")


def of_amounts(group, python=9, rust=3):
    inner = {"weight": 1, "of": {"cobol": 1, "rust": rust}, **group}
    amounts = {
        "web": {"epochs": 1},
        "wiki": {"epochs": 1},
        "code": {"tokens": 4000, "max_repetition": 5, "of": {"python": python, "old": inner}},
    }
    return a_mix(version=2, sources=FIVE, mix={"amounts": amounts})


@pytest.mark.parametrize(
    ("python", "rust"), [(9, 3), ({"weight": 9}, {"weight": 3}), ({"tokens": 9}, {"tokens": 30})]
)
def test_groups_of_amounts_are_held_to_repetitions_alone(python, rust):
    mix = of_amounts({"max_repetition": 2}, python, rust)
    history = History(mix)

    assert [end_of(history, name, 10) for name in FIVE[:3]] == [20, 50, 20]
    assert mix.mix.place_of(mix.mix.repetition_caps["rust"]) == (
        *("mix", "amounts", "code", "of", "old", "max_repetition"),
    )
    with pytest.raises(ConfigError, match="rust wants 3 epochs, and max_repetition of group code"):
        history.edited(SetAmounts(amounts={"rust": {"epochs": 3}}), 2)
    history.edited(SetAmounts(amounts={"rust": {"epochs": 2}}), 2)
    with pytest.raises(
        ValidationError, match=r"group code.old has max_fraction 0.3, a cap on shar"
    ):
        of_amounts({"max_fraction": 0.3})


def test_settings_keep_the_caps_of_groups_and_the_digest_does_not_have_them():
    mix = grouped({"max_fraction": 0.4, "max_repetition": 2})

    changed = with_settings(mix, {"seed": 8})

    assert changed.mix.group_caps == mix.mix.group_caps != ()
    assert fingerprint_of(mix, [FACTS] * 5) == fingerprint_of(grouped(), [FACTS] * 5)
