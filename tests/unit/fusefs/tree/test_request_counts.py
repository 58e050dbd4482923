"""How many requests a store gets: what a read or a write costs where each request costs."""

import errno
import mmap
import random
from contextlib import contextmanager
from functools import cache

import pytest
from pyarrow import fs as pafs

from fusefs.base.huge_pages import huge_page_buffer
from fusefs.config import DiskCacheConfig, FilesConfig, Striping
from fusefs.format.attributes import Attributes
from fusefs.stores.memory import MemoryStore
from fusefs.stores.protocol import Preferred
from fusefs.stores.remote.arrow import store_on
from fusefs.stores.retry import RetryingStore
from fusefs.tree.file_attributes import set_attributes
from fusefs.tree.namespace import StripedFiles
from tests.support.fusefs.builders import some_files
from tests.support.fusefs.recording_store import RecordingObjects, RecordingStore

MiB = 1 << 20
SIZE = 32 * MiB
BLOCK = 4 * MiB


def an_object_store(kind=RecordingObjects):
    return kind(lambda path: path.startswith(".omnifs/objects/"))


class LargeReadsInMappedMemory(RecordingObjects):
    def read_large(self, path, offset, size_bytes):
        memory = huge_page_buffer(size_bytes)
        memory[:] = self.read(path, offset, size_bytes)
        return memory


@cache
def some_data():
    return random.Random(0).randbytes(SIZE)


@contextmanager
def a_file_on(store):
    data = some_data()
    files = StripedFiles(store, FilesConfig())
    files.write_file("f", data)
    yield files, data
    files.close()


@pytest.fixture
def trusting():
    """A file of which much may be guessed before anything was read."""
    with a_file_on(an_object_store()) as found:
        yield found


@pytest.fixture
def written(trusting):
    """One whose guesses must be earned: those of other files did not come true."""
    files, data = trusting
    while files._reading.budget.acquire(MiB):
        pass
    return files, data


@pytest.fixture
def in_mapped_memory():
    with a_file_on(an_object_store(LargeReadsInMappedMemory)) as found:
        yield found


def read_by_requests(reader, offset, size, *, process):
    """Read as the kernel does: a long read comes as requests of 1 MiB."""
    return b"".join(
        bytes(reader.read(at, MiB, process=process)) for at in range(offset, offset + size, MiB)
    )


def test_the_parts_of_a_long_read_in_any_order_are_one_request(written):
    files, data = written
    with files.open("f") as file:
        parts = [(at, file.reader.start(at, MiB)) for at in (10 * MiB, 8 * MiB, 11 * MiB, 9 * MiB)]
        for at, waiting in parts:
            assert file.reader.finish(at, MiB, waiting) == data[at : at + MiB]
    files.close()

    assert files.store.reads == [(8 * MiB, BLOCK)]


def test_readers_of_scattered_blocks_leave_no_parts_of_blocks_behind(written):
    files, data = written
    places = list(range(0, SIZE, BLOCK))
    random.Random(1).shuffle(places)
    with files.open("f") as file:
        for number, at in enumerate(places):
            found = read_by_requests(file.reader, at, BLOCK, process=number % 4)
            assert found == data[at : at + BLOCK]
    files.close()

    assert all(offset % BLOCK == size % BLOCK == 0 for offset, size in files.store.reads)
    assert sum(size for _, size in files.store.reads) == SIZE
    assert len(files.store.reads) < len(places)


def test_a_sequential_read_takes_few_long_requests(written):
    files, data = written
    with files.open("f") as file:
        assert read_by_requests(file.reader, 0, SIZE, process=1) == data
    files.close()

    assert len(files.store.reads) <= 8
    assert sum(size for _, size in files.store.reads) == SIZE
    assert max(size for _, size in files.store.reads) <= 16 * MiB


