"""The promises of every store; a new store adds a fixture named ``store`` that starts empty."""

import errno

import pytest

from fusefs.stores.protocol import RESERVED
from omniload.base.errors import IntegrityError


def put(store, path, data):
    writer = store.create(path)
    writer.write(data)
    writer.close()


def names(store, path):
    return sorted(entry.name for entry in store.listing(path) if entry.name != RESERVED)


class StoreContract:
    def test_an_object_reads_back_as_written_by_any_range(self, store):
        writer = store.create("a/b/c")
        for part in (b"0123", bytearray(b"4567"), memoryview(b"89")):
            writer.write(part)
        writer.close()

        assert store.stat("a/b/c").size_bytes == 10
        assert store.read("a/b/c", 0, 10) == b"0123456789"
        assert store.read("a/b/c", 3, 4) == b"3456"
        assert store.read("a/b/c", 10, 0) == b""

    def test_an_object_is_never_overwritten(self, store):
        put(store, "a", b"first")

        with pytest.raises(FileExistsError):
            store.create("a")

        assert store.read("a", 0, 5) == b"first"

    def test_a_short_read_is_an_integrity_error_not_a_short_answer(self, store):
        put(store, "a", b"0123456789")

        with pytest.raises(IntegrityError, match="2 of the 8 bytes wanted at offset 8"):
            store.read("a", 8, 8)

    def test_a_large_range_reads_as_any_other(self, store):
        data = bytes(range(256)) * (12 << 10)
        put(store, "d/a", data)

        assert store.read_large("d/a", 7, 2 << 20) == data[7 : 7 + (2 << 20)]
        assert store.read_large("d/a", 0, len(data)) == data

    def test_a_large_range_that_is_not_whole_is_an_integrity_error(self, store):
        put(store, "a", b"0123456789")

        with pytest.raises(IntegrityError, match="2 of the 8 bytes wanted at offset 8"):
            store.read_large("a", 8, 8)
        with pytest.raises(IntegrityError, match="0 of the 8 bytes wanted at offset 10"):
            store.read_large("a", 10, 8)

    def test_large_ranges_are_of_files_only(self, store):
        put(store, "d/a", b"0123456789")

        with pytest.raises(FileNotFoundError):
            store.read_large("d/b", 0, 8)
        with pytest.raises(IsADirectoryError):
            store.read_large("d", 0, 8)

    def test_an_aborted_object_leaves_nothing_that_a_listing_of_files_would_take_for_whole(
        self, store
    ):
        put(store, "d/whole", b"whole")
        writer = store.create("d/half")
        writer.write(b"ha")
        writer.abort()

        assert {e.name: e.size_bytes for e in store.listing("d")}.get("whole") == 5

    def test_publishing_makes_parents_and_replaces_what_was_there(self, store):
        store.publish("x/y", b"old")
        store.publish("x/y", b"newer")

        assert store.read("x/y", 0, 5) == b"newer"
        assert names(store, "x") == ["y"]

    def test_publishing_an_empty_file_makes_an_empty_file(self, store):
        store.publish("empty", b"")

        assert store.stat("empty").size_bytes == 0
        assert not store.stat("empty").is_directory

    def test_publishing_over_a_directory_is_refused(self, store):
        store.make_directory("d")

        with pytest.raises(IsADirectoryError):
            store.publish("d", b"")

    def test_nothing_shows_of_a_file_before_what_must_come_first(self, store):
        seen = []

        def before(there):
            with pytest.raises(FileNotFoundError):
                store.stat("d/f")
            seen.append(there)

        store.publish("d/f", b"123", before)

        assert seen == [None]
        assert store.read("d/f", 0, 3) == b"123"

    def test_what_must_come_first_sees_what_will_be_replaced(self, store):
        store.publish("f", b"old")
        told, seen = store.stat("f"), []

        def before(there):
            seen.append((there, store.read("f", 0, 3)))

        store.publish("f", b"newer", before)

        assert seen == [(told, b"old")]
        assert store.read("f", 0, 5) == b"newer"

    @pytest.mark.parametrize("there", [True, False])
    def test_where_what_must_come_first_fails_nothing_has_changed(self, store, there):
        if there:
            store.publish("f", b"old")

        def before(_):
            raise OSError(errno.ESTALE, "not any more")

        with pytest.raises(OSError, match="not any more"):
            store.publish("f", b"newer", before)

        assert names(store, "") == (["f"] if there else [])
        assert not there or store.read("f", 0, 3) == b"old"

    def test_what_was_removed_meanwhile_is_published_all_the_same(self, store):
        store.publish("f", b"old")

        store.publish("f", b"newer", lambda _: store.remove("f"))

        assert store.read("f", 0, 5) == b"newer"

    def test_what_is_not_there_is_not_found(self, store):
        store.make_directory("d")

        for path in ("none", "d/none", "none/none"):
            with pytest.raises(FileNotFoundError):
                store.stat(path)
            with pytest.raises(FileNotFoundError):
                store.read(path, 0, 1)
            with pytest.raises(FileNotFoundError):
                store.remove(path)
            with pytest.raises(FileNotFoundError):
                store.rename(path, "other")
        with pytest.raises(FileNotFoundError):
            store.listing("none")

    def test_a_listing_holds_what_lies_directly_in_a_directory(self, store):
        store.publish("d/file", b"123")
        store.make_directory("d/sub")
        store.publish("d/sub/deeper", b"")

        listed = {e.name: (e.is_directory, e.size_bytes) for e in store.listing("d")}

        assert listed == {"file": (False, 3), "sub": (True, 0)}
        assert names(store, "") == ["d"]
        assert store.stat("").is_directory

    def test_an_empty_directory_lists_as_empty(self, store):
        store.make_directory("d")

        assert store.listing("d") == []

    def test_a_file_is_no_directory_and_a_directory_no_file(self, store):
        store.publish("f", b"1")
        store.make_directory("d")

        with pytest.raises(NotADirectoryError):
            store.listing("f")
        with pytest.raises(IsADirectoryError):
            store.remove("d")
        with pytest.raises(OSError, match=r".") as caught:
            store.read("d", 0, 1)
        assert caught.value.errno == errno.EISDIR

    def test_names_may_hold_blanks_percent_signs_and_letters_of_any_script(self, store):
        name = "a b%20c+ü漢.txt"
        store.publish(f"d/{name}", b"1")

        assert names(store, "d") == [name]
        assert store.read(f"d/{name}", 0, 1) == b"1"

    def test_renaming_over_a_file_replaces_it(self, store):
        store.publish("old", b"old")
        store.publish("d/new", b"new")

        store.rename("d/new", "old")

        assert store.read("old", 0, 3) == b"new"
        assert names(store, "d") == []

    def test_renaming_to_itself_changes_nothing(self, store):
        store.publish("a", b"1")

        store.rename("a", "a")

        assert store.read("a", 0, 1) == b"1"

    def test_renaming_a_directory_moves_all_it_holds(self, store):
        store.publish("work/a", b"1")
        store.publish("work/deep/b", b"2")

        store.rename("work", "final")

        assert store.read("final/a", 0, 1) == b"1"
        assert store.read("final/deep/b", 0, 1) == b"2"
        assert names(store, "") == ["final"]

    def test_renaming_a_directory_over_an_empty_one_replaces_it(self, store):
        store.publish("work/a", b"1")
        store.make_directory("final")

        store.rename("work", "final")

        assert names(store, "final") == ["a"]

    def test_renaming_over_a_directory_that_holds_something_is_refused(self, store):
        store.publish("work/a", b"1")
        store.publish("final/b", b"2")

        with pytest.raises(OSError, match=r".") as caught:
            store.rename("work", "final")

        assert caught.value.errno in {errno.ENOTEMPTY, errno.EEXIST}
        assert names(store, "final") == ["b"]

    def test_renaming_between_file_and_directory_is_refused(self, store):
        store.publish("f", b"1")
        store.make_directory("d")

        with pytest.raises(IsADirectoryError):
            store.rename("f", "d")
        with pytest.raises(NotADirectoryError):
            store.rename("d", "f")

    def test_a_directory_cannot_go_into_itself(self, store):
        store.make_directory("d")

        with pytest.raises(OSError, match=r".") as caught:
            store.rename("d", "d/e")

        assert caught.value.errno == errno.EINVAL

    def test_a_removed_file_is_gone_and_its_directory_stays(self, store):
        store.publish("d/f", b"1")

        store.remove("d/f")

        assert names(store, "d") == []

    def test_only_an_empty_directory_is_removed(self, store):
        store.publish("d/f", b"1")
        with pytest.raises(OSError, match=r".") as caught:
            store.remove_directory("d")
        assert caught.value.errno == errno.ENOTEMPTY

        store.remove("d/f")
        store.remove_directory("d")

        with pytest.raises(FileNotFoundError):
            store.stat("d")

    def test_a_directory_is_made_once_with_its_parents(self, store):
        store.make_directory("a/b/c")

        assert store.stat("a/b").is_directory
        with pytest.raises(FileExistsError):
            store.make_directory("a/b/c")
