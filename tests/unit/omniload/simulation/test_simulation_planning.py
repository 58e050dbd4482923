"""What planning takes, by the same windows planned several times."""

from itertools import count

import pytest

from omniload.simulation import planning
from omniload.simulation.planning import measure_planner
from tests.support.plane.profiles import a_job, a_profile

TICK_S = 0.001
_WINDOWS = 4


@pytest.fixture
def a_clock_that_stands_still_once(monkeypatch):
    """Have every look at the processor's clock take a millisecond, and the 40th ten seconds."""
    looks = count()
    now_s = [0.0]

    def look():
        now_s[0] += 10.0 if next(looks) == 40 else TICK_S
        return now_s[0]

    monkeypatch.setattr(planning.time, "process_time", look)
    return looks


@pytest.mark.usefixtures("a_clock_that_stands_still_once")
def test_a_moment_in_which_the_interpreter_did_something_else_is_in_no_figure():
    advanced = []

    found = measure_planner(a_job(ranks=2), a_profile(), _WINDOWS, advanced.append)

    for seconds in (found.report_s, found.taken_s, found.step_s, found.part_s):
        assert 0 <= seconds <= TICK_S * 1.01
    assert found.step_s > 0
    assert sum(advanced) >= _WINDOWS, "each window of the first time was told, and no other"
    assert sum(advanced) <= _WINDOWS + 2
