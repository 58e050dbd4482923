"""Read-ahead: which reads make a stream, and how far ahead of it is fetched."""

import itertools

import pytest

from fusefs.read.readahead import Closed, Fetch, Invalidated, Read, ReadAhead
from fusefs.read.speculation import SpeculationBudget, SpeculativeReads


def an_ahead(**changes):
    return ReadAhead(**{"first_bytes": 20, "largest_bytes": 100} | changes)


def fetched(ahead, process, *offsets, size=10):
    return [ahead.handle(Read(process, offset, size)) for offset in offsets]


def test_a_scattered_read_fetches_nothing_ahead():
    assert fetched(an_ahead(), 1, 5000, 900, 7000) == [(), (), ()]


def test_a_read_from_the_start_is_taken_for_the_first_of_a_stream():
    assert fetched(an_ahead(), 1, 0) == [(Fetch(10, 30),)]


def test_a_read_that_is_continued_is_a_stream():
    assert fetched(an_ahead(), 1, 500, 510) == [(), (Fetch(520, 540),)]


def test_after_an_invalidation_all_that_lies_ahead_is_fetched_again():
    ahead = an_ahead(largest_bytes=80)
    fetched(ahead, 1, *range(500, 600, 10))
    assert fetched(ahead, 1, 600) == [()]

    assert ahead.handle(Invalidated()) == ()

    assert fetched(ahead, 1, 610, 620) == [(Fetch(620, 700),), ()]


def test_a_stream_that_goes_on_doubles_its_window_up_to_the_largest():
    ahead = an_ahead(largest_bytes=80)

    commands = [c for cs in fetched(ahead, 1, *range(500, 900, 10)) for c in cs]

    assert commands[0] == Fetch(520, 540)
    assert max(c.stop for c in commands) <= 900 + 80
    assert commands[-1].stop >= 900 + 40
    assert max(c.stop - c.start for c in commands) > 20


def test_a_short_run_does_not_open_a_large_window():
    ahead = an_ahead(largest_bytes=10_000)

    commands = [c for cs in fetched(ahead, 1, 500, 501, 502, 503, size=1) for c in cs]

    assert commands[-1].stop <= 504 + 20


def test_two_processes_that_read_the_same_place_are_two_streams():
    ahead = an_ahead(largest_bytes=80)

    one = fetched(ahead, 1, 1000, 1010)
    two = fetched(ahead, 2, 1015, 5000)

    assert one[1] == (Fetch(1020, 1040),)
    assert two == [(), ()]


def test_threads_of_one_handle_far_apart_are_streams_of_their_own():
    ahead = an_ahead()
    starts = (0, 10_000, 20_000, 30_000)
    for start in starts:
        ahead.handle(Read(1, start, 10))

    second = [ahead.handle(Read(1, start + 10, 10)) for start in reversed(starts)]

    assert [commands[0].start for commands in second[:3]] == [30_020, 20_020, 10_020]
    assert all(commands for commands in second)


def test_requests_of_one_stream_that_come_out_of_order_are_still_one_stream():
    ahead = an_ahead(largest_bytes=80)

    assert any(fetched(ahead, 1, 1000, 1020, 1010, 1030))
    assert fetched(ahead, 1, 1040) != [()] or fetched(ahead, 1, 1050) != [()]


def test_streams_read_at_the_same_time_share_an_allowance():
    ahead = an_ahead(largest_bytes=1000, all_bytes=200)
    starts = [10_000 * i for i in range(1, 5)]

    reach = [0] * 4
    for at in range(0, 2000, 10):
        for i, start in enumerate(starts):
            for command in ahead.handle(Read(i, start + at, 10)):
                reach[i] = max(reach[i], command.stop - (start + at + 10))

    assert max(reach) >= 20
    assert max(reach[1:]) <= 200 // 2  # the first ones grew while they were few
    assert sum(min(r, 50) for r in reach) == 200


def test_more_streams_than_the_allowance_holds_fetch_nothing_ahead():
    ahead = an_ahead(largest_bytes=1000, all_bytes=100)
    starts = [10_000 * i for i in range(1, 9)]
    for at in (0, 10, 20):
        for start in starts:
            ahead.handle(Read(1, start + at, 10))

    late = [ahead.handle(Read(1, start + at, 10)) for at in range(30, 200, 10) for start in starts]

    assert not any(late)


