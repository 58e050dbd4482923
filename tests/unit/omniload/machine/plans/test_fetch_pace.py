"""The number of batches that a rank fetches at once: granted batches stay valid, however the mix changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.machine.plans.fetch_pace import FetchPace

steps_s = st.lists(st.floats(0.0, 5.0), min_size=2, max_size=40)


def pace_after(most, steps_s):
    """Return the pace of a rank whose steps have taken so long."""
    pace, now_s = FetchPace(most), 100.0
    pace.take(now_s)
    for step_s in steps_s:
        now_s += step_s
        pace.take(now_s)
    return pace


@pytest.mark.parametrize(
    ("step_s", "at_once", "is_slow"),
    [
        (0.0, 32, False),
        (0.007, 32, False),
        (0.0099, 25, False),
        (0.1, 2, False),
        (0.3, 1, False),
        (0.6, 1, True),
        (60.0, 1, True),
    ],
)
def test_a_rank_asks_for_what_it_takes_in_a_quarter_of_a_second(step_s, at_once, is_slow):
    pace = pace_after(32, [step_s] * 3)

    assert (pace.at_once, pace.is_slow) == (at_once, is_slow)


def test_a_rank_whose_pace_is_not_known_asks_for_one():
    assert (FetchPace(32).at_once, pace_after(32, []).at_once) == (1, 1)
    assert not pace_after(32, [60.0]).is_slow


def test_a_pause_as_for_a_checkpoint_leaves_a_rank_its_pace():
    pace = pace_after(32, [0.002, 0.002, 30.0])

    assert (pace.at_once, pace.is_slow) == (32, False)
    assert pace_after(32, [0.002, 30.0, 30.0]).is_slow


@given(steps_s)
def test_more_is_never_given_than_a_rank_takes_in_half_a_second_at_the_shorter_of_its_last_steps(
    steps_s,
):
    pace = pace_after(32, steps_s)

    assert 1 <= pace.at_once <= 32
    # One window in memory, and the requested one after it.
    assert pace.at_once == 1 or 2 * pace.at_once * min(steps_s[-2:]) <= 0.5 + 1e-6
