"""The planner's benchmark on a few small steps."""

import itertools

from click.testing import CliRunner

from benchmarks.planner import plan_time as bench

SMALL = bench.Case(sources=3, samples=100, dp=4)


def test_a_step_holds_a_whole_number_of_rows_for_every_rank():
    mix = SMALL.mix()

    assert mix.rows_per_step == 8  # 100 documents of 650 tokens are 7.9 rows of 8,192
    assert len(mix.names) == 3


def test_rows_are_as_long_as_the_microbatches_need():
    mix = bench.Case(sources=3, samples=96, dp=4, microbatches=3).mix()

    assert (mix.rows_per_step, mix.pack.length) == (12, 5_200)


def test_steps_are_planned_one_after_the_other_and_each_is_timed():
    planned = list(itertools.islice(bench.steps_of(SMALL), 100))

    assert all(step.rows == 8 for step in planned)
    assert all(0 < step.placing_s < step.seconds for step in planned)
    assert 0 < planned[-1].hearing_s < planned[-1].seconds
    assert all(step.imbalance >= step.bound for step in planned)
    assert all(step.samples > step.rows for step in planned)


def test_the_report_holds_the_cases_that_were_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.report.REPORTS", tmp_path)

    CliRunner().invoke(
        bench.main, ["--steps", "2", "--most", "512", "--soak", "40"], catch_exceptions=False
    )

    (path,) = (tmp_path / "planner").iterdir()
    text = path.read_text()
    assert "\n| 16 | 8 x 5 | " in text
    assert "| 306 |" not in text
    assert "Medians of 2 steps" in text
    assert "| 40 | " in text
