"""A planner opens the journal of its run on a store that may be away for a while."""

import queue
import time
from pathlib import Path

import pytest

from omniload.actors import planner_journal
from omniload.actors.planner_journal import claimed_place, report_times
from omniload.base.clock import FakeClock
from omniload.base.errors import DefectError, UnavailableError
from omniload.mix.journal.room import GIVE_UP_S, Room
from omniload.mix.journal.times import NO_TIMES, TimeLog
from omniload.mix.run_record import write_run_record


@pytest.fixture
def clock():
    return FakeClock()


def test_a_planner_that_follows_opens_its_journal_once_the_store_answers(monkeypatch, clock):
    answers = [UnavailableError("outage 0"), UnavailableError("outage 1"), Path("run/journal")]

    def journal_at(*_):
        if isinstance(answer := answers.pop(0), UnavailableError):
            raise answer
        return answer

    monkeypatch.setattr(planner_journal, "journal_at", journal_at)

    room, said = Room(), []
    room.says = said.append
    assert claimed_place(Path("run"), "s3://journals", room, clock) == Path("run/journal")
    assert answers == []
    assert clock.slept_s == [0.1, 0.2]
    assert said == [
        "opens the journal again, as its store refused (outage 0),",
        "opens the journal again, as its store refused (outage 1),",
        "",
    ]


def test_whoever_opens_a_plane_is_told_at_once_that_the_store_of_its_journal_is_away(
    monkeypatch, clock
):
    def journal_at(*_):
        raise UnavailableError("no such host")

    monkeypatch.setattr(planner_journal, "journal_at", journal_at)

    with pytest.raises(UnavailableError, match="no such host"):
        claimed_place(Path("run"), "s3://jurnals", clock=clock)
    assert clock.slept_s == []


def test_a_store_of_a_journal_that_stays_away_is_waited_for_a_minute(monkeypatch, clock):
    def journal_at(*_):
        raise UnavailableError("outage")

    monkeypatch.setattr(planner_journal, "journal_at", journal_at)

    with pytest.raises(UnavailableError, match="outage"):
        claimed_place(Path("run"), "s3://journals", Room(), clock)
    assert GIVE_UP_S - 3.0 <= sum(clock.slept_s) <= GIVE_UP_S


def test_times_that_are_read_are_those_since_the_latest_start_of_the_run(tmp_path, monkeypatch):
    mix_file, told = tmp_path / "mix.yaml", queue.SimpleQueue()
    log = TimeLog(tmp_path, 0)
    for now_s in (100.0, 200.0):
        monkeypatch.setattr(time, "time", lambda now_s=now_s: now_s)
        write_run_record(tmp_path, mix_file, {"dp": 1}, text="version: 1")
        log.add(5, 8, 34, now_s)

    report_times(tmp_path, 0, told.put, told.put)

    assert told.get(timeout=60).times.seconds_M.tolist() == [200.0]


def test_times_that_cannot_be_read_are_none_and_a_defect_is_told(tmp_path, monkeypatch, caplog):
    told = queue.SimpleQueue()
    (tmp_path / "run.json").write_text("damaged")

    report_times(tmp_path, 0, told.put, told.put)
    assert told.get(timeout=60).times is NO_TIMES
    assert "no cost is fitted now" in caplog.text

    (tmp_path / "run.json").unlink()
    monkeypatch.setattr(planner_journal, "times_since", lambda *_: 1 / 0)
    report_times(tmp_path, 0, told.put, told.put)
    assert isinstance(told.get(timeout=60), DefectError)
