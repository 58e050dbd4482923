"""Stage events: one line each, with job, node, attempt, time and bytes by tier."""

import json
import os
import socket

import pytest

from omniload.base.errors import StateError
from snapshot.startup.events import (
    LOG_VARIABLE,
    StageEvent,
    Tally,
    handed_down,
    restarted,
    stage,
)
from snapshot.startup.reading import parse_event
from tests.support.ids import short_id


def lines_of(path):
    return [parse_event(line) for line in path.read_text().splitlines()]


def test_without_a_log_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with stage("environment", {}) as tally:
        tally.add("store", 7)

    assert list(tmp_path.iterdir()) == []
    assert tally.bytes == {"store": 7}


def test_a_stage_writes_its_begin_and_its_end_with_the_bytes_of_each_tier(tmp_path):
    log = tmp_path / "log"
    known = {
        LOG_VARIABLE: str(log),
        "OMNILOAD_JOB": "j",
        "OMNILOAD_NODE": "n",
        "OMNILOAD_ATTEMPT": "2",
    }

    with stage("environment", known) as tally:
        tally.add("store", 5)
        tally.add("store", 6)
        tally.add("disk", 1)

    begin, end = lines_of(log)
    assert (begin.event, end.event) == ("begin", "end")
    assert {(e.job, e.node, e.attempt, e.stage, e.version) for e in (begin, end)} == {
        ("j", "n", 2, "environment", 1)
    }
    assert begin.bytes == {}
    assert end.bytes == {"store": 11, "disk": 1}
    assert begin.time_ns <= end.time_ns


def test_a_stage_that_fails_ends_in_the_log_too(tmp_path):
    log = tmp_path / "log"

    with pytest.raises(RuntimeError), stage("image", {LOG_VARIABLE: str(log)}):
        raise RuntimeError("no")

    begin, end = lines_of(log)
    assert (begin.event, end.event) == ("begin", "end")
    assert (begin.facts, end.facts) == ({}, {"error": "RuntimeError"})


def test_processes_that_carry_out_the_same_stage_at_once_are_told_apart(tmp_path):
    log = {LOG_VARIABLE: str(tmp_path / "log")}

    with stage("model_build", log), stage("model_build", log) as inner:
        inner.note("image", "sha256:" + "f" * 1000)

    first, second, second_end, first_end = lines_of(tmp_path / "log")
    assert first.run == first_end.run != second.run == second_end.run
    assert second_end.facts["image"].startswith("sha256:f")
    assert first_end.facts == {}


def test_a_launcher_counts_its_restarts_on_top_of_the_scheduler_s(tmp_path):
    log = tmp_path / "log"

    with stage("data_plane", restarted(2, {LOG_VARIABLE: str(log), "SLURM_RESTART_COUNT": "3"})):
        pass

    assert [event.attempt for event in lines_of(log)] == [5, 5]


def test_the_names_of_other_schedulers_are_understood(tmp_path):
    log = tmp_path / "log"
    known = {
        LOG_VARIABLE: str(log),
        "SLURM_JOB_ID": "41",
        "SLURMD_NODENAME": "rack3",
        "TORCHELASTIC_RESTART_COUNT": "3",
    }

    with stage("environment", known):
        pass

    event = lines_of(log)[0]
    assert (event.job, event.node, event.attempt) == ("41", "rack3", 3)


def test_an_attempt_that_is_no_number_counts_as_the_first(tmp_path):
    log = tmp_path / "log"

    with stage("environment", {LOG_VARIABLE: str(log), "OMNILOAD_ATTEMPT": "second"}):
        pass

    assert lines_of(log)[0].attempt == 0


def test_stages_append_to_what_others_wrote(tmp_path):
    log = tmp_path / "log"
    for name in ("image", "environment"):
        with stage(name, {LOG_VARIABLE: str(log)}):
            pass

    assert [event.stage for event in lines_of(log)] == [
        "image",
        "image",
        "environment",
        "environment",
    ]


@pytest.mark.parametrize("log", ["no/folder", "pipe", "/dev/full"])
def test_a_log_that_cannot_be_written_does_not_keep_a_job_from_starting(tmp_path, log):
    os.mkfifo(tmp_path / "pipe")
    ran = []

    with stage("environment", {LOG_VARIABLE: str(tmp_path / log)}):
        ran.append(True)

    assert ran == [True]


def test_an_unknown_tier_is_refused():
    with pytest.raises(ValueError, match="'moon' is not among"):
        Tally().add("moon", 1)


def test_a_line_reads_back_as_it_was():
    event = StageEvent(
        job="j", node="n", attempt=0, stage="s", event="end", time_ns=5, bytes={"peer": 2}
    )

    assert parse_event(event.line()) == event


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"event": "middle"}, {"time_ns": "now"}, {"extra": 1}],
    ids=["version", "event", "time", "unknown key"],
)
def test_a_line_that_is_none_of_ours_is_refused(change):
    event = StageEvent(job="j", node="n", attempt=0, stage="s", event="end", time_ns=5)
    fields = {**json.loads(event.line()), **change}

    with pytest.raises(StateError):
        parse_event(json.dumps(fields))


@pytest.mark.parametrize("line", ["", "{}", "[1]", "not json"])
def test_a_line_of_something_else_is_refused(line):
    with pytest.raises(StateError, match="no start-up event"):
        parse_event(line)


AN_EVENT = StageEvent(node="n", job="j", attempt=0, stage="image", event="end", time_ns=5)


def a_line(**changes):
    return json.dumps(json.loads(AN_EVENT.line()) | changes)


def test_a_script_may_leave_out_what_it_does_not_know():
    fields = json.loads(AN_EVENT.line())
    for name in ("bytes", "run", "facts"):
        del fields[name]

    assert parse_event(json.dumps(fields)) == AN_EVENT


@pytest.mark.parametrize(
    "changes",
    [
        {"node": 5},
        {"node": ""},
        {"stage": "s" * 257},
        {"event": "middle"},
        {"event": []},
        {"time_ns": -1},
        {"time_ns": True},
        {"time_ns": 1.5},
        {"time_ns": 2**63},
        {"attempt": "0"},
        {"bytes": []},
        {"bytes": {"moon": 1}},
        {"bytes": {"disk": "much"}},
        {"run": None},
        {"facts": {"image": 7}},
        {"facts": {str(i): "" for i in range(17)}},
        {"unknown": 1},
    ],
    ids=lambda value: short_id(str(value)) or str(value),
)
def test_values_that_no_writer_writes_are_refused_in_short_words(changes):
    with pytest.raises(
        StateError, match="expected a line as OMNILOAD_STARTUP_LOG has it written"
    ) as caught:
        parse_event(a_line(**changes))

    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("line", ["", "5", "[" * 5000, "{}", '{"version": true}', b"\xff\x00"])
def test_what_is_no_event_at_all_is_refused(line):
    with pytest.raises(StateError, match="is no start-up event"):
        parse_event(line)


def test_another_version_is_refused_even_with_fields_of_its_own():
    with pytest.raises(StateError, match="version 2, this code reads 1"):
        parse_event('{"version":2,"when":3}')


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


def test_an_attempt_of_thousands_of_digits_is_none(tmp_path):
    log = tmp_path / "log"

    with stage("data_plane", {LOG_VARIABLE: str(log), "OMNILOAD_ATTEMPT": "9" * 5000}):
        pass

    assert {line.attempt for line in lines_of(log)} == {0}
