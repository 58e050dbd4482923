"""Caps: no stage, edit or run gives a source more than it may have."""

import pytest
from pydantic import ValidationError

from omniload.base.errors import ConfigError
from omniload.machine.queue import end_of
from omniload.mix.edits.edit import AddSource, RetireSource, SetWeights
from omniload.mix.edits.history import History
from omniload.mix.fingerprint import SourceFacts, source_parts
from omniload.mix.schema.caps import require_repetitions
from tests.support.plane.builders import a_mix
from tests.support.plane.simulation import Simulation

NAMES = ("code", "web")
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
    facts = SourceFacts(positions_per_epoch=1, order_digest="", shards_digest="", content_digest="")
    mixes = capped(), capped(max_repetition=2, max_fraction=0.9)

    assert len({str(source_parts("code", mix.sources["code"], facts)) for mix in mixes}) == 1


def test_a_plan_that_wants_more_than_the_cap_is_refused():
    sources = capped(max_repetition=4).sources
    require_repetitions(sources, {"code": 4.02, "web": 9}, 500)

    with pytest.raises(ConfigError, match=r"500 steps want its records 5.20 times, .* is 4; give"):
        require_repetitions(sources, {"code": 5.2, "web": 9}, 500)
