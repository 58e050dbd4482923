"""What the snapshotter keeps: whole or not at all, also on a disk that is full or a file that is damaged."""

import dataclasses
import errno
import os
import resource
import sqlite3
import subprocess
from functools import partial

import pytest

from omniload.base.errors import StateError
from snapshot.engines.containerd import store as snapshotter_store
from snapshot.engines.containerd.records import Snapshot
from snapshot.engines.containerd.store import SnapshotStore, take_away, usage_of
from tests.support.snapshot.snapshotter_builders import a_kept_image


def a_snapshot(number, **changes):
    fields = {"parent": "", "kind": "active", "labels": {}, "created_ns": 1, "updated_ns": 2}
    return Snapshot(key=f"k{number}", number=number, **fields | changes)


@pytest.fixture
def store(tmp_path):
    made = SnapshotStore(tmp_path / "state.sqlite")
    made.keep(a_snapshot(1))
    yield made
    made.close()


def test_a_full_disk_is_said_as_such_and_passes(tmp_path):
    bases = []

    def connect(*words, **named):
        bases.append(sqlite3.connect(*words, **named))
        return bases[-1]

    store = SnapshotStore(tmp_path / "state.sqlite", connect)
    store.keep(a_snapshot(1))
    (base,) = bases
    (pages,) = base.execute("PRAGMA page_count").fetchone()
    base.execute(f"PRAGMA max_page_count={pages}")
    big = a_snapshot(2, labels={"x": "y" * 100_000})

    with pytest.raises(OSError, match="no room on the disk") as told:
        store.keep(big)
    assert told.value.errno == errno.ENOSPC
    assert [found.number for found in store.snapshots()] == [1]

    base.execute("PRAGMA max_page_count=100000")
    store.keep(big)
    assert [found.number for found in store.snapshots()] == [1, 2]
    store.close()


def test_a_disk_that_refuses_the_very_last_write_does_not_stop_the_store_for_ever(store, tmp_path):
    size = (tmp_path / "state.sqlite-wal").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with pytest.raises((sqlite3.OperationalError, OSError)):
            store.keep(a_snapshot(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert [found.number for found in store.snapshots()] == [1]
    store.keep(a_snapshot(3))
    store.forget(a_snapshot(1))
    assert [found.number for found in store.snapshots()] == [3]


def test_a_commit_that_fails_leaves_no_transaction_open(tmp_path):
    class Failing(sqlite3.Connection):
        """A connection whose first COMMIT is refused, as by a disk that is full."""

        left = 1

        def execute(self, statement, *words):
            if statement == "COMMIT" and self.left:
                self.left = 0
                raise sqlite3.OperationalError("disk I/O error")
            return super().execute(statement, *words)

    SnapshotStore(tmp_path / "state.sqlite").close()
    store = SnapshotStore(tmp_path / "state.sqlite", partial(sqlite3.connect, factory=Failing))
    with pytest.raises(sqlite3.OperationalError, match="disk I/O error"):
        store.keep(a_snapshot(2))

    store.keep(a_snapshot(3))

    assert [found.number for found in store.snapshots()] == [3]
    store.close()


def test_a_file_that_is_damaged_is_said_with_what_to_do(tmp_path):
    path = tmp_path / "state.sqlite"
    path.write_bytes(b"no database at all, whoever wrote it" * 1000)

    with pytest.raises(
        StateError, match=r"state\.sqlite cannot be read: .*give its own folder, or a new one"
    ):
        SnapshotStore(path)


def test_an_image_is_read_where_it_was_pulled_from_last(store):
    old = a_kept_image(2)
    new = dataclasses.replace(old, reference="new.example/team/image:v")
    layer = a_snapshot(2, kind="committed", image=old.digest, layers=1)
    upper = a_snapshot(3, kind="committed", image=old.digest, layers=2, parent="k2")

    store.keep(layer, old)
    store.keep(upper, new)
    assert store.image(old.digest) == new

    store.forget(upper)
    assert store.image(old.digest) == new, "the lower layer names it, too"
    store.forget(layer)
    with pytest.raises(StateError, match="is not kept"):
        store.image(old.digest)


DEPTH = 1500
"""Folders in folders: more than Python calls itself, and longer than a path may be with names of three bytes."""


@pytest.fixture
def deep(tmp_path):
    """A folder as a container can make it, one step after the other."""
    top = tmp_path / "deep"
    top.mkdir()
    at = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(DEPTH):
        os.mkdir("abc", dir_fd=at)
        below = os.open("abc", os.O_RDONLY | os.O_DIRECTORY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    yield top
    subprocess.run(["rm", "-rf", str(top)], check=True)


def test_a_tree_of_any_depth_can_be_counted_and_taken_away(deep, tmp_path):
    size_bytes, inodes = usage_of(deep)

    take_away(deep)

    assert inodes > 900
    assert size_bytes >= 0
    assert list(tmp_path.iterdir()) == []


def test_each_inode_counts_once_and_links_are_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/big").write_bytes(bytes(1 << 20))
    top = tmp_path / "top"
    (top / "one").mkdir(parents=True)
    (top / "one/file").write_bytes(bytes(100_000))
    os.link(top / "one/file", top / "again")
    (top / "out").symlink_to(tmp_path / "elsewhere")

    size_bytes, inodes = usage_of(top)

    assert inodes == 4, "two folders, one file, one link"
    assert 100_000 <= size_bytes < 200_000


def test_what_is_gone_or_no_folder_any_more_counts_nothing(tmp_path, monkeypatch):
    assert usage_of(tmp_path / "none") == (0, 0)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(bytes(5000))
    real = os.scandir

    def scandir(path):
        if path.endswith("folder"):  # a file in its place since it was looked at
            raise NotADirectoryError(path)
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(snapshotter_store.os, "scandir", scandir)
        assert usage_of(tmp_path)[1] == 3


def test_what_cannot_be_removed_is_said_and_no_error(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(snapshotter_store.shutil, "rmtree", lambda *_, **__: None)

    take_away(tmp_path)
    take_away(tmp_path / "none")

    (record,) = caplog.records
    assert "tried again at the next cleanup" in record.getMessage()
