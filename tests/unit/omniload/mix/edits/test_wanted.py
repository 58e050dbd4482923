"""The changes from the present mix to that of a file, and the changes that are impossible."""

import pytest

from omniload.base.errors import ConfigError
from omniload.mix.edits.edit import AddSource, RetireSource, SetAmounts, SetWeights, said_of
from omniload.mix.edits.history import History
from omniload.mix.edits.wanted import later_keys, wanted_of
from omniload.mix.schema.amounts import Amount
from tests.support.plane.builders import a_mix
from tests.support.plane.edits.waiting import EPOCHS, a_file, at_an_end

STEP = 10


def found(file, history, step=STEP):
    return wanted_of(
        file, history.base, history, step, (lambda source: source, lambda source: source)
    )


def asked(file, history):
    wanted = found(file, history)
    assert not wanted.refused
    return [(said_of(change), at) for change, at in wanted.changes]


def followed(file, history):
    """Return the history once the file was followed."""
    for change, at in found(file, history).changes:
        history = history.edited(change, STEP if at is None else at)
    return history


def refused(file, history):
    return [(".".join(map(str, fault.at)), fault.said) for fault in found(file, history).refused]


BASE = History(a_file({"web": 1, "code": 1}))
RAMP = {"from_step": 40, "weights": {"web": 1, "code": 3}, "ramp_steps": 20}
THEN = {"from_step": 60, "weights": {"web": 1, "code": 1}}


def test_what_holds_is_asked_for_no_more_in_whatever_scale():
    assert asked(a_file({"web": 3, "code": 3}), BASE) == []


def test_weights_of_the_next_step_and_of_a_stage_to_come_are_set_each_at_its_step():
    later = {"from_step": 40, "weights": {"web": 1, "code": 3}}
    history = History(a_file({"web": 1, "code": 1}, later))
    file = a_file({"web": 1, "code": 4}, later | {"weights": {"web": 1, "code": 9}})

    assert asked(file, history) == [("set web=1 code=4", None), ("set web=1 code=9", 40)]
    after = followed(file, history)
    assert [after.shares_at(step)["code"] for step in (STEP, 40)] == pytest.approx([0.8, 0.9])
    assert asked(file, after) == []


def test_a_source_more_is_added_with_its_weight_and_one_less_is_retired():
    file = a_file({"web": 1, "books": 2})

    assert asked(file, BASE) == [("add books --weight 2", None), ("retire code", None)]
    assert asked(file, followed(file, BASE)) == []
    back = a_file({"web": 1, "code": 3})
    assert asked(back, followed(file, BASE)) == [("retire books", None), ("set web=1 code=3", None)]


@pytest.mark.parametrize("weights", [{"web": 1}, {"web": 1, "books": 0}])
def test_a_source_more_whose_weights_lie_in_the_past_is_not_asked_for(weights):
    later = {"from_step": 5, "weights": {"web": 1, "code": 1}}
    history = History(a_file({"web": 1, "code": 1}, later))
    file = a_file(
        {"web": 1, "books": 1},
        {"from_step": 5, "weights": weights | {"code": 3}},
        sources=("books", "code", "web"),
    )

    assert asked(file, history) == [("set web=1 code=3", None)]
    assert asked(file, followed(file, history)) == []


def test_a_source_more_is_added_though_those_that_stay_have_no_weight_by_now():
    later = {"from_step": 5, "weights": {"web": 1, "code": 0}}
    history = History(a_file({"web": 1, "code": 1}, later))
    file = a_file(
        {"code": 1, "books": 1},
        {"from_step": 5, "weights": {"code": 1, "books": 3}},
        sources=("books", "code"),
    )

    after = followed(file, history)

    assert after.shares_at(STEP) == {"code": 0.25, "web": 0.0, "books": 0.75}
    assert asked(file, after) == []


