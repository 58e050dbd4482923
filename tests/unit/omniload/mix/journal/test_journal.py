"""The journal: what survives a kill, what is refused, and how records fold back into states."""

import errno
import io
import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace

import orjson
import pytest

from omniload.base.errors import IntegrityError, StateError, UnavailableError
from omniload.mix.journal.journal import Journal
from omniload.mix.journal.lines import JOURNAL_VERSION, chained, line_of
from omniload.mix.journal.reading import read_journal, read_tail, state_before
from omniload.mix.journal.records import StepRecord
from omniload.mix.journal.room import Room
from omniload.mix.journal.storage import FileStorage
from omniload.mix.pieces import PieceTable
from omniload.mix.state import MixState
from tests.support.plane.builders import pieces_of
from tests.support.plane.journals import (
    NAMES,
    PRINT,
    WEIGHTS,
    a_journal,
    opened,
    records_between,
    states,
)


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


class GrowingFile(io.BytesIO):
    """A file that gets the rest of its bytes just after a reader has found its end."""

    def __init__(self, content, found_bytes):
        super().__init__(content)
        self.end, self.rest = found_bytes, [len(content)]

    def readinto(self, buffer):
        data = self.read(min(len(buffer), self.end - self.tell()))
        buffer[: len(data)] = data
        if not data and self.rest:
            self.end = self.rest.pop()
        return len(data)


def test_a_line_that_is_being_written_as_it_is_read_is_not_damaged(tmp_path, monkeypatch):
    path = a_journal(tmp_path / "j", states(4))
    whole = path.read_bytes()

    def growing(_):
        return io.BufferedReader(GrowingFile(whole, len(whole) - 30))

    storage = FileStorage(path)
    monkeypatch.setattr(FileStorage, "opened", growing)

    assert steps_in(storage)[1] == [0, 1]


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


def doubled(lines, at):
    return [*lines[: at + 1], *lines[at:]]


def dropped(lines, at):
    return [*lines[:at], *lines[at + 1 :]]


def swapped(lines, at):
    return [*lines[: at - 1], lines[at], lines[at - 1], *lines[at + 1 :]]


LAST = 4
"""Number of the last line of a journal of four steps."""


@pytest.mark.parametrize(
    ("change", "at"),
    [(doubled, at) for at in range(LAST + 1)]
    + [(swapped, at) for at in range(1, LAST + 1)]
    + [(dropped, at) for at in range(LAST)],
)
def test_a_whole_line_that_is_missing_moved_or_doubled_is_found_at_open(
    tmp_path, caplog, change, at
):
    found = states(LAST + 1)
    path = a_journal(tmp_path / "j", found)
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True), at)))

    with pytest.raises((IntegrityError, StateError)):
        read_journal(path)
    opened(path, found[LAST]).close()

    assert "is moved to j.aside-1" in caplog.text
    assert steps_in(path) == (LAST, [])


def test_a_whole_last_line_that_is_missing_is_found_by_the_state_that_knows_of_it(tmp_path, caplog):
    found = states(5)
    path = a_journal(tmp_path / "j", found)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))

    opened(path, found[4]).close()

    assert "it ends before step 3, the run goes on from step 4: its last lines are missing" in (
        caplog.text
    )
    assert steps_in(path) == (4, [])


def test_records_that_are_renumbered_with_new_checksums_are_found(tmp_path):
    found = states(5)
    path = a_journal(tmp_path / "j", found)
    lines = [orjson.loads(text.rpartition(b"\t")[0]) for text in path.read_bytes().splitlines()]
    again = [line_of(lines[0], b"")]
    for value in [lines[1], lines[3], lines[4]]:
        again.append(line_of(value, again[-1].checksum))
    path.write_bytes(b"".join(map(bytes, again)))

    with pytest.raises(IntegrityError, match=r"j:3: the line is no record of step 1, which is due"):
        read_journal(path)


