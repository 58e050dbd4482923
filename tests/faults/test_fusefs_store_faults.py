"""Outages and crashes of stores, by script."""

import pytest
from pyarrow import fs as pafs

from fusefs.stores.memory import MemoryStore
from fusefs.stores.protocol import RenameBegunError
from fusefs.stores.remote.arrow import ArrowBackend, store_on
from fusefs.stores.remote.object_store import ObjectStore
from fusefs.stores.remote.rename_intents import INTENTS, Intent, encode_intent, intent_path
from fusefs.stores.remote.rename_store import RenamingStore
from fusefs.stores.retry import RetryingStore
from omniload.base.errors import IntegrityError, UnavailableError
from tests.support.fusefs.faulty_store import FaultyStore, Outage


def a_retrying_store(faulty, waits):
    return RetryingStore(faulty, waits_s=[0.1, 0.2], sleep=waits.append)


def test_a_read_outlives_an_outage_of_two_answers():
    objects = MemoryStore()
    objects.publish("a", b"payload")
    faulty = FaultyStore(objects, {("read", 1): Outage, ("read", 2): Outage})
    waited = []

    assert a_retrying_store(faulty, waited).read("a", 0, 7) == b"payload"
    assert waited == [0.1, 0.2]
    faulty.assert_all_faults_fired()


def test_an_outage_that_lasts_is_unavailable_and_never_not_found():
    faulty = FaultyStore(MemoryStore(), {("stat", n): Outage for n in (1, 2, 3)})

    with pytest.raises(UnavailableError) as caught:
        a_retrying_store(faulty, []).stat("a")

    assert "gave up after 3 attempts" in caught.value.__notes__[0]
    faulty.assert_all_faults_fired()


def test_an_integrity_error_is_not_retried():
    objects = MemoryStore()
    objects.publish("a", b"pay")
    waited = []

    with pytest.raises(IntegrityError):
        a_retrying_store(objects, waited).read("a", 0, 7)
    assert waited == []


def test_a_rename_that_was_carried_out_but_not_answered_counts_as_done():
    objects = MemoryStore()
    objects.publish("a", b"1")
    faulty = FaultyStore(objects, {("rename", 1): Outage}, carry_out=True)

    a_retrying_store(faulty, []).rename("a", "b")

    assert objects.read("b", 0, 1) == b"1"
    faulty.assert_all_faults_fired()


def test_a_removal_that_was_carried_out_but_not_answered_counts_as_done():
    objects = MemoryStore()
    objects.publish("a", b"1")
    faulty = FaultyStore(objects, {("remove", 1): Outage}, carry_out=True)

    a_retrying_store(faulty, []).remove("a")

    assert objects.listing("") == []
    faulty.assert_all_faults_fired()


def test_a_publication_that_is_repeated_asks_again_whether_all_is_ready():
    objects = MemoryStore()
    faulty = FaultyStore(objects, {("publish", 1): Outage}, carry_out=True)
    found = []

    a_retrying_store(faulty, []).publish("a", b"1", found.append)

    assert [there and there.size_bytes for there in found] == [None, 1]
    assert objects.read("a", 0, 1) == b"1"
    faulty.assert_all_faults_fired()


def test_an_outage_of_what_a_publication_waits_for_is_not_one_of_the_publication():
    objects = MemoryStore()
    waited = []
    outage = UnavailableError("object 3 is not durable")

    def before(_):
        raise outage

    with pytest.raises(UnavailableError) as caught:
        a_retrying_store(objects, waited).publish("a", b"1", before)

    assert caught.value is outage
    assert waited == []
    assert objects.listing("") == []


class Crash(BaseException):
    """The process ends here."""


class CrashingBackend(ArrowBackend):
    """Dies before its n-th call that changes something."""

    def __init__(self, root, crash_at):
        super().__init__(pafs.LocalFileSystem(), str(root), "test:")
        self._left = crash_at

    def _changing(self):
        self._left -= 1
        if self._left == 0:
            raise Crash

    def open_new(self, path):
        self._changing()
        return super().open_new(path)

    def move(self, source, target):
        self._changing()
        super().move(source, target)

    def remove(self, path):
        self._changing()
        super().remove(path)


