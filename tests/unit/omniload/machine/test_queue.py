"""What the planner knows of a source: reports in order, draws from the head, ranges to read."""

from dataclasses import replace

import numpy as np

from omniload.machine.queue import SampleQueue
from tests.support.plane.builders import a_table


def a_queue(*lengths, start=0, cursor=(0, 0, 0)):
    queue = SampleQueue.at(start)
    queue.report(a_table(lengths, start=start), cursor)
    return queue


def test_reports_follow_each_other():
    queue = a_queue(3, 4)

    assert queue.report(a_table([5], start=2), (0, 0, 0))
    assert queue.table.lengths_N.tolist() == [3, 4, 5]
    assert queue.tokens == 12
    assert queue.table.stop == 3


def test_a_repeated_or_early_report_is_ignored():
    queue = a_queue(3, 4)

    assert not queue.report(a_table([3, 4]), (0, 0, 0))
    assert not queue.report(a_table([9], start=7), (0, 0, 0))
    assert queue.tokens == 7
    assert queue.seen_positions == 2


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