def test_a_line_of_another_run_at_the_same_step_is_found(tmp_path):
    path = a_journal(tmp_path / "j", states(5))
    ours = path.read_bytes().splitlines(keepends=True)
    values = [orjson.loads(line.rpartition(b"\t")[0]) for line in ours]
    theirs = [line_of(values[0], b"")]
    for value in [{**values[1], "elsewhere": True}, *values[2:]]:
        theirs.append(line_of(value, theirs[-1].checksum))
    path.write_bytes(b"".join([*ours[:2], bytes(theirs[2]), *ours[3:]]))

    with pytest.raises(IntegrityError, match=r"j:3: the line does not match its checksum"):
        read_journal(path)


@pytest.mark.parametrize("hole", [slice(0, 30), slice(30, 60)])
def test_a_last_line_with_a_hole_as_a_power_cut_leaves_it_is_cut_off(tmp_path, hole):
    path = a_journal(tmp_path / "j", states(4))
    *lines, last = path.read_bytes().splitlines(keepends=True)
    content = bytearray(last)
    content[hole] = bytes(30)
    path.write_bytes(b"".join(lines) + content)

    assert steps_in(path) == (0, [0, 1])


def test_another_state_than_the_one_that_the_journal_leads_to_is_refused(tmp_path):
    found = states(5)
    path = a_journal(tmp_path / "j", found)
    before = path.read_bytes()
    (position, sub, token), other = found[3].cursors_S
    changed = replace(found[3], cursors_S=((position + 1, sub, token), other))

    with pytest.raises(StateError, match="it is not the state that this run reached"):
        opened(path, changed)

    assert path.read_bytes() == before


def test_another_state_than_the_one_that_the_journal_starts_from_is_refused(tmp_path):
    found = states(3)
    path = a_journal(tmp_path / "j", found[1:])

    with pytest.raises(StateError, match="it is not the state that this run reached"):
        opened(path, replace(found[1], drawn_S=(31, 10)))


def test_a_record_that_leads_elsewhere_than_when_it_was_written_is_refused():
    found = states(3)
    record = records_between(found)[1]

    with pytest.raises(StateError, match="the state after step 1 has digest"):
        replace(record, carried=PieceTable.empty()).applied_to(found[1], WEIGHTS)
    with pytest.raises(StateError, match="the state after step 1 has digest"):
        record.applied_to(found[1], WEIGHTS[::-1])


@pytest.mark.parametrize(
    "change", [{"drawn": {2: ((4, 0, 0), 5)}}, {"carried": pieces_of([2, 0, 0, 0, 5, 9])}]
)
def test_a_record_of_a_source_that_is_not_added_yet_is_refused(change):
    found = states(2)
    record = replace(records_between(found)[0], **change)

    with pytest.raises(StateError, match="step 0 is of source 2, and the mix has 2 by then"):
        record.applied_to(found[0], WEIGHTS)


def test_a_missing_journal_is_a_state_error(tmp_path):
    with pytest.raises(StateError, match="no journal; give the folder of a run"):
        read_journal(tmp_path / "none")


def test_another_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("omniload.mix.journal.lines.JOURNAL_VERSION", JOURNAL_VERSION + 1)
    path = a_journal(tmp_path / "j", states(1))
    monkeypatch.undo()

    with pytest.raises(StateError, match=f"journal state has version {JOURNAL_VERSION + 1}"):
        read_journal(path)


def test_resuming_keeps_the_history_and_drops_the_steps_that_were_lost(tmp_path):
    found = states(6)
    path = a_journal(tmp_path / "j", found)

    opened(path, found[3]).close()

    assert steps_in(path) == (0, [0, 1, 2])


def test_a_resumed_run_appends_behind_the_history(tmp_path):
    found = states(6)
    path = a_journal(tmp_path / "j", found[:4])

    a_journal(path, found, first=2)

    assert steps_in(path) == (0, [0, 1, 2, 3, 4])


def test_a_run_from_the_start_moves_the_steps_that_are_there_aside_and_says_where(tmp_path, caplog):
    found = states(4)
    path = a_journal(tmp_path / "j", found)
    opened(path, found[2]).close()
    assert "steps of a run" not in caplog.text

    opened(path, found[0]).close()

    assert steps_in(path) == (0, [])
    said = f"{path} holds 2 steps of an earlier run, but this run begins at step 0, so they are moved to j.aside-1"
    assert said in caplog.text
    assert steps_in(path.with_name("j.aside-1")) == (0, [0, 1])
    caplog.clear()
    opened(path, found[0]).close()
    assert not caplog.text
    assert not path.with_name("j.aside-2").exists()


