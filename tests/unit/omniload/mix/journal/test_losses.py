"""Losses in the run's folder: the later report counts, and there is a limit to how much is kept."""

import math
from functools import partial

import numpy as np
import orjson
import pytest

from omniload.mix.journal import bounded, losses
from omniload.mix.journal.losses import (
    LossLog,
    SourceLoss,
    TurnLosses,
    latest_losses,
    losses_by_source,
    losses_of_step,
)

KEYS = np.asarray([[0, 5, 0, 0], [1, 9, 2, 16]])


def add(log, step, sums, names=("code", "web")):
    log.add(step, names, KEYS, np.asarray(sums, float), np.asarray([4, 8]))


def test_what_two_ranks_report_is_found_by_piece_and_the_later_report_counts(tmp_path):
    add(LossLog(tmp_path, 0), 3, [8, 8])
    add(LossLog(tmp_path, 0), 4, [1, 1])
    add(LossLog(tmp_path, 1), 3, [2, math.nan])

    found = losses_of_step(tmp_path, 3)

    assert found.pieces["code", 5, 0, 0] == (2.0, 4, "document")
    assert math.isnan(found.pieces["web", 9, 2, 16][0])
    assert not losses_of_step(tmp_path, 5)


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
    assert losses_of_step(tmp_path, 3).pieces["code", 5, 0, 0] == (8.0, 4, "document")

    resumed = LossLog(tmp_path, 0)
    add(resumed, 3, [5, 5])
    add(resumed, 3, [2, 2])

    assert losses_of_step(tmp_path, 3).pieces["code", 5, 0, 0] == (2.0, 4, "document")
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

    assert losses_of_step(tmp_path, 3).pieces["code", 5, 0, 0] == (8.0, 4, "document")
    assert str(path) in caplog.text
    assert "passed over" in caplog.text


def test_a_preference_pair_counts_once_in_what_policies_go_by_whatever_its_length(tmp_path):
    log, keys = LossLog(tmp_path, 0), np.array([[0, 1, 0, 0], [0, 2, 0, 0], [1, 3, 0, 0]])
    # The losses are 0.5 and 0.1 for pairs, the second of which is long, and 2 per label for a document.
    log.add(0, ["taste", "web"], keys, np.array([0.5 * 4, 0.1 * 96, 8.0]), np.array([4, 96, 4]))

    found, _ = losses_by_source(tmp_path, 0, {"taste"})
    turns = TurnLosses(tmp_path, 0, 1, {"taste"}).since(0)

    assert {name: round(told.mean, 9) for name, told in found.items()} == {"taste": 0.3, "web": 2}
    assert turns[0] == found
    assert round(losses_by_source(tmp_path, 0)[0]["taste"].mean, 9) == 0.116


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
        for path in folder.glob("rank-?.jsonl"):  # as a full log does
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


def a_part(run, rank, sums, columns, **more):
    LossLog(run, rank).add(
        3,
        ("code", "web"),
        KEYS,
        np.asarray(sums, float),
        np.asarray([4, 8]),
        columns=columns,
        **more,
    )


def test_what_cp_peers_tell_of_one_piece_is_summed_and_a_resume_with_others_counts_alone(tmp_path):
    a_part(tmp_path, 0, [8, 16], (0, 4))
    a_part(tmp_path, 1, [4, 16], (2, 4))
    a_part(tmp_path, 1, [4, 8], (2, 4), over="row")  # reported again
    assert losses_of_step(tmp_path, 3).pieces == {
        ("code", 5, 0, 0): (12.0, 8, "row"),
        ("web", 9, 2, 16): (24.0, 16, "row"),
    }

    add(LossLog(tmp_path, 0), 3, [1, 2])

    assert losses_of_step(tmp_path, 3).pieces["web", 9, 2, 16] == (2.0, 8, "document")


