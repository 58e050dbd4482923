"""Read-ahead under any order of reads."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from fusefs.readahead import Closed, Read, ReadAhead

reads = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(1, 8)), max_size=60)


@given(reads, st.integers(1, 16), st.integers(0, 64), st.integers(0, 200))
def test_nothing_is_fetched_beyond_a_window_of_what_was_read(steps, first, largest, together):
    ahead = ReadAhead(first_bytes=first, largest_bytes=largest, all_bytes=together, most_streams=5)
    furthest = 0
    for process, offset, size in steps:
        furthest = max(furthest, offset + size)
        for command in ahead.handle(Read(process, offset, size)):
            assert 0 <= command.start < command.stop <= furthest + largest


@given(reads, st.lists(st.integers(0, 3), max_size=5))
def test_what_is_remembered_is_bounded_and_whoever_left_leaves_nothing(steps, leaving):
    ahead = ReadAhead(first_bytes=4, largest_bytes=64, most_streams=5)
    events = [Read(*step) for step in steps]
    for event, gone in itertools.zip_longest(events, map(Closed, leaving)):
        for each in (event, gone):
            if each is not None:
                ahead.handle(each)
        assert len(ahead._streams) <= 5
        assert sum(map(len, ahead._of_process.values())) == len(ahead._streams)
    for process in range(4):
        ahead.handle(Closed(process))

    assert not ahead._streams
    assert not ahead._of_process
    assert not ahead._standing_at


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=200),
    st.sampled_from([4, 16]),
)
def test_every_stream_is_followed_however_many_are_interleaved(order, size):
    """Any process, any place of it: from the third read on, what comes is on its way already."""
    ahead = ReadAhead(first_bytes=2 * size, largest_bytes=1 << 10)
    read_of, on_its_way = {}, {}
    for process, place in order:
        number = read_of[process, place] = read_of.get((process, place), -1) + 1
        start = (place + 1) * 1_000_000 + number * size
        if number >= 2:
            assert any(r.start <= start < r.stop for r in on_its_way[process])
        for command in ahead.handle(Read(process, start, size)):
            on_its_way.setdefault(process, []).append(range(command.start, command.stop))


@given(st.lists(st.integers(1, 30), min_size=2, max_size=100))
def test_ranges_of_one_stream_never_overlap(sizes):
    ahead = ReadAhead(first_bytes=32, largest_bytes=256)
    at, fetched_to = 1000, 0
    for size in sizes:
        for command in ahead.handle(Read(1, at, size)):
            assert command.start >= fetched_to
            fetched_to = command.stop
        at += size


@given(st.permutations(range(40)))
def test_scattered_reads_fetch_nothing(order):
    ahead = ReadAhead(first_bytes=16, largest_bytes=1 << 10)

    assert not any(ahead.handle(Read(1, 1000 + place * 1000, 10)) for place in order)