def test_a_run_that_is_begun_again_and_again_keeps_each_of_its_steps_aside_once(tmp_path, caplog):
    found = states(6)
    path = tmp_path / "j"
    for count in (3, 5, 2, 6, 6):
        a_journal(path, found[:count])
    for count in (4, 2, 3):
        a_journal(path, found[:count], fingerprint={"seed": "8"})
    opened(path, found[0]).close()

    kept = {each.name: len(steps_in(each)[1]) for each in tmp_path.glob("j*")}
    assert kept == {"j": 0, "j.aside-1": 5, "j.aside-2": 3}
    assert caplog.text.count("moved to j.aside-1") == 5
    assert caplog.text.count("moved to j.aside-2") == 3


def test_journals_that_were_moved_aside_before_and_that_another_begins_with_are_one(tmp_path):
    found = states(6)
    path = tmp_path / "j"
    for number, count in ((1, 3), (2, 4), (3, 6), (5, 1)):
        a_journal(tmp_path / f"j.aside-{number}", found[:count])
    (tmp_path / "j.aside-4").write_text("what is damaged\n")
    (tmp_path / "j.aside-copy").write_text("")
    a_journal(path, found[:5])

    opened(path, found[0]).close()

    # In the third, as it was: the others are looked at as one that is longer than each of them is moved.
    assert sorted(each.name for each in tmp_path.glob("j.*")) == [
        *("j.aside-1", "j.aside-2", "j.aside-3", "j.aside-4", "j.aside-5", "j.aside-copy"),
    ]
    a_journal(path, states(7))
    opened(path, found[0]).close()
    assert steps_in(tmp_path / "j.aside-1") == (0, [0, 1, 2, 3, 4, 5])
    assert sorted(each.name for each in tmp_path.glob("j.*")) == [
        *("j.aside-1", "j.aside-4", "j.aside-copy"),
    ]


def test_steps_that_were_moved_aside_are_moved_back_and_gone_on_with(tmp_path):
    found = states(5)
    path = a_journal(tmp_path / "j", found[:4])
    a_journal(path, found[:2])

    path.with_name("j.aside-1").rename(path)
    a_journal(path, found, first=3)

    assert steps_in(path) == (0, [0, 1, 2, 3])


@pytest.mark.parametrize("step", [0, 7])
def test_a_journal_that_does_not_lead_up_to_the_state_is_moved_aside(tmp_path, step):
    found = states(8)
    path = a_journal(tmp_path / "j", found[:5], first=2)

    opened(path, found[step]).close()

    assert steps_in(path) == (step, [])
    assert steps_in(path.with_name("j.aside-1"))[0] == 2


def test_a_journal_of_another_mix_is_moved_aside(tmp_path):
    found = states(4)
    path = a_journal(tmp_path / "j", found)

    opened(path, found[2], {"seed": "8"}).close()
    opened(path, found[2], {"seed": "9"}).close()

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
        opened(path, found[1], {"seed": "8"})
    monkeypatch.undo()
    opened(path, found[1], {"seed": "8"}).close()

    assert steps_in(path.with_name("j.aside-1")) == (0, [0, 1, 2])
    assert steps_in(path) == (1, [])


def test_resuming_leaves_the_bytes_of_the_history_as_they_are(tmp_path):
    found = states(6)
    path = a_journal(tmp_path / "j", found)
    before, identity = path.read_bytes(), path.stat().st_ino

    opened(path, found[3]).close()

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

    opened(path, found[2]).close()

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
    filling = {"filling": "x" * 100_000, "after": "d"}
    lines = [line_of(orjson.loads(base.rpartition(b"\t")[0]), b"")]
    for step in range(100):
        lines.append(line_of({"step": step, **filling}, lines[-1].checksum))
    path.write_bytes(b"".join(map(bytes, lines)))

    tracemalloc.start()
    Journal.leading_up(path, replace(start, step=60).to_json(NAMES, PRINT), "d").close()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert path.read_bytes() == b"".join(map(bytes, lines[:61]))
    assert peak < 20 * len(bytes(lines[1]))


