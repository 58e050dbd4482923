"""Several readers of a source, lost any number of times, give the same samples as one reader."""

import time
from itertools import cycle, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.clock import FakeClock
from omniload.base.errors import StateError, UnavailableError
from omniload.source.parts.divided import DividedSource
from omniload.source.parts.reader import OpenPart, ReaderLostError
from omniload.source.parts.share import Part
from tests.property.omniload.source.test_records import a_source, contents, samples


class Reader:
    """A reader in this thread, that opens late and is lost on command."""

    def __init__(self, source, fate):
        self.source, self.fate = source, fate
        self.parts, self.is_closed = [], False

    def facts(self):
        if (fate := next(self.fate)) == "store away":
            raise UnavailableError("it cannot be listed; try again")
        return self.source.facts if fate != "opening" else None

    def read(self, start, stop, part, without=()):
        self.parts.append(part)

        def answer():
            assert not self.is_closed
            if next(self.fate) == "lost":
                raise ReaderLostError("it was killed")
            return OpenPart(source=self.source).read(start, stop, part, without)

        return answer

    def close(self):
        self.is_closed = True


def divided(make, readers, fates=("there",), clock=None):
    fate, started = cycle(fates), []

    def start(number):
        started.append(Reader(make(), fate))
        return started[-1]

    return DividedSource(make(), readers, start, clock=clock), started


def blocks_equal(ours, theirs):
    assert samples(ours) == samples(theirs)
    assert ours.table.start == theirs.table.start
    assert ours.table.stop == theirs.table.stop
    assert ours.table.subs_N.tolist() == theirs.table.subs_N.tolist()
    assert ours.table.lengths_N.tolist() == theirs.table.lengths_N.tolist()
    assert ours.skipped == theirs.skipped
    return True


@given(
    contents,
    st.sampled_from(["none", "shards", "block", "units", "full"]),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(0, 40),
    st.lists(st.integers(0, 25), max_size=6),
    st.lists(st.sampled_from(["there", "opening", "lost"]), min_size=1, max_size=9),
)
def test_any_readers_and_any_losses_give_what_one_reader_gives(
    units, method, block_units, readers, start, lengths, fates
):
    stops = (start + np.cumsum([0, *lengths])).tolist()
    whole = a_source(units, method, block_units)[0]
    source, _ = divided(lambda: a_source(units, method, block_units)[0], readers, fates)

    assert all(blocks_equal(source.read(a, b), whole.read(a, b)) for a, b in pairwise(stops))


@given(
    contents,
    st.sampled_from(["none", "shards", "block", "units", "full"]),
    st.integers(1, 4),
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 25)), max_size=8),
    st.lists(st.sampled_from(["there", "there", "opening", "lost"]), min_size=1, max_size=9),
)
def test_whatever_their_number_becomes_between_reads_they_give_what_one_reader_gives(
    units, method, block_units, start, reads, fates
):
    whole = a_source(units, method, block_units)[0]
    source, started = divided(lambda: a_source(units, method, block_units)[0], 1, fates)

    for readers, length in reads:
        source.divide(readers)
        assert blocks_equal(source.read(start, start + length), whole.read(start, start + length))
        start += length
        assert source.so_far.readers <= readers
        assert sum(not reader.is_closed for reader in started) <= readers - 1


