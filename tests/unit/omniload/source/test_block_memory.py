"""Decoded blocks within a limit: the excess lies in files, and reads the same."""

import errno
import gc
import io
import itertools
import os
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.base.errors import UnavailableError
from omniload.base.ragged import Ragged
from omniload.source import block_memory, columns
from omniload.source.block_memory import BlockMemory, HeldBlock
from omniload.source.parts.held_column import SpilledColumn

KIB = 1024


def a_column(*lengths, dtype=np.int32, first=0):
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    return Ragged(values_V=np.arange(first, first + offsets[-1]).astype(dtype), offsets=offsets)


def a_block(memory, *units):
    with memory.writing() as writer:
        for unit in units:
            writer.append(unit)
        return memory.hold(writer.finish())


def of_kib(kib, first=0):
    """Return a unit of one record of ``kib`` KiB of token ids."""
    return {"tokens": a_column(kib * 256, first=first)}


def rows_of(block, *rows, name="tokens"):
    found = block.take(np.array(rows))[name]
    return [found[i].tolist() for i in range(len(found))]


@pytest.mark.parametrize("limit", [None, 1])
def test_records_of_all_units_are_taken_in_the_order_asked_for(limit, tmp_path):
    units = [{"tokens": a_column(2, 0, 1)}, {"tokens": a_column(3, first=7)}]

    block = a_block(BlockMemory(limit, tmp_path), *units)

    assert rows_of(block, 3, 0, 1, 2, 0) == [[7, 8, 9], [0, 1], [], [2], [0, 1]]


def test_units_in_memory_of_their_own_stay_where_they_are_until_the_block_goes_to_a_file(tmp_path):
    memory, units = BlockMemory(1000 * KIB, tmp_path), [of_kib(100), of_kib(100, first=3)]
    with memory.writing() as writer:
        for unit in units:
            writer.append(unit, own={"tokens"})
        block = memory.hold(writer.finish())
    first = block.take(np.array([0]), lent="tokens")["tokens"].values_V
    before = rows_of(block, 1, 0, 1)

    assert np.shares_memory(first, units[0]["tokens"].values_V)
    memory.set_others(950 * KIB)
    assert not block.is_in_memory
    assert rows_of(block, 1, 0, 1) == before


def test_a_unit_that_has_room_beyond_it_is_copied_into_the_block(tmp_path):
    memory, units = BlockMemory(), [of_kib(4), of_kib(4, first=3)]
    block = a_block(memory, *units)

    first = block.take(np.array([0]), lent="tokens")["tokens"].values_V

    assert not np.shares_memory(first, units[0]["tokens"].values_V)


@pytest.mark.parametrize(("most", "piece_bytes"), [(1, 1 << 31), (16, 1)])
def test_units_that_are_too_many_or_too_large_for_views_are_laid_end_to_end(
    monkeypatch, most, piece_bytes
):
    monkeypatch.setattr(columns, "_MOST_PIECES", most)
    monkeypatch.setattr(columns, "_PIECE_BYTES", piece_bytes)
    memory = BlockMemory()
    with memory.writing() as writer:
        for unit in (of_kib(1), of_kib(2, first=7)):
            writer.append(unit, own={"tokens"})
        block = memory.hold(writer.finish())

    assert [len(row) for row in rows_of(block, 1, 0)] == [512, 256]
    assert memory.used_bytes == block.size_bytes


@pytest.mark.parametrize("limit", [None, 1])
def test_columns_keep_their_types_and_names(limit, tmp_path):
    unit = {"tokens": a_column(2, 1), "loss_mask": a_column(2, 1, dtype=np.uint8, first=4)}

    block = a_block(BlockMemory(limit, tmp_path), unit)

    taken = block.take(np.array([1, 0]))
    assert {name: column.values_V.dtype for name, column in taken.items()} == {
        "tokens": np.int32,
        "loss_mask": np.uint8,
    }
    assert rows_of(block, 1, 0, name="loss_mask") == [[6], [4, 5]]


def test_records_without_any_value_are_written_and_read(tmp_path):
    block = a_block(BlockMemory(1, tmp_path), {"tokens": a_column(0, 0)})

    assert rows_of(block, 1, 0) == [[], []]


def test_a_block_that_fits_stays_in_memory(tmp_path):
    block = a_block(BlockMemory(300 * KIB, tmp_path), of_kib(20))

    assert block.is_in_memory


def test_the_block_that_is_over_the_limit_goes_to_a_file_and_the_first_stays(tmp_path):
    memory = BlockMemory(100 * KIB, tmp_path)
    first = a_block(memory, of_kib(20))

    second = a_block(memory, of_kib(90))

    assert (first.is_in_memory, second.is_in_memory) == (True, False)
    assert rows_of(second, 0) == [list(range(90 * 256))]


