"""Losses in the run's folder: the later report counts, and there is a limit to how much is kept."""

import math

import numpy as np
import orjson
import pytest

from omniload.mix.journal import bounded
from omniload.mix.journal.losses import LossLog, losses_by_source, losses_of_step

KEYS = np.asarray([[0, 5, 0, 0], [1, 9, 2, 16]])


def add(log, step, sums, names=("code", "web")):
    log.add(step, names, KEYS, np.asarray(sums, float), np.asarray([4, 8]))


def test_what_two_ranks_report_is_found_by_piece_and_the_later_report_counts(tmp_path):
    add(LossLog(tmp_path, 0), 3, [8, 8])
    add(LossLog(tmp_path, 0), 4, [1, 1])
    add(LossLog(tmp_path, 1), 3, [2, math.nan])

    found = losses_of_step(tmp_path, 3)

    assert found["code", 5, 0, 0] == (2.0, 4)
    assert math.isnan(found["web", 9, 2, 16][0])
    assert losses_of_step(tmp_path, 5) == {}


def test_the_latest_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(bounded, "_MOST_BYTES", 2000)
    log = LossLog(tmp_path, 0)

    for step in range(100):
        add(log, step, [step, step])

    kept = sum(path.stat().st_size for path in (tmp_path / "losses").iterdir())
    assert 1500 < kept < 4500
    assert losses_of_step(tmp_path, 99)
    assert not losses_of_step(tmp_path, 0)


def test_a_disk_that_refuses_costs_the_figures_and_is_told_once(tmp_path, caplog):
    (tmp_path / "losses").write_text("no folder")
    log = LossLog(tmp_path, 0)

    add(log, 1, [1, 1])
    add(log, 2, [1, 1])

    assert caplog.text.count("are kept no more") == 1


def test_a_torn_end_is_passed_over_and_the_resumed_rank_begins_a_line_of_its_own(tmp_path, caplog):
    add(LossLog(tmp_path, 0), 3, [8, 8])
    path = tmp_path / "losses" / "rank-0.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:-20])
    assert losses_of_step(tmp_path, 3)["code", 5, 0, 0] == (8.0, 4)

    resumed = LossLog(tmp_path, 0)
    add(resumed, 3, [5, 5])
    add(resumed, 3, [2, 2])

    assert losses_of_step(tmp_path, 3)["code", 5, 0, 0] == (2.0, 4)
    assert path.read_bytes().count(b"\n") == 4
    assert "passed over" in caplog.text


@pytest.mark.parametrize("lost", ["at", "names", "source", "loss", "labels"])
def test_a_damaged_line_is_named_and_passed_over_whole(tmp_path, caplog, lost):
    log = LossLog(tmp_path, 0)
    add(log, 3, [8, 8])
    path = tmp_path / "losses" / "rank-0.jsonl"
    whole = path.read_bytes()
    path.write_bytes(
        whole + whole.replace(b'"%s"' % lost.encode(), b'"lost"').replace(b"8.0", b"1.0")
    )

    assert losses_of_step(tmp_path, 3)["code", 5, 0, 0] == (8.0, 4)
    assert str(path) in caplog.text
    assert "passed over" in caplog.text


def test_losses_are_summed_by_source_from_a_step_on(tmp_path, caplog):
    add(LossLog(tmp_path, 0), 2, [100, 100])
    add(LossLog(tmp_path, 0), 3, [8, 6])
    add(LossLog(tmp_path, 1), 3, [2, math.nan])
    add(LossLog(tmp_path, 1), 5, [1, 7], names=("code", "books"))
    with (tmp_path / "losses" / "rank-1.jsonl").open("ab") as file:
        file.write(b'{"step":7,"loss":[1]}\n{"step":9,"at"')

    found, stop = losses_by_source(tmp_path, 3)

    assert {name: (each.loss, each.labels) for name, each in found.items()} == {
        "code": (11.0, 12),
        "web": (6.0, 8),
        "books": (7.0, 8),
    }
    assert stop == 6
    assert "a damaged line is passed over" in caplog.text
    assert losses_by_source(tmp_path, 6) == ({}, 6)
    assert losses_by_source(tmp_path / "none", 0) == ({}, 0)


def test_files_that_ranks_move_meanwhile_are_read_once(tmp_path):
    add(LossLog(tmp_path, 0), 1, [1, 2])
    add(LossLog(tmp_path, 1), 2, [3, 4])
    folder, taken = tmp_path / "losses", []

    def take(line):
        taken.append(orjson.loads(line)["step"])
        for path in folder.glob("rank-?.jsonl"):  # as a log does that is full
            path.replace(path.with_name(f"{path.name}.1"))

    assert bounded.take_from(folder, 0, take) == 3
    assert taken == [1, 2]


@pytest.mark.parametrize(
    "damage",
    [
        {"names": ["code"]},
        {"labels": [4, -8]},
        {"source": [0, -1]},
        {"loss": [1.0, 2.0, 3.0]},
    ],
)
def test_a_line_that_is_damaged_counts_in_no_part(tmp_path, damage):
    add(LossLog(tmp_path, 0), 3, [8, 8])
    path = tmp_path / "losses" / "rank-0.jsonl"
    line = orjson.loads(path.read_bytes())
    path.write_bytes(path.read_bytes() + orjson.dumps(line | damage) + b"\n")

    found, stop = losses_by_source(tmp_path, 0)

    assert {name: (each.loss, each.labels) for name, each in found.items()} == {
        "code": (8.0, 4),
        "web": (8.0, 8),
    }
    assert stop == 4
