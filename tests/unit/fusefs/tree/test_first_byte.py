"""What is asked of a store before the first byte of a file: each call is a request, one after the other."""

import errno
from types import SimpleNamespace

import orjson
import pytest
from pyarrow import fs as pafs

from fusefs.format.attributes import Attributes
from fusefs.stores.protocol import Entry
from fusefs.stores.remote import arrow
from fusefs.stores.remote.client import Backend
from fusefs.stores.remote.object_store import ObjectStore
from fusefs.stores.remote.rename_intents import intent_path
from fusefs.stores.remote.rename_store import RenamingStore
from fusefs.tree import manifests
from fusefs.tree.file_attributes import set_attributes, xattrs_at
from fusefs.tree.namespace import StripedFiles
from omniload.base.errors import IntegrityError, UnavailableError
from tests.support.fusefs.builders import contents, object_paths, some_files
from tests.support.fusefs.recording_store import RecordingStore

S = 10**9
DATA = bytes(range(250)) * 100
OTHER = DATA[::-1]


@pytest.fixture
def files():
    store = RecordingStore(lambda path: not path.startswith(".omnifs"))
    with some_files(store) as built:
        built.write_file("f", DATA)
        store.mtime_ns = 100 * S
        store.since()
        yield built


def test_lookup_open_and_open_again_read_a_settled_manifest_once(files):
    assert files.stat("f").size_bytes == len(DATA)
    assert files.store.since() == [("stat", "f"), ("read", "f")]

    for _ in range(2):
        assert contents(files, "f") == DATA
        assert files.store.since() == [("stat", "f")]
    assert files.stat("f").size_bytes == len(DATA)
    assert xattrs_at(files, "f") == {}
    assert files.manifest("f").size_bytes == len(DATA)
    assert files.store.since() == [("stat", "f")] * 3


def test_an_open_alone_readies_the_next_lookup(files):
    files.open("f").close()
    assert files.store.since() == [("stat", "f"), ("read", "f")]

    files.stat("f")
    assert [info.size_bytes for info in files.listing("")] == [len(DATA)]
    assert files.store.since() == [("stat", "f"), ("listing", "")]


def test_a_listing_reads_headers_alone(files, monkeypatch):
    sizes = []
    read = files.store.read
    monkeypatch.setattr(files.store, "read", lambda p, o, n: sizes.append(n) or read(p, o, n))

    files.listing("")
    files.stat("f")
    assert sizes == [4096]
    files.open("f").close()
    files.open("f").close()

    assert sizes == [4096, files.stat("f").entry.size_bytes]


def test_what_is_not_settled_is_read_at_each_open_and_a_new_version_shows(files):
    files.store.mtime_ns = 2**62  # a clock far ahead: it may be written again in the same moment
    files.stat("f")
    assert contents(files, "f") == DATA

    with some_files(files.store) as others:
        others.write_file("f", OTHER)

    assert contents(files, "f") == OTHER
    assert files.store.since().count(("read", "f")) >= 3


def test_a_settled_version_that_another_mount_replaced_is_read_anew(files):
    assert contents(files, "f") == DATA
    with some_files(files.store) as others:
        others.write_file("f", OTHER)
        files.store.mtime_ns += 1
        files.store.since()

        assert contents(files, "f") == OTHER
        assert files.store.since() == [("stat", "f"), ("read", "f")]


def test_a_store_that_tells_no_times_is_asked_each_time(files):
    files.store.mtime_ns = 0
    files.open("f").close()
    with some_files(files.store) as others:
        others.write_file("f", OTHER)

    assert contents(files, "f") == OTHER


def test_a_rename_over_it_shows_though_size_and_time_are_the_same(files):
    files.write_file("g", OTHER)
    assert (contents(files, "f"), contents(files, "g")) == (DATA, OTHER)

    files.names.rename("g", "f")

    assert contents(files, "f") == OTHER


def test_directories_that_change_places_show_their_own_files_though_all_are_as_old(files):
    for path, data in (("d/f", DATA), ("e/f", OTHER)):
        files.write_file(path, data)
    assert (contents(files, "d/f"), contents(files, "e/f")) == (DATA, OTHER)

    for source, target in (("d", "old"), ("e", "d"), ("old", "e")):
        files.names.rename(source, target)

    assert (contents(files, "d/f"), contents(files, "e/f")) == (OTHER, DATA)


def test_a_missing_object_is_the_sign_that_what_is_known_is_of_another_version(files):
    files.open("f").close()
    with some_files(files.store) as others:
        others.write_file("g", OTHER)  # as long, and as old
        others.names.rename("g", "f")

    with pytest.raises(OSError, match="open the file again") as caught:
        contents(files, "f")
    assert caught.value.errno == errno.ESTALE

    assert contents(files, "f") == OTHER


