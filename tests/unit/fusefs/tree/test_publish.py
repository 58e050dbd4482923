"""Publishing: what overlaps, what waits for what, and what is left where it fails."""

import errno
import threading

import pytest

from fusefs.format.attributes import Attributes
from fusefs.stores.memory import MemoryStore
from fusefs.stores.retry import RetryingStore
from fusefs.tools.fsck import verify
from fusefs.tree.file_attributes import set_attributes
from fusefs.tree.open_versions import MOST_VERSIONS
from fusefs.vfs.file import file_content
from fusefs.vfs.file.open_file import OpenFile, SpoolPlace
from omniload.base.errors import UnavailableError
from tests.support.fusefs.builders import contents, object_paths, tiny_files
from tests.support.fusefs.faulty_store import FaultyStore, Outage

DATA = bytes(range(256))


class SlowToClose(MemoryStore):
    """Objects become durable once a publication waits for them."""

    def __init__(self):
        super().__init__()
        self.awaited = threading.Event()
        self.order = []

    def create(self, path):
        writer = super().create(path)
        close = writer.close

        def closed():
            assert self.awaited.wait(30)
            close()
            self.order.append("object")

        writer.close = closed
        return writer

    def publish(self, path, data, before=None, mode=None):
        def then(there):
            self.awaited.set()
            if before is not None:
                before(there)
            self.order.append("manifest")

        super().publish(path, data, then)


def test_objects_become_durable_while_the_manifest_is_prepared_and_before_it_shows():
    store = SlowToClose()
    with tiny_files(store) as files:
        files.write_file("f", DATA)

        assert contents(files, "f") == DATA
    assert store.order == ["object"] * 3 + ["manifest"]


def test_a_flush_of_appended_bytes_and_of_a_short_tail_overlap_too():
    store = SlowToClose()
    with tiny_files(store) as files:
        body = OpenFile(files, SpoolPlace(), "f", None)
        body.write(0, DATA[:100])

        body.flush(last=False)

        assert contents(files, "f") == DATA[:100]
        assert store.order == ["object"] * 4 + ["manifest"]
        body.write(100, DATA[100:])
        body.flush()
        assert contents(files, "f") == DATA
        assert verify(files, read_data=True, grace_s=-60).faults == []
        body.close()


def test_an_object_that_cannot_be_closed_keeps_its_file_from_showing():
    class Full(MemoryStore):
        def create(self, path):
            writer = super().create(path)
            if path.endswith(".1"):
                writer.close = self.refuse
            return writer

        @staticmethod
        def refuse():
            raise OSError(errno.ENOSPC, "full")

    store = Full()
    with tiny_files(store) as files:
        with pytest.raises(OSError, match="full"):
            files.write_file("f", DATA)

        with pytest.raises(FileNotFoundError):
            files.stat("f")
    assert object_paths(store) == []


def test_a_failed_flush_can_be_tried_again_and_what_follows_is_appended():
    objects = MemoryStore()
    faulty = FaultyStore(objects, {("publish", 1): Outage})
    with tiny_files(faulty) as files:
        body = OpenFile(files, SpoolPlace(), "f", None)
        body.write(0, DATA[:100])
        with pytest.raises(UnavailableError):
            body.flush()
        body.write(100, DATA[100:])

        body.flush()

        assert contents(files, "f") == DATA
        assert verify(files, read_data=True, grace_s=-60).faults == []
        body.close()
    faulty.assert_all_faults_fired()


def test_a_write_after_a_flush_that_failed_waits_and_says_so():
    with tiny_files() as files:
        writer = files.writers.file("f")
        writer.write(DATA[:100])
        content = writer.seal()

        assert writer.would_wait(1)
        assert writer.size_bytes == 100

        writer.write(DATA[100:])
        assert not writer.would_wait(1)
        assert writer.finish()[:1] == content
        assert writer.size_bytes == len(DATA)


