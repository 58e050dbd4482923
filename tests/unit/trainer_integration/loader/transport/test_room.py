"""Blocks of shared memory: held as long as a tensor is, and no longer."""

import gc
import os
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_integration.loader.transport.room import (
    ALIGNMENT,
    Extents,
    Room,
    WorkersRoom,
    block_of,
)


def a_room(limit_bytes=1 << 16):
    room = Room(2, limit_bytes)
    return room, WorkersRoom(room, 1)


def received(worker, numbers):
    """Send numbers through a block, and return the tensor that the consumer gets."""
    numbers = torch.tensor(numbers)
    block = worker.take(numbers.nbytes)
    block.tensor(numbers.dtype).copy_(numbers)
    return block_of(*worker.message(block, numbers.dtype))


def test_a_block_comes_as_the_numbers_that_were_put_in():
    _room, worker = a_room()

    assert received(worker, [3, 1, 2]).tolist() == [3, 1, 2]


def test_a_block_is_used_again_when_the_last_view_is_gone():
    room, worker = a_room()
    first = received(worker, [1, 2])
    view = first[1:]
    address = first.data_ptr()
    del first
    worker.collect()
    second = received(worker, [5, 6])

    assert view.tolist() == [2]
    assert second.data_ptr() != address
    assert room.held == 2

    del view
    gc.collect()
    worker.collect()
    assert received(worker, [7, 8]).data_ptr() == address
    assert second.tolist() == [5, 6]


def test_a_region_that_is_full_gives_none_until_something_is_dropped():
    _room, worker = a_room(limit_bytes=256)
    kept = received(worker, [0] * 16), received(worker, [1] * 16)

    assert worker.take(8) is None

    del kept
    worker.collect()
    assert worker.take(256) is not None


def test_what_was_sent_to_nobody_is_free_again():
    _room, worker = a_room(limit_bytes=128)
    worker.release([worker.take(128)])
    worker.collect()

    assert worker.take(128) is not None


def test_tensors_outlive_the_room():
    room, worker = a_room()
    numbers = received(worker, [4, 5])
    del room, worker
    gc.collect()

    assert numbers.tolist() == [4, 5]


def test_a_forked_childs_end_frees_nothing():
    room, worker = a_room()
    numbers = received(worker, [4, 5])
    child = os.fork()
    if child == 0:
        del numbers
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    worker.collect()

    assert received(worker, [9, 9]).data_ptr() != numbers.data_ptr()
    assert room.held == 1


def test_what_a_forked_child_sees_is_never_written_again():
    _room, worker = a_room()
    numbers = received(worker, [4, 5])
    address = numbers.data_ptr()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reader, 1)
        os._exit(0 if numbers.tolist() == [4, 5] else 1)
    del numbers
    worker.collect()
    again = received(worker, [9, 9])
    os.write(writer, b"!")

    assert again.data_ptr() != address
    assert os.waitpid(child, 0)[1] == 0
    os.close(reader)
    os.close(writer)


def test_nothing_has_a_name_under_dev_shm():
    room, worker = a_room()
    received(worker, [1])

    assert room.key >= 0
    mapped = Path("/proc/self/maps").read_text()
    assert "memfd:omniload-loader" in mapped
    assert f"/proc/{os.getpid()}" not in mapped
    assert "/dev/shm/omniload" not in mapped


LINES = 40


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12 * ALIGNMENT)), max_size=40))
def test_blocks_never_overlap_and_the_lowest_place_that_fits_is_taken(steps):
    extents, used, taken = Extents(LINES * ALIGNMENT), [False] * LINES, []
    for take, size in steps:
        if not take and taken:
            start, freed = taken.pop(size % len(taken))
            extents.give(start, freed)
            lines = range(start // ALIGNMENT, (start + freed - 1) // ALIGNMENT + 1)
            for line in lines:
                used[line] = False
            continue
        lines = -(-size // ALIGNMENT)
        fits = [n for n in range(LINES - lines + 1) if not any(used[n : n + lines])]
        start = extents.take(size)
        assert start == (fits[0] * ALIGNMENT if fits else None)
        if start is not None:
            taken.append((start, size))
            used[fits[0] : fits[0] + lines] = [True] * lines

    # All that is free is one extent or another.
    free = [extents.take(ALIGNMENT) for _ in range(used.count(False))]
    assert free == [n * ALIGNMENT for n in range(LINES) if not used[n]]
    assert extents.take(ALIGNMENT) is None
