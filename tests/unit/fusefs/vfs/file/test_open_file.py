"""The content of one open file: its three states, what a flush publishes, and what errors leave."""

import errno
import os

import pytest

from fusefs.format.attributes import Attributes
from fusefs.stores.memory import MemoryStore
from fusefs.tools.fsck import verify
from fusefs.tree.file_attributes import set_attributes
from fusefs.vfs.file.open_file import OpenFile, SpoolPlace
from fusefs.vfs.file.rename_open import remove_open, rename_open
from omniload.base.errors import UnavailableError
from tests.support.fusefs.builders import contents, object_paths, some_files
from tests.support.fusefs.faulty_store import FaultyStore, Outage

DATA = os.urandom(20_000)


@pytest.fixture
def files():
    with some_files() as built:
        yield built


def created(files, path="f", **place):
    return OpenFile(files, SpoolPlace(**place), path, None)


def opened(files, path="f", **place):
    return OpenFile(files, SpoolPlace(**place), path, files.open(path))


def test_appended_bytes_go_to_objects_and_are_published_by_the_flush(files):
    body = created(files)
    for at in range(0, len(DATA), 3000):
        body.write(at, DATA[at : at + 3000])
    assert body.size_bytes == len(DATA)
    assert not body.pending.published

    body.flush()

    assert contents(files, "f") == DATA
    assert body.read(5, 100, 0) == DATA[5:105]
    body.close()


def test_a_created_file_that_is_never_written_becomes_an_empty_file(files):
    body = created(files)

    body.flush()

    assert files.stat("f").size_bytes == 0
    body.close()


def test_a_write_in_the_middle_goes_through_a_spool_and_replaces_the_objects(files):
    files.write_file("f", DATA)
    body = opened(files)

    body.write(7, b"XYZ")
    assert body.read(5, 7, 0) == DATA[5:7] + b"XYZ" + DATA[10:12]
    assert contents(files, "f") == DATA
    body.flush()

    assert contents(files, "f") == DATA[:7] + b"XYZ" + DATA[10:]
    body.close()
    assert object_paths(files.store) == sorted(files.manifest("f").object_paths())


def test_reading_back_what_is_being_appended_leaves_no_object_behind(files):
    body = created(files)
    body.write(0, DATA)

    assert body.read(0, 100, 0) == DATA[:100]
    body.write(len(DATA), b"more")
    body.flush()
    body.close()

    assert contents(files, "f") == DATA + b"more"
    assert object_paths(files.store) == sorted(files.manifest("f").object_paths())


def test_a_gap_behind_the_end_reads_as_zeroes(files):
    body = created(files)
    body.write(5000, b"end")
    body.flush()

    assert contents(files, "f") == bytes(5000) + b"end"
    body.close()


@pytest.mark.parametrize("size", [0, 1, 4096, 30_000])
def test_truncating_cuts_or_fills_with_zeroes(files, size):
    files.write_file("f", DATA)
    body = opened(files)

    body.truncate(size)
    body.flush()
    body.close()

    assert contents(files, "f") == DATA[:size] + bytes(max(0, size - len(DATA)))


def test_a_spool_larger_than_its_limit_is_refused_and_the_file_stays(files):
    files.write_file("f", DATA)
    body = opened(files, limit_bytes=10_000)
    body.write(3, b"x")
    body.write(9000, b"x")

    with pytest.raises(OSError, match="raise spool_limit"):
        body.write(15_000, b"x")

    body.close()
    assert contents(files, "f") == DATA


def test_synced_bytes_stay_visible_while_appending_goes_on(files):
    body = created(files)
    body.write(0, DATA[:9000])
    body.flush(last=False)
    assert contents(files, "f") == DATA[:9000]

    body.write(9000, DATA[9000:])
    assert contents(files, "f") == DATA[:9000]
    body.flush()

    assert contents(files, "f") == DATA
    body.close()


def test_a_small_change_is_written_alone_and_the_rest_of_the_objects_stays(files):
    files.write_file("f", DATA * 5)
    before = object_paths(files.store)
    body = opened(files)

    for at in (70_000, 70_010, 30_000):
        body.write(at, b"XYZ")
    body.flush(last=False)

    assert set(before) < set(object_paths(files.store))
    patch = [s for s in files.manifest("f").segments if s.object_path(0) not in before]
    assert {s.segment_id for s in patch} == {patch[0].segment_id}
    assert sum(s.size_bytes for s in patch) == 2 * 4096
    expected = bytearray(DATA * 5)
    for at in (70_000, 70_010, 30_000):
        expected[at : at + 3] = b"XYZ"
    assert contents(files, "f") == expected
    assert verify(files, read_data=True, grace_s=0).faults == []
    body.close()


