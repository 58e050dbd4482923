"""The planner's knowledge of a source: reports in order, draws from the head, ranges to read."""

import math
from dataclasses import replace

import numpy as np
import pytest

from omniload.machine.queue import SampleQueue
from tests.support.plane.builders import a_table


def a_queue(*lengths, start=0, cursor=(0, 0, 0)):
    queue = SampleQueue.at(start)
    queue.report(a_table(lengths, start=start), cursor)
    return queue


def test_reports_follow_each_other():
    queue = a_queue(3, 4)

    queue.report(a_table([5], start=2), (0, 0, 0))
    assert queue.table.lengths_N.tolist() == [3, 4, 5]
    assert queue.tokens == 12
    assert queue.table.stop == 3


def test_a_repeated_or_early_report_adds_nothing():
    queue = a_queue(3, 4)

    assert queue.news_of(a_table([3, 4]), ()) is None
    assert queue.news_of(a_table([9], start=7), ()) is None


def test_samples_before_the_cursor_were_drawn_already():
    queue = a_queue(3, 4, 5, start=10, cursor=(11, 0, 0))

    assert queue.table.positions_N.tolist() == [11, 12]
    assert queue.tokens == 9


def test_a_cursor_inside_a_record_keeps_the_samples_behind_it():
    table = replace(
        a_table([3, 4, 5]),
        positions_N=np.array([0, 0, 1]),
        subs_N=np.array([0, 1, 0], np.int32),
        stop=2,
    )
    queue = SampleQueue.at(0)

    queue.report(table, (0, 1, 0))

    assert queue.table.lengths_N.tolist() == [4, 5]


def test_a_sample_that_is_partly_drawn_is_kept():
    assert len(a_queue(300, 4, cursor=(0, 0, 32)).table) == 2


def test_drawing_removes_from_the_head_and_keeps_the_range():
    queue = a_queue(3, 4, 5)

    queue.draw(2)

    assert queue.table.positions_N.tolist() == [2]
    assert queue.tokens == 5
    assert queue.table.stop == 3


def test_the_first_range_is_a_probe():
    assert SampleQueue.at(100).next_range(10**9) == (100, 116)


def test_later_ranges_follow_from_what_was_seen():
    assert a_queue(*[10] * 20).next_range(95) == (20, 30)


def test_a_range_is_at_least_one_record_and_never_without_bound():
    assert a_queue(10, 10).next_range(1) == (2, 3)
    assert a_queue(1).next_range(10**9) == (1, 1 + (1 << 16))


@pytest.mark.parametrize(
    ("seen", "most"), [(1, 256), (16, 256), (17, 272), (4095, 65_520), (5000, 1 << 16)]
)
def test_a_few_short_samples_say_little_of_those_behind_them(seen, most):
    """Files may be sorted by length: 16 samples of one token would have 65,536 of a million asked for."""
    asked = a_queue(*[1] * seen).ask(10**9, epoch=10**6, end=math.inf)

    assert asked == (seen, seen + most)


def test_of_a_source_that_was_gone_through_enough_is_known():
    assert a_queue(*[1] * 16).ask(10**9, epoch=16, end=math.inf) == (16, 16 + 1024)


@pytest.mark.parametrize(("epoch", "first"), [(1, 1), (3, 3), (16, 16), (10**6, 16)])
def test_a_first_read_goes_over_no_record_twice(epoch, first):
    queue = SampleQueue.at(7)

    assert queue.ask(10**9, epoch=epoch, end=math.inf) == (7, 7 + first)
    assert queue.ask(10**9, epoch=epoch, end=8) == (7, 8)


@pytest.mark.parametrize(("need", "first"), [(1, 1), (300, 1), (2000, 7), (10**6, 16)])
def test_a_first_read_for_the_next_plan_alone_is_of_as_many_records_as_that_is_likely_to_need(
    need, first
):
    asked = SampleQueue.at(7).ask(10**9, epoch=10**6, end=math.inf, need=need)

    assert asked == (7, 7 + first)


def test_what_one_record_says_of_the_others_has_no_more_read_for_the_next_plan_than_a_probe():
    assert a_queue(1).ask(10**9, epoch=10**6, end=math.inf, need=300) == (1, 17)


def test_records_that_gave_nothing_do_not_stop_the_reading():
    queue = SampleQueue.at(0)
    queue.report(replace(a_table([]), stop=100), (0, 0, 0))

    start, stop = queue.next_range(10)

    assert start == 100
    assert stop > start