def test_a_block_goes_to_a_file_from_the_unit_on_that_is_too_much(tmp_path):
    memory = BlockMemory(50 * KIB, tmp_path)

    block = a_block(memory, of_kib(30), of_kib(30, first=9), of_kib(1, first=5))

    assert not block.is_in_memory
    assert [row[0] for row in rows_of(block, 2, 1, 0)] == [5, 9, 0]
    assert memory.used_bytes < 50 * KIB + 3 * 30 * KIB


def test_the_oldest_block_leaves_when_samples_read_ahead_need_the_room(tmp_path):
    memory = BlockMemory(1000 * KIB, tmp_path)
    old, young = a_block(memory, of_kib(100)), a_block(memory, of_kib(100, first=3))
    before = rows_of(old, 0)

    memory.set_others(850 * KIB)

    assert (old.is_in_memory, young.is_in_memory) == (False, True)
    assert rows_of(old, 0) == before


def test_what_a_block_took_is_free_once_nobody_holds_it(tmp_path):
    memory = BlockMemory(400 * KIB, tmp_path)
    first = a_block(memory, of_kib(90))
    assert not memory.has_room(320 * KIB)

    del first
    gc.collect()

    assert memory.used_bytes == 0
    assert a_block(memory, of_kib(90)).is_in_memory


def test_files_of_blocks_have_no_name(tmp_path):
    block = a_block(BlockMemory(1, tmp_path), of_kib(20))

    assert not block.is_in_memory
    assert not list(tmp_path.iterdir())


def test_a_folder_that_takes_no_block_is_told_with_the_remedy(tmp_path):
    with pytest.raises(UnavailableError, match=r"gone: a decoded block .*loader\.spill"):
        a_block(BlockMemory(1, tmp_path / "gone"), of_kib(20))