class LostAnswer(CrashingBackend):
    """Loses the name node instead of the process."""

    def _changing(self):
        self._left -= 1
        if self._left == 0:
            raise UnavailableError("scripted outage")


@pytest.mark.parametrize("fails_at", range(1, 6))
def test_an_outage_at_any_moment_of_a_replacement_leaves_the_old_file_or_the_new(
    tmp_path, fails_at
):
    store_on(pafs.LocalFileSystem(), str(tmp_path), "test:").publish("f", b"old")
    failing = RenamingStore(LostAnswer(tmp_path, fails_at))

    with pytest.raises(UnavailableError):
        failing.publish("f", b"new")

    assert failing.read("f", 0, 3) == (b"old" if fails_at <= 3 else b"new")
    failing.publish("f", b"end")
    assert failing.read("f", 0, 3) == b"end"


class BadLine(ArrowBackend):
    """A line to a store that breaks at the n-th call that changes something: before it, or before its answer."""

    def __init__(self, root, fails_at, *, answers_only):
        super().__init__(pafs.LocalFileSystem(), str(root), "test:")
        self._left = fails_at
        self._answers_only = answers_only

    def _over_it(self, call, *paths):
        self._left -= 1
        if self._left == 0 and not self._answers_only:
            raise UnavailableError("scripted outage")
        call(*paths)
        if self._left == 0:
            raise UnavailableError("scripted outage")

    def move(self, source, target):
        # As object stores move: a copy, which is as young as it is, and a removal.
        data = super().read(source, 0, 100)
        self._over_it(self._copied, target, data)
        self._over_it(super().remove, source)

    def _copied(self, target, data):
        writer = super().open_new(target)
        writer.write(data)
        writer.close()

    def make_directory(self, path):
        self._over_it(super().make_directory, path)

    def remove_directory(self, path):
        self._over_it(super().remove_directory, path)


@pytest.mark.parametrize("answers_only", [False, True])
@pytest.mark.parametrize("fails_at", range(1, 12))
@pytest.mark.parametrize("name", ["f", "d"])
def test_a_rename_on_an_object_store_goes_on_where_an_outage_broke_it_off(
    tmp_path, name, fails_at, answers_only
):
    whole = store_on(pafs.LocalFileSystem(), str(tmp_path), "test:")
    whole.publish("f", b"file")
    whole.publish("d/a", b"1")
    whole.publish("d/below/b", b"2")
    line = BadLine(tmp_path, fails_at, answers_only=answers_only)

    a_retrying_store(ObjectStore(line), []).rename(name, "new")

    with pytest.raises(FileNotFoundError):
        whole.stat(name)
    if name == "f":
        assert whole.read("new", 0, 4) == b"file"
    else:
        assert whole.read("new/a", 0, 1) == b"1"
        assert whole.read("new/below/b", 0, 1) == b"2"
        assert len(whole.listing("new")) == 2


def test_a_rename_of_what_another_removed_is_not_taken_for_one_that_was_carried_out(tmp_path):
    store = ObjectStore(BadLine(tmp_path, 1, answers_only=False))
    store.publish("f", b"file")
    with pytest.raises(RenameBegunError):
        store.rename("f", "g")

    store.remove("f")

    with pytest.raises(FileNotFoundError):
        store.go_on_renaming("f", "g")


def test_a_rename_that_was_given_up_is_held_to_the_rules_when_it_is_asked_for_anew(tmp_path):
    whole = store_on(pafs.LocalFileSystem(), str(tmp_path), "test:")
    whole.publish("d/a", b"1")
    whole.publish("d/b", b"2")
    store = ObjectStore(BadLine(tmp_path, 4, answers_only=False))
    with pytest.raises(RenameBegunError):
        store.rename("d", "new")
    assert (len(whole.listing("d")), len(whole.listing("new"))) == (1, 1)

    with pytest.raises(OSError, match="not empty"):
        store.rename("d", "new")


