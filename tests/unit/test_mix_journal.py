"""The journal: what survives a kill, what is refused, and how records fold back into states."""

import errno
import itertools
import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace

import orjson
import pytest
import xxhash

from omniload.base.errors import IntegrityError, StateError, UnavailableError
from omniload.mix.deficit import WEIGHT_ONE
from omniload.mix.journal import (
    JOURNAL_VERSION,
    Journal,
    StepRecord,
    read_journal,
    state_before,
)
from omniload.mix.pieces import PieceTable
from omniload.mix.state import MixState
from tests.support.builders import pieces_of

NAMES = ("web", "code")
PRINT = {"seed": "7"}
WEIGHTS = (WEIGHT_ONE // 4, WEIGHT_ONE - WEIGHT_ONE // 4)


def states(count):
    """Return consecutive states; a step draws from one source or from both."""
    found = [MixState.start(2)]
    for step in range(count - 1):
        before = found[-1]
        (p, _, _), other = before.cursors_S
        found.append(
            before.after(
                cursors_S=[(p + 3, 1, 0), other if step % 2 else (other[0] + 1, 0, 32)],
                served_S=[30, 0 if step % 2 else 11],
                weights_S=WEIGHTS,
                carried=pieces_of([0, p + 2, 0, 0, 5 + step, 9 + step]),
            )
        )
    return found


def records_between(found):
    return [
        StepRecord.between(before, after, f"digest {before.step}")
        for before, after in itertools.pairwise(found)
    ]


def a_journal(path, found, *, first=0):
    with Journal(path, found[first].to_json(NAMES, PRINT)) as journal:
        for record in records_between(found[first:]):
            journal.append(record.to_json(NAMES))
    return path


def steps_in(path):
    base, records = read_journal(path)
    return base["step"], [record["step"] for record in records]


def test_what_was_appended_is_read_back(tmp_path):
    found = states(4)
    path = a_journal(tmp_path / "j", found)

    base, records = read_journal(path)

    assert base == found[0].to_json(NAMES, PRINT)
    assert [r["digest"] for r in records] == ["digest 0", "digest 1", "digest 2"]


def test_records_fold_to_the_states_they_came_from(tmp_path):
    found = states(6)
    base, stored = read_journal(a_journal(tmp_path / "j", found))

    records = [StepRecord.from_json(record, NAMES) for record in stored]
    start = MixState.from_json(base, NAMES, PRINT)

    folded = [state_before(k, start, records, lambda _: WEIGHTS) for k in range(6)]
    assert [s.to_json(NAMES, PRINT) for s in folded] == [s.to_json(NAMES, PRINT) for s in found]


def test_a_record_carries_the_revision_of_its_mix_into_the_state():
    before = MixState.start(2)
    after = replace(states(2)[1], mix_revision=4)

    folded = StepRecord.between(before, after, "d").applied_to(before, WEIGHTS)

    assert folded.mix_revision == 4


def test_a_record_names_only_the_sources_it_drew_from():
    found = states(3)

    record = StepRecord.between(found[1], found[2], "d").to_json(NAMES)

    assert record["drawn"] == {"web": [6, 1, 0, 30]}


@pytest.mark.parametrize("torn", [1, 5, 20])
def test_a_line_torn_by_a_kill_is_cut_off(tmp_path, torn):
    path = a_journal(tmp_path / "j", states(4))
    whole = path.read_bytes()
    path.write_bytes(whole[:-torn])

    kept = steps_in(path)[1]

    assert kept == ([0, 1, 2] if torn == 1 else [0, 1])


def test_a_journal_torn_in_its_first_line_is_empty(tmp_path):
    path = a_journal(tmp_path / "j", states(1))
    path.write_bytes(path.read_bytes()[:-9])

    with pytest.raises(StateError, match="the journal is empty"):
        read_journal(path)


@pytest.mark.parametrize("line", [0, 1])
def test_a_damaged_line_in_the_middle_is_refused(tmp_path, line):
    path = a_journal(tmp_path / "j", states(4))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = lines[line].replace(b'"step":', b'"stop":', 1)
    path.write_bytes(b"".join(lines))

    with pytest.raises(IntegrityError, match=rf"j:{line + 1}: the line does not match"):
        read_journal(path)


def test_a_missing_journal_is_a_state_error(tmp_path):
    with pytest.raises(StateError, match="no journal; give the folder of a run"):
        read_journal(tmp_path / "none")


def test_another_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("omniload.mix.journal.JOURNAL_VERSION", JOURNAL_VERSION + 1)
    path = a_journal(tmp_path / "j", states(1))
    monkeypatch.undo()

    with pytest.raises(StateError, match=f"journal state has version {JOURNAL_VERSION + 1}"):
        read_journal(path)


def test_resuming_keeps_the_history_and_drops_the_steps_that_were_lost(tmp_path):
    found = states(6)
    path = a_journal(tmp_path / "j", found)

    Journal(path, found[3].to_json(NAMES, PRINT)).close()

    assert steps_in(path) == (0, [0, 1, 2])


def test_a_resumed_run_appends_behind_the_history(tmp_path):
    found = states(6)
    path = a_journal(tmp_path / "j", found[:4])

    a_journal(path, found, first=2)

    assert steps_in(path) == (0, [0, 1, 2, 3, 4])


def test_a_run_from_the_start_begins_anew(tmp_path):
    found = states(4)
    path = a_journal(tmp_path / "j", found)

    Journal(path, found[0].to_json(NAMES, PRINT)).close()

    assert steps_in(path) == (0, [])


@pytest.mark.parametrize("step", [0, 7])
def test_a_journal_that_does_not_lead_up_to_the_state_is_moved_aside(tmp_path, step):
    found = states(8)
    path = a_journal(tmp_path / "j", found[:5], first=2)

    Journal(path, found[step].to_json(NAMES, PRINT)).close()

    assert steps_in(path) == (step, [])
    assert steps_in(path.with_name("j.aside-1"))[0] == 2


def test_a_journal_of_another_mix_is_moved_aside(tmp_path):
    found = states(4)
    path = a_journal(tmp_path / "j", found)

    Journal(path, found[2].to_json(NAMES, {"seed": "8"})).close()
    Journal(path, found[2].to_json(NAMES, {"seed": "9"})).close()

    assert steps_in(path) == (2, [])
    assert steps_in(path.with_name("j.aside-1"))[0] == 0
    assert steps_in(path.with_name("j.aside-2"))[0] == 2


def test_a_kill_before_a_new_journal_is_whole_leaves_the_old_one_aside(tmp_path, monkeypatch):
    found = states(4)
    path = a_journal(tmp_path / "j", found)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(path), "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        Journal(path, found[1].to_json(NAMES, {"seed": "8"}))
    monkeypatch.undo()
    Journal(path, found[1].to_json(NAMES, {"seed": "8"})).close()

    assert steps_in(path.with_name("j.aside-1")) == (0, [0, 1, 2])
    assert steps_in(path) == (1, [])


def test_resuming_leaves_the_bytes_of_the_history_as_they_are(tmp_path):
    found = states(6)
    path = a_journal(tmp_path / "j", found)
    before, identity = path.read_bytes(), path.stat().st_ino

    Journal(path, found[3].to_json(NAMES, PRINT)).close()

    assert before.startswith(path.read_bytes())
    assert path.read_bytes().count(b"\n") == 4
    assert path.stat().st_ino == identity


@pytest.mark.parametrize("torn", [0, 1, 5, 20])
def test_a_run_resumes_behind_a_line_that_a_kill_tore(tmp_path, torn):
    found = states(6)
    path = a_journal(tmp_path / "j", found[:5])
    path.write_bytes(path.read_bytes()[: -torn or None])

    a_journal(path, found, first=4 if torn < 2 else 3)

    assert steps_in(path) == (0, [0, 1, 2, 3, 4])
    assert all(line.endswith(b"\n") for line in path.read_bytes().splitlines(keepends=True))


@pytest.mark.parametrize("line", [0, 1, 4])
def test_a_journal_damaged_in_the_middle_is_moved_aside(tmp_path, line):
    found = states(7)
    path = a_journal(tmp_path / "j", found)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = lines[line].replace(b'"step":', b'"stop":', 1)
    path.write_bytes(b"".join(lines))

    Journal(path, found[2].to_json(NAMES, PRINT)).close()

    assert steps_in(path) == (2, [])
    assert path.with_name("j.aside-1").read_bytes() == b"".join(lines)


def test_a_journal_torn_in_its_first_line_is_moved_aside(tmp_path):
    found = states(2)
    path = a_journal(tmp_path / "j", found[:1])
    path.write_bytes(path.read_bytes()[:-9])

    a_journal(path, found)

    assert steps_in(path) == (0, [0])


def test_opening_holds_one_record_however_long_the_journal_is(tmp_path):
    start = MixState.start(2)
    path = a_journal(tmp_path / "j", [start])
    base = path.read_bytes()
    text = orjson.dumps({"filling": "x" * 100_000})
    record = text + b"\t" + xxhash.xxh64_hexdigest(text).encode() + b"\n"
    path.write_bytes(base + 100 * record)

    tracemalloc.start()
    Journal(path, replace(start, step=60).to_json(NAMES, PRINT)).close()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert path.read_bytes() == base + 60 * record
    assert peak < 20 * len(record)


def test_a_write_that_takes_a_part_is_gone_on_with(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, rest, at: real(fd, bytes(rest[:7]), at))

    assert steps_in(a_journal(tmp_path / "j", states(4))) == (0, [0, 1, 2])


def failing_after(count, error):
    """Return a ``pwrite`` that writes so many bytes in all."""
    real, left = os.pwrite, [count]

    def pwrite(fd, rest, at):
        if not left[0]:
            if error is None:
                return 0
            raise error
        written = real(fd, bytes(rest[: left[0]]), at)
        left[0] -= written
        return written

    return pwrite


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), None])
def test_a_record_that_finds_no_room_leaves_the_one_before_as_the_last(
    tmp_path, monkeypatch, error
):
    found = states(4)
    path = a_journal(tmp_path / "j", found[:3])
    whole = path.read_bytes()
    last = records_between(found)[2].to_json(NAMES)
    with Journal(path, found[2].to_json(NAMES, PRINT)) as journal:
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", failing_after(9, error))
            with pytest.raises(UnavailableError, match=rf"{path}: .* \d+ bytes are free there"):
                journal.append(last)
        assert path.read_bytes() == whole

        journal.append(last)

    assert steps_in(path) == (0, [0, 1, 2])


