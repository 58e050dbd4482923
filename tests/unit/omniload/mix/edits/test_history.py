"""Effects of a change on a mix, by cases; ``tests/property/omniload/machine`` has the general properties."""

import json
from dataclasses import replace

import pytest

from omniload.base.errors import ConfigError, StateError
from omniload.base.state import sealed, unsealed
from omniload.mix.edits import history as history_module
from omniload.mix.edits import next_edit
from omniload.mix.edits.answers import EditTaken
from omniload.mix.edits.edit import (
    AddSource,
    Edit,
    RetireSource,
    SetWeights,
    SkipSteps,
    Undo,
)
from omniload.mix.edits.found import merged, require_found, require_reached
from omniload.mix.edits.history import History
from omniload.mix.sources import ParquetSource
from omniload.mix.state import MixState
from tests.support.plane.builders import a_mix, some_facts

LATER = {"from_step": 100, "weights": {"web": 1, "code": 3}}


def a_history(**mix):
    stages = [{"from_step": 0, "weights": {"web": 3, "code": 1}}, LATER]
    return History(a_mix(mix={"stages": stages} | mix))


def an_addition(name="books", weight=4):
    source = ParquetSource(type="parquet", path=f"{name}/*.parquet", tokens="tokens")
    return AddSource(name=name, source=source, weight=weight)


def test_set_holds_until_the_next_stage_of_the_file():
    history = a_history().edited(SetWeights(weights={"web": 1}), 10)

    assert history.shares_at(9) == {"code": 0.25, "web": 0.75}
    assert history.shares_at(10) == history.shares_at(99) == {"code": 0.5, "web": 0.5}
    assert history.shares_at(100) == {"code": 0.75, "web": 0.25}


def test_the_answer_names_the_stage_that_comes_after_weights_that_are_set_alone():
    history = a_history()
    changes = (SetWeights(weights={"web": 1}), RetireSource(name="web"))

    taken = [EditTaken.of(history, history.edited(change, 10), 10, 8) for change in changes]

    assert [each.until for each in taken] == [100, None]
    assert taken[0].before == {"code": 0.25, "web": 0.75}
    assert taken[0].after == {"code": 0.5, "web": 0.5}


def test_the_answer_says_of_ranks_nothing_that_they_told_long_ago():
    history = a_history()
    taken = EditTaken.of(history, history.edited(RetireSource(name="web"), 5), 5, 1)

    # A rank reports once for many small steps, so it may have taken all five.
    assert taken.said.endswith("; steps before 5 were planned already and keep the mix they have")


def test_a_retired_source_has_no_weight_in_later_stages_either():
    history = a_history().edited(RetireSource(name="web"), 10)

    assert history.shares_at(10) == history.shares_at(100) == {"code": 1.0, "web": 0.0}


def test_an_added_source_keeps_its_share_in_later_stages_and_its_number_comes_last():
    history = a_history().edited(an_addition(), 10)

    assert history.latest.names == ("code", "web", "books")
    assert history.at(9).names == ("code", "web")
    assert history.shares_at(10)["books"] == history.shares_at(100)["books"] == 0.5


def a_skip(history):
    """Skip steps 3 to 5 of a run of three sources; the numbers in the state after them are all different."""
    behind = replace(
        MixState.start(3),
        step=5,
        cursors_S=((1, 0, 0), (2, 0, 0), (3, 0, 0)),
        drawn_S=(1, 2, 3),
        mix_revision=1,
    )
    return history.edited(SkipSteps(first=3, stop=5), 3, behind=behind, at_rest=True), behind


def test_a_state_behind_skipped_steps_is_that_of_its_sources_in_whatever_order_json_has_them():
    history, behind = a_skip(a_history().edited(an_addition("books"), 1))
    kept = json.dumps(history.edits_as_json(2), sort_keys=True)

    edits = tuple(map(Edit.model_validate, json.loads(kept)))
    entered = History(history.base, edits).entering(replace(MixState.start(3), step=3), 2)

    assert history.latest.names == ("code", "web", "books")
    assert entered.cursors_S == behind.cursors_S
    assert entered.drawn_S == behind.drawn_S


@pytest.mark.parametrize("change", [{"mix_revision": 9}, {"sources": 7}, {"sources": {}}, None])
def test_a_state_behind_skipped_steps_that_is_none_is_refused(change):
    history, _ = a_skip(a_history().edited(an_addition("books"), 1))
    skip = history.edits[-1]
    held = {} if change is None else unsealed(skip.behind, of="it") | change
    edits = (history.edits[0], skip.model_copy(update={"behind": sealed(held)}))

    with pytest.raises(StateError):
        History(history.base, edits).entering(replace(MixState.start(3), step=3), 2)


def test_undo_goes_back_one_edit_after_another():
    history = a_history()
    for weight in (1, 5):
        history = history.edited(SetWeights(weights={"web": weight}), 10)

    once = history.edited(Undo(), 20)
    twice = once.edited(Undo(), 30)

    assert once.shares_at(20) == {"code": 0.5, "web": 0.5}
    assert twice.shares_at(30) == {"code": 0.25, "web": 0.75}
    assert [edit.undoes for edit in twice.edits] == [None, None, 2, 1]
    with pytest.raises(ConfigError, match="nothing to undo: of 4 edits"):
        twice.edited(Undo(), 40)


