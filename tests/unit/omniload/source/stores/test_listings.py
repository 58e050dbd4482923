"""How long an answer of a store stays valid, if its client keeps listings."""

import gc
import threading
import weakref
from types import SimpleNamespace

import fsspec
import pyarrow as pa
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from omniload.base.errors import IntegrityError
from omniload.source.files import reading, remote_file
from omniload.source.stores import listings
from omniload.source.stores.listings import (
    LISTED_S,
    asked_ahead,
    entry_lately,
    list_anew,
    listed_entry,
    look_anew,
    noted,
    opened_lately,
)


class Store(fsspec.AbstractFileSystem):
    """A store whose client lists once, and answers from that for good."""

    protocol = "s3"
    cachable = False

    def __init__(self):
        super().__init__()
        self.there, self.kept, self.asked = {"a": 1, "b": 1}, {}, 0

    def info(self, path, **_):
        if path not in self.kept:
            self.asked += 1
            if path not in self.there:
                raise FileNotFoundError(path)
            return self.entry(path, self.there[path])
        return self.entry(path, self.kept[path])

    def entry(self, path, version):
        return {"name": path, "type": "file", "size": 9, "etag": str(version)}

    def list(self):
        """Open all files, as of a source."""
        list_anew(self)
        if not self.kept:
            self.asked, self.kept = self.asked + 1, dict(self.there)
        for path in self.there:
            noted(self, path, self.info(path))

    def invalidate_cache(self, path=None):
        self.kept = {}


@pytest.fixture
def clock(monkeypatch):
    now = [1_000.0]
    monkeypatch.setattr(listings.time, "monotonic", lambda: now[0])
    return now


def test_a_change_is_seen_once_the_answer_of_before_stands_no_longer(clock):
    store = Store()
    store.list()
    assert entry_lately(store, "a")["etag"] == "1"
    store.there["a"] = 2

    clock[0] += LISTED_S - 1
    before = entry_lately(store, "a")["etag"]
    clock[0] += 1
    after = entry_lately(store, "a")["etag"]

    assert (before, after) == ("1", "2")


def test_each_file_is_asked_about_once_in_that_time_however_often_it_is_read(clock):
    store = Store()
    store.list()

    for _ in range(3 * int(LISTED_S)):
        for path in ("a", "b"):
            entry_lately(store, path)
        clock[0] += 1

    assert store.asked == 1 + 2 * 2


def test_a_file_that_is_first_read_long_after_its_listing_is_asked_about(clock):
    store = Store()
    store.list()
    store.there["b"] = 2
    clock[0] += LISTED_S

    assert entry_lately(store, "b")["etag"] == "2"


def test_a_look_behind_a_fault_asks_the_store(clock):
    store = Store()
    store.list()
    entry_lately(store, "a")
    del store.there["a"]

    look_anew(store, "a")

    with pytest.raises(FileNotFoundError):
        entry_lately(store, "a")


def test_bytes_that_cannot_be_decoded_are_told_as_a_change_where_the_file_is_another(clock):
    store = Store()
    store.list()
    file = remote_file(store, "a")
    store.there["a"] = 2

    with (
        pytest.raises(IntegrityError, match="a: changed since the source was opened"),
        reading(file),
    ):
        raise pa.ArrowInvalid("these bytes are none")


@pytest.mark.parametrize("tags", [('"1"', "1"), ("1", '"1"')])
def test_a_tag_with_quotes_in_one_answer_and_without_in_another_is_no_change(clock, tags):
    store = Store()
    listed, asked = tags
    store.there = {"a": listed}
    store.list()
    file = remote_file(store, "a")
    store.there["a"] = asked
    clock[0] += LISTED_S

    file.require_unchanged()

    assert entry_lately(store, "a")["etag"] == asked
    store.there["a"] = '"2"'
    clock[0] += LISTED_S
    with pytest.raises(IntegrityError, match="a: changed since the source was opened"):
        file.require_unchanged()


def test_sources_of_one_run_share_a_listing_and_a_later_run_lists_anew(clock):
    store = Store()
    store.list()
    store.there["a"] = 2
    store.list()
    shared = (store.asked, entry_lately(store, "a")["etag"])

    clock[0] += LISTED_S
    store.list()

    assert shared == (1, "1")
    assert (store.asked, entry_lately(store, "a")["etag"]) == (2, "2")


