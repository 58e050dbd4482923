"""The comparison of mounts: who reads what, and what the table says."""

import subprocess
import sys

import pytest

from benchmarks.fusefs import peers as fusefs_peers
from benchmarks.fusefs.contenders import OURS, TASKS, Contender, mounted, program, rclones
from benchmarks.fusefs.peers import MiB, rounds_of, scattered, table_of


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


def test_rounds_that_failed_are_said_beside_the_median_of_the_others():
    costs = {
        (OURS, TASKS[2]): [(1.0, 0.5), (1.0, 0.5)],
        ("peer", TASKS[2]): [None, (2.0, 0.25)],
        ("broken", TASKS[2]): [None, None],
    }

    table = table_of("HDFS", costs, 200_000_000)

    assert [row[3] for row in table.rows] == [
        "200, 0.50 s",
        "100 (2.00x), 0.25 s; 1 of 2 failed",
        "2 of 2 failed",
    ]


def test_a_round_that_fails_is_kept_as_one(tmp_path, monkeypatch):
    outcomes = iter([(1.0, 0.5), OSError(5, "not reported yet"), (2.0, 0.5)])

    def costs_of(*_):
        outcome = next(outcomes)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    monkeypatch.setattr("benchmarks.fusefs.peers.costs_of", costs_of)
    one = Contender(OURS, None, "striped", TASKS[2:])

    assert rounds_of([one], tmp_path, b"", 3) == {(OURS, TASKS[2]): [(1.0, 0.5), None, (2.0, 0.5)]}


def test_a_peer_is_started_at_the_mount_point_without_proxies_and_with_its_keys(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("https_proxy", "http://proxy")
    text = "import os, sys; print(sys.argv[1], os.environ.get('https_proxy'), os.environ['A'])"

    program(sys.executable, "-c", text, "@", environment={"A": "key"}, log=tmp_path / "log")(
        tmp_path / "mnt"
    ).wait()

    assert (tmp_path / "log").read_text() == f"{tmp_path / 'mnt'} None key\n"


def test_a_peer_that_ends_before_it_mounts_is_an_error(tmp_path):
    ends = Contender("gone", lambda _: subprocess.Popen(["false"]), "plain")

    with pytest.raises(RuntimeError, match="gone did not mount"), mounted(ends, tmp_path):
        pytest.fail("nothing is mounted")


def test_rclone_with_its_cache_takes_no_part_in_the_writes(tmp_path):
    plain, cached = rclones("remote:", tmp_path, tmp_path / "log")

    assert TASKS[2] in plain.tasks
    assert cached.tasks == TASKS[:2]
    assert (plain.file, cached.file) == ("plain", "plain")


def test_the_servers_of_hdfs_lie_beside_the_mount_and_not_on_a_disk(monkeypatch, tmp_path):
    asked = {}

    def cluster(*_, **named):
        asked.update(named)
        raise RuntimeError("far enough")

    monkeypatch.setattr(fusefs_peers, "hdfs_cluster", cluster)

    with pytest.raises(RuntimeError, match="far enough"):
        fusefs_peers.on_hdfs(tmp_path, b"", 1, None)
    assert asked == {"replication": 1, "above": tmp_path}
