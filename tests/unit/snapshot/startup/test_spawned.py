"""What a process did before its first stage: told by who started it, written by the first stage."""

import json
import socket
from pathlib import Path

import pytest

from snapshot.startup.attempts import attempts_of
from snapshot.startup.events import (
    LOG_VARIABLE,
    handed_down,
    process_started,
    restarted,
    spawning,
    stage,
)
from snapshot.startup.reading import parse_event

SPAWNED = "OMNILOAD_STARTUP_SPAWNED"


@pytest.fixture
def known(tmp_path, monkeypatch):
    """The variables of a start whose process was started a second ago."""
    monkeypatch.setattr("snapshot.startup.events.time.time_ns", lambda: 5_000_000_000)
    monkeypatch.setenv(SPAWNED, "4000000000 0")
    return {LOG_VARIABLE: str(tmp_path / "log"), "OMNILOAD_JOB": "j", "OMNILOAD_NODE": "n"}


def lines_of(known):
    text = Path(known[LOG_VARIABLE]).read_text(encoding="utf-8")
    return [parse_event(line) for line in text.splitlines()]


def test_the_first_stage_tells_what_the_process_did_before_it(known):
    with stage("data_plane", known):
        pass
    with stage("model_build", known):
        pass

    events = lines_of(known)
    assert [(e.stage, e.event) for e in events] == [
        ("process_start", "begin"),
        ("process_start", "end"),
        ("data_plane", "begin"),
        ("data_plane", "end"),
        ("model_build", "begin"),
        ("model_build", "end"),
    ]
    assert (events[0].time_ns, events[1].time_ns) == (4_000_000_000, 5_000_000_000)
    assert events[0].run == events[1].run != events[2].run
    assert {(e.job, e.node, e.attempt) for e in events} == {("j", "n", 0)}


def test_the_time_is_in_the_report_as_a_stage_of_its_own(known):
    with stage("first_step", known):
        pass

    (attempt,) = attempts_of(lines_of(known))
    assert [(each.name, each.path_s) for each in attempt.stages] == [
        ("process_start", 1.0),
        ("first_step", 0.0),
    ]
    assert attempt.seconds == 1.0


def test_a_process_without_a_stage_may_tell_too_and_tells_once(known):
    process_started(known)
    process_started(known)

    assert [e.stage for e in lines_of(known)] == ["process_start"] * 2


def test_a_process_that_somebody_in_between_restarted_says_nothing(known):
    again = restarted(1, known)

    with stage("data_plane", again):
        pass

    assert [e.stage for e in lines_of(known)] == ["data_plane"] * 2


def test_a_launcher_s_own_restart_is_told(known, monkeypatch):
    again = restarted(1, known)
    monkeypatch.setenv(SPAWNED, spawning(again)[SPAWNED])

    with stage("data_plane", again):
        pass

    first = lines_of(known)[0]
    assert (first.stage, first.attempt, first.time_ns) == ("process_start", 1, 5_000_000_000)


@pytest.mark.parametrize("said", ["", "soon 0", "-5 0", "4000000000", "4000000000 0 0"])
def test_a_time_that_is_none_says_nothing(known, monkeypatch, said):
    monkeypatch.setenv(SPAWNED, said)

    with stage("data_plane", known):
        pass

    assert [e.stage for e in lines_of(known)] == ["data_plane"] * 2


def test_a_clock_that_was_set_back_gives_no_time_below_zero(known, monkeypatch):
    monkeypatch.setenv(SPAWNED, "9000000000 0")

    process_started(known)

    begin, end = lines_of(known)
    assert begin.time_ns == end.time_ns == 5_000_000_000


def test_without_a_log_nothing_is_handed_on_and_nothing_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SPAWNED, "1 0")

    process_started({})

    assert spawning({}) == {}
    assert list(tmp_path.iterdir()) == []


def test_what_a_process_is_started_with_names_time_and_attempt(known):
    assert spawning(known | {"SLURM_RESTART_COUNT": "3"}) == {SPAWNED: "5000000000 3"}


def test_who_a_start_is_goes_along_under_the_names_it_came_by():
    known = {
        "SLURM_JOB_ID": "41",
        "OMNILOAD_NODE": "n1",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "HOME": "/root",
        LOG_VARIABLE: "/log",
    }

    assert handed_down(known) == {
        "SLURM_JOB_ID": "41",
        "OMNILOAD_NODE": "n1",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }


def test_a_node_that_nobody_named_is_named_before_it_goes_along():
    assert handed_down({}) == {"OMNILOAD_NODE": socket.gethostname()}
    assert handed_down({"SLURMD_NODENAME": "rack3"})["OMNILOAD_NODE"] == "rack3"


def test_lines_written_with_what_was_handed_down_are_of_the_same_start(tmp_path):
    outside = {LOG_VARIABLE: str(tmp_path / "log"), "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    inside = handed_down(outside) | {LOG_VARIABLE: outside[LOG_VARIABLE]}

    for known in (outside, inside):
        with stage("image", known):
            pass

    seen = {
        (e["job"], e["node"], e["attempt"])
        for e in map(json.loads, (tmp_path / "log").read_text().splitlines())
    }
    assert seen == {("7", socket.gethostname(), 1)}


@pytest.mark.parametrize("began", ["\u0664" * 10, "9" * 5000, "\u00b2", ""])
def test_a_start_whose_time_is_no_number_of_ours_has_no_such_stage(known, monkeypatch, began):
    monkeypatch.setenv(SPAWNED, f"{began} 0")

    process_started(known)

    assert not Path(known[LOG_VARIABLE]).exists()


def test_an_attempt_of_thousands_of_digits_is_none(known):
    with stage("data_plane", known | {"OMNILOAD_ATTEMPT": "9" * 5000}):
        pass

    assert {line.attempt for line in lines_of(known)} == {0}
