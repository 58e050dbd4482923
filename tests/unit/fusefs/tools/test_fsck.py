"""Checking and repairing a store: what is found, what is removed, and above all what is not."""

import sys

import pytest
from pyarrow import fs as pafs

from fusefs.stores.memory import MemoryStore
from fusefs.stores.protocol import Entry
from fusefs.stores.remote.arrow import store_on
from fusefs.stores.remote.rename_intents import Intent, encode_intent, intent_path
from fusefs.tools.fsck import verify
from omniload.base.errors import IntegrityError, StateError
from tests.faults.test_fusefs_store_faults import Crash, CrashingBackend, RenamingStore
from tests.support.fusefs.builders import contents, object_paths, some_files, tiny_files

DATA = bytes(range(256)) * 100


@pytest.fixture
def files():
    with some_files() as built:
        built.write_file("d/a", DATA)
        built.write_file("d/small", b"plain")
        yield built


def kinds(report):
    return sorted(fault.kind for fault in report.faults)


def test_a_healthy_store_has_no_faults_and_repair_removes_nothing(files):
    before = object_paths(files.store)

    report = verify(files, read_data=True, repair=True, grace_s=0)

    assert report.faults == []
    assert (report.files, report.manifests, report.objects) == (2, 1, 3)
    assert report.bytes_verified == len(DATA)
    assert object_paths(files.store) == before


def test_a_missing_object_is_found_with_the_manifest_that_names_it(files):
    files.store.remove(object_paths(files.store)[0])

    (fault,) = verify(files).harmful

    assert fault.kind == "missing"
    assert "'d/a'" in fault.detail


def test_an_object_of_the_wrong_size_is_found_without_reading_it(files):
    path = object_paths(files.store)[0]
    files.store.publish(path, b"short")

    (fault,) = verify(files).harmful

    assert (fault.kind, fault.path) == ("wrong size", path)


def test_a_flipped_bit_is_found_by_reading(files):
    path = object_paths(files.store)[0]
    data = bytearray(files.store.read(path, 0, files.store.stat(path).size_bytes))
    data[0] ^= 1
    files.store.publish(path, bytes(data))

    assert verify(files).faults == []
    (fault,) = verify(files, read_data=True).harmful
    assert fault.kind == "corrupt"
    assert path in fault.detail


def an_orphan(files):
    writer = files.writers.file("lost")
    writer.write(DATA)
    writer.finish()
    return set(object_paths(files.store))


def test_orphans_are_removed_by_repair_and_by_nothing_else(files):
    named = set(object_paths(files.store))
    orphans = an_orphan(files) - named

    assert kinds(verify(files, grace_s=0)) == ["orphan"] * len(orphans)
    report = verify(files, repair=True, grace_s=0)

    assert set(report.repaired) == orphans
    assert set(object_paths(files.store)) == named
    assert contents(files, "d/a") == DATA


def test_objects_younger_than_the_grace_may_belong_to_a_write_under_way(files):
    an_orphan(files)

    assert verify(files, repair=True, grace_s=60).faults == []


def test_an_unreadable_manifest_stops_the_removal_of_objects(files):
    an_orphan(files)
    before = object_paths(files.store)
    broken = bytearray(files.store.read("d/a", 0, files.store.stat("d/a").size_bytes))
    broken[4100] ^= 1
    files.store.publish("d/a", bytes(broken))

    with pytest.raises(StateError, match="may name them"):
        verify(files, repair=True, grace_s=0)

    assert object_paths(files.store) == before


class Private(MemoryStore):
    """Keeps the head of one file from this process, as a local store keeps another user's."""

    def read(self, path, offset, size_bytes):
        if path == "d/a":
            raise PermissionError(13, "Permission denied", path)
        return super().read(path, offset, size_bytes)


def test_a_manifest_that_may_not_be_read_stops_the_removal_of_objects():
    with some_files(Private()) as files:
        files.write_file("d/a", DATA)
        before = object_paths(files.store)

        (fault,) = verify(files).harmful
        with pytest.raises(StateError, match="orphans stay"):
            verify(files, repair=True, grace_s=0)

        assert (fault.kind, fault.path) == ("unreadable", "d/a")
        assert object_paths(files.store) == before


def damaged(files, path, change):
    files.store.publish(path, change(files.store.read(path, 0, files.store.stat(path).size_bytes)))


CUT = {
    "cut": lambda data: data[:1000],
    "cut to the magic": lambda data: data[:10],
    "cut by one byte": lambda data: data[:-1],
    "cut by pages": lambda data: data[:-4096] if len(data) > 8192 else data[:4100],
    "grown": lambda data: data + b"x" * 9000,
    "beheaded": lambda data: data[100:],
    "another first byte": lambda data: b"X" + data[1:],
}


@pytest.mark.parametrize("change", CUT.values(), ids=CUT)
def test_what_is_left_of_a_manifest_is_a_fault_and_stops_the_removal_of_objects(files, change):
    before = object_paths(files.store)
    damaged(files, "d/a", change)

    (fault,) = verify(files).harmful
    assert (fault.kind, fault.path) == ("unreadable", "d/a")
    assert "restore" in fault.detail
    for read_data in (False, True):
        with pytest.raises(StateError, match=r"may name them \('d/a'\)"):
            verify(files, repair=True, grace_s=0, read_data=read_data)
    assert object_paths(files.store) == before