def test_an_outage_before_a_rename_begins_skips_no_rule(tmp_path):
    whole = store_on(pafs.LocalFileSystem(), str(tmp_path), "test:")
    whole.publish("d/a", b"1")
    whole.publish("new/b", b"2")
    faulty = FaultyStore(
        ObjectStore(BadLine(tmp_path, 99, answers_only=False)), {("rename", 1): Outage}
    )

    with pytest.raises(OSError, match="not empty"):
        a_retrying_store(faulty, []).rename("d", "new")

    assert whole.read("new/b", 0, 1) == b"2"
    faulty.assert_all_faults_fired()


@pytest.mark.parametrize("crash_at", range(1, 6))
def test_a_crash_at_any_moment_of_a_replacement_leaves_the_old_file_or_the_new(tmp_path, crash_at):
    store_on(pafs.LocalFileSystem(), str(tmp_path), "test:").publish("f", b"old")
    dying = RenamingStore(CrashingBackend(tmp_path, crash_at))

    with pytest.raises(Crash):
        dying.publish("f", b"new")

    survivor = store_on(pafs.LocalFileSystem(), str(tmp_path), "test:")
    assert survivor.stat("f").size_bytes == 3
    assert survivor.read("f", 0, 3) == (b"old" if crash_at <= 3 else b"new")


def test_a_file_unlinked_after_a_crash_does_not_come_back(tmp_path):
    store_on(pafs.LocalFileSystem(), str(tmp_path), "test:").publish("f", b"old")
    dying = RenamingStore(CrashingBackend(tmp_path, 3))  # the intent stands, the target too
    with pytest.raises(Crash):
        dying.publish("f", b"new")
    survivor = store_on(pafs.LocalFileSystem(), str(tmp_path), "test:")
    assert len(survivor.listing(INTENTS)) == 1

    survivor.remove("f")

    with pytest.raises(FileNotFoundError):
        survivor.stat("f")


class DeafHadoop:
    """A client that answers "not found" for everything, and says why only when it lists."""

    type_name = "hdfs"

    def __init__(self, why):
        self.why = why

    def get_file_info(self, what):
        if isinstance(what, pafs.FileSelector):
            raise self.why
        return pafs.FileInfo(what, pafs.FileType.NotFound)

    def open_input_file(self, _):
        raise self.why


def test_a_name_node_that_does_not_answer_is_unavailable_though_its_client_says_not_found():
    deaf = RenamingStore(ArrowBackend(DeafHadoop(OSError(255, "Unknown error 255")), "/r", "hdfs:"))

    with pytest.raises(UnavailableError, match="Unknown error 255"):
        deaf.stat("a")


def test_a_name_node_that_says_not_found_is_believed():
    answering = RenamingStore(
        ArrowBackend(DeafHadoop(FileNotFoundError(2, "No such file")), "/r", "hdfs:")
    )

    with pytest.raises(FileNotFoundError):
        answering.stat("a")


def test_looking_for_what_is_not_there_opens_nothing(tmp_path, monkeypatch):
    store = store_on(pafs.LocalFileSystem(), str(tmp_path), "file:///")
    opened = []
    monkeypatch.setattr(ArrowBackend, "read", lambda _, path, *__: opened.append(path) or b"")

    with pytest.raises(FileNotFoundError):
        store.stat("missing")

    assert opened == []  # libhdfs logs a page for each file that it cannot open


@pytest.mark.parametrize("name", ["f", ".omnifs-notes"])
def test_a_reader_ends_a_replacement_whatever_letters_its_name_begins_with(tmp_path, name):
    store = RenamingStore(ArrowBackend(pafs.LocalFileSystem(), str(tmp_path), "test:"))
    store.publish(".omnifs/new/content", b"newer")
    store.publish(intent_path(name), encode_intent(Intent(".omnifs/new/content", name)))

    assert store.read(name, 0, 5) == b"newer"
