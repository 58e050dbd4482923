"""Traces are found by image and command, and never keep a start from starting."""

import logging
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from omniload.base.errors import ConfigError
from snapshot.image.trace.store import (
    TraceStore,
    check_record,
    merge_into,
)
from snapshot.image.trace.trace import Touch, command_key, most_run, nearest, trace_of

OTHER = "sha256:" + "cd" * 32
RUN = ("python", "train.py", "--step", "7")


@pytest.fixture
def image():
    return "sha256:" + "ab" * 32


@pytest.fixture
def kept(tmp_path):
    return TraceStore(tmp_path / "traces")


def a_trace(image, command=RUN, *touches):
    return trace_of(image, command, touches or [Touch(1, "f", 0, 10)])


def test_the_nearest_command_shares_most_leading_words():
    commands = [("sh",), ("python", "eval.py"), ("python", "train.py", "--step", "3"), ("python",)]

    assert nearest(commands, RUN) == 2
    assert nearest(commands, ("python", "-c", "1")) == 3
    assert nearest(commands, ("bash",)) is None
    assert nearest([], RUN) is None


def test_a_command_is_its_words_and_not_their_text():
    assert command_key(("a", "b")) != command_key(("a b",))
    assert command_key(["a", "b"]) == command_key(("a", "b"))


def test_traces_of_starts_are_merged_under_their_key(kept, image):
    assert kept.get(image, RUN) is None

    kept.add(a_trace(image, RUN, Touch(5, "f", 0, 10)))
    merged = kept.add(a_trace(image, RUN, Touch(3, "f", 0, 10)))

    assert kept.get(image, RUN) == merged
    assert (merged.runs, merged.touches) == (2, (Touch(3, "f", 0, 10, 2),))


def test_the_same_command_in_another_image_is_another_start(kept, image):
    kept.add(a_trace(image))

    assert kept.get(OTHER, RUN) is None


def test_a_job_that_goes_on_starts_from_the_trace_of_its_last_step(kept, image):
    kept.add(a_trace(image, ("python", "eval.py")))
    last = kept.add(a_trace(image, (*RUN[:-1], "6")))

    assert kept.get(image, RUN) == last
    assert kept.get(image, ("sh",)) is None


def test_a_broken_trace_is_passed_over_and_replaced(kept, image, caplog):
    kept.add(a_trace(image))
    kept.path(image, RUN).write_bytes(b"broken")

    with caplog.at_level(logging.WARNING, "omniload"):
        assert kept.get(image, RUN) is None
        assert kept.add(a_trace(image)).runs == 1

    assert "passed over" in caplog.text
    assert "replaced" in caplog.text
    assert kept.get(image, RUN).runs == 1


def test_starts_that_end_at_once_are_all_counted(kept, image):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: kept.add(a_trace(image)), range(16)))

    assert kept.get(image, RUN).runs == 16


def test_merging_leaves_no_other_file(tmp_path):
    for _ in range(2):
        merge_into(tmp_path / "trace", a_trace(OTHER))

    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


OWN = ("sh",)


@pytest.mark.parametrize(
    ("runs", "chosen"),
    [
        ([], ()),
        ([5], (0,)),
        ([1, 1000], (1,)),
        ([20, 50, 30], (1, 2)),
        ([10, 10, 10, 10], (0, 1, 2)),
        ([1] * 100, tuple(range(8))),
    ],
)
def test_the_commands_that_make_up_most_starts_are_chosen(runs, chosen):
    assert most_run(runs) == chosen


def test_a_start_of_an_unknown_command_finds_what_others_ran(kept, image):
    kept.add(a_trace(image, ("python", "a.py"), Touch(1, "f", 0, 10)))
    kept.add(a_trace(image, ("java",), Touch(2, "g", 0, 10), Touch(4, "f", 0, 10)))
    kept.add(a_trace(OTHER, ("python",), Touch(1, "h", 0, 10)))

    assert kept.get(image, OWN) is None
    found = kept.any_of(image, OWN)

    assert (found.image, found.command, found.runs) == (image, OWN, 2)
    assert found.touches == (Touch(1, "f", 0, 10, 2), Touch(2, "g", 0, 10, 1))


def test_an_empty_trace_does_not_hide_one_that_is_not(kept, image):
    assert kept.any_of(image, OWN) is None
    for _ in range(9):
        kept.add(trace_of(image, OWN, []))
    assert kept.any_of(image, OWN) is None
    kept.add(a_trace(image))

    assert [touch.path for touch in kept.any_of(image, OWN).touches] == ["f"]


def test_a_trace_over_the_limit_or_a_pipe_is_passed_over_and_replaced(
    kept, image, monkeypatch, caplog
):
    path = kept.path(image, RUN)
    kept.add(a_trace(image))
    monkeypatch.setattr("snapshot.image.trace.store.MAX_TRACE_BYTES", path.stat().st_size - 1)

    assert kept.get(image, RUN) is None
    assert "and a trace at most" in caplog.text
    assert kept.add(a_trace(image)).runs == 1
    path.unlink()
    os.mkfifo(path)
    assert kept.get(image, RUN) is None


def test_a_trace_is_recorded_where_a_trace_or_nothing_lies(tmp_path, image):
    (tmp_path / "empty").touch()
    merge_into(tmp_path / "trace", a_trace(image))
    (tmp_path / "of another release").write_bytes(b'{"omniload_trace": 2}\n')

    for name in ("empty", "trace", "of another release", "new"):
        check_record(tmp_path / name)


def test_a_record_that_could_not_be_kept_is_refused_before_the_start(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "thesis").write_bytes(b"of years")

    for name, said in {
        "pipe": "a pipe is there",
        "": "a folder is there",
        "thesis": "holds b'of years'..., no trace",
        "none/trace": "its folder is not there",
        "thesis/trace": "its folder is not there",
        "n" * 300: "File name too long",
    }.items():
        with pytest.raises(ConfigError, match=said):
            check_record(tmp_path / name)