@pytest.mark.parametrize(
    "weights",
    [
        {"web": 5, "code": 1, "books": 2, "news": 1},
        {"books": 2, "news": 1},
        {"code": 1, "books": 0.001},
        {"web": 1e6, "news": 1},
    ],
)
def test_once_a_file_was_followed_its_shares_hold(weights):
    after = followed(a_file(weights), BASE)

    whole = sum(weights.values())
    shares = {name: share for name, share in after.shares_at(STEP).items() if share}
    assert shares == pytest.approx({name: weight / whole for name, weight in weights.items()})
    assert asked(a_file(weights), after) == []


def test_edits_by_hand_are_what_the_file_differs_from():
    history = BASE.edited(SetWeights(weights={"web": 9}), 5)

    assert asked(a_file({"web": 1, "code": 1}), history) == [("set web=1 code=1", None)]
    assert asked(a_file({"web": 9, "code": 1}), history) == []


LATER = {"from_step": 60, "weights": {"web": 9, "code": 1}}


def scheduled(file, history):
    return [(".".join(map(str, each.at)), each.said) for each in found(file, history).scheduled]


def test_a_change_that_is_set_for_a_step_to_come_stays_and_a_save_holds_up_to_there():
    history = BASE.edited(SetWeights(weights={"web": 9}), 60)
    file = a_file({"web": 1, "code": 3})

    assert asked(file, history) == [("set web=1 code=3", None)]
    after = followed(file, history)
    assert [after.shares_at(step)["web"] for step in (STEP, 59, 60)] == pytest.approx(
        [0.25, 0.25, 0.9]
    )
    assert asked(file, after) == []
    for each in (history, after):
        ((key, said),) = scheduled(file, each)
        assert key == "mix.stages.0"
        assert "holds to step 59: edit 1 (set web=9) is set for step 60, and stays" in said
    # A file may adopt it, and then contains the weights that apply there.
    assert scheduled(a_file({"web": 1, "code": 3}, LATER), after) == []
    assert asked(a_file({"web": 1, "code": 3}, LATER), after) == []
    other = a_file({"web": 1, "code": 3}, LATER | {"weights": {"web": 1, "code": 3}})
    assert asked(other, after) == [("set web=1 code=3", 60)]
    # A stage of its own that the file leaves out is refused as before, at its place in the file.
    history = History(a_file({"web": 1, "code": 1}, LATER)).edited(
        SetWeights(weights={"web": 9}), 30
    )
    ((key, said),) = refused(a_file({"web": 1, "code": 1}), history)
    assert (key, "a stage none in the file, and from step 60" in said) == ("mix.stages.0", True)


def test_sources_come_and_go_by_a_file_beside_what_is_set_for_a_step_to_come():
    books = a_file({"web": 1, "books": 1}).sources["books"]
    history = BASE.edited(AddSource(name="books", source=books, weight=2.0), 60)

    assert asked(BASE.base, history) == []
    assert [said for _, said in scheduled(BASE.base, history)] != []
    file = a_file({"web": 1, "news": 1})
    assert asked(file, history) == [("add news --weight 1", None), ("retire code", None)]
    after = followed(file, history)
    assert asked(file, after) == []
    # The one that comes has its share of the stage to come as well, as if it had been typed.
    shares = after.shares_at(60)
    assert shares["books"] == pytest.approx(2 * shares["web"])
    assert (shares["news"] > 0, shares["code"]) == (True, 0)
    # If a coming stage draws from nothing else, a source gets no weight up to there, and is not retired.
    history = BASE.edited(SetWeights(weights={"web": 0}), 60)
    file = a_file({"web": 1})
    assert asked(file, history) == [("set web=1 code=0", None)]
    after = followed(file, history)
    assert [after.shares_at(step)["code"] for step in (STEP, 60)] == [0, 1]
    assert asked(file, after) == []


