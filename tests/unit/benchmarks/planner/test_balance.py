import numpy as np
from click.testing import CliRunner

from benchmarks.planner import balance as bench
from omniload.plan.balance_methods import balance


def test_differencing_of_groups_fills_bins_equally():
    cost_N = np.random.default_rng(0).lognormal(5, 1, 96)

    bins_N = bench.equal_count_differencing(cost_N, 8)

    assert np.bincount(bins_N).tolist() == [12] * 8
    in_order = balance(cost_N, 8, method="none")
    assert np.bincount(bins_N, cost_N).max() < in_order.loads_B.max()


def test_packed_rows_hold_equal_tokens_and_unequal_work():
    linear_only = 768.0 * 1024
    all_pairs = linear_only + 1024.0**2

    cost_N = bench.rows(16, 4, 1_024).draw(np.random.default_rng(0)).cost_N

    assert cost_N.shape == (16,)
    assert (cost_N > linear_only).all()
    assert (cost_N <= all_pairs).all()
    assert cost_N.min() < cost_N.max()


def test_a_row_of_the_table_is_measured_against_mean_and_bound():
    even = bench.Case(
        name="even",
        num_items=8,
        num_bins=4,
        draw=lambda _rng: bench.Items(cost_N=np.ones(8), tokens_N=np.ones(8), longest_N=np.ones(8)),
    )
    method = bench.Method("greedy_swap", lambda c, b: balance(c, b).bins_N)

    name, bins, method_name, duration_ms, *ratios = bench.measured(even, method, draws=2)

    assert (name, bins, method_name) == ("even", "4", "greedy_swap")
    assert float(duration_ms) >= 0
    assert ratios == ["1.0000", "1.000000", "1.000000"]


def test_the_benchmark_prints_its_table_and_writes_nothing_unless_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "CASES", (bench.rows(8, 2, 512), bench.samples(32, 4, 1_024)))
    monkeypatch.setattr(bench, "SIZES", ((2, 2, 1), (4, 4, 4)))
    monkeypatch.setattr("benchmarks.report.REPORTS", tmp_path)
    arguments = ["--draws", "1", "--most", "16"]

    quiet = CliRunner().invoke(bench.main, [*arguments, "--no-report"], catch_exceptions=False)
    assert "greedy_swap" in quiet.output
    assert list(tmp_path.iterdir()) == []

    CliRunner().invoke(bench.main, arguments, catch_exceptions=False)
    (path,) = (tmp_path / "planner").iterdir()
    text = path.read_text()
    assert "| 8 rows of 0k | 2 | karmarkar_karp |" in text
    assert "| 32 samples to 1k | 4 | karmarkar_karp |" not in text
    assert "| 2 x 2 x 1 |" in text
    assert "| 4 x 4 x 4 |" not in text
    assert "python -m benchmarks.planner.balance --draws 1 --most 16" in text
