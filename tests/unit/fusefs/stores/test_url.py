"""What a store was opened at is looked at before anything is mounted on it."""

import pytest
from pyarrow import fs as pafs

from fusefs.stores import url
from fusefs.stores.memory import MemoryStore
from fusefs.stores.remote.arrow import store_on
from fusefs.stores.retry import RetryingStore
from fusefs.stores.url import check_root
from omniload.base.errors import ConfigError, UnavailableError
from tests.support.fusefs.faulty_store import FaultyStore, Outage


def test_a_directory_that_is_there_is_taken(tmp_path):
    check_root(MemoryStore())
    check_root(store_on(pafs.LocalFileSystem(), str(tmp_path), "x:///"))


def test_a_directory_that_is_not_there_is_a_fault_of_the_configuration(tmp_path):
    store = RetryingStore(store_on(pafs.LocalFileSystem(), str(tmp_path / "no"), "hdfs://h/no"))

    with pytest.raises(ConfigError, match="'hdfs://h/no' is not there; make the directory"):
        check_root(store)


class Bucket(MemoryStore):
    """A store in a bucket, whose root nobody has written to."""

    location = "s3://k:s@bucket/new/prefix?region=here"

    def __init__(self, *buckets, monkeypatch):
        super().__init__()
        self.made, self.opened = [], []
        monkeypatch.setattr(url, "open_store", lambda url: self._bucket(url, buckets))

    def _bucket(self, url, buckets):
        self.opened.append(url)
        return (
            MemoryStore()
            if buckets
            else FaultyStore(MemoryStore(), {("stat", 1): FileNotFoundError})
        )

    def stat(self, path):
        raise FileNotFoundError(2, "nothing there", path)

    def make_directory(self, path):
        self.made.append(path)


def test_a_prefix_that_nobody_wrote_to_begins_with_its_first_mount(monkeypatch):
    store = Bucket("bucket", monkeypatch=monkeypatch)

    check_root(store, begin=True)

    assert store.opened == ["s3://k:s@bucket?region=here"]
    assert store.made == [""]


def test_a_prefix_that_nobody_wrote_to_is_not_made_by_a_look_at_it(monkeypatch):
    store = Bucket("bucket", monkeypatch=monkeypatch)

    with pytest.raises(ConfigError, match="holds nothing yet; its first mount begins it"):
        check_root(store)

    assert store.made == []


@pytest.mark.parametrize("begin", [True, False])
def test_a_bucket_that_is_not_there_is_said_to_be_none(monkeypatch, begin):
    store = Bucket(monkeypatch=monkeypatch)

    with pytest.raises(ConfigError, match="there is no bucket 'bucket'; make it"):
        check_root(store, begin=begin)

    assert store.made == []


def test_a_directory_that_is_not_there_is_not_made_by_a_mount(tmp_path):
    with pytest.raises(ConfigError, match="make the directory"):
        check_root(
            store_on(pafs.LocalFileSystem(), str(tmp_path / "no"), "hdfs://h/no"), begin=True
        )

    assert not (tmp_path / "no").exists()


def test_a_file_is_no_directory_to_mount(tmp_path):
    (tmp_path / "f").write_bytes(b"x")

    with pytest.raises(ConfigError, match="is a file; name a directory"):
        check_root(store_on(pafs.LocalFileSystem(), str(tmp_path / "f"), "hdfs://h/f"))


def test_a_store_that_does_not_answer_stays_one():
    with pytest.raises(UnavailableError):
        check_root(FaultyStore(MemoryStore(), {("stat", 1): Outage}))
