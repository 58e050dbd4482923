"""Segments: how bytes are cut into units, and what is left of one that fails."""

import errno
import os

import pytest

from fusefs.base.serial_executor import ByteBudget
from fusefs.format.layout import StripeLayout
from fusefs.stores.local import store as local_store
from fusefs.stores.local.store import LocalStore
from fusefs.stores.memory import MemoryStore
from fusefs.stores.protocol import ObjectWriter
from fusefs.write.segment_writer import SegmentWriter, UnitBuffer, written_segment
from omniload.base.errors import StateError
from tests.support.fusefs.builders import object_paths, tiny_files

DATA = bytes(range(20))


def test_bytes_are_cut_into_units_and_the_rest_is_given_back():
    units = UnitBuffer(8)

    rest = units.take(memoryview(DATA))

    assert rest == DATA[8:]
    assert units.full == [DATA[:8]]
    assert units.tail == b""


def test_a_unit_is_filled_by_several_parts():
    units = UnitBuffer(8)

    assert units.take(memoryview(DATA[:5])) == b""
    assert units.tail == DATA[:5]
    assert units.take(memoryview(DATA[5:])) == DATA[8:]
    assert units.full == [DATA[:8]]


def test_what_is_held_counts_until_it_is_popped_or_dropped():
    units = UnitBuffer(8)
    units.take(units.take(memoryview(DATA[:11])))
    assert units.size_bytes == 11

    units.full.pop()
    assert units.size_bytes == 3

    units.clear()
    assert units.size_bytes == 0


def test_parts_become_one_segment_of_whole_units_and_a_short_one():
    with tiny_files(store := MemoryStore()) as files:
        engine = files.writers.engine
        parts = [DATA[:3], b"", DATA[3:15], DATA[15:]]
        segment = written_segment(engine, StripeLayout(4, 2), parts)

        files.publish("f", (segment,))

        assert segment.size_bytes == len(DATA)
        with files.open("f") as file:
            assert file.reader.read(0, 100) == DATA
        assert len(object_paths(store)) == 2


def test_nothing_is_left_of_a_segment_whose_bytes_do_not_come():
    def parts():
        yield DATA
        raise OSError(5, "the spool cannot be read")

    with tiny_files(store := MemoryStore()) as files:
        with pytest.raises(OSError, match="cannot be read"):
            written_segment(files.writers.engine, StripeLayout(4, 2), parts())

        assert object_paths(store) == []


def test_a_segment_that_lacks_a_unit_which_no_thread_would_take_is_never_whole(monkeypatch):
    with tiny_files(store := MemoryStore()) as files:
        engine = files.writers.engine
        writer = SegmentWriter(engine, StripeLayout(4, 2))
        writer.append(DATA[:4])
        with monkeypatch.context() as patched:
            patched.setattr(engine.pool, "submit", refuse)
            with pytest.raises(RuntimeError, match="no thread"):
                writer.append(DATA[4:8])

        with pytest.raises(RuntimeError, match="no thread"):
            writer.finish()
        writer.abandon()

        assert engine.budget.used_bytes == 0
        assert object_paths(store) == []


def refuse(*_):
    raise RuntimeError("no thread")


class FailingStream(ObjectWriter):
    """Raises at one of its calls, and counts how often it is given up."""

    def __init__(self, at, error):
        self.at, self.error, self.aborts = at, error, 0

    def write(self, data):
        if self.at == "write":
            raise self.error

    def close(self):
        if self.at == "close":
            raise self.error

    def abort(self):
        self.aborts += 1


@pytest.mark.parametrize("at", ["write", "close"])
@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("can't start new thread")])
def test_a_segment_is_not_whole_whatever_a_client_raises(monkeypatch, at, error):
    with tiny_files(store := MemoryStore()) as files:
        monkeypatch.setattr(store, "create", lambda _: FailingStream(at, error))
        writer = SegmentWriter(files.writers.engine, StripeLayout(4, 2))
        writer.append(DATA[:4])

        with pytest.raises(type(error), match=str(error)):
            writer.finish()


def test_a_stream_that_failed_is_given_up_once_however_often_the_file_is_closed(monkeypatch):
    stream = FailingStream("write", OSError(errno.ENOSPC, "the disk is full"))
    with tiny_files(store := MemoryStore()) as files:
        monkeypatch.setattr(store, "create", lambda _: stream)
        writer = SegmentWriter(files.writers.engine, StripeLayout(4, 2))
        writer.append(DATA[:4])
        writer.seal()
        for _ in range(2):
            with pytest.raises(OSError, match="full"):
                writer.settle()
        writer.abandon()

    assert stream.aborts == 1


def test_a_local_object_that_is_given_up_twice_closes_no_number_that_is_anothers(
    monkeypatch, tmp_path
):
    def refused(*_):
        raise OSError(errno.ENOSPC, "the disk is full")

    writer = LocalStore(tmp_path).create(".omnifs/objects/ab/abc.0")
    monkeypatch.setattr(local_store, "_write", refused)
    with pytest.raises(OSError, match="full"):
        writer.write(DATA)
    writer.abort()
    anothers = os.open(tmp_path, os.O_RDONLY)

    writer.abort()

    os.close(anothers)


def test_a_process_that_was_forked_off_waits_for_no_room_that_threads_elsewhere_hold(monkeypatch):
    with tiny_files(MemoryStore()) as files:
        engine = files.writers.engine
        monkeypatch.setattr(ByteBudget, "acquire", lambda *_: pytest.fail("waits"))
        monkeypatch.setattr(engine.pool, "_process", -1)

        with pytest.raises(StateError, match="forked off"):
            SegmentWriter(engine, StripeLayout(4, 2)).append(DATA[:4])