def test_a_header_patched_at_the_end_costs_its_granule_not_the_file(files):
    body = created(files)
    body.write(0, DATA)

    body.write(0, b"HEAD")
    body.flush()

    assert contents(files, "f") == b"HEAD" + DATA[4:]
    assert len(files.manifest("f").distinct_segments()) > 1
    assert verify(files, grace_s=0).faults == []
    body.close()


def test_a_file_changed_at_many_places_is_written_anew_at_some_point(files):
    files.write_file("f", bytes(4096 * 40))
    body, most = opened(files), 0
    for turn in range(120):
        body.write(turn * 7 % 40 * 4096, b"x")
        body.flush(last=False)
        stored = {s.segment_id: s.stored_bytes for s in files.manifest("f").segments}
        most = max(most, sum(stored.values()))

    assert most <= 2 * 4096 * 40
    assert contents(files, "f") == (b"x" + bytes(4095)) * 40
    assert verify(files, read_data=True, grace_s=0).faults == []
    body.close()


def test_nothing_is_spliced_to_what_another_mount_removed(files):
    files.write_file("f", DATA * 3)
    with some_files(files.store, read_ahead=0) as elsewhere:
        body = opened(elsewhere)
        body.write(30_000, b"here")
        files.write_file("f", DATA[::-1] * 3)

        with pytest.raises(OSError, match=r"version that was opened is gone") as caught:
            body.flush()

        assert caught.value.errno == errno.ESTALE
        body.close()
    assert contents(files, "f") == DATA[::-1] * 3
    assert verify(files, read_data=True).harmful == []


def test_nothing_is_appended_to_what_another_mount_removed(files):
    files.write_file("f", DATA)
    with some_files(files.store) as elsewhere:
        body = opened(elsewhere)
        body.write(len(DATA), DATA)
        files.write_file("f", b"short")

        with pytest.raises(OSError, match="another mount replaced") as caught:
            body.flush()

        assert caught.value.errno == errno.ESTALE
        body.close()
    assert contents(files, "f") == b"short"


def test_a_publish_that_fails_after_a_splice_is_made_good_by_the_next(files):
    files.write_file("f", DATA * 3)
    faulty = FaultyStore(files.store, {("publish", 1): Outage})
    with some_files(faulty) as failing:
        body = opened(failing)
        body.write(30_000, b"here")
        with pytest.raises(UnavailableError):
            body.flush()

        body.flush()

        assert (
            contents(failing, "f")[29_999:30_005]
            == DATA[9999:10_000] + b"here" + DATA[10_004:10_005]
        )
        assert verify(failing, read_data=True).harmful == []
        body.close()
    faulty.assert_all_faults_fired()


def test_attributes_set_while_open_go_out_with_the_content(files):
    body = created(files)
    body.set_attributes(Attributes(mode=0o755, xattrs={"user.a": b"1"}))
    body.write(0, b"#!")
    body.flush()
    assert (files.stat("f").mode, files.manifest("f").xattrs) == (0o755, {"user.a": b"1"})

    body.write(0, b"%!")
    body.flush()

    assert (files.stat("f").mode, files.manifest("f").xattrs) == (0o755, {"user.a": b"1"})
    body.close()


def test_attributes_that_would_not_fit_are_refused_at_once_and_not_by_the_close(files):
    body = created(files)
    body.write(0, DATA)

    with pytest.raises(OSError, match="shorten") as caught:
        body.set_attributes(Attributes(xattrs={"user.big": bytes(3000)}))

    assert caught.value.errno == errno.ENOSPC
    body.set_attributes(Attributes(xattrs={"user.fits": bytes(1500)}))
    body.flush()
    assert contents(files, "f") == DATA
    assert files.manifest("f").xattrs == {"user.fits": bytes(1500)}
    body.close()


def test_a_flush_that_fails_keeps_the_bytes_for_the_next(files):
    faulty = FaultyStore(files.store, {("publish", 1): Outage})
    with some_files(faulty) as failing:
        body = created(failing)
        body.write(0, b"small")
        with pytest.raises(UnavailableError):
            body.flush()
        assert body.pending.dirty

        body.flush()

        assert contents(failing, "f") == b"small"
        body.close()
    faulty.assert_all_faults_fired()


