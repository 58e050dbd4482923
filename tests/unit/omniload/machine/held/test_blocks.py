"""Blocks of a source in memory, of which some reads lack a shard."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from omniload.machine.held.blocks import HeldSamples, SampleRange
from tests.support.plane.reference import SHARDS, read_range, shard_of

EPOCH = [[3], [1, 2], [4], [5], [2]]


def a_read(start, stop, without=()):
    table, columns = read_range(1, EPOCH, start, stop, without)
    return SampleRange(table, columns.tokens, columns.others, frozenset(without))


def positions(held):
    return [p for block in held.blocks for p in block.table.positions_N.tolist()]


def test_what_lacks_a_shard_gives_way_to_a_read_that_has_it_and_the_rest_of_it_stays():
    held = HeldSamples()
    held.hold(a_read(0, 10, without=(1,)))

    held.hold(a_read(4, 6))

    spans = [(block.table.start, block.table.stop) for block in held.blocks]
    assert spans == [(0, 4), (4, 6), (6, 10)]
    assert positions(held) == [0, 2, 3, 4, 5, 7, 8]
    assert [block.without for block in held.blocks] == [{1}, set(), {1}]


def test_what_holds_more_than_a_read_stays():
    held = HeldSamples()
    held.hold(a_read(0, 6))

    held.hold(a_read(0, 8, without=(1,)))

    assert positions(held) == [0, 1, 1, 2, 3, 4, 5, 7]


def test_a_range_is_found_without_the_shards_that_are_asked_for():
    held = HeldSamples()
    held.hold(a_read(0, 6, without=(1,)))

    assert held.find(1, 5, frozenset()) == []
    assert held.find(1, 5, frozenset({1, 2})) == []
    (found,) = held.find(1, 5, frozenset({1}))
    assert found.table.positions_N.tolist() == [2, 3]


def test_of_a_range_the_first_part_is_found_up_to_what_is_not_held():
    held = HeldSamples()
    for start, stop in ((2, 4), (4, 6), (8, 9)):
        held.hold(a_read(start, stop))

    found = held.find(3, 9, frozenset())

    assert [(block.table.start, block.table.stop) for block in found] == [(3, 4), (4, 6)]
    assert held.find(6, 9, frozenset()) == held.find(0, 9, frozenset()) == []


reads = st.tuples(
    st.integers(0, 20), st.integers(1, 9), st.sets(st.integers(0, SHARDS - 1), max_size=2)
)


@given(st.lists(reads, max_size=8), st.integers(0, 12))
def test_whatever_is_read_every_sample_of_some_read_is_held_once_and_nothing_else(reads, floor):
    held, read = HeldSamples(), set()
    for start, count, without in reads:
        held.hold(a_read(start, start + count, without))
        read |= {p for p in range(start, start + count) if shard_of(EPOCH, p) not in without}

    blocks = list(held.blocks)
    assert all(a.table.stop <= b.table.start for a, b in pairwise(blocks))
    found = positions(held)
    assert found == sorted(found)
    # Blocks that gave way may have contained a shard that the later read lacks, and that shard is not requested
    # again.
    last = {
        p
        for start, n, out in reads[-1:]
        for p in range(start, start + n)
        if shard_of(EPOCH, p) not in out
    }
    assert last <= {*found} <= read
    assert held.size_bytes == sum(block.size_bytes for block in blocks)

    held.release(floor)

    assert all(block.table.stop > floor for block in held.blocks)
    keys = held.index().keys_N.tolist()
    assert keys == sorted(set(keys))
    assert len(keys) == sum(len(block.table) for block in held.blocks)
