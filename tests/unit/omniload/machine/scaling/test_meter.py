"""Rates of what loaders have done, over lives of loaders and moves of sources."""

import pytest

from omniload.machine.scaling.meter import WorkMeter


def test_rates_are_of_what_was_done_since_the_last_look():
    meter = WorkMeter()
    meter.see("loader-0", {0: (1.0, 100)})
    assert meter.since_last(10.0) == ({}, {})

    meter.see("loader-0", {0: (3.0, 500)})

    busy_S, tokens_S = meter.since_last(20.0)
    assert busy_S == pytest.approx({0: 0.2})
    assert tokens_S == pytest.approx({0: 40.0})


def test_another_life_of_a_loader_begins_at_nothing():
    meter = WorkMeter()
    meter.see("loader-0", {0: (3.0, 500)})
    meter.since_last(10.0)

    meter.see("loader-0+1", {0: (1.0, 50)})

    assert meter.since_last(20.0) == ({0: 0.1}, {0: 5.0})


def test_a_source_that_is_read_by_two_loaders_counts_once_for_each():
    meter = WorkMeter()
    meter.since_last(0.0)

    meter.see("loader-0", {0: (1.0, 50)})
    meter.see("loader-1", {0: (2.0, 10)})

    assert meter.since_last(10.0) == ({0: 0.3}, {0: 6.0})
