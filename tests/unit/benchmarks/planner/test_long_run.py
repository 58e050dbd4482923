"""The memory of a planner over many steps: how fast it grows is read off marks, of a planner that really runs."""

import numpy as np
import pytest

from benchmarks.planner.long_run import marks_of, slope_of
from benchmarks.planner.plan_time import Case


def test_memory_that_grows_by_seven_bytes_a_step_does():
    slope, error = slope_of([100, 200, 300, 400], [700, 1400, 2100, 2800])

    assert (slope, error) == (pytest.approx(7), pytest.approx(0, abs=1e-9))


def test_how_sure_a_slope_is_is_what_numpy_says():
    steps, held = [1, 2, 3, 4, 5], [3, 9, 2, 8, 4]

    slope, error = slope_of(steps, held)

    (found, _), covariance = np.polyfit(steps, held, 1, cov=True)
    assert slope == pytest.approx(found)
    assert error == pytest.approx(np.sqrt(covariance[0, 0]))


def test_marks_are_of_a_planner_with_its_journal(tmp_path):
    case = Case(sources=4, samples=32, dp=8, microbatches=2)

    marks = list(marks_of(case, 12, 4, tmp_path))

    assert [mark.step for mark in marks] == [4, 8, 12]
    assert all(mark.resident_bytes > 0 for mark in marks)
    assert len((tmp_path / "journal.jsonl").read_bytes().splitlines()) > 12