def test_a_file_given_up_while_it_becomes_durable_leaves_no_objects():
    with tiny_files() as files:
        writer = files.writers.file("f")
        writer.write(DATA)
        writer.seal(last=False)

        writer.abandon()

        assert object_paths(files.store) == []


def test_a_publication_repeated_after_its_answer_was_lost_still_removes_what_it_replaced():
    objects = MemoryStore()
    with tiny_files(objects) as files:
        files.write_file("f", DATA)
        old = set(object_paths(objects))

        class Repeating(MemoryStore):
            """Carries every publication out twice, as one does whose answer was lost."""

            def publish(self, path, data, before=None, mode=None):
                objects.publish(path, data, before)
                objects.publish(path, data, before)

        files.publisher._store = Repeating()
        files.write_file("f", DATA[::-1])

        assert contents(files, "f") == DATA[::-1]
        assert not old & set(object_paths(objects))
        assert len(object_paths(objects)) == 3


def test_a_file_that_another_mount_replaces_while_an_append_becomes_durable_is_left_alone():
    store = MemoryStore()
    with tiny_files(store) as files, tiny_files(store) as elsewhere:
        files.write_file("f", DATA[:96])
        body = OpenFile(files, SpoolPlace(), "f", files.open("f"))
        body.write(96, DATA[96:])
        prepared = files.publisher._manifest_of

        def replaced_meanwhile(path, there):
            elsewhere.write_file("f", DATA[::-1])
            return prepared(path, there)

        files.publisher._manifest_of = replaced_meanwhile
        with pytest.raises(OSError, match="another mount replaced") as caught:
            body.flush()

        assert caught.value.errno == errno.ESTALE
        assert contents(elsewhere, "f") == DATA[::-1]
        body.close()


def test_what_another_mount_has_published_since_keeps_the_objects_it_shares(monkeypatch):
    store = MemoryStore()
    with tiny_files(store) as files, tiny_files(store) as elsewhere:
        files.write_file("f", DATA[:96])
        body = OpenFile(elsewhere, SpoolPlace(), "f", elsewhere.open("f"))
        body.write(96, DATA[96:])
        publish = store.publish

        def then_the_other(path, data, before=None, mode=None):
            publish(path, data, before)
            if path == "f" and before is not None:
                store.publish = publish
                elsewhere.publisher._catalog._store = store
                # It looked just before.
                monkeypatch.setattr(file_content, "is_there", lambda *_: True)
                body.flush()

        store.publish = then_the_other
        files.write_file("f", DATA[::-1])

        assert contents(files, "f") == DATA
        assert verify(files, read_data=True, grace_s=-60).harmful == []
        body.close()


@pytest.mark.parametrize(
    ("fault", "objects_left"), [(Outage, 6), (lambda _: FileNotFoundError(2, "gone"), 3)]
)
def test_what_was_replaced_stays_where_it_cannot_be_told_what_is_there(fault, objects_left):
    objects = MemoryStore()
    with tiny_files(objects) as files:
        files.write_file("f", DATA)
    faulty = FaultyStore(objects, {("stat", 1): fault})
    with tiny_files(faulty) as files:
        files.write_file("f", DATA[::-1])

        assert contents(files, "f") == DATA[::-1]
    assert len(object_paths(objects)) == objects_left
    faulty.assert_all_faults_fired()


@pytest.mark.parametrize("seed", range(4))
def test_two_mounts_that_append_and_replace_at_once_never_leave_a_manifest_without_its_objects(
    seed,
):
    store = MemoryStore()
    with tiny_files(store) as files, tiny_files(store) as elsewhere, tiny_files(store) as reader:
        files.write_file("f", DATA)
        barrier, refused, broken = threading.Barrier(2, timeout=60), [], []

        def append(view):
            for _ in range(15):
                body = OpenFile(view, SpoolPlace(), "f", view.open("f"))
                barrier.wait()
                try:
                    body.write(body.size_bytes, DATA[: 40 + seed])
                    body.flush()
                except OSError as error:
                    refused.append(error.errno)
                body.close()

        def replace(view):
            for _ in range(15):
                barrier.wait()
                view.write_file("f", DATA[seed:])

        both = [
            threading.Thread(target=append, args=[files]),
            threading.Thread(target=replace, args=[elsewhere]),
        ]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        broken = verify(reader, read_data=True, grace_s=-60).harmful

    assert broken == []
    assert set(refused) <= {errno.ESTALE}


