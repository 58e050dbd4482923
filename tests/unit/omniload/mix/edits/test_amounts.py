"""Amounts that change: the valid ones, the refusals, and the distribution of the rest."""

import math
from dataclasses import replace

import orjson
import pytest

from omniload.base.errors import ConfigError, StateError
from omniload.base.state import sealed
from omniload.machine.queue import end_of
from omniload.mix.edits.amounts import require_drawable
from omniload.mix.edits.answers import EditTaken
from omniload.mix.edits.edit import (
    AddSource,
    RetireSource,
    SetAmounts,
    SetWeights,
    SkipShard,
    Undo,
    said_of,
)
from omniload.mix.edits.edits_file import read_history, write_history
from omniload.mix.edits.history import History
from omniload.mix.schedule import draw_weights_at
from omniload.mix.schema.amounts import Amount
from omniload.mix.sources import ParquetSource
from omniload.mix.state import MixState
from tests.support.plane.builders import a_mix

RECORDS = [100, 50, 40]


def a_history(**amounts):
    wanted = {"books": {"epochs": 2}, "code": {"tokens": 900}, "web": {"samples": 30}}
    return History(
        a_mix(version=2, sources=("books", "code", "web"), mix={"amounts": wanted | amounts})
    )


def a_state(step=4, *, books=(60, 1, 0), drawn=(61, 400, 10)):
    return replace(
        MixState.start(3),
        step=step,
        cursors_S=(books, (20, 1, 0), (9, 1, 0)),
        drawn_S=drawn,
        credits_S=(5, -3, -2),
    )


def set_to(**amounts):
    return SetAmounts(amounts={name: Amount(**given) for name, given in amounts.items()})


def edited(history, change, step=4, state=None):
    after = history.edited(change, step)
    require_drawable(history, after, state or a_state(), RECORDS)
    return after


def test_what_was_drawn_stays_and_the_rest_is_spread_from_there():
    history = edited(a_history(), set_to(books={"epochs": 3}, code={"tokens": 600}))

    before, after = a_state(), history.entered(a_state())[1]
    weights = draw_weights_at(history.at(4), after, RECORDS)

    assert (after.cursors_S, after.drawn_S) == (before.cursors_S, before.drawn_S)
    assert (after.since_S, after.credits_S) == ((61, 400, 10), (0, 0, 0))
    rest = [300 - 61, 600 - 400, 30 - 10]
    assert [w / sum(weights) for w in weights] == pytest.approx([r / sum(rest) for r in rest])
    assert history.at(3).mix.amounts == a_history().base.mix.amounts


def test_an_amount_that_is_drawn_goes_on_once_it_grows_and_one_that_is_just_drawn_ends():
    whole = a_state(books=(200, 0, 0), drawn=(200, 400, 10))
    grown = edited(a_history(), set_to(books={"epochs": 2.5}), state=whole)
    ended = edited(a_history(), set_to(web={"samples": 10}), state=whole)

    weights = [
        draw_weights_at(h.at(4), h.entered(whole)[1], RECORDS) for h in (a_history(), grown, ended)
    ]

    assert [w[0] > 0 for w in weights] == [False, True, False]
    assert [w[2] > 0 for w in weights] == [True, True, False]


def test_any_source_can_be_given_epochs_and_is_counted_in_records_from_then_on():
    history = edited(a_history(), set_to(code={"epochs": 1}))

    state = history.entered(a_state())[1]

    assert state.drawn_S == (61, 21, 10)
    assert state.since_S == state.drawn_S
    with pytest.raises(
        ConfigError, match=r"code is counted in records .* which nobody has counted; give it epochs"
    ):
        edited(history, Undo(), 9, replace(state, step=9))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            set_to(books={"epochs": 0.5}),
            "0.5 epochs are 50 records, and before step 4 61 are drawn; .* retire RUN books",
        ),
        (set_to(code={"tokens": 100}), "100 tokens, and before step 4 400 are drawn"),
        (set_to(web={"samples": 9}), "9 samples, and before step 4 10 are drawn"),
        (
            set_to(web={"tokens": 900}),
            r"web is counted in samples \(30 samples\), and 900 tokens would be tokens from",
        ),
        (set_to(books={"epochs": 0.001}), "less than one record"),
        (set_to(wbe={"samples": 9}), "did you mean 'web'"),
        (SetWeights(weights={"web": 2}), "web=2 is a weight; say how much"),
        (
            AddSource(
                name="n", source=ParquetSource(type="parquet", path="n", tokens="t"), weight=1
            ),
            "comes with a weight, and the run draws amounts; give --amount",
        ),
    ],
)
def test_what_no_run_can_meet_is_refused_with_what_was_found(change, said):
    with pytest.raises(ConfigError, match=said):
        edited(a_history(), change)


def test_weights_divide_anew_what_sources_have_together():
    history = a_history(books={"tokens": 600})

    after = edited(
        history, SetWeights(weights={"books": 1, "code": 2}), state=a_state(drawn=(61, 400, 10))
    )

    assert after.edits[0].change == set_to(books={"tokens": 500}, code={"tokens": 1000})
    assert said_of(after.edits[0].change) == "set books=500tokens code=1000tokens"
    assert after.latest.mix.amounts["web"] == Amount(samples=30)
    with pytest.raises(ConfigError, match="15 tokens, and before step 4 61 are drawn"):
        edited(history, SetWeights(weights={"books": 1, "code": 99}))


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"books": 1, "web": 1}, r"\(books has 600 tokens, web has 30 samples\)"),
        (
            {"books": 0, "code": 1},
            "'books' gets none of 1,500 tokens by weight 0; .* retire RUN books",
        ),
        ({"boks": 1, "code": 1}, "did you mean 'books'"),
    ],
)
def test_weights_that_cannot_divide_amounts_are_refused(weights, said):
    with pytest.raises(ConfigError, match=said):
        a_history(books={"tokens": 600}).edited(SetWeights(weights=weights), 4)


