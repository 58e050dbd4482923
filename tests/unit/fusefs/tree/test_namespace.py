"""Names, links, directories and ranges over the reference store."""

import errno

import pytest

from fusefs.config import DirectoryStriping, Striping
from fusefs.format.attributes import Attributes
from fusefs.stores.memory import MemoryStore
from fusefs.stores.retry import RetryingStore
from fusefs.tree.file_attributes import set_attributes
from omniload.base.errors import IntegrityError
from tests.support.fusefs.builders import contents, object_paths, some_files, tiny_files

BIG = bytes(range(256)) * 100


@pytest.fixture
def files():
    with some_files() as built:
        yield built


@pytest.mark.parametrize("limit", [0, 1, 4096, 8191, 8192])
def test_the_limit_of_plain_files_holds_where_a_unit_is_larger(limit):
    with some_files(striping=Striping(unit=8192, count=3), plain_limit=limit) as files:
        for name, size in {"at": limit, "above": limit + 1}.items():
            files.write_file(name, b"x" * size)
            files.store.publish(f"foreign {name}", b"y" * size)

        assert files.stat("at").stored == "plain"
        assert files.stat("above").stored == "manifest"
        for name, size in {"at": limit, "above": limit + 1}.items():
            for path, data in {name: b"x" * size, f"foreign {name}": b"y" * size}.items():
                set_attributes(files, path, Attributes(mode=0o600))
                assert (files.stat(path).mode, contents(files, path)) == (0o600, data)


def test_a_small_file_is_plain_and_a_large_one_is_a_manifest(files):
    files.write_file("small", b"x" * 4096)
    files.write_file("large", b"x" * 4097)

    assert files.store.read("small", 0, 4096) == b"x" * 4096
    assert files.stat("large").stored == "manifest"
    assert len(object_paths(files.store)) == 2


def test_a_file_that_was_there_before_is_read_as_it_is(files):
    files.store.publish("old", BIG)

    assert files.stat("old").stored == "plain"
    assert contents(files, "old") == BIG


def test_a_directory_may_have_a_striping_of_its_own():
    wide = DirectoryStriping(path="wide", unit=4096, count=5)
    with some_files(directories=(wide,), striping=Striping(unit=4096, count=2)) as files:
        files.write_file("wide/f", BIG)
        files.write_file("f", BIG)

        assert files.manifest("wide/f").segments[0].layout.stripe_count == 5
        assert files.manifest("f").segments[0].layout.stripe_count == 2


def test_a_directory_rename_moves_manifests_and_no_object(files):
    files.write_file("step.tmp/rank0", BIG)
    before = object_paths(files.store)

    files.names.rename("step.tmp", "step")

    assert contents(files, "step/rank0") == BIG
    assert object_paths(files.store) == before


def test_renaming_over_a_striped_file_removes_its_objects(files):
    files.write_file("a", BIG)
    files.write_file("b", BIG[::-1])

    files.names.rename("b", "a")

    assert contents(files, "a") == BIG[::-1]
    assert object_paths(files.store) == sorted(files.manifest("a").object_paths())


def test_renaming_to_itself_keeps_the_objects(files):
    files.write_file("a", BIG)

    files.names.rename("a", "a")

    assert contents(files, "a") == BIG


def test_removing_a_striped_file_removes_its_objects(files):
    files.write_file("a", BIG)

    files.names.remove("a")

    assert object_paths(files.store) == []
    assert files.listing("") == []


def test_a_link_says_where_it_points_and_is_as_long(files):
    files.names.make_link("d/link", "../target")

    assert files.stat("d/link").kind == "symlink"
    assert files.stat("d/link").size_bytes == len("../target")
    assert files.names.read_link("d/link") == "../target"
    with pytest.raises(FileExistsError):
        files.names.make_link("d/link", "elsewhere")


def test_a_file_is_no_link(files):
    files.write_file("f", b"")

    with pytest.raises(OSError, match="not a symbolic link") as caught:
        files.names.read_link("f")
    assert caught.value.errno == errno.EINVAL


def test_what_belongs_to_the_store_is_out_of_sight_and_out_of_reach(files):
    files.write_file("a", BIG)

    assert [info.name for info in files.listing("")] == ["a"]
    for call in (
        files.stat,
        files.listing,
        files.names.remove,
        files.names.make_directory,
        files.open,
    ):
        with pytest.raises(PermissionError):
            call(".omnifs/objects")


def test_the_root_stays(files):
    with pytest.raises(OSError, match="root") as caught:
        files.names.remove_directory("")
    assert caught.value.errno == errno.EBUSY


def test_opening_a_directory_is_refused(files):
    files.names.make_directory("d")

    with pytest.raises(IsADirectoryError):
        files.open("d")


def test_attributes_that_do_not_fit_are_enospc_and_change_nothing(files):
    files.write_file("f", b"1")

    with pytest.raises(OSError, match="shorten") as caught:
        set_attributes(files, "f", Attributes(xattrs={"user.big": bytes(5000)}))

    assert caught.value.errno == errno.ENOSPC
    assert files.stat("f").stored == "plain"