def test_words_on_a_source_are_summed_over_ranks_and_microbatches_and_told_once(tmp_path):
    logs = [LossLog(tmp_path, rank) for rank in range(2)]
    for _ in range(2):  # as after a resume
        logs[0].add_source(3, "web", SourceLoss(6.0, 4), KEYS[1])
        logs[0].add_source(3, "web", SourceLoss(2.0, 1), KEYS[0])
        logs[1].add_source(3, "web", SourceLoss(1.0, 4), KEYS[1] + 1)
        logs[1].add_source(3, "code", SourceLoss(math.nan, 4), KEYS[0])
    found = losses_of_step(tmp_path, 3)

    assert found.sources == {"web": SourceLoss(9.0, 9)}
    assert found.of_piece(("web", 70, 0, 0)) == (9.0, 9, "source")
    assert found.of_piece(("code", 5, 0, 0)) is None
    assert losses_by_source(tmp_path, 0)[0]["web"] == SourceLoss(18.0, 18)

    logs[0].add_source(4, "web", SourceLoss(60.0, 30), None)
    logs[1].add_source(4, "web", SourceLoss(90.0, 30), None)
    assert losses_of_step(tmp_path, 4).by_source() == {"web": SourceLoss(90.0, 30)}

    add(logs[0], 4, [8, 16])  # losses of documents too: these count
    found = losses_of_step(tmp_path, 4)
    assert found.by_source() == {"web": SourceLoss(16.0, 8), "code": SourceLoss(8.0, 4)}
    assert found.of_piece(("web", 9, 2, 16)).mean == 2.0
    assert found.of_piece(("web", 1, 1, 1)).mean == 3.0


def test_the_step_that_was_last_reported_of_is_found_at_the_ends_of_the_files(
    tmp_path, monkeypatch
):
    assert latest_losses(tmp_path) is None
    for step in (7, 8, 2):  # a run that went back
        for rank in (0, 1):
            add(LossLog(tmp_path, rank), step, [step, 8 * rank])

    step, found = latest_losses(tmp_path)
    assert (step, found.by_source()["code"].mean) == (2, 0.5)
    whole = (tmp_path / "losses" / "rank-0.jsonl").read_bytes()
    room = len(whole.splitlines()[-1]) + 9
    monkeypatch.setattr(losses, "last_lines", partial(bounded.last_lines, room=room))
    assert latest_losses(tmp_path) == (2, found)
    monkeypatch.undo()

    add(LossLog(tmp_path, 1), 3, [3, 4])
    with (tmp_path / "losses" / "rank-1.jsonl").open("ab") as file:
        file.write(b'{"step":9,"at"')
    assert latest_losses(tmp_path)[0] == 3
    (tmp_path / "losses" / "rank-1.jsonl").write_bytes(b'{"step":9}\n')
    assert latest_losses(tmp_path)[0] == 2


def test_losses_are_told_by_turns_of_some_steps(tmp_path, caplog):
    for step in (3, 4, 6, 7, 12):
        add(LossLog(tmp_path, step % 2), step, [step, math.nan if step == 12 else 8])
    with (tmp_path / "losses" / "rank-0.jsonl").open("ab") as file:
        file.write(b'{"step":30,"loss":[1]}\n')

    told = TurnLosses(tmp_path, 4, 3)
    assert told.since(0) == {
        0: {"code": SourceLoss(10.0, 8), "web": SourceLoss(16.0, 16)},
        1: {"code": SourceLoss(7.0, 4), "web": SourceLoss(8.0, 8)},
        2: {"code": SourceLoss(12.0, 4), "web": SourceLoss(0.0, 0)},
    }
    assert "a damaged line is passed over" in caplog.text


def test_a_line_of_a_turn_is_read_once_while_ranks_write_on_and_their_files_are_moved(
    tmp_path, monkeypatch
):
    parsed = []
    loads = orjson.loads
    monkeypatch.setattr(losses.orjson, "loads", lambda line: parsed.append(line) or loads(line))
    logs, told = [LossLog(tmp_path, rank) for rank in (0, 1)], TurnLosses(tmp_path, 0, 4)
    newest = tmp_path / "losses" / "rank-0.jsonl"
    assert told.since(0) == {}

    for step in range(6):
        add(logs[step % 2], step, [4, 8])
    assert told.since(0) == TurnLosses(tmp_path, 0, 4).since(0)
    parsed.clear()
    with newest.open("ab") as file:
        file.write(b'{"step":6,"at"')  # on its way, or torn off by a kill
    add(logs[1], 6, [4, 8])

    assert told.since(0)[1] == {"code": SourceLoss(12.0, 12), "web": SourceLoss(24.0, 24)}
    assert len(parsed) == 1
    add(logs[0], 7, [4, 8])
    newest.replace(newest.with_name("rank-0.jsonl.1"))
    add(logs[0], 8, [4, 8])

    assert told.since(1) == TurnLosses(tmp_path, 0, 4).since(1)
    assert list(told.since(1)) == [1, 2]
    assert told.since(1)[1]["code"] == SourceLoss(16.0, 16)
    assert list(told.since(0)) == [0, 1, 2]  # the run went back
