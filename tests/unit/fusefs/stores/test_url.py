"""What a store was opened at is looked at before anything is mounted on it."""

import pytest
from fsspec import AbstractFileSystem
from pyarrow import fs as pafs

from fusefs.stores import url
from fusefs.stores.local.store import LocalStore
from fusefs.stores.memory import MemoryStore
from fusefs.stores.remote.arrow import store_on
from fusefs.stores.remote.fsspec_store import FsspecBackend
from fusefs.stores.retry import RetryingStore
from fusefs.stores.url import check_root, local_path, open_store
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


@pytest.mark.parametrize(
    "name", ["plain", "a b", "100%", "%41", "x#y?z", "a:b", "host:1", "\udcff"]
)
def test_the_location_of_a_directory_and_its_path_open_it(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "f").touch()

    for given in (str(tmp_path / name), LocalStore(tmp_path / name).location):
        store = open_store(given)
        assert isinstance(store, LocalStore)
        assert [entry.name for entry in store.listing("")] == ["f"]


def test_a_name_with_a_colon_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:b").mkdir()

    assert isinstance(open_store("a:b"), LocalStore)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "names nothing"),
        ("file://", "names nothing"),
        ("file://store", "names no path; write file:///PATH"),
        ("http://[x", "is no URL"),
        ("s3://", "names no bucket"),
        ("gs://?x=1", "names no bucket"),
    ],
)
def test_what_names_no_store_is_a_fault_of_the_configuration(given, said):
    with pytest.raises(ConfigError, match=said):
        open_store(given)


def test_links_in_a_circle_are_told(tmp_path):
    (tmp_path / "loop").symlink_to("loop")

    with pytest.raises(ConfigError, match="cannot be opened: Too many levels of symbolic links"):
        open_store(str(tmp_path / "loop"))


@pytest.mark.parametrize(
    "scheme", ["simplecache", "filecache", "blockcache", "cached", "fsspec+simplecache"]
)
def test_clients_that_keep_what_they_read_are_refused(tmp_path, scheme):
    with pytest.raises(ConfigError, match="which would show what was there before"):
        open_store(f"{scheme}::{tmp_path.as_uri()}")


def test_a_client_that_leads_to_a_directory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="whose links this client would follow; give its path"):
        open_store(f"dir://{tmp_path}::{tmp_path.as_uri()}")
    assert local_path(f"dir://{tmp_path}::{tmp_path.as_uri()}") is None


class Http(AbstractFileSystem):
    """As fsspec's client: whatever its server answers, or does not, is "not found"."""

    def __init__(self, why):
        super().__init__()
        self.why = why

    def info(self, path, **_):
        raise FileNotFoundError(path) from self.why


def test_a_client_that_finds_nothing_as_its_server_does_not_answer_is_an_outage():
    refused = ConnectionRefusedError(111, "Connection refused")

    with pytest.raises(UnavailableError, match=r"the store answers: .*Connection refused"):
        FsspecBackend(Http(refused), "", "http://h").find("f")
    for absent in (None, KeyError("f"), FileNotFoundError(2, "none")):
        assert FsspecBackend(Http(absent), "", "http://h").find("f") is None