def test_tokens_are_met_by_the_piece_that_reaches_them():
    row = a_history().base.pack.length

    edited(a_history(), set_to(code={"tokens": 400 - row + 1}))

    with pytest.raises(ConfigError, match="400 are drawn"):
        edited(a_history(), set_to(code={"tokens": 400 - row}))


def test_a_source_is_read_as_far_as_any_step_needs_it_whatever_later_edits_leave():
    history = edited(a_history(), set_to(books={"epochs": 3}))
    assert [end_of(h, "books", 100) for h in (a_history(), history)] == [200, 300]

    undone = edited(history, Undo(), 6, a_state(6))

    assert end_of(undone, "books", 100) == 300
    assert end_of(undone, "code", 50) == math.inf


def test_a_cap_holds_for_amounts_too():
    history = a_history()
    capped = {
        n: s.model_copy(update={"max_repetition": 2.5}) for n, s in history.base.sources.items()
    }
    history = History(history.base.model_copy(update={"sources": capped}))

    with pytest.raises(ConfigError, match=r"books wants 3 epochs, and its max_repetition is 2\.5"):
        history.edited(set_to(books={"epochs": 3}), 4)


def test_at_a_later_step_amounts_may_grow_and_nothing_changes_before():
    history = edited(a_history(), set_to(web={"samples": 40}), 9)

    with pytest.raises(
        ConfigError, match=r"what is drawn by then is known when it comes.* say --at next"
    ):
        edited(a_history(), set_to(web={"samples": 20}), 9)
    skip = SkipShard(file="web/1", source="web", number=1, of=3)
    for change in (set_to(web={"samples": 50}), skip, RetireSource(name="books")):
        with pytest.raises(
            ConfigError, match="step 6 lies before step 9, from which on edit 1 spreads"
        ):
            history.edited(change, 6)
    assert edited(history, Undo(), 6, a_state(6)).at(9).mix.amounts == history.base.mix.amounts


def test_a_retired_source_draws_no_more_until_that_is_undone():
    history = edited(a_history(), RetireSource(name="books"))
    back = edited(history, Undo(), 6, a_state(6))

    state = history.entered(a_state())[1]

    assert draw_weights_at(history.at(4), state, RECORDS)[0] == 0
    assert draw_weights_at(back.at(6), back.entered(replace(state, step=6))[1], RECORDS)[0] > 0
    with pytest.raises(ConfigError, match="it is retired already"):
        history.edited(RetireSource(name="books"), 6)
    left = history.edited(RetireSource(name="code"), 6)
    with pytest.raises(ConfigError, match="no source would have an amount without 'web'"):
        left.edited(RetireSource(name="web"), 6)


def test_a_source_is_added_with_an_amount_of_its_own():
    source = ParquetSource(type="parquet", path="new/*.parquet", tokens="t")
    change = AddSource(name="new", source=source, amount=Amount(epochs=2))
    history = a_history().edited(change, 4)
    require_drawable(a_history(), history, a_state(), [*RECORDS, 7])

    state = history.entered(a_state())[1]

    weights = draw_weights_at(history.at(4), state, [*RECORDS, 7])
    rest = [200 - 61, 900 - 400, 30 - 10, 14]
    assert [w / sum(weights) for w in weights] == pytest.approx([r / sum(rest) for r in rest])
    assert said_of(change) == "add new --amount 2epochs"
    with pytest.raises(ValueError, match="with a weight or with an amount"):
        AddSource(name="new", source=source)


def test_amounts_are_not_given_where_weights_are_drawn():
    with pytest.raises(
        ConfigError, match="the run draws by weight, and web is given 2 epochs; say a weight"
    ):
        History(a_mix(sources=("web", "code"))).edited(set_to(web={"epochs": 2}), 4)


def test_a_state_says_what_was_drawn_before_in_a_version_that_older_releases_refuse():
    history = edited(a_history(), set_to(books={"epochs": 3}))
    state = history.entered(a_state())[1]
    names = history.base.names

    saved = orjson.loads(orjson.dumps(state.to_json(names, {}, history.edits_as_json(1))))

    assert (saved["version"], saved["since"]) == (4, {"books": 61, "code": 400, "web": 10})
    assert MixState.from_json(saved, names, {}).digest() == state.digest()
    assert state.digest() != replace(state, since_S=()).digest()
    for since in ({"books": 61}, {**saved["since"], "web": 11}, 3):
        content = {k: v for k, v in saved.items() if k != "blake2b"} | {"since": since}
        with pytest.raises(StateError, match="damaged"):
            MixState.from_json(sealed(content), names, {})
    with pytest.raises(StateError, match="version"):
        MixState.from_json(saved | {"version": 3}, names, {})


def test_edits_of_amounts_are_kept_in_a_version_of_their_own_and_said_as_typed(tmp_path):
    history = edited(a_history(), set_to(books={"epochs": 2.5}, code={"tokens": 5_000_000_000}))

    write_history(tmp_path, history)

    assert orjson.loads((tmp_path / "edits.json").read_bytes())["version"] == 4
    assert read_history(tmp_path, history.base) == history
    assert said_of(history.edits[0].change) == "set books=2.5epochs code=5000000000tokens"
    taken = EditTaken.of(a_history(), history, 4, 2)
    assert taken.amounts == {
        "books": ("2 epochs", "2.5 epochs"),
        "code": ("900 tokens", "5,000,000,000 tokens"),
    }
