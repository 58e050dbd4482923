"""The edits of a run in its folder: kept edits are read back, and files of other origin are refused."""

from dataclasses import replace

import orjson
import pytest
from pydantic import ValidationError

from omniload.base.errors import ConfigError, StateError
from omniload.base.state import sealed
from omniload.mix.edits.edit import AddSource, Edit, FitCost, SetWeights, Undo
from omniload.mix.edits.edits_file import EDITS_NAME, read_history, write_history
from omniload.mix.edits.found import merged, require_reached
from omniload.mix.edits.history import History
from omniload.mix.sources import ParquetSource
from omniload.mix.state import MixState
from tests.support.plane.builders import a_mix

BOOKS = ParquetSource(type="parquet", path="books.parquet", text="text")


@pytest.fixture
def history():
    history = History(a_mix()).edited(SetWeights(weights={"web": 3}), 5)
    history = history.edited(AddSource(name="books", source=BOOKS, weight=1), 8)
    return history.edited(Undo(), 9)


def forged(folder, history, change):
    """Write edits with a change and a digest of their own; return them."""
    write_history(folder, history)
    content = orjson.loads((folder / EDITS_NAME).read_bytes())
    content.pop("blake2b")
    change(content["edits"])
    (folder / EDITS_NAME).write_bytes(orjson.dumps(sealed(content)))


def fitted(history, step, **changes):
    """Return a history with a cost that a planner has fitted."""
    cost = {"linear": 2e-6, "quadratic": 5e-9, "measured": 640, "residual": 0.03} | changes
    edit = Edit(revision=len(history.edits) + 1, step=step, change=FitCost(**cost), stages=())
    return History(history.base, (*history.edits, edit))


def test_a_cost_that_was_fitted_is_kept_as_a_version_that_older_releases_refuse(tmp_path, history):
    history = fitted(history, 12)

    write_history(tmp_path, history)

    assert orjson.loads((tmp_path / "edits.json").read_bytes())["version"] == 6
    assert read_history(tmp_path, history.base) == history


@pytest.mark.parametrize("fit_every", [0, 500])
def test_a_cost_that_was_fitted_holds_where_the_mix_has_costs_fitted(fit_every):
    mix = a_mix(balance={"fit_every": fit_every})
    history = fitted(History(mix), 12).edited(SetWeights(weights={"web": 3}), 20)

    costs = [
        (history.at(step).balance.linear, history.at(step).balance.quadratic)
        for step in (11, 12, 30)
    ]
    assert costs == [(768, 1), *[(2e-6, 5e-9) if fit_every else (768, 1)] * 2]
    assert history.shares_at(12) == History(mix).shares_at(12)


def test_a_cost_that_was_fitted_is_nobodys_to_ask_for_or_to_undo(history):
    history = fitted(History(a_mix()).edited(SetWeights(weights={"web": 3}), 5), 12)

    with pytest.raises(ConfigError, match=r"a cost is fitted by the planner.*balance.fit_every"):
        history.edited(history.edits[-1].change, 20)
    assert history.edited(Undo(), 20).edits[-1].undoes == 1
    with pytest.raises(ValidationError, match="linear and quadratic are both 0"):
        fitted(history, 13, linear=0, quadratic=0)


def test_a_state_from_before_a_cost_was_fitted_goes_on_as_it_holds_the_same_samples():
    history = fitted(History(a_mix()), 12)

    require_reached(history, replace(MixState.start(2), step=30), 0)
    weighed = history.edited(SetWeights(weights={"web": 3}), 20)
    with pytest.raises(StateError, match="is of revision 0 of the mix"):
        require_reached(weighed, replace(MixState.start(2), step=30), 0)


def test_what_was_kept_is_read(tmp_path, history):
    write_history(tmp_path, history)

    assert read_history(tmp_path, history.base) == history


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda edits: edits[0]["stages"][0].update(from_step=7), "begin at its step 5"),
        (lambda edits: edits[0].update(step=0), "begin at its step 0"),
        (
            lambda edits: edits[0]["stages"].append(edits[0]["stages"][0]),
            "follow each other",
        ),
        (
            lambda edits: edits[0]["stages"][0].update(weights={"books": 1}),
            "edit 1 speaks of source 'books'",
        ),
        (lambda edits: edits[0].update(undoes=1), "revisions|undoes"),
    ],
)
def test_edits_that_are_none_of_this_mix_are_refused_whoever_made_their_digest(
    tmp_path, history, change, said
):
    forged(tmp_path, history, change)

    with pytest.raises(StateError, match=said):
        read_history(tmp_path, history.base)


def test_edits_of_a_state_speak_of_the_sources_of_its_mix(history):
    carried = history.edits[:1]
    other = carried[0].model_copy(
        update={"stages": (carried[0].stages[0].model_copy(update={"weights": {"books": 1.0}}),)}
    )

    assert merged(History(history.base), carried).edits == carried
    with pytest.raises(StateError, match="in the mix state: edit 1 speaks of source 'books'"):
        merged(History(history.base), [other])
