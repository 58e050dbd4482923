"""Segments: how bytes are cut into units, and what is left of one that fails."""

import pytest

from fusefs.base.serial_executor import ByteBudget
from fusefs.format.layout import StripeLayout
from fusefs.stores.memory import MemoryStore
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


def test_a_process_that_was_forked_off_waits_for_no_room_that_threads_elsewhere_hold(monkeypatch):
    with tiny_files(MemoryStore()) as files:
        engine = files.writers.engine
        monkeypatch.setattr(ByteBudget, "acquire", lambda *_: pytest.fail("waits"))
        monkeypatch.setattr(engine.pool, "_process", -1)

        with pytest.raises(StateError, match="forked off"):
            SegmentWriter(engine, StripeLayout(4, 2)).append(DATA[:4])