def test_a_variable_that_names_a_folder_that_is_not_here_leaves_the_usual_one(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert BlockMemory(1).folder == tmp_path

    monkeypatch.setenv("TMPDIR", str(tmp_path / "of-the-host"))
    assert BlockMemory(1).folder == Path("/var/tmp")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_block_whose_folder_may_not_be_written_stays_in_memory_and_the_run_goes_on(
    tmp_path, monkeypatch, caplog, number
):
    def refused(**_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tempfile.TemporaryFile", refused)

    block = a_block(BlockMemory(1, tmp_path), of_kib(20))

    assert block.is_in_memory
    (told,) = caplog.messages
    assert f"{os.strerror(number)}; have it writable, name another folder in loader.spill" in told


class SmallFile(io.FileIO):
    """A file on a disk of a few KiB, which takes only a part of a write that does not fit."""

    free_kib = 0

    def write(self, data):
        left = SmallFile.free_kib * KIB - self.tell()
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data[:left])


@pytest.fixture
def small_disk(tmp_path, monkeypatch):
    """Files of columns are on a small disk; gives the seconds of the clock, which tests move."""
    names, now_s = itertools.count(), [1000.0]
    monkeypatch.setattr(
        "tempfile.TemporaryFile", lambda **_: SmallFile(tmp_path / f"{next(names)}", "w+")
    )
    monkeypatch.setattr(block_memory, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    return now_s


@pytest.mark.parametrize("free_kib", [0, 9, 25])
def test_a_block_whose_disk_fills_up_stays_in_memory_until_there_is_room(
    small_disk, tmp_path, monkeypatch, caplog, free_kib
):
    units = [{**of_kib(10, first=n), "mask": a_column(4 * n, first=n)} for n in range(4)]
    expected = [rows_of(a_block(BlockMemory(), *units), 3, 0, 2, 1, name=n) for n in units[0]]
    monkeypatch.setattr(SmallFile, "free_kib", free_kib)
    memory = BlockMemory(1, tmp_path)

    block, other = a_block(memory, *units), a_block(memory, *units)

    assert block.is_in_memory
    assert other.is_in_memory
    (told,) = caplog.messages
    assert told.startswith(f"{tmp_path}: ")
    assert "No space left on device, " in told
    assert "are free there; make room, name another folder in loader.spill, or raise" in told
    assert [rows_of(block, 3, 0, 2, 1, name=n) for n in units[0]] == expected

    monkeypatch.setattr(SmallFile, "free_kib", 1000)
    memory.set_others(0)
    assert block.is_in_memory, "it is asked once a minute"
    small_disk[0] += 60
    memory.set_others(0)

    assert not block.is_in_memory
    assert not other.is_in_memory
    assert [rows_of(block, 3, 0, 2, 1, name=n) for n in units[0]] == expected
    assert len(caplog.messages) == 2
    assert "there is room again" in caplog.messages[1]


def test_a_disk_that_is_full_midway_keeps_columns_that_were_written_too(
    small_disk, tmp_path, monkeypatch
):
    """One column has all of its units in a file when the other finds no room."""
    units = [{"tokens": a_column(100, first=n), "wide": a_column(20 * 256)} for n in range(3)]
    expected = [rows_of(a_block(BlockMemory(), *units), 2, 0, 1, name=n) for n in units[0]]
    monkeypatch.setattr(SmallFile, "free_kib", 30)

    block = a_block(BlockMemory(1, tmp_path), *units)

    assert block.is_in_memory
    assert [rows_of(block, 2, 0, 1, name=n) for n in units[0]] == expected


def test_blocks_are_let_go_of_behind_reads_only_while_a_full_disk_leaves_several_in_memory(
    small_disk, tmp_path, monkeypatch
):
    monkeypatch.setattr(SmallFile, "free_kib", 0)
    memory = BlockMemory(15 * KIB, tmp_path)
    first = a_block(memory, of_kib(20))
    assert not memory.is_over(), "another decoding would take as much"

    others = [a_block(memory, of_kib(10, first=3))]
    assert memory.is_over()
    others.clear()
    assert not memory.is_over()

    others.append(a_block(memory, of_kib(10, first=3)))
    monkeypatch.setattr(SmallFile, "free_kib", 1000)
    small_disk[0] += 60
    memory.set_others(0)
    assert not memory.is_over()
    assert rows_of(first, 0) == [list(range(20 * 256))]


def test_a_record_of_the_log_that_is_kept_keeps_no_block(small_disk, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(SmallFile, "free_kib", 0)
    memory = BlockMemory(1, tmp_path)

    def read():
        block = a_block(memory, of_kib(10))  # a frame that the record refers to
        return weakref.ref(block)

    assert read()() is None
    (told,) = caplog.records
    assert "are free there" in told.getMessage()


def test_a_second_decoding_waits_while_the_first_needs_the_room(tmp_path):
    memory = BlockMemory(200 * KIB, tmp_path)
    a_block(memory, of_kib(60))  # a decoding is thought to take thrice that
    assert memory.may_decode()

    with memory.writing():
        assert not memory.may_decode()
    assert memory.may_decode()


def test_without_a_limit_decodings_go_on_together():
    memory = BlockMemory()
    a_block(memory, of_kib(60))

    with memory.writing():
        assert memory.may_decode()


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=12), st.integers(0, 60))
def test_what_is_counted_is_what_the_blocks_that_live_take(blocks, limit):
    memory = BlockMemory(limit * KIB)
    living = []
    for kib, ends in blocks:
        living.append(a_block(memory, of_kib(kib)))
        if ends:
            living.pop(0)

        assert memory.used_bytes == sum(block.size_bytes for block in living)


def test_what_arrow_has_freed_goes_back_to_the_system_now_and_then_alone(tmp_path, monkeypatch):
    given_back, clock = [], [100.0]
    pool = SimpleNamespace(release_unused=lambda: given_back.append(clock[0]))
    monkeypatch.setattr(block_memory.pa, "default_memory_pool", lambda: pool)
    monkeypatch.setattr(block_memory.time, "monotonic", lambda: clock[0])
    memory = BlockMemory(1 << 30, tmp_path)

    for now in (100.0, 100.1, 109.9, 110.0, 110.1):
        clock[0] = now
        with memory.writing():
            pass

    assert given_back == [100.0, 110.0]


def test_without_a_limit_arrow_keeps_what_it_has_freed(monkeypatch):
    monkeypatch.setattr(block_memory.pa, "default_memory_pool", _refused)

    with BlockMemory().writing():
        pass


def _refused():
    raise AssertionError("nothing is given back")


def test_a_block_may_go_while_room_is_looked_for(tmp_path):
    memory = BlockMemory(None, tmp_path)
    others = [a_block(memory, of_kib(1)) for _ in range(2)]

    class Moved(HeldBlock):
        @property
        def is_in_memory(self):
            del others[:1]  # for the first one, the looking thread has the last reference now
            return False

    for other in others:
        other.__class__ = Moved
    del other
    held = a_block(memory, of_kib(4))
    memory.limit_bytes = 4 * KIB

    memory.set_others(0)

    assert not held.is_in_memory
    assert rows_of(held, 0)[0][:2] == [0, 1]


def test_a_column_that_nobody_finishes_closes_its_file_as_it_goes(tmp_path, recwarn):
    column = SpilledColumn(tmp_path, np.dtype(np.int32))
    column.append(a_column(3, 5))

    del column
    gc.collect()

    assert not [each for each in recwarn if issubclass(each.category, ResourceWarning)]