def test_a_write_that_takes_a_part_is_gone_on_with(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, rest, at: real(fd, bytes(rest[:7]), at))

    assert steps_in(a_journal(tmp_path / "j", states(4))) == (0, [0, 1, 2])


def failing_after(count, error):
    """Return a ``pwrite`` that writes ``count`` bytes in all and then fails."""
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
    with opened(path, found[2]) as journal:
        journal.wait_in(Room(lambda _: True))
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", failing_after(9, error))
            with pytest.raises(
                StateError,
                match=rf"{path}: needs \d+ bytes, \d+ bytes .* are free there: .*; make room",
            ):
                journal.append(last)
        assert path.read_bytes() == whole

        journal.append(last)

    assert steps_in(path) == (0, [0, 1, 2])


def test_a_new_journal_that_finds_no_room_is_no_outage(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", failing_after(0, OSError(errno.ENOSPC, "full")))

    with pytest.raises(
        StateError, match=r"needs \d{2,} bytes, .* full; make room, or raise the quota"
    ):
        a_journal(tmp_path / "j", states(2))

    assert not (tmp_path / "j").exists()


LIMITED = """
import resource, sys
from pathlib import Path
from omniload.mix.journal.journal import Journal

journal = Journal.leading_up(Path(sys.argv[1]), {"step": 0, "fingerprint": {}}, "d")
size = Path(sys.argv[1]).stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))
record = {"revision": 0, "digest": "", "after": "", "drawn": {}, "carried": []}
journal.append({"step": 0, **record})
journal.append({"step": 1, **record, "filling": "x" * 200})
"""


def test_a_limit_of_the_system_on_the_file_leaves_whole_records(tmp_path):
    path = tmp_path / "j"

    ended = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, check=False
    )

    assert "StateError" in ended.stderr
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

    with opened(path, found[0], PRINT) as journal:
        for record in records_between(found):
            journal.append(record.to_json(NAMES))
            assert synced[-1] == path.stat().st_size


@pytest.mark.parametrize("step", [-1, 6])
def test_a_step_that_the_journal_does_not_cover_is_refused(step):
    found = states(4)

    with pytest.raises(
        StateError, match=rf"covers steps 0 to 2, .*before step 3; step {step} is outside"
    ):
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
        {"drawn": {"web": [1, 0, 0, -5]}},
        {"drawn": {"web": [-1, 0, 0, 5]}},
        {"step": True},
        {"revision": 1.0},
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


@pytest.mark.timeout(120)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_no_journal_and_not_waited_for(tmp_path, make):
    make(tmp_path / "journal")

    with pytest.raises(StateError, match=r"journal: is a (pipe|folder), not a file of ours"):
        read_journal(tmp_path / "journal")
    opened(tmp_path / "journal", states(1)[0]).close()
    assert (tmp_path / "journal.aside-1").exists()


def forged(path, change):
    """Write a journal again with other texts of its lines, each with a checksum that fits."""
    before, content = b"", b""
    for text in change([line.rpartition(b"\t")[0] for line in path.read_bytes().splitlines()]):
        line = chained(text, before)
        before, content = line.checksum, content + bytes(line)
    path.write_bytes(content)


NESTED = b"[" * 1000 + b"]" * 1000
FIRST_LINES = [
    b"no JSON",
    b"[]",
    b"null",
    b'{"version":' + NESTED + b"}",
    b'{"version":3,"base":' + NESTED + b"}",
    b'{"version":3,"base":{"step":' + NESTED + b"}}",
    b'{"version":3,"base":{"step":-5}}',
    b'{"version":3,"base":{"step":true}}',
]
STEP_LINES = [
    b'{"step":1,no JSON',
    b'{"step":1,"revision":0}',
    b'{"step":1,"revision":"0","digest":"","after":"","drawn":{},"carried":[]}',
    b'{"step":1,"revision":0,"digest":{},"after":"","drawn":{},"carried":[]}',
    b'{"step":1,"x":' + NESTED + b"}",
    b'{"kind":no JSON',
    b'{"kind":[],"step":1}',
    b'{"kind":"base","step":1,"state":{"step":' + NESTED + b"}}",
]


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, text) for text in FIRST_LINES] + [(2, text) for text in STEP_LINES],
    ids=lambda value: value[:40].decode() if isinstance(value, bytes) else str(value),
)
def test_a_line_that_is_none_of_ours_is_refused_whoever_made_its_checksum(tmp_path, number, text):
    path = a_journal(tmp_path / "j", states(4))

    forged(path, lambda texts: [*texts[:number], text, *texts[number + 1 :]])

    with pytest.raises((StateError, IntegrityError), match=r"resume from|release that wrote"):
        read_journal(path)
    with pytest.raises((StateError, IntegrityError), match=r"resume from|release that wrote"):
        read_tail(path, 0).records  # noqa: B018 -- a property that reads


