"""What of a version lies near: told of memory, of the kernel and of bytes that need no fetching."""

import pytest

from fusefs.base.thread_pools import StorePool
from fusefs.config import DiskCacheConfig
from fusefs.format.attributes import Attributes
from fusefs.stores.memory import MemoryStore
from tests.support.fusefs.builders import some_files

DATA = bytes(range(256)) * 64
"""Four units of 4 KiB."""


@pytest.fixture
def file():
    with some_files(read_ahead=0) as files:
        files.write_file("f", DATA)
        with files.open("f") as opened:
            yield opened


def test_only_what_was_read_lies_in_memory(file):
    assert file.reader.cached.held_bytes() == (0, None)

    file.reader.read(0, 5000)

    assert file.reader.cached.held_bytes() == (8192, None)
    assert not file.reader.cached.is_complete()


def test_a_range_is_kept_whole_units_at_a_time_and_forgotten_at_once(file):
    file.reader.cached.keep(0, len(DATA))
    assert file.reader.cached.is_complete()
    assert file.reader.cached.held_bytes() == (len(DATA), None)

    assert file.reader.cached.forget() == len(DATA)

    assert file.reader.cached.held_bytes() == (0, None)
    assert not file.reader.cached.is_complete()


def test_what_went_to_the_kernel_whole_is_near_though_it_is_not_in_memory(file):
    file.reader.read(0, len(DATA))

    file.reader.served(0, len(DATA))

    assert file.reader.cached.held_bytes() == (0, None)
    assert file.reader.cached.is_complete()


def test_a_file_in_its_manifest_is_always_near_and_nothing_of_it_is_forgotten():
    with some_files() as files:
        files.write_file("f", b"inline", Attributes(mode=0o600))
        with files.open("f") as opened:
            assert opened.reader.cached.held_bytes() == (6, None)
            assert opened.reader.cached.is_complete()
            assert opened.reader.cached.forget() == 0


def test_a_copy_that_no_thread_would_compare_is_left_for_a_later_open(tmp_path, monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    disk = DiskCacheConfig(directory=str(tmp_path), capacity=1 << 20)
    store = MemoryStore()
    with some_files(store, disk_cache=disk, read_ahead=0) as files:
        files.write_file("f", DATA)
        with files.open("f") as opened:
            opened.reader.cached.keep(0, len(DATA))
    # A process that has compared nothing of it yet.
    with some_files(store, disk_cache=disk, read_ahead=0) as files, files.open("f") as opened:
        with monkeypatch.context() as patched:
            patched.setattr(StorePool, "submit", refuse)
            assert opened.local_copy() is None

        assert not opened.reader.cached.copy.copy.comparing.locked()