def test_a_new_journal_that_finds_no_room_is_an_outage(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", failing_after(0, OSError(errno.ENOSPC, "full")))

    with pytest.raises(UnavailableError, match="bytes are free there; make room and resume"):
        a_journal(tmp_path / "j", states(2))

    assert not (tmp_path / "j").exists()


LIMITED = """
import resource, sys
from pathlib import Path
from omniload.mix.journal import Journal

journal = Journal(Path(sys.argv[1]), {"step": 0, "fingerprint": {}})
size = Path(sys.argv[1]).stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))
journal.append({"step": 0})
journal.append({"step": 1, "filling": "x" * 200})
"""


def test_a_limit_of_the_system_on_the_file_leaves_whole_records(tmp_path):
    path = tmp_path / "j"

    ended = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, check=False
    )

    assert "UnavailableError" in ended.stderr
    assert "File too large" in ended.stderr
    assert steps_in(path) == (0, [0])
    assert path.read_bytes().endswith(b"\n")


def test_every_record_is_on_the_disk_before_append_returns(tmp_path, monkeypatch):
    found = states(3)
    path = tmp_path / "j"
    synced = []
    real = os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (real(fd), synced.append(path.stat().st_size if path.exists() else 0)),
    )

    with Journal(path, found[0].to_json(NAMES, PRINT)) as journal:
        for record in records_between(found):
            journal.append(record.to_json(NAMES))
            assert synced[-1] == path.stat().st_size