def test_a_stream_of_the_past_takes_no_share():
    ahead = an_ahead(largest_bytes=1000, all_bytes=200, most_streams=4)
    fetched(ahead, 1, *range(10_000, 10_100, 10))

    commands = [c for cs in fetched(ahead, 2, *range(0, 1000, 10)) for c in cs]

    assert max(c.stop for c in commands) - 1000 > 100


def test_the_least_recently_used_stream_is_forgotten():
    ahead = an_ahead(most_streams=2)
    fetched(ahead, 1, 1000)
    fetched(ahead, 1, 5000, 9000)

    assert fetched(ahead, 1, 1010) == [()]
    assert fetched(ahead, 1, 9010) != [()]


def test_a_process_that_left_begins_anew():
    ahead = an_ahead()
    fetched(ahead, 1, 1000)
    fetched(ahead, 2, 1000)

    assert ahead.handle(Closed(1)) == ()
    assert ahead.handle(Closed(7)) == ()

    assert fetched(ahead, 1, 1010) == [()]
    assert fetched(ahead, 2, 1010) == [(Fetch(1020, 1040),)]


def test_read_ahead_that_is_off_fetches_nothing():
    assert fetched(an_ahead(largest_bytes=0), 1, 0, 10, 20) == [(), (), ()]


def test_a_read_of_nothing_is_none():
    assert fetched(an_ahead(), 1, 0, size=0) == [()]
    assert fetched(an_ahead(), 1, 500, 510) == [(), (Fetch(520, 540),)]


def test_a_long_first_read_brings_in_all_of_its_block_and_no_more_within_it():
    ahead = an_ahead(first_bytes=10, block_bytes=40)

    assert fetched(ahead, 1, 400, 410, 420, 430) == [(Fetch(400, 440),), (), (), ()]


@pytest.mark.parametrize("order", list(itertools.permutations((400, 410, 420, 430))))
def test_the_parts_of_one_read_bring_in_its_block_once_in_any_order(order):
    ahead = an_ahead(first_bytes=10, block_bytes=40)

    assert [c for cs in fetched(ahead, 1, *order) for c in cs] == [Fetch(400, 440)]


def test_a_long_read_that_crosses_into_another_block_brings_in_both_and_no_more():
    ahead = an_ahead(first_bytes=10, block_bytes=40)

    commands = fetched(ahead, 1, 420, 430, 440, 450)

    assert commands == [(Fetch(400, 440),), (), (Fetch(440, 480),), ()]


def test_a_read_past_a_block_that_it_read_whole_is_a_stream_of_whole_blocks():
    ahead = an_ahead(first_bytes=10, block_bytes=40, largest_bytes=200)
    fetched(ahead, 1, 400, 410, 420, 430)

    commands = [c for cs in fetched(ahead, 1, *range(440, 800, 10)) for c in cs]

    assert commands[0].start == 440
    assert all(c.start % 40 == c.stop % 40 == 0 for c in commands)
    assert all(one.stop == other.start for one, other in itertools.pairwise(commands))
    assert commands[-1].stop >= 800 + 100


def test_a_short_first_read_brings_in_nothing_of_its_block():
    assert fetched(an_ahead(block_bytes=40), 1, 400) == [()]


def test_a_first_read_of_a_whole_block_brings_in_nothing_else():
    assert fetched(an_ahead(first_bytes=10, block_bytes=40), 1, 400, size=40) == [()]


def test_whole_blocks_read_one_after_the_other_are_a_stream():
    ahead = an_ahead(first_bytes=10, block_bytes=40, largest_bytes=200)

    assert fetched(ahead, 1, 400, 440, size=40)[1] == (Fetch(440, 560),)


def test_blocks_read_once_take_no_share_from_those_to_come():
    ahead = an_ahead(first_bytes=10, block_bytes=40, all_bytes=80)
    starts = [1000 * i for i in range(1, 30)]

    found = [fetched(ahead, 1, start, start + 10)[0] for start in starts]

    assert found == [(Fetch(start, start + 40),) for start in starts]


def test_read_ahead_that_is_off_brings_in_no_block():
    assert fetched(an_ahead(largest_bytes=0, block_bytes=40), 1, 400, 410) == [(), ()]


def a_speculating_ahead(most_bytes=1000, **changes):
    speculative = SpeculativeReads(40, 160, 1600, most_bytes=most_bytes)
    return an_ahead(**{"first_bytes": 10, "block_bytes": 40, "speculative": speculative} | changes)