@pytest.mark.parametrize("step", [STEP, 45])
@pytest.mark.parametrize(
    "change",
    [
        SetWeights(weights={"web": 9}),
        RetireSource(name="code"),
        AddSource(name="books", source=BASE.base.sources["web"], weight=1.0),
    ],
)
def test_a_change_that_is_set_for_a_step_within_a_ramp_stays(change, step):
    base = a_file({"web": 1, "code": 1}, RAMP, THEN)
    history = History(base).edited(change, 50)

    assert found(base, history, step).refused == ()
    assert found(base, history, step).changes == ()
    (told,) = found(base, history, step).scheduled
    assert told.at == ("mix", "stages", 1)


def test_amounts_that_are_set_for_a_step_to_come_stay_and_others_are_set_no_earlier():
    def of(**amounts):
        return a_mix(version=2, sources=tuple(amounts), mix={"amounts": amounts})

    base = of(web={"epochs": 1}, code={"tokens": 500})
    history = History(base).edited(SetAmounts(amounts={"web": Amount(epochs=2)}), 60)

    assert asked(base, history) == []
    ((key, said),) = scheduled(base, history)
    assert key == "mix.amounts"
    assert "edit 1 (set web=2epochs) is set for step 60, and stays" in said
    file = of(web={"epochs": 3}, code={"tokens": 500}, books={"samples": 9})
    assert asked(file, history) == [("set web=3epochs", 60), ("add books --amount 9samples", 60)]
    assert scheduled(file, history) == []
    assert asked(file, followed(file, history)) == []
    assert asked(of(web={"epochs": 2}), history) == [("retire code", 60)]


def test_what_a_run_keeps_is_refused_by_its_key_all_of_it_at_once():
    file = a_file({"web": 1, "code": 2}, seed=4, batch={"tokens": 64, "micro_tokens": 32})
    shuffled = file.sources["web"].model_copy(update={"path": "elsewhere"})
    file = file.model_copy(update={"sources": file.sources | {"web": shuffled}})

    faults = dict(refused(file, BASE))

    assert list(faults) == ["batch.tokens", "seed", "sources.web.path"]
    assert f"is 4 in the file, and {BASE.base.seed} in the run" in faults["seed"]
    assert "put it back, or start a new run" in faults["batch.tokens"]
    assert "declare it under another name, and leave web out" in faults["sources.web.path"]


def test_a_path_that_is_long_is_shown_with_both_ends_and_one_of_another_folder_with_what_it_starts_at():
    def in_folder(folder):
        return lambda source: source.model_copy(update={"path": f"{folder}/{source.path}"})

    here, there = (f"/{'deep/' * 40}{name}" for name in ("here", "there"))
    wanted = wanted_of(BASE.base, BASE.base, BASE, STEP, (in_folder(here), in_folder(there)))

    said = {".".join(map(str, fault.at)): fault.said for fault in wanted.refused}
    assert list(said) == ["sources.code.path", "sources.web.path"]
    path = BASE.base.sources["web"].path
    assert f"deep/here/{path}' in the file, and '/deep" in said["sources.web.path"]
    assert f"deep/there/{path}' in the run" in said["sources.web.path"]
    assert "keep it beside the mix file of the run" in said["sources.web.path"]


