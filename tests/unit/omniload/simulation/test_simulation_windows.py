"""Costs of windows: planned and built several times; building is a line through two, one a quarter of the other."""

from itertools import count

import pytest

from omniload.actors.plane import PlaneSpec
from omniload.mix import config
from omniload.plan.place_tree import ClientPlaceTree
from omniload.simulation import windows
from omniload.simulation.windows import measure_builds, measure_planner
from tests.support.plane.corpora import a_corpus
from tests.support.plane.profiles import a_job, a_profile

TICK_S = 0.001
_WINDOWS = 4


@pytest.fixture
def a_clock_that_stands_still_once(monkeypatch):
    """Make every reading of the processor's clock take a millisecond, and the 40th ten seconds."""
    looks = count()
    now_s = [0.0]

    def look():
        now_s[0] += 10.0 if next(looks) == 40 else TICK_S
        return now_s[0]

    monkeypatch.setattr(windows.time, "process_time", look)
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


@pytest.mark.parametrize(
    ("at_once", "steps"), [(2_048, 8), (256, 1)], ids=["windows of eight steps", "of one"]
)
def test_the_smaller_window_has_a_quarter_of_the_tokens_of_the_larger_one(
    tmp_path, monkeypatch, at_once, steps
):
    monkeypatch.setattr(config, "_TOKENS_AT_ONCE", at_once)
    monkeypatch.setattr(windows, "_TOKENS_BUILT", 1)
    lines = []
    own = windows.line_through
    monkeypatch.setattr(windows, "line_through", lambda *p: lines.append(p) or own(*p))
    mix = a_corpus(tmp_path, rows=16, length=16, mix={"stop": "never"}, runtime={"kind": "ray"})
    assert mix.steps_at_once == steps
    spec = PlaneSpec(mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of(dp=4))

    costs = measure_builds(spec, "ray", ranks=4, tokens=256)

    for small, _, large, _ in lines:
        assert small == pytest.approx(large / 4, rel=0.35)
    assert len(lines) == 2
    assert costs.rows_token_s + costs.rows_s > 0


def test_a_window_whose_building_was_held_up_is_in_no_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(windows, "_TOKENS_BUILT", 1)
    calls = count()

    def held_up(call):
        # As many calls as the build of one window of each size makes.
        return (100.0 if next(calls) in range(12, 20) else 1e-3), call()

    monkeypatch.setattr(windows, "spent_s", held_up)
    mix = a_corpus(tmp_path, rows=16, length=16, mix={"stop": "never"}, runtime={"kind": "ray"})
    spec = PlaneSpec(mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of(dp=4))

    costs = measure_builds(spec, "ray", ranks=4, tokens=256)

    assert next(calls) >= 20, "it was reached"
    assert max(costs.rows_s, costs.slices_request_s) <= 3e-3