def test_as_much_may_be_speculated_as_was_read():
    ahead = a_speculating_ahead(largest_bytes=400)

    # Three blocks are read before three more may come with the fourth.
    assert fetched(ahead, 1, 80, 400)[1] == (Fetch(400, 440),)
    assert fetched(ahead, 2, 720, 1200) == [(Fetch(640, 800),), (Fetch(1200, 1240),)]


def test_a_speculative_block_that_is_read_earns_another():
    ahead = a_speculating_ahead(largest_bytes=400)
    fetched(ahead, 1, 80, 400)
    fetched(ahead, 2, 720)  # three of them speculative

    assert fetched(ahead, 3, 640) == [(Fetch(640, 680),)]  # in case it is held no more
    assert fetched(ahead, 4, 960) == [(Fetch(960, 1120),)]


def test_speculation_ends_where_a_block_is_known_already():
    ahead = a_speculating_ahead(largest_bytes=400)
    fetched(ahead, 1, 760, 80)

    assert fetched(ahead, 2, 640) == [(Fetch(640, 760),)]


def test_nothing_is_speculated_where_memory_has_no_room_for_it():
    narrow = a_speculating_ahead(largest_bytes=400, most_bytes=80)
    shared = a_speculating_ahead(largest_bytes=159)

    for ahead in (narrow, shared):
        starts = range(80, 1600, 160)
        commands = [c for i, at in enumerate(starts) for c in fetched(ahead, i, at)[0]]
        assert {c.stop - c.start for c in commands} == {40}


def test_wide_blocks_end_with_the_file():
    speculative = SpeculativeReads(40, 160, 250, most_bytes=1000)
    speculative.read(0, 160)
    speculative.read(200, 240)

    assert speculative.widened(200, 240) == (160, 280)
    assert (speculative.read_bytes, speculative.speculative_bytes) == (200, 80)


def test_nothing_is_speculated_for_what_lies_behind_the_end():
    for size_bytes in (0, 250):
        speculative = SpeculativeReads(
            40, 160, size_bytes, most_bytes=1000, budget=SpeculationBudget(1000)
        )

        assert speculative.widened(440, 480) == (440, 480)
        assert speculative.speculative_bytes == 0


def a_lending(budget, **changes):
    return SpeculativeReads(40, 160, 1600, **{"most_bytes": 1000, "budget": budget} | changes)


def test_a_budget_lends_what_is_not_earned_yet():
    speculative = a_lending(SpeculationBudget(200))
    ahead = an_ahead(first_bytes=10, block_bytes=40, speculative=speculative, largest_bytes=400)

    # Three for one read, six for two: four are lent.
    assert fetched(ahead, 1, 200, 400) == [(Fetch(160, 320),), (Fetch(320, 480),)]
    # Nine for three: one is left, two are short. A fourth read earns what is missing.
    assert fetched(ahead, 2, 640, 960) == [(Fetch(640, 680),), (Fetch(960, 1120),)]


def test_speculative_blocks_that_are_read_refund_the_budget_of_other_files():
    budget = SpeculationBudget(120)
    one, two, three = (a_lending(budget) for _ in range(3))
    assert one.widened(160, 200) == (160, 320)
    assert two.widened(160, 200) == (160, 200)

    one.read(200, 320)

    assert three.widened(160, 200) == (160, 320)
    assert two.widened(160, 200) == (160, 200)


def test_who_reads_a_little_of_many_files_empties_the_budget():
    budget, brought = SpeculationBudget(480), 0
    for _ in range(100):
        speculative = a_lending(budget)
        speculative.read(160, 200)
        start, stop = speculative.widened(160, 200)
        brought += stop - start

    assert brought == 100 * 40 + 6 * 120


def test_what_is_lent_is_kept_within_memory_too():
    speculative = a_lending(SpeculationBudget(480), most_bytes=120)

    assert speculative.widened(160, 200) == (160, 320)
    assert speculative.widened(400, 440) == (400, 440)


def test_short_reads_earn_no_speculation():
    ahead = a_speculating_ahead(largest_bytes=400)
    for number, at in enumerate(range(80, 1600, 40)):
        fetched(ahead, number, at, size=9)

    assert fetched(ahead, 99, 400) == [(Fetch(400, 440),)]
