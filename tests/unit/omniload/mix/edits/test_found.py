"""The steps at which an edit takes effect, and steps that a run never reaches."""

import re

import pytest

from omniload.base.errors import ConfigError
from omniload.mix.edits.answers import EditTaken
from omniload.mix.edits.edit import SetWeights, Undo
from omniload.mix.edits.found import never_reached, require_open
from omniload.mix.edits.history import History
from tests.support.plane.builders import a_mix

STAGES = [{"weights": {"web": 1, "code": 1}}]


def changed(history, *steps):
    for step in steps:
        history = history.edited(SetWeights(weights={"web": 3}), step)
    return history


@pytest.mark.parametrize(
    ("step", "end", "ended", "said"),
    [
        (7, None, False, "step 7 is planned already.*first step that can be changed is 8"),
        (50, 50, False, "ends before step 50: say --at 8, or --at next"),
        (8, 8, False, r"ends before step 8: all its steps are planned.*runtime\.prefetch_steps"),
        (9, None, True, "ends before step 8: all its steps are planned"),
    ],
)
def test_a_step_that_no_edit_can_hold_at_is_refused(step, end, ended, said):
    with pytest.raises(ConfigError, match=said):
        require_open(step, planned=8, end=end, ended=ended)


def test_edits_behind_the_end_are_never_reached_unless_they_are_undone():
    history = changed(History(a_mix()), 8, 9, 12)

    assert [edit.revision for edit in never_reached(history, 9)] == [2, 3]
    assert never_reached(history, 13) == ()
    assert [edit.revision for edit in never_reached(history.edited(Undo(), 8), 9)] == [2]


@pytest.mark.parametrize(
    ("stop", "step", "at_rest", "said"),
    [
        (
            "each_once",
            9,
            False,
            r"ends with its data \(stop is each_once\).*before step 9, the edit",
        ),
        ("each_once", 8, False, "^$"),  # the next step: it is waited for
        ("never", 9, False, "^$"),
        ("never", 8, True, "no data plane is up: it holds once the run goes on to step 8$"),
        (
            "never",
            900,
            True,
            "goes on to step 900; its last step so far is 7: should the steps that it is given end it before, the edit",
        ),
        (
            "each_once",
            9,
            True,
            r"so far is 7: should the steps that it is given, or its data \(stop is each_once\), end it before, the",
        ),
        ("never", 7, True, "^$"),  # planned again
    ],
)
def test_an_edit_says_what_has_to_be_for_the_run_to_come_to_it(stop, step, at_rest, said):
    before = History(a_mix(mix={"stop": stop, "stages": STAGES}))

    taken = EditTaken.of(before, changed(before, step), 8, 8, at_rest=at_rest)

    assert re.search(said, taken.unsure)
    assert taken.unsure in taken.said
    assert ("unsure" in taken.model_dump()) == bool(taken.unsure)
