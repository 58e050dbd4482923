"""The planner's benchmark on a few small steps."""

import itertools

from click.testing import CliRunner

from benchmarks import plan_time as bench


def test_a_step_holds_a_whole_number_of_rows_for_every_rank():
    mix = bench.a_mix(3, num_samples=100, dp=4)

    assert mix.rows_per_step == 8  # 100 documents of 650 tokens are 7.9 rows of 8,192
    assert len(mix.names) == 3


def test_steps_are_planned_one_after_the_other_and_each_is_timed():
    planned = list(itertools.islice(bench.steps_of(bench.a_mix(3, 100, 4), 4), 6))

    assert all(step.rows == 8 for step in planned)
    assert all(step.seconds > 0 for step in planned)
    assert all(step.imbalance >= step.bound for step in planned)
    assert all(step.samples > step.rows for step in planned)


def test_the_report_holds_the_cases_that_were_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.report.REPORTS", tmp_path)

    CliRunner().invoke(bench.main, ["--steps", "2", "--most", "512"], catch_exceptions=False)

    (path,) = tmp_path.iterdir()
    text = path.read_text()
    assert "\n| 16 | 8 | " in text
    assert "| 306 |" not in text
    assert "Medians of 2 steps" in text