def test_a_newer_version_from_elsewhere_is_taken_up_when_it_is_told_to(files):
    files.write_file("f", DATA)
    body = opened(files)
    with some_files(files.store) as elsewhere:
        elsewhere.write_file("f", DATA[::-1])

    body.take_up()

    assert body.read(0, 10, 0) == DATA[::-1][:10]
    body.close()


def test_what_is_not_flushed_is_lost_at_close_and_leaves_nothing(files):
    body = created(files)
    body.write(0, DATA)

    body.close()

    assert files.listing("") == []
    assert object_paths(files.store) == []


def test_a_removed_file_is_published_nowhere(files):
    body = created(files)
    body.write(0, DATA)

    remove_open(files, "f", body)
    body.flush()
    body.close()

    assert files.listing("") == []


def test_removing_what_is_neither_there_nor_open_is_not_found(files):
    with pytest.raises(FileNotFoundError):
        remove_open(files, "none", None)


def test_a_file_renamed_before_its_first_flush_is_published_at_its_new_path(files):
    files.write_file("g", b"old")
    body = created(files)
    body.write(0, DATA)

    rename_open(files, "f", "g", [body], None)
    assert contents(files, "g") == b"old"
    body.flush()

    assert contents(files, "g") == DATA
    assert [info.name for info in files.listing("")] == ["g"]
    body.close()


def test_an_open_plain_file_keeps_its_bytes_when_its_path_is_taken(files):
    files.write_file("f", b"plain content")
    files.write_file("g", b"other")
    body = opened(files)

    rename_open(files, "g", "f", [], body)

    assert body.read(0, 100, 0) == b"plain content"
    assert contents(files, "f") == b"other"
    body.close()


def test_an_open_plain_file_is_read_where_it_was_renamed_to():
    with some_files(MemoryStore()) as files:
        files.store.publish("f", DATA)
        body = opened(files)

        rename_open(files, "f", "d/g", [body], None)

        assert body.read(10_000, 50, 0) == DATA[10_000:10_050]
        body.close()


def time_of(files, path):
    """Of a directory, None where it is the store's own."""
    files.directories.forget(path)
    return files.stat(path).mtime_ns if files.directories.of(path).mtime_ns > 0 else None


@pytest.fixture
def dated(files):
    for path in ("here", "there"):
        files.names.make_directory(path)
        set_attributes(files, path, Attributes(mtime_ns=10**9))
    assert (time_of(files, "here"), time_of(files, "there")) == (10**9, 10**9)
    return files


def test_a_file_removed_before_its_first_flush_moves_the_time_of_its_directory(dated):
    body = created(dated, "here/f")

    remove_open(dated, "here/f", body)

    assert (time_of(dated, "here"), time_of(dated, "there")) == (None, 10**9)
    body.close()


@pytest.mark.parametrize("was_renamed_over", [False, True])
def test_a_file_renamed_before_its_first_flush_moves_the_time_of_both_directories(
    dated, was_renamed_over
):
    if was_renamed_over:
        dated.write_file("here/f", b"old")
        set_attributes(dated, "here", Attributes(mtime_ns=10**9))
    body = created(dated, "here/f")

    rename_open(dated, "here/f", "there/g", [body], None)

    assert (time_of(dated, "here"), time_of(dated, "there")) == (None, None)
    body.close()


def test_a_removed_file_that_is_appended_to_and_read_leaves_nothing_when_it_is_closed(files):
    files.write_file("f", DATA)
    body = opened(files)
    remove_open(files, "f", body)
    body.write(len(DATA), DATA)
    assert body.read(len(DATA) - 10, 20, 0) == DATA[-10:] + DATA[:10]

    body.close()

    assert object_paths(files.store) == []


def test_what_is_dropped_of_a_file_leaves_its_version_whole_and_to_be_removed_later(files):
    files.write_file("f", DATA)
    body = opened(files)
    body.write(len(DATA), DATA)
    assert body.read(0, 10, 0) == DATA[:10]

    body.close()

    assert contents(files, "f") == DATA
    assert object_paths(files.store) == sorted(files.manifest("f").object_paths())
    files.names.remove("f")
    assert object_paths(files.store) == []