def test_a_plain_file_waits_for_nothing_and_is_new_only_once():
    with tiny_files() as files:
        publisher = files.publisher

        assert publisher.publish("f", b"1", Attributes()).is_new
        assert not publisher.publish("f", b"22", Attributes()).is_new
        assert contents(files, "f") == b"22"


class Replaced(MemoryStore):
    """Where somebody else is faster: ``meanwhile`` is called once, before a publication takes its place."""

    def __init__(self):
        super().__init__()
        self.meanwhile = []

    def publish(self, path, data, before=None, mode=None):
        if self.meanwhile:
            self.meanwhile.pop()()
        super().publish(path, data, before)


@pytest.mark.parametrize("was", ["striped", "plain"])
def test_attributes_are_set_on_what_replaced_the_file_meanwhile(was):
    store = Replaced()
    with tiny_files(store) as files, tiny_files(store) as others:
        files.write_file("f", DATA) if was == "striped" else store.publish("f", DATA)
        store.meanwhile.append(lambda: others.write_file("f", b"newer than that"))

        set_attributes(files, "f", Attributes(mode=0o600))

        assert (contents(files, "f"), files.stat("f").mode) == (b"newer than that", 0o600)
        assert (contents(others, "f"), others.stat("f").mode) == (b"newer than that", 0o600)
        assert verify(files, read_data=True, grace_s=-60).faults == []


def test_attributes_bring_nothing_back_that_was_removed_meanwhile():
    store = Replaced()
    with tiny_files(store) as files, tiny_files(store) as others:
        store.publish("f", DATA)
        store.meanwhile.append(lambda: others.names.remove("f"))

        with pytest.raises(FileNotFoundError):
            set_attributes(files, "f", Attributes(mode=0o600))

        assert files.listing("") == []
        assert object_paths(store) == []


def test_attributes_of_a_file_that_is_replaced_without_end_are_refused():
    store = Replaced()
    with tiny_files(store) as files:
        files.write_file("f", DATA)
        store.meanwhile += [lambda: MemoryStore.publish(store, "f", DATA)] * MOST_VERSIONS

        with pytest.raises(OSError, match=f"replaced {MOST_VERSIONS} times") as caught:
            set_attributes(files, "f", Attributes(mode=0o600))

        assert caught.value.errno == errno.EBUSY
        set_attributes(files, "f", Attributes(mode=0o600))
        assert (contents(files, "f"), files.stat("f").mode) == (DATA, 0o600)


def test_attributes_of_a_plain_file_whose_answer_was_lost_cost_no_byte():
    store = MemoryStore()
    store.publish("f", DATA)
    faulty = FaultyStore(store, {("publish", 1): Outage}, carry_out=True)
    patient = RetryingStore(faulty, sleep=lambda _: None)
    with tiny_files(patient) as files:
        set_attributes(files, "f", Attributes(mode=0o600))

        faulty.assert_all_faults_fired()
        assert (contents(files, "f"), files.stat("f").mode) == (DATA, 0o600)
        assert verify(files, read_data=True, grace_s=-60).faults == []


@pytest.mark.parametrize("is_there", [True, False])
def test_objects_that_another_mount_has_removed_are_no_orphans(caplog, is_there):
    caplog.set_level("INFO", "omniload")
    memory = MemoryStore()
    faults = {("remove", 1): Outage} if is_there else {}
    with tiny_files(FaultyStore(memory, faults)) as files:
        files.write_file("f", DATA)
        segments = files.manifest("f").segments
        if not is_there:
            for path in object_paths(memory):
                memory.remove(path)

        files.references.discard(segments)

    assert ("stays an orphan" in caplog.text) is is_there
