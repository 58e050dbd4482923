"""The content of one open file: its three states, what a flush publishes, and what errors leave."""

import os

import pytest

from fusefs.attributes import Attributes
from fusefs.body import Body, SpoolPlace
from fusefs.moves import remove_open, rename_open
from fusefs.stores.memory import MemoryStore
from omniload.base.errors import UnavailableError
from tests.support.fusefs_builders import contents, object_paths, some_files
from tests.support.fusefs_faulty_store import FaultyStore, Outage

DATA = os.urandom(20_000)


@pytest.fixture
def files():
    with some_files() as built:
        yield built


def created(files, path="f", **place):
    return Body(files, SpoolPlace(**place), path, None)


def opened(files, path="f", **place):
    return Body(files, SpoolPlace(**place), path, files.open(path))


def test_appended_bytes_go_to_objects_and_are_published_by_the_flush(files):
    body = created(files)
    for at in range(0, len(DATA), 3000):
        body.write(at, DATA[at : at + 3000])
    assert body.size_bytes == len(DATA)
    assert not body.published

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

    with pytest.raises(OSError, match="raise spool_limit"):
        body.write(3, b"x")

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


def test_a_flush_that_fails_keeps_the_bytes_for_the_next(files):
    faulty = FaultyStore(files.store, {("publish", 1): Outage})
    with some_files(faulty) as failing:
        body = created(failing)
        body.write(0, b"small")
        with pytest.raises(UnavailableError):
            body.flush()
        assert body.dirty

        body.flush()

        assert contents(failing, "f") == b"small"
        body.close()
    faulty.assert_all_faults_fired()


def test_a_newer_version_from_elsewhere_is_taken_up_at_the_next_open(files):
    files.write_file("f", DATA)
    body = opened(files)
    with some_files(files.store) as elsewhere:
        elsewhere.write_file("f", DATA[::-1])

    body.refresh()

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