@pytest.mark.parametrize(
    "ask", [StripedFiles.stat, StripedFiles.open, StripedFiles.manifest, xattrs_at]
)
def test_a_file_that_is_replaced_by_one_with_a_shorter_manifest_while_it_is_looked_at(
    files, monkeypatch, ask
):
    files.write_file("f", DATA[:4000], Attributes(mode=0o600))
    assert files.store.stat("f").size_bytes > 9000
    others, read = [], files.store.read

    def replaced_first(path, offset, size_bytes):
        if path == "f" and not others:
            others.append("wrote")
            with some_files(files.store) as other:
                other.write_file("f", DATA)
        return read(path, offset, size_bytes)

    monkeypatch.setattr(files.store, "read", replaced_first)
    files.catalog.forget("f")
    found = ask(files, "f")

    assert others == ["wrote"]
    if ask is StripedFiles.stat:
        assert found.size_bytes == len(DATA)
    assert contents(files, "f") == DATA
    if ask is StripedFiles.open:
        assert found.reader.read(0, 10) == DATA[:10]
        found.close()


def test_what_this_mount_replaced_shows_at_once_whatever_the_clocks_say(files):
    """All it writes bears the time stamp of what was there, which is believed to be settled."""
    assert contents(files, "f") == DATA
    files.write_file("f", OTHER)
    assert contents(files, "f") == OTHER
    assert len(object_paths(files.store)) == len(files.manifest("f").object_paths())

    for mode in (0o600, 0o640):
        set_attributes(files, "f", Attributes(mode=mode))
        assert files.stat("f").mode == mode

    for target in ("one", "two"):
        files.names.remove("f")
        files.names.make_link("f", target)
        assert files.names.read_link("f") == target


def test_what_was_forgotten_is_read_anew(files):
    files.open("f").close()
    files.catalog.forget("")
    files.store.since()

    files.open("f").close()

    assert files.store.since() == [("stat", "f"), ("read", "f")]


def test_a_long_manifest_is_described_by_its_header_and_never_remembered_whole(files, monkeypatch):
    monkeypatch.setattr(manifests, "SHORT_BYTES", 5000)
    for reads in (2, 1, 1):  # the header is known from the first time
        files.open("f").close()
        assert files.store.since() == [("stat", "f"), *[("read", "f")] * reads]


def test_a_manifest_that_came_broken_once_is_not_remembered_so(files, monkeypatch):
    read, broken = files.store.read, [True]

    def flipped(path, offset, size_bytes):
        data = read(path, offset, size_bytes)
        if path == "f" and broken and size_bytes > 5000:
            return data[:4096] + b"\xff" * 64 + data[4160:]
        return data

    monkeypatch.setattr(files.store, "read", flipped)
    assert files.stat("f").size_bytes == len(DATA)  # the header is whole, and says so
    with pytest.raises(IntegrityError):
        files.open("f")
    broken.clear()

    assert contents(files, "f") == DATA


def test_a_plain_file_of_a_manifests_size_is_told_by_one_read(files):
    files.store.publish("chance", bytes(5461))

    assert files.stat("chance").stored == "plain"
    assert files.store.since()[1:] == [("stat", "chance"), ("read", "chance")]


def test_replacing_a_settled_file_reads_what_is_there_before_and_after(files):
    files.write_file("f", OTHER)
    assert files.store.since().count(("read", "f")) == 2
    files.open("f").close()
    files.store.since()

    files.write_file("f", DATA)
    assert files.store.since().count(("read", "f")) == 1  # what was there before is known

    files.store.mtime_ns += 1
    assert contents(files, "f") == DATA


class NotingBackend(Backend):
    """A client of an object store over a dict: lists a prefix, finds a key; notes each request."""

    location = "noting:"

    def __init__(self, *keys, lists_itself=False, root_mtime_ns=0):
        self.keys = dict.fromkeys(keys, b"1")
        self.calls = []
        self.lists_itself = lists_itself
        self.root_mtime_ns = root_mtime_ns
        self.fails = set()

    def _note(self, call, path):
        self.calls.append((call, path))
        if (call, path) in self.fails:
            raise UnavailableError("scripted outage")

    def _below(self, path):
        above = f"{path}/" if path else ""
        return sorted({k[len(above) :].split("/")[0] for k in self.keys if k.startswith(above)})

    def _entry(self, path):
        name = path.rpartition("/")[2]
        if path in self.keys:
            return Entry(name, False, 1, 100 * S)
        there = not path or self._below(path)
        return Entry(name, True, 0, 0 if path else self.root_mtime_ns) if there else None

    def find(self, path):
        self._note("find", path)
        return self._entry(path)

    def listing(self, path):
        self._note("listing", path)
        if path in self.keys and self.lists_itself:
            return [self._entry(path)]
        if path and not self._below(path):
            raise FileNotFoundError(2, "no such prefix", path)
        above = f"{path}/" if path else ""
        return [self._entry(above + name) for name in self._below(path)]

    def since(self):
        calls, self.calls = self.calls, []
        return calls