def test_a_scattered_read_of_whole_blocks_takes_one_request_each_and_as_much_again_at_most(written):
    files, data = written
    blocks = [5, 2, 7, 3]
    with files.open("f") as file:
        for process, block in enumerate(blocks):
            at = block * BLOCK
            assert (
                read_by_requests(file.reader, at, BLOCK, process=process) == data[at : at + BLOCK]
            )
    files.close()

    # The third has earned its neighbour; those of the fourth are read already, or of another wide block.
    reads = [(offset // BLOCK, size // BLOCK) for offset, size in files.store.reads]
    assert reads == [(5, 1), (2, 1), (6, 2), (3, 1)]


def test_where_nothing_is_known_yet_a_scattered_read_brings_in_what_one_request_may(trusting):
    files, data = trusting
    with files.open("f") as file:
        for process, at in enumerate((5 * BLOCK, 2 * BLOCK, 7 * BLOCK, 3 * BLOCK)):
            found = read_by_requests(file.reader, at, BLOCK, process=process)
            assert found == data[at : at + BLOCK]
    files.close()

    assert files.store.reads == [(16 * MiB, 16 * MiB), (0, 16 * MiB)]


def test_who_reads_a_block_of_many_files_soon_gets_no_more_than_that(trusting):
    files, data = trusting
    for number in range(16):
        files.write_file(f"{number}", data)
        with files.open(f"{number}") as file:
            read_by_requests(file.reader, 5 * BLOCK, BLOCK, process=0)
    files.close()

    assert [size // BLOCK for _, size in files.store.reads] == [4] * 12 + [1] * 4


def test_a_small_read_brings_in_its_unit_alone(written):
    files, data = written
    with files.open("f") as file:
        assert file.reader.read(9 * MiB + 100, 5000) == data[9 * MiB + 100 :][:5000]
    files.close()

    assert files.store.reads == [(9 * MiB, MiB)]


def test_what_a_store_prefers_shapes_new_files_and_the_user_goes_first(written):
    files, _ = written
    assert files.manifest("f").segments[0].layout.stripe_count == 1

    chosen = FilesConfig(striping=Striping(count=3), longest_read=MiB, read_ahead=0)
    theirs = StripedFiles(an_object_store(), chosen)
    theirs.write_file("f", bytes(4 * MiB))
    theirs.close()

    assert theirs.manifest("f").segments[0].layout.stripe_count == 3
    assert (theirs.longest_read, chosen.reading(theirs.store.preferred)) == (MiB, (MiB, 0))


def test_a_small_cache_is_not_filled_by_one_request():
    config = FilesConfig(cache=8 * MiB)

    assert config.reading(RecordingObjects.preferred) == (MiB, 64 * MiB)
    assert FilesConfig().reading(Preferred()) == (4 * MiB, 32 * MiB)


def test_a_disk_cache_takes_shorter_reads_since_they_lie_beside_the_cap_until_written(tmp_path):
    chosen = DiskCacheConfig(directory=str(tmp_path), capacity=64 * MiB)
    assert FilesConfig(disk_cache=chosen).reading(RecordingObjects.preferred)[0] == 4 * MiB

    files = StripedFiles(an_object_store(), FilesConfig())
    assert files.longest_read == 16 * MiB
    files.use_disk_cache(chosen)
    files.close()

    assert files.longest_read == 4 * MiB


def test_whoever_wraps_a_store_prefers_what_it_prefers():
    store = an_object_store()

    assert RetryingStore(store).preferred is store.preferred
    assert MemoryStore().preferred == Preferred()
    assert MemoryStore().preferred.stripe_count == 4


def test_a_plain_file_on_s3_is_opened_once_and_again_when_its_length_changed(tmp_path, monkeypatch):
    client = pafs.LocalFileSystem()
    store = store_on(client, str(tmp_path), "file:///")
    held = store._files.inner._held
    opened = []
    open_file = held._open_file
    monkeypatch.setattr(held, "_any_path", True)
    monkeypatch.setattr(held, "_open_file", lambda path: opened.append(path) or open_file(path))
    store.publish("plain", b"short")

    assert [store.read("plain", at, 2) for at in (0, 2)] == [b"sh", b"or"]
    assert [path for path in opened if not path.startswith(".omnifs/intents")] == ["plain"]
    store.publish("plain", b"a longer one")
    assert store.read("plain", 5, 7) == b"ger one"
    store.remove("plain")
    with pytest.raises(FileNotFoundError):
        store.read("plain", 0, 2)


def test_reading_further_than_a_block_makes_it_a_stream(written):
    files, data = written
    with files.open("f") as file:
        found = read_by_requests(file.reader, 8 * MiB, 16 * MiB, process=1)
        assert found == data[8 * MiB : 24 * MiB]
    files.close()

    assert files.store.reads[0] == (8 * MiB, BLOCK)
    assert len(files.store.reads) <= 5
    with some_files(files.store) as again:
        assert again.manifest("f").size_bytes == SIZE


def read_into_a_page_cache(reader, start, stop, *, process):
    """Read as a mount does for a kernel that keeps it: in order, and nothing twice."""
    for at in range(start, stop, MiB):
        data = reader.try_read(at, MiB)
        if data is None:
            data = reader.read(at, MiB, process=process)
        else:
            reader.note(at, MiB, process=process)
        reader.served(at, len(data))


def test_what_the_kernel_dropped_is_fetched_ahead_again_though_memory_has_the_beginning(written):
    files, _ = written
    with files.open("f") as file:
        read_by_requests(file.reader, 0, BLOCK, process=1)  # past the page cache
        read_into_a_page_cache(file.reader, BLOCK, SIZE, process=2)
        held = len(files.store.reads)

        read_into_a_page_cache(file.reader, 0, SIZE, process=3)
    files.close()

    again = files.store.reads[held:]
    assert len(again) <= 6
    assert sum(size for _, size in again) <= SIZE


def test_a_kernel_without_room_for_pages_costs_few_blocks_twice(written):
    files, _ = written
    with files.open("f") as file:
        for at in range(0, SIZE, MiB):
            for _ in range(3):
                read_into_a_page_cache(file.reader, at, at + MiB, process=1)
    files.close()

    assert sum(size for _, size in files.store.reads) <= 1.25 * SIZE


def test_a_read_past_the_end_is_empty_and_asks_for_nothing(trusting):
    files, _ = trusting
    files.write_file("f", bytes(5 * BLOCK + 1))
    with files.open("f") as file:
        for at in range(5 * BLOCK + 1, 6 * SIZE, BLOCK // 2):
            assert file.reader.try_read(at, MiB) == b""
            file.reader.note(at, MiB, process=at)
            assert file.reader.read(at, MiB, process=at) == b""
            file.reader.served(at, 0)
    files.close()

    assert files.store.reads == []


def test_nobody_changes_what_others_read(in_mapped_memory):
    files, data = in_mapped_memory
    with files.open("f") as file:
        for at, size in ((BLOCK, MiB), (5 * MiB, MiB), (BLOCK - 1, 2)):
            assert memoryview(file.reader.read(at, size)).readonly
            assert memoryview(file.reader.try_read(at, size)).readonly
            assert file.reader.read(at, size) == data[at : at + size]


def test_memory_that_is_refused_fails_the_reads_that_wait_for_it_and_no_others(
    in_mapped_memory, monkeypatch
):
    files, data = in_mapped_memory
    with files.open("f") as file:
        with monkeypatch.context() as refused:
            refused.setattr(mmap, "mmap", refuse_memory)
            for unit in file.reader.start(BLOCK, 2 * MiB):
                with pytest.raises(OSError, match="Cannot allocate") as raised:
                    unit.result(timeout=30)
                assert raised.value.errno == errno.ENOMEM

        assert file.reader.read(BLOCK, MiB) == data[BLOCK : BLOCK + MiB]


def refuse_memory(*_, **__):
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def opened_and_read(files):
    with files.open("d/small") as file:
        return file.reader.read(0, 5)


def looked_for_nothing(files):
    with pytest.raises(FileNotFoundError):
        files.stat("d/none")


BUDGETS = {
    "look at a file": (1, lambda files: files.stat("d/small")),
    "look for what is not there": (1, looked_for_nothing),
    "open and read a file just written": (3, opened_and_read),
    "list a folder": (1, lambda files: files.listing("d")),
    "write a small file": (2, lambda files: files.write_file("d/new", b"fresh")),
    "replace a small file": (1, lambda files: files.write_file("d/small", b"other")),
    "write three objects": (5, lambda files: files.write_file("d/large", bytes(3 * 4096))),
    "set attributes": (4, lambda files: set_attributes(files, "d/small", Attributes(mode=0o640))),
    "rename a file": (3, lambda files: files.names.rename("d/small", "d/other")),
    "remove a file": (3, lambda files: files.names.remove("d/small")),
    "make a folder": (2, lambda files: files.names.make_directory("e")),
}
"""Most requests of an operation where nothing is known of the tree; whether folders are marked is asked once."""


@pytest.mark.parametrize("operation", BUDGETS)
@pytest.mark.parametrize("kind", [RecordingStore, RecordingObjects])
def test_an_operation_keeps_to_its_budget_of_requests(kind, operation):
    store, (most, carry_out) = kind(), BUDGETS[operation]
    with some_files(store) as files:
        files.write_file("d/small", b"bytes")
    with some_files(store) as files:
        store.since()

        carry_out(files)

        asked = store.since()
    assert 0 < len(asked) <= most, asked