def test_a_stage_that_is_over_is_told_where_its_weights_never_held():
    later = {"from_step": 5, "weights": {"web": 1, "code": 3}}
    history = History(a_file({"web": 1, "code": 1}, later))

    def over(file, history):
        wanted = found(file, history)
        assert (wanted.changes, wanted.refused) == ((), ())
        return [(".".join(map(str, each.at)), each.said) for each in wanted.over]

    ((key, said),) = over(a_file({"web": 9, "code": 1}, later), history)
    assert key == "mix.stages.0"
    assert "is over, of steps 0 to 4, and step 10 is the first that is not planned" in said
    assert "say it in mix.stages.1, which holds" in said
    assert over(history.base, history) == []
    # The change took effect for some of its steps, so there is nothing to report when it is over.
    edited = history.edited(SetWeights(weights={"web": 9}), 3)
    assert over(a_file({"web": 9, "code": 1}, later), edited) == []
    assert over(a_file({"web": 1, "code": 1}, later), edited) == []


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ({"from_step": 50, "weights": {"web": 1, "code": 3}}, "when stages begin"),
        (
            {"from_step": 40, "weights": {"web": 1}, "ramp_steps": 4},
            "leads to web 100.0% in the file, and to code 75.0%, web 25.0% in the run, by a ramp from step 40",
        ),
        ({"from_step": 40, "weights": {"web": 1, "code": 3}, "ramp_steps": 9}, "when stages begin"),
        (None, "on, a stage none in the file, and from step 40"),
    ],
)
def test_stages_begin_and_are_ramped_as_they_were(stage, said):
    later = {"from_step": 40, "weights": {"web": 1, "code": 3}, "ramp_steps": 4}
    history = History(a_file({"web": 1, "code": 1}, later))

    ((key, text),) = refused(a_file({"web": 1, "code": 1}, *([stage] if stage else [])), history)

    assert key in ("mix.stages.0", "mix.stages.1")
    assert said in text


@pytest.mark.parametrize("then", [(), ({"from_step": 40, "weights": {"web": 1, "code": 9}},)])
def test_a_ramp_under_way_begins_where_it_did(then):
    ramp = {"from_step": 8, "weights": {"web": 1, "code": 3}, "ramp_steps": 9}
    history = History(a_file({"web": 1, "code": 1}, ramp, *then))

    assert asked(history.base, history) == []
    with pytest.raises(ConfigError, match="a ramp begins at, which ends at step 17, are others"):
        found(a_file({"web": 5, "code": 1}, ramp, *then), history)
    assert found(a_file({"web": 5, "code": 1}, ramp, *then), history, step=16).changes == ()


@pytest.mark.parametrize("then", [(), (THEN,)])
@pytest.mark.parametrize(
    ("at", "step"), [(40, STEP), (40, 39), (40, 40), (40, 57), (41, 41), (50, 50)]
)
def test_a_file_that_still_has_a_ramp_which_an_edit_ended_is_followed(at, step, then):
    base = a_file({"web": 1, "code": 1}, RAMP, *then)
    history = History(base).edited(SetWeights(weights={"web": 9}), at)

    def asked(*stages, history=history):
        wanted = found(a_file({"web": 1, "code": 1}, *stages, *then), history, step)
        said = [(said_of(change), at) for change, at in wanted.changes]
        return said, [each.at for each in wanted.over], wanted.refused

    later = 40 if step < 40 else None
    # Unchanged, it asks for nothing and reports that; other weights are applied once.
    assert asked(RAMP) == ([], [("mix", "stages", 1)], ())
    other = RAMP | {"weights": {"web": 5, "code": 1}}
    assert asked(other) == ([("set code=1 web=5", later)], [], ())
    after = history.edited(SetWeights(weights={"web": 5, "code": 1}), later or step)
    assert asked(other, history=after) == ([], [], ())
    assert after.shares_at(max(step, 40))["web"] == pytest.approx(5 / 6)
    assert asked({**RAMP, "ramp_steps": 0})[0] == [("set code=3 web=1", later)]
    # A ramp that the run never had is no more than it was.
    assert "when stages begin" in asked({**RAMP, "ramp_steps": 19})[2][0].said


def test_a_source_joins_and_another_leaves_where_an_edit_ended_a_ramp():
    history = History(a_file({"web": 1, "code": 1}, RAMP)).edited(
        SetWeights(weights={"web": 9}), 40
    )
    stage = RAMP | {"weights": {"web": 1, "books": 2}}
    file = a_file({"web": 9}, stage, sources=("web", "books"))

    changes = [(said_of(change), at) for change, at in found(file, history, 40).changes]

    assert changes == [("add books --weight 18", None), ("retire code", None)]