class FailingPut:
    """A stream of an object store: nothing shows before its close, and that fails as scripted."""

    def __init__(self, backend, path, *, arrives):
        self.backend, self.path, self.arrives, self.data = backend, path, arrives, b""

    def write(self, data):
        self.data += data

    def close(self):
        if self.arrives:
            self.backend.keys[self.path] = self.data
        raise UnavailableError("scripted: the answer was lost")

    def abort(self):
        self.backend.remove(self.path)


class Put(FailingPut):
    def close(self):
        self.backend.keys[self.path] = self.data


class Failing(NotingBackend):
    """Its puts fail, or its moves do."""

    def __init__(self, *, puts=True, arrives=True):
        super().__init__("f")
        self.put, self.arrives = (FailingPut if puts else Put), arrives

    def open_new(self, path):
        return self.put(self, path, arrives=self.arrives)

    def move(self, source, target):
        raise UnavailableError("scripted outage")

    def remove(self, path):
        self.keys.pop(path, None)


@pytest.mark.parametrize("arrives", [False, True])
def test_a_put_that_fails_takes_nothing_away_of_what_it_was_to_replace(arrives):
    backend = Failing(arrives=arrives)
    with pytest.raises(UnavailableError):
        ObjectStore(backend).publish("f", b"new")

    assert backend.keys == {"f": b"new" if arrives else b"1"}


@pytest.mark.parametrize("puts", [False, True])
def test_what_goes_in_parts_replaces_a_file_once_it_is_whole_and_leaves_nothing(puts):
    backend = Failing(puts=puts)
    with pytest.raises(UnavailableError):
        ObjectStore(backend).publish("f", bytes(5 << 20))

    assert backend.keys == {"f": b"1"}


BOTH = pytest.mark.parametrize("kind", [ObjectStore, RenamingStore])


@BOTH
def test_a_listing_that_holds_something_asks_nothing_else(kind):
    backend = NotingBackend("d/a", "d/b", ".omnifs/x")
    store = kind(backend)

    assert [entry.name for entry in store.listing("d")] == ["a", "b"]
    assert len(store.listing("")) == 2
    assert backend.since() == [("listing", "d"), ("listing", "")]


@BOTH
@pytest.mark.parametrize("lists_itself", [False, True])
def test_a_file_is_no_directory_however_a_client_lists_it(kind, lists_itself):
    store = kind(NotingBackend("d/f", lists_itself=lists_itself))

    with pytest.raises(NotADirectoryError):
        store.listing("d/f")
    with pytest.raises(NotADirectoryError):
        store.listing("d/f/below")


@BOTH
def test_a_directory_that_holds_one_file_of_its_own_name_is_listed(kind):
    store = kind(NotingBackend("d/d"))

    assert [entry.name for entry in store.listing("d")] == ["d"]


@BOTH
def test_a_listing_of_nothing_is_not_found_and_of_the_stores_own_at_once(kind):
    backend = NotingBackend("f")
    store = kind(backend)

    with pytest.raises(FileNotFoundError):
        store.listing("none")
    backend.since()
    with pytest.raises(FileNotFoundError):
        store.listing(".omnifs/directories")

    assert backend.since() == [("listing", ".omnifs/directories")]


@BOTH
def test_an_outage_of_the_listing_stays_one(kind):
    backend = NotingBackend("d/f")
    backend.fails = {("listing", "d")}

    with pytest.raises(UnavailableError):
        kind(backend).listing("d")
    backend.fails = {("listing", "none"), ("find", "none")}
    with pytest.raises(UnavailableError):
        kind(backend).listing("none")


def test_a_directory_made_while_it_is_listed_shows_what_it_holds():
    class Made(NotingBackend):
        def listing(self, path):
            try:
                return super().listing(path)
            finally:
                self.keys["d/f"] = b"1"

    assert [entry.name for entry in ObjectStore(Made("x")).listing("d")] == ["f"]


