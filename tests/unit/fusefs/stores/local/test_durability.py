"""When what is done in a local store becomes durable: which flushes come before what."""

import os
import threading

import pytest

from fusefs.bridge.api.waiting import run_blocking
from fusefs.format.attributes import Attributes
from fusefs.stores.local import durability
from fusefs.stores.local.durability import Settling
from fusefs.stores.local.store import LocalStore
from fusefs.vfs.file.open_file import SpoolPlace
from fusefs.vfs.store_filesystem import StoreFileSystem
from omniload.base.errors import IntegrityError
from tests.support.fusefs.builders import tiny_files

BIG = bytes(range(256)) * 64


@pytest.fixture
def done(monkeypatch):
    """What was flushed and renamed, in order."""
    calls, rename = [], os.rename

    def renamed(source, target, **named):
        rename(source, target, **named)
        calls.append(("rename", target))

    def named(file):
        return os.readlink(f"/proc/self/fd/{file}").rpartition("/")[2]  # noqa: PTH115

    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "fsync", lambda file: calls.append(("fsync", named(file))))
    monkeypatch.setattr(durability, "syncfs", lambda file: calls.append(("syncfs", named(file))))
    # Only what asks for it becomes durable here, and nothing by time.
    monkeypatch.setattr(durability, "SETTLES_WITHIN_S", 3600.0)
    return calls


@pytest.fixture
def store(tmp_path, done):
    (tmp_path / "store").mkdir()
    store = LocalStore(tmp_path / "store")
    store.delay_syncs()
    store.publish("warm", b"")
    store.sync()
    done.clear()
    yield store
    store.close()


def test_what_is_closed_is_flushed_by_no_call_of_its_own(store, done):
    store.make_directory("d")
    store.publish("d/f", b"small")
    store.rename("d/f", "d/g")

    assert [what for what, _ in done] == ["rename", "rename"]


def test_what_takes_the_place_of_a_file_is_durable_before_it_does(store, done):
    store.publish("f", b"old")
    store.publish("g", b"new")
    done.clear()

    store.publish("f", b"newer")
    assert [what for what, _ in done] == ["fsync", "rename"]
    done.clear()
    store.rename("g", "f")
    assert done == [("fsync", "g"), ("rename", "f")]


def test_fsync_flushes_a_file_and_its_directory_and_no_more(store, done):
    store.publish("f", b"small")
    done.clear()

    store.sync("f")

    assert done == [("fsync", "f"), ("fsync", "store")]


@pytest.mark.parametrize("renames", [False, True])
def test_fsync_below_a_new_directory_makes_the_names_above_durable(store, done, renames):
    store.make_directory("d/e")
    store.publish("d/e/f", b"small")
    if renames:
        store.sync()
        store.rename("d", "g")
    path = "g/e/f" if renames else "d/e/f"
    done.clear()

    store.sync(path)
    store.sync(path)

    assert done == [("syncfs", "store"), ("fsync", "f"), ("fsync", "e")]


def test_of_a_process_before_nothing_is_believed(tmp_path, done):
    LocalStore(tmp_path).publish("d/f", b"small")
    store = LocalStore(tmp_path)
    store.delay_syncs()
    done.clear()

    store.sync("d/f")

    assert [what for what, _ in done] == ["syncfs"]


def test_a_striped_file_is_durable_when_it_is_closed_and_before_what_it_replaces_goes(store, done):
    with tiny_files(store) as files:
        files.write_file("f", BIG)
        assert ("fsync", "f") in done
        done.clear()
        files.write_file("f", b"small")
        assert [what for what, _ in done][-2:] == ["fsync", "fsync"]


def test_fsync_of_a_file_that_was_closed_before_flushes_it(store, done):
    with tiny_files(store) as files:
        files.write_file("f", b"small", Attributes(mtime_ns=10**9))
        shown = StoreFileSystem(files, SpoolPlace())
        opened = run_blocking(shown.open(run_blocking(shown.lookup(1, b"f")).inode, os.O_WRONLY))
        done.clear()

        run_blocking(shown.fsync(opened.handle))

        assert done == [("fsync", "f"), ("fsync", "store")]
        run_blocking(shown.release(opened.handle))
        shown.close()


def test_without_delay_each_call_is_durable_when_it_returns(tmp_path, done):
    store = LocalStore(tmp_path)

    store.make_directory("d")
    store.publish("d/f", b"small")
    flushed = [where for what, where in done if what == "fsync"]
    assert flushed[-1] == "d"
    assert [what for what, _ in done][-3:] == ["fsync", "rename", "fsync"]


def test_everything_is_flushed_once_for_all_changes_of_a_while():
    flushed = threading.Event()
    changes = Settling(flushed.set, within_s=0.01)

    for _ in range(1000):
        changes.changed()

    assert flushed.wait(30)
    changes.close()


def test_what_is_not_flushed_yet_is_at_the_end():
    flushed = []
    changes = Settling(lambda: flushed.append(1), within_s=3600)

    changes.close()
    assert flushed == []
    changes = Settling(lambda: flushed.append(1), within_s=3600)
    changes.changed()
    changes.close()
    assert flushed == [1]


def test_a_name_made_while_all_is_flushed_is_not_taken_for_durable():
    changes = Settling(lambda: changes.directory_named("d/e"), within_s=3600)

    changes.settle()

    assert changes.is_reached("x/f")
    assert not changes.is_reached("d/e/f")
    changes.close()


def test_a_name_is_not_durable_while_the_flush_for_it_is_under_way():
    answers = []
    changes = Settling(lambda: answers.append(changes.is_reached("d/f")), within_s=3600)
    changes.settle()
    changes.directory_named("d")

    changes.settle()

    assert answers == [False, False]
    assert changes.is_reached("d/f")
    changes.close()


def test_what_could_not_be_written_fails_every_fsync_from_then_on(store, done, monkeypatch):
    def broken(_):
        raise OSError(5, "Input/output error")

    store.publish("f", b"small")
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(IntegrityError, match="may be lost; fsync fails from now on"):
        store.sync("f")
    monkeypatch.setattr(os, "fsync", lambda _: None)

    with pytest.raises(IntegrityError, match="Input/output error"):
        store.sync("f")
    with pytest.raises(IntegrityError, match="mount anew"):
        store.sync()


def test_a_store_that_closes_waits_for_the_sync_that_its_timer_began():
    ended, closing = [], []

    def sync():
        closing.append(threading.Thread(target=lambda: (settling.close(), ended.append("close"))))
        closing[0].start()
        closing[0].join(0.1)
        ended.append("sync")

    settling = Settling(sync, within_s=3600.0)
    settling.settle()
    closing[0].join(60)

    assert ended == ["sync", "close"]


def test_what_no_thread_would_wait_for_is_durable_at_once_and_later_changes_in_time(monkeypatch):
    flushed, again = [], threading.Event()

    def sync():
        flushed.append(1)
        if len(flushed) > 1:
            again.set()

    def refuse(_):
        raise RuntimeError("can't start new thread")

    settling = Settling(sync, within_s=0.01)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Timer, "start", refuse)
        settling.changed()
    assert flushed == [1]

    settling.changed()

    assert again.wait(30)
    settling.close()