def test_a_source_that_comes_before_a_ramp_that_leaves_it_out_is_refused_and_not_the_ramp_cut_off():
    ramp = {"from_step": 40, "weights": {"code": 1}, "ramp_steps": 9}
    history = History(a_file({"web": 1, "code": 1}, ramp))

    with pytest.raises(
        ConfigError, match=r"from step 40, linear over 9 steps.*once the ramp is over"
    ):
        found(a_file({"web": 1, "code": 1, "books": 2}, ramp), history)


@pytest.mark.parametrize("later", [(), ({"from_step": 40, "weights": {"web": 7e9, "code": 1}},)])
def test_a_source_is_added_in_whatever_scale_the_run_and_its_stages_have(later):
    history = History(a_file({"web": 8e11, "code": 1e11}, *later))
    file = a_file({"web": 8, "code": 1, "books": 90}, *later)

    after = followed(file, history)

    assert after.shares_at(STEP)["books"] == pytest.approx(90 / 99)
    assert asked(file, after) == []


def test_a_source_that_was_retired_comes_back_in_place_of_all_others():
    history = BASE.edited(RetireSource(name="code"), 5)
    file = a_file({"code": 1})

    assert asked(file, history) == [("set web=0 code=1", None)]
    assert asked(file, followed(file, history)) == []


def test_amounts_are_set_added_and_retired():
    def of(**amounts):
        return a_mix(version=2, sources=tuple(amounts), mix={"amounts": amounts})

    history = History(of(web={"epochs": 1}, code={"tokens": 500}))
    file = of(web={"epochs": 2}, books={"samples": 9})

    assert asked(file, history) == [
        ("set web=2epochs", None),
        ("add books --amount 9samples", None),
        ("retire code", None),
    ]
    assert asked(file, followed(file, history)) == []
    ((key, said),) = refused(a_file({"web": 1, "code": 1}), history)
    assert key == "mix.stages"
    assert "the run draws amounts, from its start to its end" in said
    ((key, _),) = refused(of(web={"epochs": 1}, code={"tokens": 500}), BASE)
    assert key == "mix.amounts"


def test_what_may_differ_in_each_start_is_neither_refused_nor_asked_for():
    file = a_file({"web": 1, "code": 1}, runtime={"prefetch_steps": 9})

    assert asked(file, BASE) == []
    assert later_keys(file, BASE.base) == ["runtime.prefetch_steps"]


def test_a_file_with_a_stage_that_waits_is_the_run_before_and_after_it_began():
    file = a_file({"web": 3, "code": 1}, EPOCHS)
    before = History(file)
    begun = at_an_end(before, 6)
    assert [edit.change.kind for edit in begun.edits] == ["begin"]

    assert asked(file, before) == []
    for step in (6, 7, 8, 9, 30):
        wanted = found(file, begun, step)
        assert (wanted.changes, wanted.refused) == ((), ())

    other = a_file({"web": 3, "code": 1}, {**EPOCHS, "from_epochs": {"web": 3}})
    refused, _ = found(other, before).refused
    assert "is {'web': 3.0} in the file, and {'web': 2.0} in the run" in refused.said
    ramp = a_file({"web": 3, "code": 1}, {**EPOCHS, "ramp_steps": 4})
    (refused,) = found(ramp, before).refused
    assert "a stage once web was gone through 2 times, linear over 4 steps" in refused.said


def test_a_file_changes_what_holds_now_and_not_the_weights_of_a_stage_that_waits():
    history = History(a_file({"web": 3, "code": 1}, EPOCHS))

    assert asked(a_file({"web": 1, "code": 1}, EPOCHS), history) == [("set web=1 code=1", None)]
    later = {**EPOCHS, "ramp_steps": 0}
    history = History(a_file({"web": 3, "code": 1}, later))
    later = {**later, "weights": {"web": 1, "code": 4}}
    with pytest.raises(ConfigError, match="other weights in the run, and nobody knows its step"):
        found(a_file({"web": 3, "code": 1}, later), history)
