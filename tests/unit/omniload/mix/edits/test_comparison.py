"""Differences of two mixes whose stages wait for epochs."""

import pytest

from omniload.mix.edits.comparison import differences_of, first_other
from omniload.mix.edits.edit import SetWeights
from omniload.mix.edits.history import History
from omniload.mix.edits.stages import by_epochs
from tests.support.plane.edits.waiting import EPOCHS, a_file, at_an_end

WAITING = "mix.stages.from_epochs.0"


def told(one, other):
    """Return the keys that have different values in two mixes, and the values."""
    return [(each.key, each.one, each.other) for each in differences_of(one, other).keys]


def test_two_mixes_differ_by_what_their_stages_wait_for_and_by_their_weights_then():
    one = History(a_file({"web": 3, "code": 1}, EPOCHS))
    other = History(a_file({"web": 3, "code": 1}, {**EPOCHS, "from_epochs": {"web": 3}}))
    heavier = {**EPOCHS, "weights": {"web": 1, "code": 4}}

    assert differences_of(one, one).keys == ()
    assert [each.key for each in differences_of(one, other).keys] == ["mix.stages.from_epochs.0"]
    third = History(a_file({"web": 3, "code": 1}, heavier))
    (shares,) = differences_of(one, third).keys
    assert (shares.key, shares.one) == (f"{WAITING}.shares", {"web": 0.25, "code": 0.75})
    slower = History(a_file({"web": 3, "code": 1}, {**EPOCHS, "ramp_steps": 9}))
    assert told(one, slower) == [(f"{WAITING}.ramp", "linear over 3 steps", "linear over 9 steps")]


def test_a_stage_that_began_is_compared_with_the_one_that_waits_whatever_was_edited_between():
    one = History(a_file({"web": 3, "code": 1}, EPOCHS))
    begun = at_an_end(one, 6)

    assert told(one, begun) == [(f"{WAITING}.began", "not yet", "at step 6")]
    assert differences_of(one, begun).first_step == 6
    # Weights that are set before it and within it show only in the shares of steps.
    for step in (6, 7, 20):
        set_ = begun.edited(SetWeights(weights={"web": 5}), step)
        assert differences_of(begun, set_).keys == ()
        assert differences_of(begun, set_).first_step == step
    set_ = one.edited(SetWeights(weights={"web": 3.0}), 5)
    assert differences_of(one, set_).keys == ()
    assert told(set_, at_an_end(set_, 7)) == [(f"{WAITING}.began", "not yet", "at step 7")]
    plain = a_file({"web": 3, "code": 1}, {"from_step": 2, "weights": {"web": 1}}, EPOCHS)
    assert differences_of(one, History(plain)).keys == ()


def test_stages_that_wait_are_numbered_as_in_the_file_however_many_edits_lie_before():
    third = {"from_epochs": {"code": 1}, "weights": {"web": 1}}
    history = History(a_file({"web": 3, "code": 1}, EPOCHS, third))
    history = history.edited(SetWeights(weights={"web": 4}), 3)

    assert [each[:2] for each in by_epochs(history)] == [(1, None), (2, None)]
    begun = at_an_end(history, 6).edited(SetWeights(weights={"web": 2}), 6)
    assert [each[:2] for each in by_epochs(begun)] == [(1, 6), (2, None)]
    assert by_epochs(begun)[0][2].weights == {"web": 1, "code": 3}


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ("", "0a", (0, None)),
        ("0a 1b", "2c", (0, None)),
        ("0a 1b 2c", "1b 2c 3d", (2, None)),
        ("2c 3d 4e 5f", "0a 1b 2c 3x 4x", (3, 3)),
    ],
)
def test_steps_of_two_runs_are_compared_as_they_are_read(one, other, found):
    steps = [iter([(int(step[0]), step[1]) for step in each.split()]) for each in (one, other)]

    assert first_other(*steps) == found
