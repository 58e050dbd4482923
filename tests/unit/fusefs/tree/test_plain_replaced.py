"""Plain files that somebody replaces while they are opened: what is read is one version, whole."""

import contextlib
import errno

import pytest

from fusefs.format.attributes import Attributes
from fusefs.stores.memory import MemoryStore
from fusefs.tree.file_attributes import set_attributes
from fusefs.tree.freshness import Shown, shown_at
from fusefs.tree.open_versions import MOST_VERSIONS
from fusefs.vfs.file.open_file import OpenFile, SpoolPlace
from omniload.base.errors import UnavailableError
from tests.support.fusefs.builders import contents, some_files

OLD = b"old " * 100


class Restless(MemoryStore):
    """Something happens before a read of ``f``, as long as there is something to happen."""

    def __init__(self):
        super().__init__()
        self.reads, self.looks, self.before_reads = 0, 0, []

    def stat(self, path):
        self.looks += path == "f"
        return super().stat(path)

    def read(self, path, offset, size_bytes):
        self.reads += path == "f"
        if path == "f" and self.before_reads:
            self.before_reads.pop()()
        return super().read(path, offset, size_bytes)


@pytest.fixture
def store():
    made = Restless()
    made.publish("f", OLD)
    return made


@pytest.fixture
def files(store):
    with some_files(store) as built:
        yield built


@pytest.mark.parametrize("new", [b"n" * 300, b"n" * 400, b"n" * 4000, b""])
@pytest.mark.parametrize("times", [1, 3])
def test_bytes_are_never_of_another_version_than_the_size(store, files, new, times):
    for version in range(times):
        data = new if not version else new + b"more"  # the last one to happen is ``new``
        store.before_reads.append(lambda data=data: store.publish("f", data))

    with files.open("f") as file:
        assert file.reader.size_bytes == len(new)
        assert file.reader.read(0, 5000) == new


def test_a_plain_file_that_becomes_a_manifest_or_long_while_it_is_opened_is_read_as_such(
    store, files
):
    with some_files(store) as others:
        for change in (
            lambda: set_attributes(others, "f", Attributes(mode=0o600)),
            lambda: others.write_file("f", b"long" * 5000),
        ):
            store.publish("f", OLD)
            store.before_reads = [change]
            found = contents(files, "f")
            assert found == contents(others, "f")
    assert len(found) == 20_000


def test_what_is_removed_while_it_is_opened_is_not_there(store, files):
    store.before_reads.append(lambda: store.remove("f"))

    with pytest.raises(FileNotFoundError):
        files.open("f")


def test_a_file_that_is_replaced_without_end_is_refused_and_not_mixed(store, files):
    for version in range(MOST_VERSIONS + 7):
        store.before_reads.append(lambda version=version: store.publish("f", OLD[version:]))

    with pytest.raises(OSError, match=f"replaced {MOST_VERSIONS} times") as caught:
        files.open("f")

    assert caught.value.errno == errno.ESTALE
    assert len(store.before_reads) == 7


def test_what_is_believed_of_a_file_saves_the_first_look_and_is_checked(store, files):
    expected = files.stat("f")
    store.looks = 0
    with files.open("f", expected=expected) as file:
        assert (store.reads, store.looks) == (1, 1)
        assert file.reader.read(0, 5000) == OLD
        assert store.reads == 1

    store.publish("f", b"newer")
    with files.open("f", expected=expected) as file:
        assert file.reader.read(0, 5000) == b"newer"
    store.remove("f")
    with pytest.raises(FileNotFoundError):
        files.open("f", expected=expected)


def test_bytes_at_hand_are_not_brought_again_nor_those_nobody_wants(store, files):
    store.mtimes_ns["f"] -= 10**10
    with files.open("f", brings=False):
        assert store.reads == 0
    for _ in range(3):
        assert contents(files, "f") == OLD
    assert store.reads == 1


def test_an_outage_while_bytes_are_brought_is_told_as_one(store, files):
    def fails():
        raise UnavailableError("no store")

    store.before_reads.append(fails)
    with files.open("f") as file:  # it is there: whether it can be read, reading says
        assert file.reader.read(0, 5000) == OLD


def test_what_an_open_file_has_published_is_at_hand_whatever_lies_at_its_path(store, files):
    with files.open("f") as opened:
        file = OpenFile(files, SpoolPlace(), "f", opened)
        file.truncate(0)
        file.write(0, b"written here")
        file.flush()
        assert store.reads == 1, "the old content"

        store.publish("f", b"written away")
        assert file.read(0, 100, 1) == b"written here"
        assert shown_at(files, "f", file.version) is Shown.ANOTHER
        store.publish("f", b"written here")
        assert shown_at(files, "f", file.version) is Shown.SAME
        file.close()


@pytest.mark.parametrize(
    "data",
    [b"from elsewhere", b"from here"[::-1], b"long" * 5000],
    ids=["other", "of one size", "striped"],
)
def test_what_another_mount_publishes_in_the_same_moment_is_not_taken_for_the_own(
    store, files, data
):
    file = OpenFile(files, SpoolPlace(), "f", files.open("f"))
    publish = files.publish

    def published_over(*arguments, **named):
        published = publish(*arguments, **named)
        with some_files(store) as others:
            others.write_file("f", data)
        return published

    files.publish = published_over
    for written in (b"from here", b"striped" * 2000):
        file.truncate(0)
        file.write(0, written)
        file.flush()

        assert file.size_bytes == len(written)
        assert shown_at(files, "f", file.version) is Shown.ANOTHER
        with contextlib.suppress(OSError):  # ESTALE: its objects went with it
            assert file.read(0, 100_000, 1) == written
    file.close()
