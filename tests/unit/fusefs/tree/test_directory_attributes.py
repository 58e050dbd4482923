"""Attributes of directories: kept, found, moved and let go; and what a directory without any costs."""

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.format.attributes import Attributes
from fusefs.tools.fsck import verify
from fusefs.tree import directory_attributes
from fusefs.tree.directory_attributes import (
    ATTRIBUTES_NAME,
    NOT_KEPT,
    attributes_path,
    is_attributes,
    mark,
    marker_of,
    read_attributes,
)
from fusefs.tree.file_attributes import set_attributes, xattrs_at
from omniload.base.errors import IntegrityError, UnavailableError
from tests.support.fusefs.builders import some_files
from tests.support.fusefs.recording_store import RecordingStore

OLD_NS = 946_684_800_123_456_789
KEPT = Attributes(mode=0o750, mtime_ns=OLD_NS, xattrs={"user.origin": b"tape"})


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(directory_attributes, "time", clock)
    return clock


@pytest.fixture
def files():
    with some_files(RecordingStore()) as built:
        built.names.make_directory("d")
        set_attributes(built, "d", KEPT)
        yield built


def shown(files, path="d"):
    info = files.stat(path)
    return info.mode, info.mtime_ns, xattrs_at(files, path)


ALL = (0o750, OLD_NS, {"user.origin": b"tape"})


def test_a_directory_keeps_mode_time_and_xattrs(files):
    assert shown(files) == ALL


def test_they_are_there_for_who_opens_the_store_later(files):
    with some_files(files.store) as later:
        assert shown(later) == ALL
        (listed,) = later.listing("")
        assert (listed.mode, listed.mtime_ns) == (0o750, OLD_NS)


def test_the_root_keeps_them_too(files):
    set_attributes(files, "", Attributes(mode=0o700, mtime_ns=OLD_NS))

    with some_files(files.store) as later:
        assert (later.stat("").mode, later.stat("").mtime_ns) == (0o700, OLD_NS)
        assert [info.name for info in later.listing("")] == ["d"]


def test_each_change_leaves_the_others(files):
    set_attributes(files, "d", Attributes(mode=0o711))
    set_attributes(files, "d", Attributes(xattrs={"user.b": b"2"}))

    assert shown(files) == (0o711, OLD_NS, {"user.b": b"2"})


def test_a_new_mode_alone_does_not_move_the_time(files):
    files.names.make_directory("e")
    before = files.stat("e").mtime_ns

    set_attributes(files, "e", Attributes(mode=0o700))

    assert (files.stat("e").mode, files.stat("e").mtime_ns) == (0o700, before)


def test_xattrs_that_do_not_fit_are_refused_and_change_nothing(files):
    with pytest.raises(OSError, match="attributes need a header") as caught:
        set_attributes(files, "d", Attributes(xattrs={"user.x": b"x" * 4000}))

    assert caught.value.errno == errno.ENOSPC
    assert shown(files) == ALL


def test_where_they_lie_is_hidden_and_refused(files):
    assert files.listing("d") == []
    for call in (files.stat, files.open, files.names.remove, files.names.make_directory):
        with pytest.raises(PermissionError):
            call(f"d/{ATTRIBUTES_NAME}")
    with pytest.raises(PermissionError):
        files.names.rename("d", ATTRIBUTES_NAME)


@pytest.mark.parametrize("target", ["e", "other/f", "other/deep/d"])
def test_a_renamed_directory_takes_them_along(files, target):
    files.names.make_directory("other/deep")

    files.names.rename("d", target)

    with some_files(files.store) as later:
        assert shown(later, target) == ALL


def test_a_rename_above_takes_them_along(files):
    files.names.make_directory("top/mid")
    set_attributes(files, "top/mid", KEPT)

    files.names.rename("top", "up")

    with some_files(files.store) as later:
        assert shown(later, "up/mid") == ALL
        assert later.stat("up").mode == 0o755


def test_what_takes_the_name_of_a_renamed_directory_begins_without(files):
    files.names.rename("d", "e")
    files.names.make_directory("d")

    assert files.stat("d").mode == 0o755
    assert xattrs_at(files, "d") == {}


def test_an_empty_directory_with_attributes_is_empty(files):
    files.names.remove_directory("d")

    assert files.listing("") == []
    with pytest.raises(FileNotFoundError):
        files.store.stat(attributes_path("d"))


def test_a_directory_that_holds_a_file_is_not_removed_and_keeps_its_attributes(files):
    files.write_file("d/f", b"x")
    set_attributes(files, "d", Attributes(mtime_ns=OLD_NS))

    with pytest.raises(OSError, match="not empty") as caught:
        files.names.remove_directory("d")

    assert caught.value.errno == errno.ENOTEMPTY
    assert shown(files) == ALL