def test_records_of_more_than_is_counted_are_refused(tmp_path):
    found = states(3)
    first = records_between(found)[0].to_json(NAMES)
    first["drawn"]["web"][3] = 2**63 - 1
    second = {**records_between(found)[1].to_json(NAMES), "drawn": first["drawn"]}
    records = [StepRecord.from_json(record, NAMES) for record in (first, second)]
    start = replace(found[0], drawn_S=(1, 1))

    with pytest.raises(StateError, match="after step 0 more than"):
        state_before(2, start, records, lambda _: WEIGHTS)


@pytest.mark.parametrize("damage", [b"\0", b"x"], ids=["hole", "text"])
def test_a_line_without_an_end_is_not_held(tmp_path, monkeypatch, damage):
    monkeypatch.setattr("omniload.mix.journal.lines.LARGEST_LINE_BYTES", 1 << 16)
    path = a_journal(tmp_path / "j", states(4))
    with path.open("ab") as file:
        file.write(damage * (8 << 20))

    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError, match=r"j:5: the line has no end within 64 KiB"):
            read_journal(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_line_longer_than_any_that_is_read_is_not_written(monkeypatch):
    monkeypatch.setattr("omniload.mix.journal.lines.LARGEST_LINE_BYTES", 64)

    with pytest.raises(StateError, match="would hold 100 B, more than the 64 B of any"):
        chained(b" " * 100, b"")


def _append_and_fail(journal, record):
    journal.append(record)
    raise KeyError("a command that nobody knows")


def test_a_window_that_is_broken_off_leaves_nothing_for_the_next_record_to_bring_along(tmp_path):
    found = states(4)
    first, second, third = (record.to_json(NAMES) for record in records_between(found))
    path = tmp_path / "j"
    with opened(path, found[0]) as journal:
        journal.append(first)
        with pytest.raises(KeyError), journal.together():
            _append_and_fail(journal, second)
        journal.append(second)
        journal.append(third)

    assert steps_in(path) == (0, [0, 1, 2])


def test_a_folder_that_is_gone_is_told_as_what_could_not_be_written(tmp_path):
    (tmp_path / "run").mkdir()
    storage = FileStorage(tmp_path / "run" / "j")
    (tmp_path / "run").rmdir()

    with pytest.raises(UnavailableError, match=r"j: cannot be written: .*No such file"):
        storage.begin(b"{}\n")


def test_a_journal_that_is_removed_under_its_run_takes_no_further_step(tmp_path):
    found = states(3)
    first, second = (record.to_json(NAMES) for record in records_between(found))
    path = tmp_path / "j"
    with opened(path, found[0]) as journal:
        journal.append(first)
        path.unlink()

        with pytest.raises(
            UnavailableError, match=r"j: cannot be written: .*removed under the run"
        ):
            journal.append(second)


@pytest.mark.parametrize("left", [0, 20])
def test_a_journal_that_is_shortened_under_its_run_takes_no_further_step(tmp_path, left):
    found = states(3)
    first, second = (record.to_json(NAMES) for record in records_between(found))
    path = tmp_path / "j"
    with opened(path, found[0]) as journal:
        journal.append(first)
        os.truncate(path, left)  # as by logrotate's copytruncate

        with pytest.raises(
            UnavailableError, match=rf"j: cannot be written: .*{left} of its \d+ bytes are left"
        ):
            journal.append(second)
    assert path.stat().st_size == left
