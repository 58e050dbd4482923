"""The mix benchmark on a few small steps."""

import itertools

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.planner import mix_accuracy as bench
from benchmarks.planner.planned_steps import Lengths, steps_of, table_at
from tests.support.plane.builders import a_mix


def test_lengths_go_round_and_round():
    lengths = Lengths(np.array([5, 7, 9], np.int32))

    assert lengths.between(2, 6).tolist() == [9, 5, 7, 9]
    table = table_at(lengths, 2, 2)
    assert (table.start, table.stop, table.positions_N.tolist()) == (2, 4, [2, 3])
    assert table.lengths_N.tolist() == [9, 5]


def test_steps_follow_each_other_and_are_full_but_for_padding():
    mix = a_mix(rows=4, length=32)
    lengths = [Lengths(np.array([3, 8, 2], np.int32)), Lengths(np.array([40, 1], np.int32))]

    steps = list(itertools.islice(steps_of(mix, lengths), 5))

    assert [state.step for state, _ in steps] == [0, 1, 2, 3, 4]
    for (_, before), (state, _) in itertools.pairwise(steps):
        assert state == before.after
    assert all(100 < m.pieces.lengths_P.sum() <= 128 for _, m in steps)


def test_choice_by_weight_draws_until_the_budget_is_met():
    lengths = [Lengths(np.array([10], np.int32)), Lengths(np.array([30], np.int32))]

    tokens = bench.chosen_tokens(np.random.default_rng(0), lengths, np.array([1.0, 1.0]), 8_000)

    assert tokens.sum() >= 8_000
    assert tokens[1] / tokens.sum() == pytest.approx(0.75, abs=0.05)


def test_a_share_is_measured_against_the_weights_of_each_step():
    shares = bench.Shares.none(2)
    shares.add(bench.DRAWN, np.array([10.0, 30.0]), np.array([0.25, 0.75]))
    assert shares.tokens[bench.DRAWN].tolist() == [10.0, 30.0]

    for method in bench.METHODS:
        shares.add(method, np.array([60.0, 0.0]), np.array([0.5, 0.5]))

    assert shares.worst()[bench.DRAWN] == pytest.approx(30.0)
    assert shares.worst()[bench.WEIGHTED] == pytest.approx(50.0)


def test_the_planner_comes_closer_than_chance_at_every_moment():
    found = bench.deviations(bench.Case(8, 0), rows=8, steps=4, samples=500)

    assert set(found) == {
        "500 samples",
        "step 4, a stage or ramp ends",
        "step 8, a stage or ramp ends",
        "step 10, a stage or ramp ends",
        "step 12, the end",
    }
    for by_method in found.values():
        assert by_method[bench.DRAWN] < by_method[bench.WEIGHTED]


def test_the_report_holds_the_worst_of_all_draws(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.report.REPORTS", tmp_path)
    monkeypatch.setattr(bench, "_SAMPLES", 300)
    arguments = ["--draws", "2", "--most", "2", "--rows", "4", "--steps", "2"]

    CliRunner().invoke(bench.main, arguments, catch_exceptions=False)

    (path,) = (tmp_path / "planner").iterdir()
    text = path.read_text()
    assert "| 2 | 300 samples |" in text
    assert "worst of 2 draws" in text
    assert "After 300 samples" in text