@pytest.mark.parametrize("change", ["remove_directory", "rename_over"])
def test_a_directory_in_which_another_mount_makes_something_just_then_keeps_its_attributes(
    files, change
):
    files.names.make_directory("new")
    with some_files(files.store) as other:
        remove = files.store.remove

        def removed_and_something_made(path):
            remove(path)
            other.write_file("d/theirs", b"x")

        files.store.remove = removed_and_something_made
        with pytest.raises(OSError, match="not empty") as caught:
            files.names.remove_directory(
                "d"
            ) if change == "remove_directory" else files.names.rename("new", "d")

    assert caught.value.errno == errno.ENOTEMPTY
    assert shown(files) == ALL
    assert [info.name for info in files.listing("d")] == ["theirs"]


def test_a_directory_is_renamed_over_an_empty_one_with_attributes(files):
    files.names.make_directory("new")
    files.write_file("new/f", b"x")

    files.names.rename("new", "d")

    assert [info.name for info in files.listing("d")] == ["f"]
    assert xattrs_at(files, "d") == {}


def test_a_directory_is_not_renamed_over_one_that_holds_a_file(files):
    files.write_file("d/f", b"x")
    files.names.make_directory("new")

    with pytest.raises(OSError, match="not empty"):
        files.names.rename("new", "d")

    assert files.stat("d").mode == 0o750


def change_write(files):
    files.write_file("d/new", b"x")


def change_remove(files):
    files.names.remove("d/f")


def change_mkdir(files):
    files.names.make_directory("d/sub")


def change_rmdir(files):
    files.names.remove_directory("d/empty")


def change_link(files):
    files.names.make_link("d/link", "f")


def change_rename_within(files):
    files.names.rename("d/f", "d/g")


def change_rename_out(files):
    files.names.rename("d/f", "g")


def change_rename_in(files):
    files.names.rename("outside", "d/g")


CHANGES = [value for name, value in sorted(globals().items()) if name.startswith("change_")]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_names_moves_the_time_and_leaves_the_rest(files, change):
    files.write_file("d/f", b"x")
    files.write_file("outside", b"x")
    files.names.make_directory("d/empty")
    set_attributes(files, "d", Attributes(mtime_ns=OLD_NS))

    change(files)

    mode, mtime_ns, xattrs = shown(files)
    assert mtime_ns == files.store.stat("d").mtime_ns
    assert (mode, xattrs) == (0o750, {"user.origin": b"tape"})


def test_new_content_and_attributes_of_a_file_leave_the_time(files):
    files.write_file("d/f", b"x")
    set_attributes(files, "d", Attributes(mtime_ns=OLD_NS))

    files.write_file("d/f", b"another")
    set_attributes(files, "d/f", Attributes(mode=0o600))

    assert shown(files) == ALL


def test_a_change_that_failed_leaves_the_time(files):
    with pytest.raises(FileNotFoundError):
        files.names.remove("d/missing")
    with pytest.raises(FileExistsError):
        files.names.make_directory("d")

    assert shown(files) == ALL


def test_a_done_change_is_no_failure_because_the_time_could_not_be_moved(files, monkeypatch):
    files.write_file("d/f", b"x")
    set_attributes(files, "d", KEPT)

    def down(path, data):
        raise UnavailableError("outage")

    monkeypatch.setattr(files.store, "publish", down)
    files.names.remove("d/f")

    assert files.listing("d") == []


def test_a_directory_that_another_mount_removes_meanwhile_does_not_come_back(files):
    files.write_file("d/mine", b"x")
    files.write_file("d/theirs", b"x")
    set_attributes(files, "d", KEPT)
    assert shown(files) == ALL  # so it is remembered for a second
    with some_files(files.store) as other:
        remove = files.store.remove

        def removed_then_the_rest(path):
            remove(path)
            files.store.remove = remove
            other.names.remove("d/theirs")
            other.names.remove_directory("d")

        files.store.remove = removed_then_the_rest
        files.names.remove("d/mine")

    assert files.listing("") == []
    assert verify(files).faults == []


def test_what_another_mount_set_meanwhile_is_not_lost_when_the_time_moves(files):
    assert shown(files) == ALL
    with some_files(files.store) as other:
        set_attributes(other, "d", Attributes(mode=0o700, xattrs={"user.new": b"1"}))

    files.write_file("d/f", b"x")

    mode, mtime_ns, xattrs = shown(files)
    assert (mode, xattrs) == (0o700, {"user.new": b"1"})
    assert mtime_ns == files.store.stat("d").mtime_ns


def test_directories_without_attributes_cost_one_listing_a_second(clock):
    with some_files(RecordingStore()) as files:
        for number in range(50):
            files.names.make_directory(f"d{number}")
        files.store.calls.clear()

        for number in range(50):
            files.stat(f"d{number}")
        files.listing("")

        asked = [call for call in files.store.calls if ".omnifs" in call[1]]
        assert asked == []  # asked while they were made, and believed for a second

        clock.now_s += 1.5
        files.listing("")

        asked = [call for call in files.store.calls if ".omnifs" in call[1]]
        assert asked == [("listing", ".omnifs/directories")]


