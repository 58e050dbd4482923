"""Files held open between reads: which, how many, and what becomes of one that fails."""

import threading

import pyarrow as pa
import pytest
from pyarrow import fs as pafs

from fusefs.stores.handle_cache import HandleCache
from fusefs.stores.remote.arrow import ArrowBackend, store_on
from tests.support.fusefs.builders import contents, some_files

OBJECT = ".omnifs/objects/ab/{}.0"
DATA = bytes(range(250)) * 100


def test_an_object_is_opened_once_and_any_other_file_each_time():
    opened = []
    held = HandleCache(lambda path: opened.append(path) or f"file {path}")

    for path in (OBJECT.format(1), "plain"):
        for _ in range(2):
            assert (held.held(path) or held.opened(path)) == f"file {path}"

    assert opened == [OBJECT.format(1), "plain", "plain"]


def test_the_least_recently_read_goes_first():
    held = HandleCache(str, most=2)
    for name in (1, 2):
        held.opened(OBJECT.format(name))
    held.held(OBJECT.format(1))

    held.opened(OBJECT.format(3))

    assert held.held(OBJECT.format(2)) is None
    assert held.held(OBJECT.format(1)) is not None


def test_what_is_dropped_is_opened_again():
    held = HandleCache(str)
    held.opened(OBJECT.format(1))
    held.drop(OBJECT.format(1))
    assert held.held(OBJECT.format(1)) is None
    held.opened(OBJECT.format(1))

    held.clear()

    assert held.held(OBJECT.format(1)) is None


def test_readers_that_meet_at_an_object_share_one_opening():
    opened, held, found = [], None, []
    others = [
        threading.Thread(target=lambda: found.append(held.opened(OBJECT.format(1))))
        for _ in range(2)
    ]

    def open_file(path):
        opened.append(path)
        for other in others:
            other.start()
        return f"file {path}"

    held = HandleCache(open_file)
    found.append(held.opened(OBJECT.format(1)))
    for other in others:
        other.join()

    assert found == [f"file {OBJECT.format(1)}"] * 3
    assert opened == [OBJECT.format(1)]


def test_an_opening_that_fails_fails_for_who_began_it_and_the_others_try_themselves():
    held, found, began = None, [], threading.Event()

    def other():
        began.set()
        found.append(held.opened(OBJECT.format(1)))

    waiting = threading.Thread(target=other)

    def open_file(path):
        if not waiting.ident:
            waiting.start()
            began.wait(30)
            raise FileNotFoundError(path)
        return "file"

    held = HandleCache(open_file)
    with pytest.raises(FileNotFoundError):
        held.opened(OBJECT.format(1))
    waiting.join()

    assert found == ["file"]
    assert held.opened(OBJECT.format(1)) == "file"


@pytest.fixture
def store(tmp_path):
    return store_on(pafs.LocalFileSystem(), str(tmp_path), "file:///")


def test_a_store_reads_an_object_again_without_opening_it(store, monkeypatch):
    with some_files(store, read_ahead=0) as files:
        files.write_file("f", DATA)
        path = files.manifest("f").segments[0].object_path(0)
        first = store.read(path, 0, 100)
        backend = store._files.inner
        monkeypatch.setattr(backend._held, "_open_file", lambda path: pytest.fail(f"opened {path}"))

        assert store.read(path, 0, 100) == first
        assert store.read(path, 50, 10) == first[50:60]


def test_a_file_that_broke_while_held_is_opened_afresh(store):
    with some_files(store, read_ahead=0) as files:
        files.write_file("f", DATA)
        path = files.manifest("f").segments[0].object_path(0)
        broken = pa.BufferReader(b"")
        broken.close()
        store._files.inner._held.put(path, broken)

        assert contents(files, "f") == DATA


def test_an_object_that_was_removed_is_not_there_though_it_was_held(store):
    with some_files(store) as files:
        files.write_file("f", DATA)
        path = files.manifest("f").segments[0].object_path(0)
        store.read(path, 0, 10)

        store.remove(path)

        with pytest.raises(FileNotFoundError):
            store.read(path, 0, 10)


def test_a_file_opened_elsewhere_takes_the_place_of_the_one_held():
    held = HandleCache(lambda path: f"old {path}", most=2, any_path=True)
    held.opened("a")

    held.put("a", "new a")
    held.put("b", "b")
    assert (held.held("a"), held.opened("a")) == ("new a", "new a")
    held.put("c", "c")

    assert [held.held(path) for path in "abc"] == ["new a", None, "c"]


class CountingS3:
    """Opens one object, again and again."""

    type_name = "s3"

    def __init__(self, data):
        self.data = data
        self.opened = 0

    def open_input_file(self, _):
        self.opened += 1
        return pa.BufferReader(self.data)


@pytest.mark.parametrize(
    ("path", "last", "opened"),
    [("plain", b"\x00", 1), ("plain", b"\xa7", 3), (".omnifs/objects/ab/abc.0", b"\xa7", 1)],
)
@pytest.mark.parametrize("read", ["read", "read_large"])
def test_what_may_be_shorter_than_it_was_is_opened_again_where_it_may_have_changed(
    path, last, opened, read
):
    client = CountingS3(bytes(99) + last)
    backend = ArrowBackend(client, "bucket", "s3://bucket")

    for _ in range(3):
        assert getattr(backend, read)(path, 0, 100) == client.data

    assert client.opened == opened