def test_a_large_plain_file_that_gets_attributes_is_striped_with_the_same_bytes(files):
    files.store.publish("old", BIG)

    set_attributes(files, "old", Attributes(mode=0o600))

    assert files.stat("old").mode == 0o600
    assert contents(files, "old") == BIG


def test_a_plain_file_with_the_size_of_a_manifest_is_still_plain(files):
    files.store.publish("odd", b"y" * 5461)

    assert files.stat("odd").stored == "plain"
    assert contents(files, "odd") == b"y" * 5461


def test_the_same_header_is_read_once_when_its_time_stamp_is_settled():
    store = MemoryStore()
    with some_files(store) as files:
        files.write_file("f", BIG)
        store.mtimes_ns["f"] -= 10**10
        reads = []
        read = store.read
        store.read = lambda *a: (reads.append(a), read(*a))[1]

        files.stat("f")
        files.listing("")

    assert len(reads) == 1


@pytest.mark.parametrize(("units", "reads"), [(3, 1), (8000, 2)])
def test_an_open_reads_a_short_manifest_once_and_the_header_of_a_long_one_first(units, reads):
    store = MemoryStore()
    data = bytes(units * 8)
    with tiny_files(store) as files:
        files.write_file("f", data)
        seen = []
        read = store.read
        store.read = lambda *a: (seen.append(a), read(*a))[1]

        with files.open("f") as file:
            assert file.manifest.size_bytes == file.info.size_bytes == len(data)
        files.open("f").close()

    assert len(seen) == 2 * reads


def test_a_plain_file_with_the_size_of_a_manifest_and_its_end_is_said_to_be_damaged(files):
    files.store.publish("odd", b"y" * 5453 + b"\nomnifs\n")

    for call in (files.stat, files.open):
        with pytest.raises(IntegrityError, match="ends as one"):
            call("odd")


def test_a_cached_read_costs_no_store_call():
    with tiny_files() as files:
        files.write_file("f", BIG)
        with files.open("f") as file:
            file.reader.read(0, 100)

            assert file.reader.try_read(10, 50) == BIG[10:60]
            assert file.reader.try_read(len(BIG) - 8, 8) is None


def test_memory_of_the_cache_stays_under_its_cap_while_a_larger_file_is_read():
    cap = 8 << 20
    with some_files(cache=cap, striping=Striping(unit=1 << 20, count=2)) as files:
        data = bytes(3 << 20) * 4
        files.write_file("f", data)
        with files.open("f") as file:
            for at in range(0, len(data), 1 << 20):
                file.reader.read(at, 1 << 20)
                assert files.cache.used_bytes <= cap


def filled(files, path, ranges):
    """Read ranges of a file into buffers of their own."""
    buffers = [bytearray(size) for _, size in ranges]
    with files.open(path) as file:
        views = [(at, memoryview(b)) for (at, _), b in zip(ranges, buffers, strict=True)]
        for future in file.reader.start_into(views):
            future.result()
    return [bytes(buffer) for buffer in buffers]


RANGES = [(0, 10), (4090, 5000), (4090, 5000), (len(BIG) - 7, 7), (5, 0)]


@pytest.mark.parametrize("stored", ["striped", "plain", "inline"])
def test_ranges_are_read_straight_into_buffers_however_the_file_is_stored(files, stored):
    data = BIG if stored != "inline" else BIG[:4000]
    ranges = RANGES if stored != "inline" else [(0, 4000), (17, 3)]
    if stored == "plain":
        files.store.publish("f", data)
    else:
        files.write_file("f", data, Attributes(mode=0o600))

    assert filled(files, "f", ranges) == [data[at : at + size] for at, size in ranges]


def test_units_that_several_ranges_share_are_read_once_and_not_cached():
    with some_files(RetryingStore(MemoryStore())) as files:
        files.write_file("f", BIG)
        filled(files, "f", [])
        opening = files.store.calls["read"]

        assert filled(files, "f", [(0, 3), (3, 3), (6, 3)]) == [BIG[0:3], BIG[3:6], BIG[6:9]]

        assert files.store.calls["read"] == opening * 2 + 1
        assert files.cache.used_bytes == 0


def test_a_range_past_the_end_is_refused(files):
    files.write_file("f", BIG)

    with pytest.raises(ValueError, match="past the end"):
        filled(files, "f", [(len(BIG) - 1, 2)])


def test_a_segment_written_from_views_is_published_as_a_file(files):
    writer = files.writers.segment("f")
    for at in range(0, len(BIG), 4096):
        writer.append(memoryview(BIG)[at : at + 4096])

    files.publish("f", (writer.finish(),))

    assert contents(files, "f") == BIG
    assert files.manifest("f").segments[0].layout.stripe_count == 3


class Private(MemoryStore):
    """Keeps one file from this process, as a local store keeps another user's."""

    def read(self, path, offset, size_bytes):
        if path == "d/theirs":
            raise PermissionError(13, "Permission denied", path)
        return super().read(path, offset, size_bytes)


def test_a_manifest_that_another_user_keeps_private_hides_no_neighbour():
    with some_files(Private()) as files:
        files.write_file("d/ours", bytes(20_000))
        files.write_file("d/theirs", bytes(20_000))

        assert [info.name for info in files.listing("d")] == ["ours", "theirs"]
        with pytest.raises(PermissionError):
            files.stat("d/theirs")
