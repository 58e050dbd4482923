"""The relay that benchmarks hold streams to a rate with: how long bytes are held back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.hdfs.throttle import LATE_S, Pacer


def test_bytes_wait_until_their_time_has_come():
    pacer = Pacer(1000.0, 5.0)

    assert pacer.wait_s(500, 5.0) == pytest.approx(0.5)
    assert pacer.wait_s(500, 5.0) == pytest.approx(1.0)
    assert pacer.wait_s(500, 6.0) == pytest.approx(0.5)


def test_what_was_idle_is_not_saved_up():
    pacer = Pacer(1000.0, 0.0)

    assert pacer.wait_s(500, 60.0) == pytest.approx(0.5 - LATE_S)


@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 2)), max_size=50))
def test_never_more_passes_than_the_rate_allows(arrivals):
    rate, now = 1e6, 10.0
    pacer, passed = Pacer(rate, now), 0
    for size, idle in arrivals:
        now += idle
        now += max(0.0, pacer.wait_s(size, now))
        passed += size

        assert passed <= rate * (now - 10.0) * (1 + 1e-9) + 1e-3


@given(st.lists(st.integers(1 << 15, 1 << 17), min_size=1, max_size=50))
def test_a_stream_that_is_always_full_runs_at_the_rate(sizes):
    rate, now = 1e6, 0.0
    pacer = Pacer(rate, now)
    for size in sizes:
        # Every wake-up comes a little late.
        now += max(0.0, pacer.wait_s(size, now)) + LATE_S / 2

    assert now <= sum(sizes) / rate + LATE_S