def test_a_cut_manifest_whose_objects_are_gone_is_found_with_the_data(files):
    damaged(files, "d/a", CUT["cut"])
    for path in object_paths(files.store):
        files.store.remove(path)

    assert verify(files).faults == []
    (fault,) = verify(files, read_data=True).harmful
    assert "cut short" in fault.detail


def test_what_is_left_of_a_manifest_can_be_removed_and_its_objects_go_by_repair(files):
    damaged(files, "d/a", CUT["cut"])
    files.store.remove("d/a")

    report = verify(files, repair=True, grace_s=0)

    assert len(report.repaired) == 3
    assert object_paths(files.store) == []


def test_a_users_files_that_remind_of_manifests_are_no_faults(files):
    files.store.publish("names", b"torch\nomnifs\n")
    files.store.publish("long", bytes(range(256)) * 100)
    files.store.publish("short", b'{"')
    files.store.publish("empty", b"")
    an_orphan(files)

    assert verify(files, read_data=True, grace_s=60).faults == []
    assert verify(files, repair=True, grace_s=0).harmful == []


def test_heads_of_plain_files_are_read_only_where_an_object_is_named_by_nothing(files):
    read, asked = files.store.read, []

    def counted(path, offset, size_bytes):
        asked.append(path)
        return read(path, offset, size_bytes)

    files.store.read = counted
    verify(files)
    assert "d/small" not in asked

    files.store.publish("d/small", b"torch, more than ten bytes")
    an_orphan(files)
    verify(files)
    assert asked.count("d/small") == 1


def test_a_plain_file_that_goes_while_its_head_is_read_is_no_fault(files):
    read = files.store.read
    files.store.publish("d/gone", b"x" * 100)
    files.store.publish("d/shorter", b"x" * 100)
    an_orphan(files)

    def racing(path, offset, size_bytes):
        if path == "d/gone" and files.store.stat(path):
            files.store.remove(path)
        if path == "d/shorter":
            files.store.publish(path, b"x" * 50)
        return read(path, offset, size_bytes)

    files.store.read = racing
    assert verify(files, grace_s=60).faults == []


def test_a_plain_file_whose_bytes_are_fewer_than_its_size_is_a_fault(files):
    read = files.store.read
    files.store.publish("d/torn", b"x" * 100)
    an_orphan(files)

    def torn(path, offset, size_bytes):
        if path == "d/torn":
            raise IntegrityError("'d/torn' gives 7 of the 100 bytes wanted at offset 0")
        return read(path, offset, size_bytes)

    files.store.read = torn
    (fault,) = verify(files, grace_s=60).harmful
    assert (fault.kind, fault.path) == ("unreadable", "d/torn")


def test_a_tree_that_changes_under_the_walk_stops_the_removal_of_objects():
    store = MemoryStore()
    with tiny_files(store) as files:
        files.write_file("a/f", DATA[:300])
        an_orphan(files)
        before = object_paths(store)
        listing, walks = store.listing, []

        def renaming(path):
            walks.append(path)
            if walks.count("") == 2 and path == "":
                store.rename("a/f", "g")
            return listing(path)

        store.listing = renaming
        with pytest.raises(StateError, match="changed while it was walked"):
            verify(files, repair=True, grace_s=0)

        store.listing = listing
        assert object_paths(store) == before


def test_left_over_temporaries_are_removed(files):
    files.store.publish(".omnifs/new/abc", b"half")

    assert kinds(verify(files, grace_s=0)) == ["left over"]
    assert verify(files, repair=True, grace_s=0).repaired == [".omnifs/new/abc"]


@pytest.mark.parametrize(("crash_at", "content"), [(3, b"old"), (4, b"new"), (5, b"new")])
def test_an_interrupted_replacement_is_ended_and_forgotten(tmp_path, crash_at, content):
    store = store_on(pafs.LocalFileSystem(), str(tmp_path), "test:")
    store.publish("f", b"old")
    with pytest.raises(Crash):
        RenamingStore(CrashingBackend(tmp_path, crash_at)).publish("f", b"new")

    with some_files(store) as files:
        assert "interrupted" in kinds(verify(files, grace_s=0))
        verify(files, repair=True, grace_s=0)

        assert verify(files, grace_s=0).faults == []
        assert contents(files, "f") == content


def test_an_intent_whose_folder_is_a_file_by_now_does_not_stop_the_check(tmp_path):
    store = store_on(pafs.LocalFileSystem(), str(tmp_path), "test:")
    store.publish("d", b"a file")
    store.publish(".omnifs/new/content", b"1")
    intent = Intent(".omnifs/new/content", "d/f")
    store.publish(intent_path("d/f"), encode_intent(intent))
    with tiny_files(store) as files:
        report = verify(files, repair=True, grace_s=0)

    assert [(f.kind, f.path) for f in report.harmful] == [("missing", "d/f")]
    assert store.read(".omnifs/new/content", 0, 1) == b"1"


class Deep(MemoryStore):
    """A folder in a folder, and so on, and a file in the last."""

    def listing(self, path):
        if path.startswith(".omnifs"):
            return super().listing(path)
        is_last = path.count("d") > sys.getrecursionlimit()
        return [Entry("f", False, 4, 0) if is_last else Entry("d", True, 0, 0)]

    def stat(self, path):
        return Entry("f", False, 4, 0) if path.endswith("/f") else super().stat(path)


def test_a_tree_that_is_deeper_than_a_stack_is_checked():
    with some_files(Deep()) as files:
        report = verify(files)

    assert (report.files, report.faults) == (1, [])
