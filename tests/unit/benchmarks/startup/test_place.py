"""The link of the start-up benchmark: one rate for all, one delay, and bytes counted as they come."""

import pytest

from benchmarks.startup.place import Shape


def test_a_piece_leaves_after_its_bytes_and_the_delay():
    link = Shape(bytes_per_s=100.0, delay_s=0.5)

    assert link.leaves_s(10, 1.0) == pytest.approx(1.6)


def test_pieces_of_all_connections_queue_behind_each_other():
    link = Shape(bytes_per_s=100.0, delay_s=0.5)

    times = [link.leaves_s(10, 1.0) for _ in range(3)]

    assert times == pytest.approx([1.6, 1.7, 1.8])


def test_idle_time_is_not_saved_up():
    link = Shape(bytes_per_s=100.0, delay_s=0.0)
    link.leaves_s(10, 0.0)

    assert [link.leaves_s(50, 9.0) for _ in range(2)] == pytest.approx([9.5, 10.0])