def test_the_shortest_sample_is_remembered_after_it_was_drawn():
    queue = a_queue(3, 9)

    queue.draw(2)

    assert queue.shortest == 3
    assert SampleQueue.at(0).shortest is None


def test_what_a_short_report_left_out_is_asked_for_again():
    queue = SampleQueue.at(0)
    queue.asked_to = 8

    queue.report(a_table([5, 5, 5]), (0, 0, 0))

    assert queue.asked_to == 3
    assert queue.next_range(5)[0] == 3


def a_queue_without_a_shard(cursor=(2, 0, 0)):
    queue = a_queue(3, 4, 5, 6)
    queue.leave_out((1,), cursor)
    return queue


def test_a_shard_is_left_out_from_the_cursor_on_and_what_was_known_from_there_is_asked_again():
    queue = a_queue_without_a_shard()

    assert queue.table.positions_N.tolist() == [0, 1]
    assert queue.tokens == 7
    assert (queue.table.stop, queue.without_from(2)) == (2, (1,))
    assert queue.ask(9, epoch=9, end=100)[0] == 2


def test_a_record_that_is_begun_stays():
    for cursor in ((2, 1, 0), (2, 0, 4)):
        assert a_queue_without_a_shard(cursor).table.positions_N.tolist() == [0, 1, 2]


def test_a_report_that_leaves_out_other_shards_is_late():
    queue = a_queue_without_a_shard()

    assert queue.news_of(a_table([5, 6], start=2), ()) is None
    assert queue.news_of(a_table([5, 6], start=2), (1, 2)) is None
    assert queue.news_of(a_table([6], start=3), (1,)) is None
    assert len(queue.news_of(a_table([6], start=2), (1,))) == 1


def test_what_lies_before_the_cursor_is_read_whole_and_by_itself():
    queue = SampleQueue.at(4)
    queue.reach, queue.needed = 7, (4, 6)
    queue.leave_out((1,), (8, 1, 0))

    assert queue.ask(1, epoch=9, end=100) == (4, 9)
    table = queue.news_of(a_table([5] * 8, start=4), ())
    assert (table.start, table.stop) == (4, 9)
    queue.report(table, (8, 1, 0))
    assert queue.without_from(queue.ask(1, epoch=9, end=100)[0]) == (1,)


def test_a_shard_that_comes_back_is_read_again_from_the_cursor_on():
    queue = a_queue_without_a_shard()
    queue.report(queue.news_of(a_table([6, 7], start=2), (1,)), (2, 0, 0))

    queue.leave_out((), (3, 0, 0))

    assert queue.table.stop == 3
    assert queue.news_of(a_table([7], start=3), (1,)) is None
    assert queue.news_of(a_table([7], start=3), ()) is not None


def test_behind_skipped_steps_nothing_is_taken_for_known_that_lacks_a_shard():
    queue = a_queue_without_a_shard()

    queue.skip_to((9, 0, 0), 3)

    assert (queue.table.start, queue.table.stop, queue.tokens) == (3, 3, 0)
    assert queue.without_from(3) == ()


def test_far_from_what_is_carried_a_shard_is_left_out_before_the_cursor_too():
    queue = SampleQueue.at(4)
    queue.reach, queue.needed = 5001, (4, 20, 5000)
    queue.leave_out((1,), (9000, 0, 7))
    read = []

    while queue.table.stop < 9001:
        start, stop = queue.ask(10**9, epoch=10**6, end=10**6)
        without = queue.without_from(start)
        read.append((start, stop, without))
        queue.report(
            queue.news_of(replace(a_table([1], start=start), stop=stop), without), (0, 0, 0)
        )

    assert read == [
        (4, 21, ()),
        (21, 5000, (1,)),
        (5000, 5001, ()),
        (5001, 9000, (1,)),
        (9000, 9001, ()),
    ]


def test_where_nothing_was_found_yet_more_is_looked_at_each_time_and_never_without_bound():
    queue = SampleQueue.at(0)
    stops = []
    for _ in range(5):
        start, stop = queue.ask(4096, epoch=10**6, end=math.inf)
        queue.report(replace(a_table([], start=start), stop=stop), (0, 0, 0))
        stops.append(stop)

    assert stops == [16, 16 + 256, 272 * 17, 4624 * 15 + 800, 4624 * 15 + 800 + (1 << 16)]
