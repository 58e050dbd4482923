"""Files left open when the mount ends: kept as they are, within a bounded time."""

import threading

import pytest

from fusefs.tools.fsck import verify
from fusefs.vfs.file import open_file
from fusefs.vfs.file.open_file import OpenFile, SpoolPlace, flush_all
from tests.support.fusefs.builders import contents, some_files
from tests.support.fusefs.faulty_store import FaultyStore, Outage

DATA = bytes(range(250)) * 100


@pytest.fixture
def files():
    with some_files() as built:
        yield built


def a_file_under_way(files, path):
    body = OpenFile(files, SpoolPlace(), path, None)
    body.write(0, DATA)
    return body


def test_what_was_written_is_published_whether_appended_or_spooled(files):
    files.write_file("db", DATA)
    appended = a_file_under_way(files, "log")
    changed = OpenFile(files, SpoolPlace(), "db", files.open("db"))
    changed.write(3, b"XYZ")

    assert flush_all([appended, changed, appended], within_s=60) == []

    assert contents(files, "log") == DATA
    assert contents(files, "db") == DATA[:3] + b"XYZ" + DATA[6:]
    assert verify(files, read_data=True, grace_s=0).faults == []


def test_removed_and_unchanged_files_are_left_alone(files):
    removed = a_file_under_way(files, "gone")
    removed.pending.unlinked()
    files.write_file("f", DATA)
    clean = OpenFile(files, SpoolPlace(), "f", files.open("f"))
    before = files.stat("f").entry

    assert flush_all([removed, clean], within_s=60) == []

    assert files.stat("f").entry == before
    assert [info.name for info in files.listing("")] == ["f"]


@pytest.mark.parametrize("num_threads", [0, 1])
def test_with_fewer_threads_than_files_all_are_published(files, monkeypatch, num_threads):
    start, given = threading.Thread.start, iter([True] * num_threads)

    def limited(thread):
        if thread.name == "fusefs-flush-all" and not next(given, False):
            raise RuntimeError("can't start new thread")
        start(thread)

    bodies = [a_file_under_way(files, f"f{i}") for i in range(3)]
    monkeypatch.setattr(threading.Thread, "start", limited)

    assert flush_all(bodies, within_s=60) == []

    assert [info.name for info in files.listing("")] == ["f0", "f1", "f2"]


def test_a_defect_in_publishing_one_is_said_and_keeps_no_thread_from_the_others(
    files, caplog, monkeypatch
):
    def flush():
        raise MemoryError("no room")

    bodies = [a_file_under_way(files, f"f{i}") for i in range(3)]
    monkeypatch.setattr(bodies[0], "flush", flush)
    monkeypatch.setattr(open_file, "_AT_ONCE", 1)

    assert flush_all(bodies, within_s=60) == ["f0"]

    assert "f0: what was written last is lost: no room" in caplog.text
    assert [info.name for info in files.listing("")] == ["f1", "f2"]


def test_one_that_cannot_be_published_is_named_and_stops_no_other(files, caplog):
    faulty = FaultyStore(files.store, {("publish", 1): Outage})
    with some_files(faulty) as failing:
        bodies = [a_file_under_way(failing, f"f{i}") for i in range(3)]

        (lost,) = flush_all(bodies, within_s=60)

        assert sorted(info.name for info in failing.listing("")) == sorted(
            {"f0", "f1", "f2"} - {lost}
        )
        assert f"{lost}: what was written last is lost" in caplog.text
    faulty.assert_all_faults_fired()


def test_a_store_that_hangs_is_given_up(files, caplog):
    body, go_on = a_file_under_way(files, "f"), threading.Event()
    held = threading.Event()

    def hold():
        with body.lock:
            held.set()
            go_on.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)

    assert flush_all([body], within_s=0.05) == ["f"]

    go_on.set()
    thread.join()
    for late in [t for t in threading.enumerate() if t.name == "fusefs-flush-all"]:
        late.join()  # it goes on, and must not find the files closed
    assert "gave up" in caplog.text