@given(
    contents,
    st.sampled_from(["none", "shards", "block", "units", "full"]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 40),
    st.lists(st.integers(0, 25), max_size=6),
    st.sets(st.integers(0, 3), max_size=3),
)
def test_without_some_shards_a_source_gives_the_records_of_the_others_and_decodes_no_more(
    units, method, block_units, readers, start, lengths, without
):
    stops = (start + np.cumsum([0, *lengths])).tolist()
    held = []

    def make():
        source, its = a_source(units, method, block_units)
        held.append(its)
        return source

    whole = a_source(units, method, block_units)[0]
    source, _ = divided(make, readers)

    for a, b in pairwise(stops):
        block = source.read(a, b, tuple(sorted(without)))
        wanted = [s for s in samples(whole.read(a, b)) if whole.shard_at(s[0]) not in without]
        assert samples(block) == wanted
        assert (block.table.start, block.table.stop) == (a, b)
    used = sorted({unit // 2 for unit, rows in enumerate(units) if rows})
    assert {used.index(unit // 2) for its in held for unit in its.decoded}.isdisjoint(without)


@given(contents, st.integers(1, 4), st.integers(2, 5), st.integers(1, 4))
def test_readers_decode_every_unit_of_an_epoch_once_together(units, block_units, readers, step):
    held = []

    def make():
        source, its = a_source(units, "block", block_units)
        held.append(its)
        return source

    source, _ = divided(make, readers)
    n = source.positions_per_epoch
    for at in range(0, n, step):
        source.read(at, min(n, at + step))

    decoded = [unit for its in held for unit in its.decoded]
    assert sorted(decoded) == [i for i, unit in enumerate(units) if unit]


def test_a_read_of_a_shuffled_block_is_work_of_every_reader():
    units = [[[u, r] for r in range(64)] for u in range(4)]
    source, started = divided(lambda: a_source(units, "block", 4)[0], 4)

    source.read(0, 64)

    shares = [len(r.source.read_part(0, 64, r.parts[-1]).table) for r in started]
    assert all(8 <= share <= 24 for share in shares)


def test_readers_that_are_added_take_part_once_all_have_the_source_open_and_the_last_go_first():
    units = [[[u, r] for r in range(8)] for u in range(6)]
    # The third reader that is asked at the second read is still opening until the read after that.
    fates = [*["there"] * 4, "opening", *["there"] * 40]
    source, started = divided(lambda: a_source(units, "block", 6)[0], 2, fates)

    def read(at, readers):
        source.divide(readers)
        source.read(at, at + 8)
        return source.so_far.readers

    assert [read(0, 2), read(8, 4), read(16, 4), read(24, 2)] == [2, 2, 4, 2]
    assert [reader.is_closed for reader in started] == [False, True, True]
    assert source.so_far.tokens == 4 * 8 * 2


def test_readers_that_are_too_many_end_at_once_where_nothing_is_read():
    source, started = divided(lambda: a_source([[[1]], [[2]]], "block", 2)[0], 3)
    source.read(0, 2)

    source.divide(1)

    assert [reader.is_closed for reader in started] == [True, True]


def test_readers_that_are_to_be_there_at_once_are_started_before_a_read_and_the_first_is_theirs():
    source, started = divided(lambda: a_source([[[1]], [[2]], [[3]]], "block", 3)[0], 1)

    source.divide(3)
    assert started == []
    source.divide(3, at_once=True)
    assert len(started) == 2
    source.read(0, 3)

    assert (source.so_far.readers, len(started)) == (3, 2)
    source.close()
    source.divide(4, at_once=True)
    assert [reader.is_closed for reader in started] == [True, True]


class EndedReader(Reader):
    """A reader that may end although no request is open."""

    def facts(self):
        if (fate := next(self.fate)) == "ended":
            raise ReaderLostError("it was killed")
        if fate == "store away":
            raise UnavailableError("it cannot be listed; try again")
        return self.source.facts


def ahead_of_reads(fates, readers=3):
    """Return a source whose readers are there before a read, its readers, and a look that comes after a second."""
    units, fate, started, clock = [[[u, 1]] for u in range(6)], cycle(fates), [], FakeClock()

    def start(number):
        started.append(EndedReader(a_source(units, "block", 6)[0], fate))
        return started[-1]

    source = DividedSource(a_source(units, "block", 6)[0], 1, start, clock=clock)
    source.divide(readers, at_once=True)

    def look():
        clock.advance(1.0)
        source.look()
        return len([reader for reader in started if not reader.is_closed])

    return source, started, look


def test_readers_that_end_before_the_first_read_are_started_again_so_that_it_is_theirs():
    source, started, look = ahead_of_reads(["there", "ended", *["there"] * 60])

    assert (look(), len(started)) == (2, 3)
    assert (look(), len(started)) == (2, 3)
    source.read(0, 6)

    assert source.so_far.readers == 3


def test_readers_that_end_again_and_again_before_the_first_read_are_left_alone_like_others():
    source, started, look = ahead_of_reads(["ended"], readers=2)

    assert [look() for _ in range(8)] == [1, 1, 1, 1, 1, 0, 0, 0]
    assert (len(started), source.lost) == (6, 6)
    source.close()
    assert look() == 0


def test_readers_that_end_between_reads_are_replaced_before_the_next_which_is_theirs():
    source, started, look = ahead_of_reads([*["there"] * 4, "ended", *["there"] * 60])
    source.read(0, 6)
    assert (look(), len(started)) == (2, 3)

    source.read(0, 6)

    assert (source.so_far.readers, len(started)) == (3, 3)
    assert [reader.is_closed for reader in started] == [True, False, False]


def test_fewer_that_are_wanted_as_a_read_ends_are_fewer_at_once(monkeypatch):
    source, started = divided(lambda: a_source([[[1]], [[2]]], "block", 2)[0], 3)
    looks = []
    monkeypatch.setattr(time, "thread_time", lambda: looks.append(0.0) or 0.0)
    source.read(0, 2)
    last = 2 * len(looks)

    def fewer():
        if len(looks) == last - 1:  # the read is over, and still has the source
            source.divide(1)
        return looks.append(0.0) or 0.0

    monkeypatch.setattr(time, "thread_time", fewer)
    source.read(0, 2)

    assert len(looks) == last
    assert [reader.is_closed for reader in started] == [True, True]


def test_readers_that_a_read_starts_as_the_source_is_closed_end_with_that_read():
    units, started = [[[1], [2]], [[3]]], []

    def start(number):
        source.close()  # called by another thread, as when the source moves to another loader
        started.append(Reader(a_source(units)[0], cycle(["there"])))
        return started[-1]

    source = DividedSource(a_source(units)[0], 3, start)

    assert blocks_equal(source.read(0, 3), a_source(units)[0].read(0, 3))
    assert [reader.is_closed for reader in started] == [True]


def test_a_reader_in_place_of_one_that_was_lost_is_started_before_this_process_reads_for_it():
    units, seen = [[[1], [2]]] * 4, []
    source, started = divided(
        lambda: a_source(units)[0], 3, [*["there"] * 2, "lost", *["there"] * 9]
    )
    own = source.own.read_part
    source.own.read_part = lambda *asked: seen.append((len(started), asked[2])) or own(*asked)

    assert blocks_equal(source.read(0, 8), a_source(units)[0].read(0, 8))

    assert seen == [(2, Part(0, 3)), (3, Part(0, 3, (1,)))]
    assert [reader.is_closed for reader in started] == [True, False, False]
    source.read(0, 8)
    assert (source.so_far.readers, len(started)) == (3, 3)


def of_blocks(readers, fates):
    """A source of blocks of six units, and the units that it and its readers have decoded, each by itself."""
    held = []

    def make():
        source, its = a_source([[[u, r] for r in range(8)] for u in range(12)], "block", 6)
        held.append(its)
        return source

    return *divided(make, readers, fates), held


def test_readers_beside_one_that_was_lost_decode_nothing_again_and_nobody_waits_for_the_next(
    caplog,
):
    caplog.set_level("INFO")
    # At the second read the first reader is lost; its successor opens the source at the third.
    fates = [*["there"] * 4, "there", "there", "lost", "there", "opening", *["there"] * 60]
    source, started, held = of_blocks(3, fates)
    whole = a_source([[[u, r] for r in range(8)] for u in range(12)], "block", 6)[0]
    at = 0

    def read():
        nonlocal at
        assert blocks_equal(source.read(at, at + 6), whole.read(at, at + 6))
        at += 6
        return source.so_far.readers

    assert [read() for _ in range(5)] == [3, 2, 2, 3, 3]

    assert [reader.is_closed for reader in started] == [True, False, False]
    own, lost, kept, new = (its.decoded for its in held)
    assert len(kept) == 2  # of the six units of the block: once, and never again
    assert {part.number for part in started[1].parts} == {2}
    assert sorted(new) == sorted(lost)
    assert {part.number for part in started[2].parts} == {1}
    assert [m.partition(": ")[2] for m in caplog.messages] == [
        "a reader was lost, another is started: it was killed",
        "another reader is there for one that was lost",
    ]
    # Its own two, those two together with the two of the lost reader, and its own two again.
    assert (len(own), len({*own})) == (8, 4)
    assert {*lost} < {*own}


def test_a_reader_that_is_lost_in_one_place_again_and_again_takes_none_of_the_others_along():
    """Each successor in the same place ends while it opens; the other reader reads on, with this process's share."""
    units, clock = [[[u, r] for r in range(4)] for u in range(4)], FakeClock()
    steady, started = Reader(a_source(units, "block", 4)[0], cycle(["there"])), []

    def start(number):
        if number == 1:
            return steady
        started.append(EndedReader(a_source(units, "block", 4)[0], cycle(["ended"])))
        return started[-1]

    source = DividedSource(a_source(units, "block", 4)[0], 3, start, clock=clock)
    whole = a_source(units, "block", 4)[0]

    def reads(times):
        for _ in range(times):
            clock.advance(1.0)
            assert blocks_equal(source.read(0, 16), whole.read(0, 16))
        return len(started), source.so_far.readers, source.lost, steady.is_closed

    assert reads(4)[0] == 5
    assert reads(20) == (6, 2, 6, False)
    assert steady.parts[-1] == Part(1, 2)  # the place without a reader is no longer counted
    assert reads(600) == (7, 2, 7, False)


def test_two_readers_that_cannot_open_a_source_in_one_outage_are_waited_for_once():
    units, clock = [[[1], [2]]] * 4, FakeClock()
    fates = ["store away", "store away", *["there"] * 40]
    source, started = divided(lambda: a_source(units)[0], 3, fates, clock)

    def reads(times):
        for _ in range(times):
            source.read(0, 8)
            clock.advance(1.0)
        return len(started), source.so_far.readers

    assert reads(5) == (2, 1)
    assert reads(1) == (4, 3)


def test_readers_that_are_lost_again_and_again_are_done_without():
    units = [[[1], [2]]] * 4
    source, started = divided(lambda: a_source(units)[0], 2, ("there", "lost"))

    for _ in range(20):
        source.read(0, 8)

    assert (len(started), source.lost) == (6, 6)
    assert all(reader.is_closed for reader in started)


def reading(units, fates, clock):
    """Return the results of a source with two readers: how many readers were started, read, and were lost."""
    source, started = divided(lambda: a_source(units)[0], 2, fates, clock)

    def reads(count, advance_s):
        for _ in range(count):
            clock.advance(advance_s)
            assert blocks_equal(source.read(0, 8), a_source(units)[0].read(0, 8))
        return len(started), source.so_far.readers, source.lost

    return reads


def test_after_many_were_lost_another_is_tried_every_ten_minutes_until_one_is_there():
    units = [[[1], [2]]] * 4
    clock = FakeClock()
    # One more is lost while it opens the source, and one while it reads; the next one stays.
    fates = [*["there", "lost"] * 6, "opening", "opening", "there", "lost", *["there"] * 20]
    reads = reading(units, fates, clock)

    assert reads(6, 0) == reads(9, 60) == (6, 1, 6)
    assert reads(2, 60) == (7, 1, 6)  # it opens the source
    assert reads(1, 0) == (7, 1, 7)
    assert reads(9, 60) == (7, 1, 7)
    assert reads(1, 60) == (8, 2, 0)


def test_readers_that_open_in_an_outage_are_tried_ever_more_seldom_until_it_is_over():
    units, clock = [[[1], [2]]] * 4, FakeClock()
    fates = [*["store away"] * 10, "there", "there", "store away", *["there"] * 20]
    reads = reading(units, fates, clock)

    assert reads(1, 0.0) == (1, 1, 0)
    for number, wait_s in enumerate((5, 10, 20, 40, 80, 160, 320, 600, 600), 1):
        assert reads(4, wait_s / 5) == (number, 1, 0)
        assert reads(1, wait_s / 5) == (number + 1, 1, 0)
    assert reads(5, 120.0) == (11, 2, 0)
    assert reads(1, 0.0) == (11, 1, 0)  # another outage, which may be short
    assert reads(5, 1.0) == (12, 2, 0)


def test_readers_for_a_coming_step_that_open_in_an_outage_are_tried_now_and_then():
    _, started, look = ahead_of_reads(["store away"] * 2 + ["there"] * 20, readers=2)

    # A reader that cannot open the source is followed five seconds later, and the next one after ten.
    assert [(look(), len(started)) for _ in range(19)] == [
        *[(0, 1)] * 5,
        *[(1, 2), *[(0, 2)] * 10, *[(1, 3)] * 3],
    ]


def test_a_reader_that_finds_other_data_is_refused():
    others = iter([[[[1], [2]], [[3]]], [[[1]], [[3]]]])
    source, _ = divided(lambda: a_source(next(others))[0], 2)

    with pytest.raises(StateError, match="another reader found"):
        source.read(0, 2)


def test_bad_records_of_all_readers_are_told_with_each_read():
    units = [[None, [1]], [None, [2]], [None, [3]], [None, [4]]]
    source = divided(lambda: a_source(units, "block", 4)[0], 2)[0]
    source_alone = a_source(units, "block", 4)[0]

    for _ in range(3):
        table = source.read(0, 8).table
        assert (len(table.bad_N), table.reason) == (4, "bad")
        assert table.places == source_alone.read(0, 8).table.places


def test_after_its_end_a_source_reads_alone():
    units = [[[1], [2]], [[3]]]
    source, started = divided(lambda: a_source(units)[0], 3)
    source.read(0, 3)

    source.close()

    assert blocks_equal(source.read(0, 3), a_source(units)[0].read(0, 3))
    assert all(reader.is_closed for reader in started)
    assert len(started) == 2
