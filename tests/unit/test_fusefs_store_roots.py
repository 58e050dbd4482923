"""What a store was opened at is looked at before anything is mounted on it."""

import pytest
from pyarrow import fs as pafs

from fusefs.stores.arrow import store_on
from fusefs.stores.memory import MemoryStore
from fusefs.stores.opening import check_root
from fusefs.stores.retrying import RetryingStore
from omniload.base.errors import ConfigError, UnavailableError
from tests.support.fusefs_faulty_store import FaultyStore, Outage


def test_a_directory_that_is_there_is_taken(tmp_path):
    check_root(MemoryStore())
    check_root(store_on(pafs.LocalFileSystem(), str(tmp_path), "x:///"))


def test_a_directory_that_is_not_there_is_a_fault_of_the_configuration(tmp_path):
    store = RetryingStore(store_on(pafs.LocalFileSystem(), str(tmp_path / "no"), "hdfs://h/no"))

    with pytest.raises(ConfigError, match="'hdfs://h/no' is not there; make the directory"):
        check_root(store)


def test_a_file_is_no_directory_to_mount(tmp_path):
    (tmp_path / "f").write_bytes(b"x")

    with pytest.raises(ConfigError, match="is a file; name a directory"):
        check_root(store_on(pafs.LocalFileSystem(), str(tmp_path / "f"), "hdfs://h/f"))


def test_a_store_that_does_not_answer_stays_one():
    with pytest.raises(UnavailableError):
        check_root(FaultyStore(MemoryStore(), {("stat", 1): Outage}))
