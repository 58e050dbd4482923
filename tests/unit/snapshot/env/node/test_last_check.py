"""The time of a check: known for a day, and unknown where the file cannot be what was written."""

import json
import os

import pytest

from snapshot.env.node.last_check import CHECKED, is_due, note_check

NOW_S = 1_700_000_000.0
DAY_S = 86_400


def test_a_check_holds_for_a_day_and_not_for_a_time_before_it(tmp_path):
    assert is_due(tmp_path, NOW_S)

    note_check(tmp_path, NOW_S)

    assert not is_due(tmp_path, NOW_S)
    assert not is_due(tmp_path, NOW_S + DAY_S - 1)
    assert is_due(tmp_path, NOW_S + DAY_S)
    assert is_due(tmp_path, NOW_S - 1), "a clock that was set back"
    assert [path.name for path in tmp_path.iterdir()] == [CHECKED]


@pytest.mark.parametrize(
    "fields",
    [
        *([], {}, {"version": 2, "checked_s": NOW_S}),
        *({"version": 1, "checked_s": value} for value in (True, "1700000000", NOW_S, -1, 1 << 70)),
    ],
)
def test_what_cannot_have_been_written_counts_as_never(tmp_path, fields):
    (tmp_path / CHECKED).write_text(json.dumps(fields))

    assert is_due(tmp_path, NOW_S)


def test_a_large_file_or_a_pipe_is_not_read(tmp_path):
    note_check(tmp_path, NOW_S)
    with (tmp_path / CHECKED).open("a") as file:
        file.write(" " * 5000)
    assert is_due(tmp_path, NOW_S)

    (tmp_path / CHECKED).unlink()
    os.mkfifo(tmp_path / CHECKED)
    assert is_due(tmp_path, NOW_S)