def test_as_many_edits_as_a_run_may_have_are_folded_once_each(monkeypatch):
    folded, one = [], history_module.edited_mix

    def counted(before, edit):
        folded.append(edit.revision)
        return one(before, edit)

    most = 500
    monkeypatch.setattr(history_module, "edited_mix", counted)
    monkeypatch.setattr(next_edit, "MOST_EDITS", most)
    history = a_history()
    for step in range(most):
        history = history.edited(SetWeights(weights={"web": 1 + step % 7}), 100 + step // 64)
    assert folded == list(range(1, most + 1))
    with pytest.raises(ConfigError, match="the run has 500 edits, 500 at most"):
        history.edited(Undo(), 200)

    folded.clear()
    read_again = History(history.base, history.edits)

    assert read_again.latest == history.latest
    assert read_again.shares_at(10**6) == history.shares_at(10**6)
    assert folded == list(range(1, most + 1))


def test_two_histories_that_part_know_each_its_own_mix():
    history = a_history().edited(SetWeights(weights={"web": 1}), 10)
    ways = [history.edited(RetireSource(name=name), 20) for name in ("web", "code")]

    assert [way.latest.mix.stages[-1].weights for way in ways] == [{"code": 3}, {"web": 1}]
    assert history.shares_at(20) == {"code": 0.5, "web": 0.5}


def test_a_source_with_a_secret_is_no_edit_whoever_asks():
    """The planner too is asked by a file, which anybody may have written."""
    source = an_addition().source.model_copy(update={"path": ("a", "s3://KEY:SECRETS@bucket/x")})

    with pytest.raises(ConfigError, match="holds credentials") as refused:
        a_history().edited(AddSource(name="books", source=source, weight=1), 10)
    assert "SECRETS" not in str(refused.value)


def pictures(name, patch=14):
    images = {"type": "images", "patch": patch, "placeholder": 7}
    fields = {"type": "parquet", "path": "x", "text": "t", "images": "i", "transforms": [images]}
    return AddSource(name=name, source=ParquetSource.model_validate(fields), weight=1)


def test_images_come_only_to_a_run_that_was_opened_with_some_and_as_the_file_could_have_had_them():
    first = pictures("first").source
    words = {"type": "parquet", "path": "w", "tokens": "tokens"}
    sources = {"words": words, "first": first.model_dump(exclude_none=True)}
    mix = a_mix(sources=sources, pack={"method": "none"}, tokenizer={"type": "bytes"})

    with pytest.raises(ConfigError, match="'more' holds images, and the run has none: its trainer"):
        a_history().edited(pictures("more"), 10)
    with pytest.raises(ConfigError, match="patch and merge are 16 and 1, and 14 and 1 in sources"):
        History(mix).edited(pictures("more", patch=16), 10)
    assert "more" in History(mix).edited(pictures("more"), 10).latest.names


def test_a_mix_that_goes_through_each_source_once_may_not_pause_one():
    history = History(a_mix(mix={"stop": "each_once", "stages": [LATER | {"from_step": 0}, LATER]}))

    with pytest.raises(ConfigError, match="gives 'web' no weight"):
        history.edited(SetWeights(weights={"web": 0}), 10)


def test_a_state_of_other_edits_than_the_folders_is_refused():
    mine = a_history().edited(RetireSource(name="web"), 10)
    other = a_history().edited(RetireSource(name="code"), 10)

    assert merged(mine, mine.edits) is mine
    assert merged(History(mine.base), mine.edits) == mine
    with pytest.raises(StateError, match="the state is of another run"):
        merged(mine, other.edits)


def test_a_state_that_passed_the_step_of_an_edit_without_it_is_refused():
    history = a_history().edited(RetireSource(name="web"), 0)
    state = MixState.start(2).after(
        cursors_S=[(0, 0, 0)] * 2,
        served_S=[0, 0],
        weights_S=[1, 0],
        carried=MixState.start(2).carried,
    )

    with pytest.raises(
        StateError,
        match="is of revision 0 of the mix, and the edits of its run make it 1: edit 1 was made afterwards and holds "
        "from step 0 on; begin it anew, without a state",
    ):
        require_reached(history, state, 0)


def test_an_added_source_whose_data_changed_is_refused():
    history = a_history().edited(an_addition(), 10, {"sources.books.records": "7"})

    with pytest.raises(StateError, match="'books', which edit 1 added, is not what it was"):
        require_found(history, some_facts([5, 5, 8]))


def test_the_greatest_shares_of_coming_steps_lie_where_stages_ramps_and_edits_begin_or_end():
    stages = [
        {"from_step": 0, "weights": {"code": 1, "web": 3}},
        {"from_step": 10, "weights": {"code": 3, "web": 1}, "ramp_steps": 5},
        {"from_step": 20, "weights": {"code": 1, "web": 1}},
    ]
    history = History(a_mix(mix={"stages": stages}))
    edited = history.edited(SetWeights(weights={"web": 9.0}), 30)

    def by_step(history, start, stop):
        shares = [history.shares_at(step) for step in range(start, stop + 1)]
        return {name: max(each[name] for each in shares) for name in ("code", "web")}

    for start, stop in ((0, 5), (0, 12), (5, 40), (12, 19), (14, 14), (29, 31)):
        for each in (history, edited):
            assert each.greatest_shares(start, stop) == pytest.approx(by_step(each, start, stop))


@pytest.mark.parametrize("change", [SetWeights(weights={"web": 2}), RetireSource(name="code")])
def test_weights_are_set_before_a_ramp_that_an_edit_of_a_step_to_come_ends(change):
    ramp = {"from_step": 30, "weights": {"web": 1, "code": 3}, "ramp_steps": 20}
    stages = [{"from_step": 0, "weights": {"web": 1, "code": 1}}, ramp]
    history = History(a_mix(mix={"stages": stages})).edited(SetWeights(weights={"web": 9}), 40)

    after = history.edited(change, 10)

    for step in (40, 60):
        assert after.shares_at(step).keys() == {"code", "web"}
        assert (after.shares_at(step)["code"] > 0) == (change.kind == "set")