def test_what_a_later_source_found_stands_for_it_though_an_earlier_answer_is_young(clock):
    store = Store()
    store.list()
    entry_lately(store, "a")
    store.there["a"] = 2
    store.invalidate_cache()  # as a client does after a write

    store.list()

    assert entry_lately(store, "a")["etag"] == "2"


def test_a_client_of_the_same_settings_has_answers_of_its_own(clock):
    one, other = Store(), Store()
    one.list()
    one.there["a"] = 2
    other.there["a"] = 2
    other.list()

    assert one == other
    assert [entry_lately(each, "a")["etag"] for each in (one, other)] == ["1", "2"]


def test_a_client_that_keeps_no_listing_is_asked_each_time():
    store = Store()
    store.protocol = "hdfs"

    for _ in range(3):
        entry_lately(store, "a")

    assert store.asked == 3


def test_a_store_that_nobody_has_is_let_go_of():
    store = Store()
    store.list()
    there = weakref.ref(store)

    del store
    gc.collect()

    assert there() is None


class Bucket(MemoryFileSystem):
    """A store whose client goes through all that it has listed of a folder for each path, as that of S3 does."""

    protocol = "s3"
    cachable = False
    store, pseudo_dirs = {}, [""]

    def __init__(self, files):
        super().__init__()
        self.looks, self.told = 0, []
        listing = [
            {"name": f"bucket/{i}", "type": "file", "size": 1, "etag": f"{i}"} for i in range(files)
        ]
        self.dircache["bucket"] = listing

    def info(self, path, **_):
        self.looks += 1
        return next(each for each in self.dircache["bucket"] if each["name"] == path)

    def open(self, path, mode="rb", *, size=None):
        self.told.append((path, size))
        return SimpleNamespace(details=None)

    def invalidate_cache(self, path=None):
        pass


def test_files_of_a_folder_are_found_in_its_listing_without_going_through_it_for_each():
    bucket = Bucket(files=1_000)

    found = [listed_entry(bucket, f"bucket/{i}") for i in range(1_000)]

    assert [each["etag"] for each in found] == [f"{i}" for i in range(1_000)]
    assert bucket.looks == 0


def test_another_listing_of_a_folder_is_looked_at_anew():
    bucket = Bucket(files=2)
    listed_entry(bucket, "bucket/1")
    bucket.dircache["bucket"] = [{"name": "bucket/1", "type": "file", "size": 1, "etag": "new"}]

    assert listed_entry(bucket, "bucket/1")["etag"] == "new"


def test_a_folder_in_a_listing_is_left_to_the_client():
    bucket = Bucket(files=0)
    bucket.dircache["bucket"] = [{"name": "bucket/a", "type": "directory", "size": 0}]

    assert listed_entry(bucket, "bucket/a")["type"] == "directory"
    assert bucket.looks == 1


def test_a_file_of_s3_is_opened_with_what_is_known_of_it():
    bucket = Bucket(files=2)
    noted(bucket, "bucket/1", listed_entry(bucket, "bucket/1"))

    opened = opened_lately(bucket, "bucket/1")

    assert (bucket.told, bucket.looks) == ([("bucket/1", 1)], 0)
    assert opened.details["etag"] == "1"


class Brace(Bucket):
    """A bucket that answers once several have asked."""

    _strip_protocol = classmethod(lambda cls, path: path.removeprefix("s3://"))

    def __init__(self):
        super().__init__(files=0)
        self.dircache.clear()
        self.asked, self.together = [], threading.Barrier(4, timeout=30)

    def info(self, path, **_):
        self.asked.append(path)
        self.together.wait()
        if path.endswith("gone"):
            raise FileNotFoundError(path)
        return {"name": path, "type": "file", "size": 1, "etag": path}


def test_files_that_braces_name_are_asked_about_side_by_side(monkeypatch):
    bucket = Brace()
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url: (bucket, url.removeprefix("s3://")))
    urls = [f"s3://bucket/{name}" for name in ("a", "b", "c", "gone")]

    yielded = list(asked_ahead(urls))

    assert yielded == urls
    assert sorted(bucket.asked) == ["bucket/a", "bucket/b", "bucket/c", "bucket/gone"]
    assert entry_lately(bucket, "bucket/b")["etag"] == "bucket/b"
    assert len(bucket.asked) == 4  # as it was asked a moment ago
