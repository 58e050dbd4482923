"""Read-ahead under any order of reads."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from fusefs.read.readahead import Closed, Read, ReadAhead
from fusefs.read.speculation import SpeculationBudget, SpeculativeReads

reads = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(1, 8)), max_size=60)


@given(reads, st.integers(1, 16), st.integers(0, 64), st.integers(0, 200))
def test_nothing_is_fetched_beyond_a_window_of_what_was_read(steps, first, largest, together):
    ahead = ReadAhead(first_bytes=first, largest_bytes=largest, all_bytes=together, most_streams=5)
    furthest = 0
    for process, offset, size in steps:
        furthest = max(furthest, offset + size)
        for command in ahead.handle(Read(process, offset, size)):
            assert 0 <= command.start < command.stop <= furthest + largest


@given(reads, st.integers(1, 16), st.integers(0, 64), st.integers(0, 200), st.sampled_from([8, 32]))
def test_blocks_reach_no_further_either_and_are_whole_where_nothing_limits_them(
    steps, first, largest, together, block
):
    speculative = SpeculativeReads(block, 2 * block, 64, most_bytes=together)
    ahead = ReadAhead(
        first_bytes=first,
        largest_bytes=largest,
        all_bytes=together,
        most_streams=5,
        block_bytes=block,
        speculative=speculative,
    )
    furthest = 0
    for process, offset, size in steps:
        furthest = max(furthest, offset + size)
        for command in ahead.handle(Read(process, offset, size)):
            assert 0 <= command.start < command.stop <= furthest + largest
        assert speculative.speculative_bytes <= min(speculative.read_bytes, together)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.permutations(range(4))), max_size=40),
    st.sampled_from([160, 640]),
)
def test_scattered_blocks_never_bring_in_more_than_twice_what_was_read(places, wide):
    """Each block is read by a separate process, so no read belongs to a stream; its parts come in any order."""
    speculative = SpeculativeReads(40, wide, 40 * 31, most_bytes=10_000)
    ahead = ReadAhead(first_bytes=10, largest_bytes=1000, block_bytes=40, speculative=speculative)
    read, brought = set(), set()
    for process, (place, order) in enumerate(places):
        read.add(place)
        for part in order if place else range(1):
            offset = 40 * place + 10 * part
            commands = ahead.handle(Read(process, offset, 10))
            for command in commands:
                assert command.start % 40 == 0
                assert command.stop % 40 == 0
                brought.update(range(command.start // 40, command.stop // 40))
        assert read <= brought
        assert len(brought) <= 2 * len(read)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 99), st.integers(1, 7)), max_size=60),
    st.integers(0, 150),
)
def test_speculative_blocks_are_what_a_model_says(steps, lent_bytes):
    speculative = SpeculativeReads(
        10, 40, 995, most_bytes=120, budget=SpeculationBudget(lent_bytes)
    )
    read, unread, came_true = set(), set(), 0
    for widens, first, num_blocks in steps:
        start, stop = 10 * first, 10 * (first + num_blocks)
        blocks = set(range(first, first + num_blocks)) & set(range(100))
        speculative.read(start, stop)
        read |= blocks
        came_true += len(unread & blocks)
        unread -= blocks
        if widens:
            wide_start, wide_stop = speculative.widened(start, stop)
            assert wide_start <= start < stop <= wide_stop
            unread |= set(range(wide_start // 10, min(100, -(-wide_stop // 10)))) - read
        assert (speculative.read_bytes, speculative.speculative_bytes) == (
            10 * len(read),
            10 * len(unread),
        )
        assert len(unread) <= min(12, lent_bytes // 10 + came_true + len(read))


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(0, 30)), max_size=80),
    st.integers(0, 200),
)
def test_all_files_together_fetch_no_more_than_the_budget_and_twice_what_was_read(
    steps, lent_bytes
):
    """Files are also closed and opened again; the debt of a closed file is cancelled."""
    budget, gone = SpeculationBudget(lent_bytes), 0
    files = {}
    read_bytes = 0
    for number, closes, block in steps:
        if closes and number in files:
            gone += files.pop(number).speculative_bytes
            continue
        speculative = files.setdefault(
            number, SpeculativeReads(10, 40, 255, most_bytes=120, budget=budget)
        )
        before = speculative.read_bytes
        speculative.read(10 * block, 10 * block + 10)
        speculative.widened(10 * block, 10 * block + 10)
        read_bytes += speculative.read_bytes - before
        unread = gone + sum(each.speculative_bytes for each in files.values())
        assert unread <= lent_bytes + 2 * read_bytes


@given(reads, st.lists(st.integers(0, 3), max_size=5))
def test_what_is_remembered_is_bounded_and_whoever_left_leaves_nothing(steps, leaving):
    ahead = ReadAhead(first_bytes=4, largest_bytes=64, most_streams=5)
    events = [Read(*step) for step in steps]
    for event, gone in itertools.zip_longest(events, map(Closed, leaving)):
        for each in (event, gone):
            if each is not None:
                ahead.handle(each)
        assert len(ahead.streams) <= 5
        assert sum(map(len, ahead.streams._of_process.values())) == len(ahead.streams)
    for process in range(4):
        ahead.handle(Closed(process))

    assert not ahead.streams
    assert not ahead.streams._of_process
    assert not ahead.streams._standing_at


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=200),
    st.sampled_from([4, 16]),
)
def test_every_stream_is_followed_however_many_are_interleaved(order, size):
    """Any process, at any place: from the third read on, the next bytes are already on their way."""
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


@given(st.permutations(range(40)), st.sampled_from([0, 64]))
def test_scattered_short_reads_fetch_nothing(order, block):
    ahead = ReadAhead(first_bytes=16, largest_bytes=1 << 10, block_bytes=block)

    assert not any(ahead.handle(Read(1, 1000 + place * 1000, 10)) for place in order)