@pytest.mark.parametrize("step", [-1, 6])
def test_a_step_that_the_journal_does_not_cover_is_refused(step):
    found = states(4)

    with pytest.raises(StateError, match=rf"covers steps 0 to 3, step {step} is outside"):
        state_before(step, found[0], records_between(found), lambda _: WEIGHTS)


def test_a_record_of_another_step_is_refused():
    found = states(4)
    record = records_between(found)[2]

    with pytest.raises(StateError, match="has step 2 where step 0 was due"):
        record.applied_to(found[0], WEIGHTS)


@pytest.mark.parametrize(
    "changes",
    [
        {"drawn": {"books": [1, 0, 0, 5]}},
        {"drawn": {"web": [1]}},
        {"drawn": None},
        {"step": "x"},
        {"carried": [[1]]},
    ],
)
def test_a_damaged_record_is_refused(changes):
    record = records_between(states(2))[0].to_json(NAMES) | changes

    with pytest.raises(StateError, match="damaged"):
        StepRecord.from_json(record, NAMES)


def test_an_empty_carry_goes_through_a_record():
    found = states(2)
    record = StepRecord.between(found[0], replace(found[1], carried=PieceTable.empty()), "d")

    assert len(StepRecord.from_json(record.to_json(NAMES), NAMES).carried) == 0