def test_beside_one_with_attributes_the_others_cost_nothing(clock, files):
    files.names.make_directory("plain")
    assert marker_of("plain") != marker_of("d")
    clock.now_s += 5
    files.store.calls.clear()

    files.listing("")

    assert [call for call in files.store.calls if call[0] != "stat"] == [
        ("listing", ""),
        ("listing", ".omnifs/directories"),
        ("read", attributes_path("d")),
    ]


def test_attributes_that_are_not_there_are_not_opened(clock, files):
    files.names.make_directory("plain")
    mark(files.store, "plain")
    clock.now_s += 5
    files.store.calls.clear()

    assert files.stat("plain").mode == 0o755

    assert ("stat", attributes_path("plain")) in files.store.calls
    assert "read" not in [call for call, _ in files.store.calls]


def test_what_another_process_set_shows_after_a_second(clock, files):
    with some_files(files.store) as other:
        assert other.stat("d").mode == 0o750
        set_attributes(files, "d", Attributes(mode=0o700))
        files.names.make_directory("fresh")
        set_attributes(files, "fresh", Attributes(mode=0o700))

        clock.now_s += 1.5

        assert (other.stat("d").mode, other.stat("fresh").mode) == (0o700, 0o700)


def test_two_who_change_one_directory_keep_what_each_set(files):
    with some_files(files.store) as other:
        set_attributes(other, "d", Attributes(mode=0o700))
        set_attributes(files, "d", Attributes(mtime_ns=OLD_NS + 1))

        assert (files.stat("d").mode, files.stat("d").mtime_ns) == (0o700, OLD_NS + 1)


def test_damage_hides_the_attributes_and_nothing_below(clock, files):
    files.write_file("d/f", b"x")
    data = bytearray(files.store.read(attributes_path("d"), 0, 5461))
    data[20] ^= 1
    files.store.publish(attributes_path("d"), bytes(data))
    clock.now_s += 5

    assert files.stat("d").mode == 0o755
    assert [info.name for info in files.listing("d")] == ["f"]
    (fault,) = verify(files).harmful
    assert (fault.kind, fault.path) == ("unreadable", attributes_path("d"))

    set_attributes(files, "d", Attributes(mode=0o700))
    assert verify(files).faults == []


def test_a_files_manifest_in_their_place_is_an_error(files):
    files.write_file("large", b"x" * 5000)
    size = files.store.stat("large").size_bytes
    data = files.store.read("large", 0, size)
    files.store.publish(attributes_path("d"), data[:4096] + data[-(5461 - 4096) :])

    with pytest.raises(IntegrityError):
        read_attributes(files.store, "d")


def test_attributes_copied_to_a_files_name_are_no_directory(files):
    files.store.publish("copied", files.store.read(attributes_path("d"), 0, 5461))

    with pytest.raises(IntegrityError, match="under a file's name"):
        files.stat("copied")


def test_verify_counts_them_as_no_file_and_finds_nothing_wrong(files):
    files.write_file("d/f", b"x")

    report = verify(files, read_data=True, repair=True, grace_s=0)

    assert (report.files, report.faults, report.repaired) == (1, [], [])
    assert xattrs_at(files, "d") == {"user.origin": b"tape"}


def test_a_lost_marker_is_found_and_made_again(clock, files):
    files.store.remove(marker_of("d"))
    with some_files(files.store) as later:
        assert later.stat("d").mode == 0o755

        (fault,) = verify(later, repair=True, grace_s=0).faults

        assert (fault.kind, fault.path) == ("unmarked", "d")
        clock.now_s += 5
        assert later.stat("d").mode == 0o750
        assert verify(later).faults == []


def test_the_format_is_a_manifest_without_a_body(files):
    kept = read_attributes(files.store, "d")

    assert files.store.stat(attributes_path("d")).size_bytes == 5461
    assert (kept.kind, kept.mode, kept.mtime_ns) == ("directory", 0o750, OLD_NS)
    assert kept.size_bytes == 0
    files.names.make_directory("d/sub")
    assert read_attributes(files.store, "d").mtime_ns == NOT_KEPT


@given(st.text("abc./", max_size=12))
def test_a_path_is_of_attributes_exactly_when_it_was_made_from_a_directory(path):
    assert is_attributes(attributes_path(path.strip("/")))
    assert not is_attributes(path)


@given(st.text("xyz", min_size=1), st.text("xyz", min_size=1), st.text("xyz", min_size=1))
def test_a_marker_stays_right_when_a_directory_above_is_renamed(name, above, other):
    assert marker_of(f"{above}/{name}") == marker_of(f"{other}/{name}") == marker_of(name)
