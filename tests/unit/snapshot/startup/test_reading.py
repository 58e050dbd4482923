"""Event files from anywhere: read once, whole or cut, and refused in plain words."""

from pathlib import Path

import pytest

from omniload.base.errors import ConfigError, StateError
from snapshot.startup import reading
from snapshot.startup.reading import parse_events, read_events
from tests.support.snapshot.startup_builders import a_pair, a_start, write_events, write_nodes

PAIR = a_pair("image", "n1", 0, 5)
DATA = "".join(event.line() for event in PAIR).encode()


def test_a_folder_is_read_at_any_depth_and_a_file_once(tmp_path):
    write_nodes(tmp_path / "nodes", a_start())
    write_events(tmp_path / "nodes" / "later" / "n9.jsonl", PAIR)
    (tmp_path / "nodes" / "README").write_text("not read")

    log = read_events([tmp_path / "nodes", tmp_path / "nodes" / "n1.jsonl"])

    assert log.files == 5
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
