"""Processor time and memory of processes."""

import time

import psutil

from omniload.actors.ray.measuring.spent import memory_of, spent_by


def test_a_process_has_spent_what_its_own_clock_says_at_most_and_more_as_it_works():
    own = psutil.Process()
    before_s, began_s = spent_by(own), time.process_time()

    while time.process_time() - began_s < 0.05:
        sum(range(1_000))

    assert 0 < before_s <= began_s + 0.02
    assert 0.04 < spent_by(own) - before_s < 0.5


def test_a_process_that_has_ended_has_nothing():
    ended = psutil.Popen(["true"])
    ended.wait()

    assert spent_by(ended) == 0
    assert memory_of(ended) == 0
