"""The comparison of mounts: who reads what, and what the table says."""

from benchmarks.fusefs_peers import OURS, TASKS, MiB, scattered, table_of


def test_readers_share_the_blocks_of_a_file_each_read_once_and_out_of_order():
    parts = scattered(64 * MiB, 4, seed=1)

    assert sorted(offset for part in parts for offset in part) == list(range(0, 64 * MiB, 4 * MiB))
    assert [len(part) for part in parts] == [4, 4, 4, 4]
    assert any(part != sorted(part) for part in parts)


def test_the_same_round_deals_the_same_blocks():
    assert scattered(256 * MiB, 4, seed=2) == scattered(256 * MiB, 4, seed=2)
    assert scattered(256 * MiB, 4, seed=2) != scattered(256 * MiB, 4, seed=3)


def test_the_table_gives_medians_and_how_often_ours_is_faster():
    costs = {
        (OURS, TASKS[0]): [(1.0, 0.5), (2.0, 0.1), (9.0, 0.2)],
        (OURS, TASKS[2]): [(4.0, 1.0)],
        ("peer", TASKS[0]): [(3.0, 0.5), (4.0, 0.5), (5.0, 0.5)],
        ("peer", TASKS[2]): [(2.0, 0.25)],
    }

    table = table_of("S3", costs, 200_000_000)

    assert table.columns[1:] == TASKS
    assert table.rows == (
        (OURS, "100, 0.20 s", "", "50, 1.00 s"),
        ("peer", "50 (2.00x), 0.50 s", "", "100 (0.50x), 0.25 s"),
    )
