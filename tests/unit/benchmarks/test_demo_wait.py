"""The wait of the demo's trainer, read from lines of a run's log."""

import pytest
from click.testing import CliRunner

from benchmarks import demo_wait as bench
from trainer_integration.run.run_log import RunLog, StepLine


def a_step(step, *, seconds=1.0, wait_s=(0.0, 0.0), attempt=0):
    return StepLine(
        attempt=attempt,
        step=step,
        loss=1.0,
        balance_loss=1.0,
        grad_norm=1.0,
        lr=0.1,
        tokens=8,
        seconds=seconds,
        wait_s=wait_s,
        compute_s=(0.5, 0.5),
        imbalance=1.0,
        bound=1.0,
        tokens_by_source={"web": 8},
        digest=None,
    )


def test_the_slowest_rank_counts_and_the_first_steps_do_not():
    first = [a_step(0, wait_s=(1.0, 1.0)), a_step(1, wait_s=(1.0, 1.0))]
    rest = [a_step(s, seconds=2.0, wait_s=(0.02, w)) for s, w in [(2, 0.0), (3, 0.06), (4, 0.5)]]

    waits = bench.waits_of([*first, *rest])

    assert (waits.steps, waits.ranks, waits.seconds) == (3, 2, 2.0)
    assert waits.median == pytest.approx(0.03)
    assert waits.most == pytest.approx(0.25)
    assert waits.whole == pytest.approx((0.02 + 0.06 + 0.5) / 6)


def test_a_run_of_nothing_but_first_steps_is_refused():
    with pytest.raises(ValueError, match="the run has 2 steps; 3 or more"):
        bench.waits_of([a_step(0), a_step(1)])


def test_a_run_that_is_there_is_read_and_not_run_again(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.report.REPORTS", tmp_path / "reports")
    with RunLog(tmp_path / "run") as log:
        for step in range(5):
            log.write(a_step(step, wait_s=(0.01, 0.015)))
        log.write(a_step(4, wait_s=(0.02, 0.0), attempt=1))  # run again after a restart

    CliRunner().invoke(bench.main, ["--run-dir", str(tmp_path / "run")], catch_exceptions=False)

    (path,) = (tmp_path / "reports").iterdir()
    text = path.read_text()
    assert "| 2 | 3 | 1.000 | 1.50 % | 1.90 % | 2.00 % | 1.67 % |" in text
    assert "waits for data 1.50 % of a step in the median" in text