def test_the_root_of_a_bucket_is_found_once_and_one_that_has_a_time_each_time():
    bucket, dated = NotingBackend("f"), NotingBackend("f", root_mtime_ns=5)
    for backend in (bucket, dated):
        store = ObjectStore(backend)
        for _ in range(3):
            assert store.stat("").is_directory

    assert bucket.since() == [("find", "")]
    assert dated.since() == [("find", "")] * 3


def test_a_root_that_was_not_found_is_asked_for_again():
    backend = NotingBackend("f")
    backend.fails = {("find", "")}
    store = ObjectStore(backend)
    with pytest.raises(UnavailableError):
        store.stat("")
    backend.fails = set()

    assert store.stat("").is_directory


def test_what_is_missing_of_the_stores_own_is_asked_for_once():
    backend = NotingBackend("f")
    store = ObjectStore(backend)

    with pytest.raises(FileNotFoundError):
        store.stat(".omnifs/objects/ab/none")
    assert backend.since() == [("find", ".omnifs/objects/ab/none")]
    with pytest.raises(NotADirectoryError):
        store.stat("f/none")
    assert backend.since() == [("find", "f/none"), ("find", "f")]


def test_a_store_without_marks_is_asked_for_them_by_one_listing():
    backend = NotingBackend("d/f")
    with some_files(ObjectStore(backend)) as files:
        backend.close = lambda: None
        files.stat("")
        files.stat("d")

    assert backend.since() == [("find", ""), ("listing", ".omnifs/directories"), ("find", "d")]


class Glimpsing(NotingBackend):
    """A client whose glimpse may miss what is there, as HDFS's does in an outage."""

    def __init__(self, *keys):
        super().__init__(*keys)
        self.misses = set()

    def glimpse(self, path):
        self._note("glimpse", path)
        return None if path in self.misses else self._entry(path)

    def is_file(self, path):
        self._note("is_file", path)
        return path in self.keys


def an_intent(backend, source, target):
    path = intent_path(target)
    backend.keys[path] = orjson.dumps({"version": 1, "source": source, "target": target})
    backend.read = lambda at, *_: backend.keys[at]
    return path


def test_a_name_that_is_there_takes_a_glimpse_and_a_missing_one_no_look_twice():
    backend = Glimpsing("d/f")
    store = RenamingStore(backend)

    store.stat("d/f")
    assert backend.since() == [("glimpse", "d/f")]
    with pytest.raises(FileNotFoundError):
        store.stat("d/none")
    assert backend.since() == [
        ("glimpse", "d/none"),
        ("is_file", intent_path("d/none")),
        ("find", "d/none"),
        ("glimpse", "d"),
    ]


def test_a_glimpse_that_missed_finishes_no_rename_over_what_is_there():
    backend = Glimpsing("f", ".omnifs/new/1")
    backend.misses = {"f"}
    an_intent(backend, ".omnifs/new/1", "f")
    backend.move = lambda *_: pytest.fail("the target is there")

    assert RenamingStore(backend).stat("f").size_bytes == 1


def test_a_rename_whose_target_is_gone_is_finished_after_a_sure_look():
    backend = Glimpsing(".omnifs/new/1")
    an_intent(backend, ".omnifs/new/1", "f")
    backend.move = lambda source, target: backend.keys.update({target: backend.keys.pop(source)})

    assert not RenamingStore(backend).stat("f").is_directory
    assert ("find", "f") in backend.since()


def test_an_intent_that_lost_its_source_leaves_the_target_missing():
    backend = Glimpsing("other")
    an_intent(backend, ".omnifs/new/gone", "f")

    with pytest.raises(FileNotFoundError):
        RenamingStore(backend).stat("f")


def test_an_outage_behind_a_glimpse_is_an_outage():
    backend = Glimpsing("f")
    backend.misses = {"f"}
    backend.fails = {("find", "f")}

    with pytest.raises(UnavailableError):
        RenamingStore(backend).stat("f")


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ("s3://b/p", "s3://b/p?allow_delayed_open=true"),
        ("s3://b?region=x", "s3://b?region=x&allow_delayed_open=true"),
        ("s3://b?allow_delayed_open=false", "s3://b?allow_delayed_open=false"),
    ],
)
def test_a_small_file_is_put_by_one_request_unless_the_url_says_otherwise(monkeypatch, url, asked):
    seen = []

    def from_uri(given):
        seen.append(given)
        return pafs.LocalFileSystem(), "/"

    monkeypatch.setattr(arrow.pafs, "FileSystem", SimpleNamespace(from_uri=from_uri))

    assert arrow.arrow_store(url).location == url
    assert seen == [asked]
