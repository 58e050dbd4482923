"""What the snapshotter keeps: whole or not at all, also on a disk that is full or a file that is damaged."""

import dataclasses
import errno
import resource
import sqlite3

import pytest

from omniload.base.errors import StateError
from snapshot.engines.containerd.records import Forget, Keep, Snapshot
from snapshot.engines.containerd.store import SnapshotStore
from tests.support.snapshot.snapshotter_builders import a_kept_image


def a_snapshot(number, **changes):
    fields = {"parent": "", "kind": "active", "labels": {}, "created_ns": 1, "updated_ns": 2}
    return Snapshot(key=f"k{number}", number=number, **fields | changes)


@pytest.fixture
def store(tmp_path):
    made = SnapshotStore(tmp_path / "state.sqlite")
    made.apply([Keep(a_snapshot(1))])
    yield made
    made.close()


def test_a_full_disk_is_said_as_such_and_passes(tmp_path):
    bases = []

    def connect(*words, **named):
        bases.append(sqlite3.connect(*words, **named))
        return bases[-1]

    store = SnapshotStore(tmp_path / "state.sqlite", connect)
    store.apply([Keep(a_snapshot(1))])
    (base,) = bases
    (pages,) = base.execute("PRAGMA page_count").fetchone()
    base.execute(f"PRAGMA max_page_count={pages}")
    big = Keep(a_snapshot(2, labels={"x": "y" * 100_000}))

    with pytest.raises(OSError, match="no room on the disk") as told:
        store.apply([big])
    assert told.value.errno == errno.ENOSPC
    assert [found.number for found in store.snapshots()] == [1]

    base.execute("PRAGMA max_page_count=100000")
    store.apply([big])
    assert [found.number for found in store.snapshots()] == [1, 2]
    store.close()


def test_a_disk_that_refuses_the_very_last_write_does_not_stop_the_store_for_ever(store, tmp_path):
    size = (tmp_path / "state.sqlite-wal").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with pytest.raises((sqlite3.OperationalError, OSError)):
            store.apply([Keep(a_snapshot(2))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert [found.number for found in store.snapshots()] == [1]
    store.apply([Keep(a_snapshot(3))])
    store.apply([Forget(a_snapshot(1))])
    assert [found.number for found in store.snapshots()] == [3]


def test_a_commit_that_fails_leaves_no_transaction_open(tmp_path):
    class Failing:
        """A connection whose first COMMIT is refused, as by a disk that is full."""

        def __init__(self, base):
            self._base, self._left = base, 1

        def __getattr__(self, name):
            return getattr(self._base, name)

        def execute(self, statement, *words):
            if statement == "COMMIT" and self._left:
                self._left = 0
                raise sqlite3.OperationalError("disk I/O error")
            return self._base.execute(statement, *words)

    SnapshotStore(tmp_path / "state.sqlite").close()
    store = SnapshotStore(
        tmp_path / "state.sqlite", lambda *words, **named: Failing(sqlite3.connect(*words, **named))
    )
    with pytest.raises(sqlite3.OperationalError, match="disk I/O error"):
        store.apply([Keep(a_snapshot(2))])

    store.apply([Keep(a_snapshot(3))])

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

    store.apply([Keep(layer)], old)
    store.apply([Keep(upper)], new)
    assert store.image(old.digest) == new

    store.apply([Forget(upper)])
    assert store.image(old.digest) == new, "the lower layer names it, too"
    store.apply([Forget(layer)])
    with pytest.raises(StateError, match="is not kept"):
        store.image(old.digest)
