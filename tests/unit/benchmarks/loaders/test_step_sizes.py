"""The table of step sizes: each size beside the best of the others."""

from benchmarks.loaders.step_sizes import table_of
from benchmarks.loaders.throughput import CONTENDERS, OURS


def test_each_size_is_compared_with_the_best_of_the_others():
    others = [name for name in CONTENDERS if name != OURS]
    rates = {OURS: [9e6, 12e6, 15e6]} | {
        name: [n * 1e6] * 3 for n, name in enumerate(others, start=1)
    }

    table = table_of({8_192: rates, 131_072: rates})

    best = len(others)
    assert [row[0] for row in table.rows] == ["8k", "128k"]
    assert table.rows[0][1] == "12.0 (9.0 to 15.0)"
    assert table.rows[0][-1] == f"{12 / best:.2f}"
    assert len(table.rows[0]) == len(table.columns)
