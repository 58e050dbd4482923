"""Event files from anywhere: read once, whole or cut, and refused in plain words."""

from pathlib import Path

import pytest

from omniload.base.errors import ConfigError, StateError
from snapshot.startup import reading
from snapshot.startup.reading import Run, parse_events, read_events, runs_of, spans_of
from tests.support.snapshot.startup_builders import (
    EPOCH_NS,
    NS,
    a_pair,
    a_start,
    write_events,
    write_nodes,
)

PAIR = a_pair("image", "n1", 0, 5)
DATA = "".join(event.line() for event in PAIR).encode()


def test_a_folder_is_read_at_any_depth_and_a_file_once(tmp_path):
    write_nodes(tmp_path / "nodes", a_start())
    write_events(tmp_path / "nodes" / "later" / "n9.jsonl", PAIR)
    (tmp_path / "nodes" / "README").write_text("not read")

    log = read_events([tmp_path / "nodes", tmp_path / "nodes" / "n1.jsonl"])

    assert len(log.events) == len(a_start()) + 2
    assert log.torn == 0


def test_empty_lines_and_an_empty_file_are_nothing():
    assert parse_events(b"", "f") == ([], 0)
    assert parse_events(b"\n" + DATA + b"\n \n", "f") == (PAIR, 0)


def test_a_last_line_is_whole_without_its_newline():
    assert parse_events(DATA[:-1], "f") == (PAIR, 0)


def test_zeroes_at_the_end_that_a_crash_left_are_a_cut_line():
    assert parse_events(DATA + bytes(100), "f") == (PAIR, 1)


def test_what_looks_like_a_head_within_a_text_is_none():
    events = a_pair('{"version":1', "n1", 0, 5)

    assert parse_events("".join(e.line() for e in events).encode(), "f") == (events, 0)


def test_a_line_that_is_no_event_is_named_by_file_and_number():
    with pytest.raises(StateError, match=r"^n1\.jsonl:2: b'broken' is no start-up event"):
        parse_events(DATA.splitlines(keepends=True)[0] + b"broken\n" + DATA, "n1.jsonl")


@pytest.mark.parametrize("end", [b"\n", b""])
def test_another_version_is_refused_also_in_a_last_line(end):
    with pytest.raises(StateError, match=r"^f:3: start-up event has version 2"):
        parse_events(DATA + b'{"version":2}' + end, "f")


def test_a_line_longer_than_any_writer_s_is_refused(monkeypatch):
    monkeypatch.setattr(reading, "MOST_LINE_BYTES", 100)
    with pytest.raises(StateError, match="f:1: line of 200 bytes, longer than 100"):
        parse_events(b"x" * 200, "f")


@pytest.mark.parametrize(
    ("limit", "value", "said"),
    [
        ("MOST_BYTES", 1000, "above 1000 B"),
        ("MOST_FILES", 3, "files to 4, more than 3"),
        ("MOST_EVENTS", 15, "events to 16, more than 15"),
    ],
)
def test_more_than_is_read_is_refused(tmp_path, monkeypatch, limit, value, said):
    folder = write_nodes(tmp_path / "nodes", a_start())
    monkeypatch.setattr(reading, limit, value)

    with pytest.raises(StateError, match=said):
        read_events([folder])


def test_a_path_that_is_missing_or_no_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no file and no folder"):
        read_events([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="is no file and no folder"):
        read_events([Path("/dev/zero")])
    with pytest.raises(ConfigError, match=r"holds no \*\.jsonl file"):
        read_events([tmp_path])


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = write_events(tmp_path / "n1.jsonl", PAIR)

    def refuse(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", refuse)

    with pytest.raises(ConfigError, match=r"n1\.jsonl cannot be read: Permission denied"):
        read_events([path])


def seconds(joined):
    """Return begins and ends of the runs in seconds from the epoch of the builders."""
    return [
        (
            (run.begin_ns - EPOCH_NS) / NS,
            None if run.end_ns is None else (run.end_ns - EPOCH_NS) / NS,
        )
        for run in joined.runs
    ]


def joined(events):
    """Return what ``runs_of`` gives for events of one stage on one node, its runs alone."""
    found = runs_of(events)
    (runs,) = found.runs.values()
    return found._replace(runs=runs)


def test_a_begin_and_an_end_make_a_run_with_what_the_end_tells():
    (run,) = joined(a_pair("image", "a", 1, 4, bytes={"peer": 7}, facts={"image": "x"})).runs

    assert (run.end_ns - run.begin_ns) / NS == 3
    assert (dict(run.bytes), dict(run.facts)) == ({"peer": 7}, {"image": "x"})


def test_nothing_is_nothing():
    assert runs_of([]) == ({}, 0, 0)


def test_stages_and_nodes_are_not_mixed():
    events = a_pair("image", "a", 0, 1) + a_pair("image", "b", 0, 1) + a_pair("queue", "a", 0, 1)

    assert set(runs_of(events).runs) == {
        ("a", "image"),
        ("b", "image"),
        ("a", "queue"),
    }


def test_runs_that_name_themselves_keep_their_own_ends():
    events = a_pair("image", "a", 0, 9, run="long") + a_pair("image", "a", 1, 2, run="short")

    assert seconds(joined(events)) == [(0, 9), (1, 2)]


def test_runs_without_a_name_are_paired_first_to_first():
    assert seconds(joined(a_pair("image", "a", 0, 9) + a_pair("image", "a", 1, 2))) == [
        (0, 2),
        (1, 9),
    ]


def test_lines_without_a_name_may_come_in_any_order():
    begin, end = a_pair("image", "a", 0, 5)

    assert seconds(joined([end, begin])) == [(0, 5)]
    assert joined([end, begin]).strays == 0


def test_a_stage_that_takes_no_time_has_an_end():
    begin, end = a_pair("image", "a", 3, 3)

    assert seconds(joined([end, begin])) == [(3, 3)]


def test_of_a_named_run_the_order_of_the_lines_counts_not_their_times():
    found = joined(a_pair("image", "a", 5, 2, run="x"))

    assert seconds(found) == [(5, 5)]
    assert (found.backward, found.strays) == (1, 0)


@pytest.mark.parametrize("run", ["", "x"])
def test_ends_too_many_are_strays(run):
    begin, end = a_pair("image", "a", 0, 5, run=run)

    found = joined([begin, end, end, end])

    assert (len(found.runs), found.strays) == (1, 2)


@pytest.mark.parametrize("run", ["", "x"])
def test_begins_too_many_have_no_end(run):
    begin, end = a_pair("image", "a", 0, 5, run=run)

    assert seconds(joined([begin, begin, end])) == [(0, 5), (0, None)]


def some_runs(*pairs):
    return [Run(begin_ns=begin, end_ns=end) for begin, end in pairs]


@pytest.mark.parametrize(
    ("runs", "last_ns", "spans"),
    [
        ([], None, []),
        ([(0, 5)], None, [(0, 5)]),
        ([(3, 5), (0, 2)], None, [(0, 2), (3, 5)]),
        ([(0, 4), (2, 6)], None, [(0, 6)]),
        ([(0, 9), (2, 6)], None, [(0, 9)]),
        ([(0, 2), (2, 4)], None, [(0, 4)]),
        ([(1, 1)], None, [(1, 1)]),
        ([(0, None)], None, []),
        ([(0, None), (7, 8)], 9, [(0, 9)]),
        ([(-5, -3), (-4, -1)], None, [(-5, -1)]),
    ],
)
def test_runs_cover_spans_that_lie_apart(runs, last_ns, spans):
    assert spans_of(some_runs(*runs), last_ns) == spans
