"""Decisions on groups in the run's folder: whole lines, in order, cut when a run resumes from an earlier state."""

import numpy as np
import orjson
import pytest

from omniload.base.errors import IntegrityError, StateError
from omniload.base.state import sealed
from omniload.mix.journal.groups import (
    GROUPS_NAME,
    Answers,
    BatchDecision,
    GroupJournal,
    RoundDecision,
    decision_of,
)


def a_decision(batch, step=7):
    of_step = RoundDecision(
        step=step,
        keys_N3=np.array([[0, 31, 0], [1, 7, 2]]),
        verdicts_N=np.array([0, 2], np.int8),
    )
    return BatchDecision(
        batch=batch,
        groups=1,
        surplus="carry",
        rounds=(of_step,),
        digest="5f",
        answers={0: Answers(4, 3)},
    )


def batches_in(folder, since=0):
    return [each.batch for each in GroupJournal(folder).since(since)]


@pytest.fixture
def run(tmp_path):
    journal = GroupJournal(tmp_path / "run")
    for batch in range(4):
        journal.append(a_decision(batch))
    return tmp_path / "run"


def test_a_decision_is_read_as_it_was_kept(run):
    found = next(GroupJournal(run).since(2))

    assert found.line() == a_decision(2).line()
    assert found.rounds[0].keys_N3.tolist() == [[0, 31, 0], [1, 7, 2]]
    assert found.rounds[0].verdicts_N.tolist() == [0, 2]
    assert found.answers == {0: (4, 3)}


def test_a_run_that_goes_on_from_before_writes_its_batches_anew(run):
    journal = GroupJournal(run)
    journal.append(a_decision(1, step=99))
    journal.append(a_decision(2))

    found = list(journal.since(0))

    assert [each.batch for each in found] == [0, 1, 2]
    assert found[1].rounds[0].step == 99


def test_a_run_that_begins_again_moves_the_decisions_of_before_aside_and_says_where(run, caplog):
    before = (run / GROUPS_NAME).read_bytes()
    journal = GroupJournal(run)
    journal.append(a_decision(0, step=99))
    journal.append(a_decision(1))
    journal.append(a_decision(0, step=98))  # its own, of work that it lost

    assert batches_in(run) == [0]
    assert (run / f"{GROUPS_NAME}.aside-1").read_bytes() == before
    assert len(list(run.iterdir())) == 2
    assert "holds batch 0 of a run, and this one goes on with batch 0" in caplog.text
    assert "moved to groups.jsonl.aside-1" in caplog.text


def test_decisions_that_do_not_lead_up_to_a_batch_are_moved_aside(run, caplog):
    GroupJournal(run).append(a_decision(6))

    assert batches_in(run, since=6) == [6]
    assert [each.batch for each in GroupJournal(run).every()] == [6]
    assert "holds batch 3 of a run, and this one goes on with batch 6" in caplog.text


def test_a_run_that_was_begun_from_a_state_and_goes_on_from_before_keeps_no_old_lines(tmp_path):
    for batch in (5, 6):
        GroupJournal(tmp_path).append(a_decision(batch))
    GroupJournal(tmp_path).append(a_decision(3))

    assert [each.batch for each in GroupJournal(tmp_path).every()] == [3]
    assert [path.name for path in tmp_path.iterdir()] == [GROUPS_NAME]


def test_the_name_of_the_file_is_made_durable_once_by_each_process(run, monkeypatch):
    synced = []
    monkeypatch.setattr("omniload.mix.journal.groups.sync_folder", synced.append)
    journal = GroupJournal(run)  # the one before may have been killed before it was

    for batch in range(4, 7):
        journal.append(a_decision(batch))

    assert synced == [run]


def test_a_line_torn_by_a_kill_is_none_and_is_written_over(run):
    path = run / GROUPS_NAME
    path.write_bytes(path.read_bytes()[:-30])
    assert batches_in(run) == [0, 1, 2]

    GroupJournal(run).append(a_decision(3))

    assert batches_in(run) == [0, 1, 2, 3]


def test_a_line_that_is_missing_is_told_with_its_place(run):
    path = run / GROUPS_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:1], *lines[2:]]))

    with pytest.raises(StateError, match=r"groups\.jsonl:2: has batch 2 where batch 1 is due"):
        batches_in(run)


def test_a_run_that_kept_none_is_told(tmp_path):
    with pytest.raises(StateError, match=r"groups\.jsonl: no decisions on groups"):
        batches_in(tmp_path)


def changed(**changes):
    """Return a line with other values, with a new checksum as a forger would write it."""
    held = orjson.loads(a_decision(0).line())
    del held["blake2b"]
    return orjson.dumps(sealed(held | changes))


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        a_decision(0).line().replace(b'"step":7', b'"step":8'),
        changed(batch=-1),
        changed(groups=0),
        changed(surplus="kept"),
        changed(rounds=[{"step": 1, "source": [0], "position": [1], "sub": [0], "verdicts": "kk"}]),
        changed(rounds=[{"step": 1, "source": [0], "position": [1], "sub": [0], "verdicts": "x"}]),
        changed(
            rounds=[{"step": 1, "source": [0.5], "position": [1], "sub": [0], "verdicts": "k"}]
        ),
        changed(rounds=[{"step": 1, "source": [-1], "position": [1], "sub": [0], "verdicts": "k"}]),
        changed(rounds=[7]),
        changed(answers={"0": [1, 2]}),
        changed(answers={"web": [2, 1]}),
    ],
)
def test_a_damaged_line_is_told_with_its_place(line):
    with pytest.raises(IntegrityError, match=r"^run:3: the line of a batch of groups is damaged"):
        decision_of(line, "run:3")


def test_a_line_of_another_version_is_told(run):
    with pytest.raises(StateError, match="version 2, this code reads 1"):
        decision_of(changed(version=2), "run:3")


def test_what_is_no_line_of_ours_is_not_cut_away(run):
    path = run / GROUPS_NAME
    path.write_bytes(b'{"version":2,"batch":0}\n' + path.read_bytes())

    with pytest.raises(StateError, match="version 2"):
        GroupJournal(run).append(a_decision(1))
    assert path.read_bytes().startswith(b'{"version":2')
