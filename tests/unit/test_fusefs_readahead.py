"""Read-ahead: which reads make a stream, and how far ahead of it is fetched."""

from fusefs.readahead import Closed, Fetch, Read, ReadAhead


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


def test_a_long_first_read_brings_in_the_rest_of_its_block_and_no_more_within_it():
    ahead = an_ahead(first_bytes=10, block_bytes=40)

    assert fetched(ahead, 1, 400, 410, 420, 430) == [(Fetch(410, 440),), (), (), ()]


def test_a_read_past_its_first_block_is_a_stream():
    ahead = an_ahead(first_bytes=10, block_bytes=40)
    fetched(ahead, 1, 410, 420, 430)

    commands = fetched(ahead, 1, 440)[0]

    assert commands[0].start == 450
    assert commands[0].stop > 460


def test_a_short_first_read_brings_in_nothing_of_its_block():
    assert fetched(an_ahead(block_bytes=40), 1, 400) == [()]


def test_a_first_read_that_ends_with_its_block_brings_in_nothing():
    assert fetched(an_ahead(first_bytes=10, block_bytes=40), 1, 430) == [()]


def test_blocks_read_once_take_no_share_from_those_to_come():
    ahead = an_ahead(first_bytes=10, block_bytes=40, all_bytes=80)
    starts = [1000 * i for i in range(1, 30)]

    found = [fetched(ahead, 1, start, start + 10)[0] for start in starts]

    assert found == [(Fetch(start + 10, start + 40),) for start in starts]


def test_read_ahead_that_is_off_brings_in_no_block():
    assert fetched(an_ahead(largest_bytes=0, block_bytes=40), 1, 400, 410) == [(), ()]
