"""Compute times in the run's folder: the latest of each rank are read, whatever a kill or a disk did to them."""

import numpy as np
import pytest

from omniload.base import clock
from omniload.base.errors import ConfigError
from omniload.mix.journal import bounded
from omniload.mix.journal import times as times_module
from omniload.mix.journal.times import TimeLog, require_seconds, times_since


def test_times_of_all_ranks_are_found_from_a_step_on(tmp_path):
    for rank in (0, 1):
        log = TimeLog(tmp_path, rank)
        for step in range(4):
            log.add(step, 8, 34, 0.5 + step + 10 * rank)

    found = times_since(tmp_path, 2)

    assert found.ranks_M.tolist() == [0, 0, 1, 1]
    assert found.tokens_M.tolist() == [8] * 4
    assert found.squares_M.tolist() == [34] * 4
    assert found.seconds_M.tolist() == [2.5, 3.5, 12.5, 13.5]
    assert len(times_since(tmp_path, 4)) == len(times_since(tmp_path / "elsewhere", 0)) == 0


def test_times_that_are_read_are_the_latest_of_a_long_run(tmp_path, monkeypatch):
    monkeypatch.setattr(times_module, "_LATEST_BYTES", 1000)
    log = TimeLog(tmp_path, 0)
    for step in range(200):
        log.add(step, 8, 34, 1.0 + step)

    seconds = times_since(tmp_path, 0).seconds_M.tolist()

    assert 10 < len(seconds) < 20
    assert seconds == [201.0 - n for n in range(len(seconds), 0, -1)]


def test_times_of_steps_that_an_earlier_start_had_are_not_those_of_the_latest(
    tmp_path, monkeypatch
):
    log = TimeLog(tmp_path, 0)
    for now_s in (100.0, 200.0):
        monkeypatch.setattr(clock.time, "time", lambda now_s=now_s: now_s)
        log.add(7, 8, 34, now_s)
    path = tmp_path / "times" / "rank-0.jsonl"
    of_the_release_before = b'{"step":7,"tokens":8,"squares":34,"seconds":9.0}\n'
    path.write_bytes(of_the_release_before + path.read_bytes())

    assert times_since(tmp_path, 7, 200.0).seconds_M.tolist() == [200.0]
    assert times_since(tmp_path, 7).seconds_M.tolist() == [9.0, 100.0, 200.0]


def test_times_that_are_told_behind_a_clock_that_was_set_are_of_the_start(tmp_path, monkeypatch):
    """None of them was of the start for as long as the clock was set back, so that no cost was fitted."""
    log = TimeLog(tmp_path, 0)
    for clock_s in (5_000.0, 1_400.0, 1_401.0, 9_000.0, 1_402.0):
        monkeypatch.setattr(clock.time, "time", lambda clock_s=clock_s: clock_s)
        log.add(7, 8, 34, clock_s)

    assert len(times_since(tmp_path, 7, 4_999.0)) == 5
    assert times_since(tmp_path, 7, 8_999.0).seconds_M.tolist() == [9_000.0, 1_402.0]


def test_times_of_many_ranks_are_read_as_far_as_there_is_room_for_all(tmp_path, monkeypatch):
    monkeypatch.setattr(times_module, "_ALL_BYTES", 4000)
    for rank in range(8):
        log = TimeLog(tmp_path, rank)
        for step in range(20):
            log.add(step, 8, 34, 1.0 + step)

    found = times_since(tmp_path, 0)

    of_each = np.bincount(found.ranks_M)
    assert len(of_each) == 8
    assert set(of_each.tolist()) <= {5, 6, 7}


def test_times_are_read_across_a_file_that_was_just_moved_aside(tmp_path, monkeypatch):
    monkeypatch.setattr(bounded, "_MOST_BYTES", 1300)
    log = TimeLog(tmp_path, 0)
    for step in range(30):
        log.add(step, 8, 34, 1.0 + step)

    found = times_since(tmp_path, 0).seconds_M.tolist()

    assert (tmp_path / "times" / "rank-0.jsonl.1").exists()
    assert sorted(found) == [1.0 + step for step in range(30 - len(found), 30)]
    assert len(found) > 18  # of both files


def test_times_of_many_ranks_are_those_of_some_among_all(tmp_path, monkeypatch):
    monkeypatch.setattr(times_module, "_RANKS", 4)
    for rank in range(10):
        TimeLog(tmp_path, rank).add(0, 8, 34, 1.0 + rank)

    assert times_since(tmp_path, 0).seconds_M.tolist() == [1, 4, 7, 10]


@pytest.mark.parametrize(
    "line",
    [
        b'{"step":1,"tokens":8,"squares":34}',
        b'{"step":1,"tokens":8,"squares":34,"seconds":null}',
        b'{"step":1,"tokens":8,"squares":34,"seconds":-1}',
        b'{"step":1,"tokens":8,"squares":34,"seconds":1e-310}',
        b'{"step":1,"tokens":8,"squares":4,"seconds":1}',
        b'{"step":1,"tokens":0,"squares":0,"seconds":1}',
        b'{"step":1,"tokens":1.5,"squares":34,"seconds":1}',
        b'{"step":1,"tok',
    ],
)
def test_times_on_a_damaged_line_are_passed_over_and_told(tmp_path, caplog, line):
    TimeLog(tmp_path, 0).add(0, 8, 34, 1.0)
    path = tmp_path / "times" / "rank-0.jsonl"
    path.write_bytes(path.read_bytes() + line + b"\n")
    TimeLog(tmp_path, 0).add(2, 8, 34, 3.0)

    assert times_since(tmp_path, 0).seconds_M.tolist() == [1, 3]
    assert caplog.text.count("a damaged line is passed over") == 1


def test_times_of_rows_without_a_document_are_none(tmp_path):
    TimeLog(tmp_path, 0).add(0, 0, 0, 1.0)

    assert not (tmp_path / "times").exists()


@pytest.mark.parametrize(
    "seconds",
    [
        0,
        -1.0,
        1e-310,
        pytest.param(10**400, id="huge"),
        float("nan"),
        float("inf"),
        "soon",
        None,
        [1, 2],
    ],
)
def test_times_that_are_none_are_refused(seconds):
    with pytest.raises(ConfigError, match="give the time that the rows took, above 0"):
        require_seconds(seconds)
