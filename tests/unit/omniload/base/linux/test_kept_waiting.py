"""The time for which a thread was kept from running."""

from omniload.base.linux.kept_waiting import kept_waiting_s


def test_a_thread_has_waited_for_a_core_no_less_than_before():
    before_s = kept_waiting_s()

    sum(range(100_000))

    assert 0 <= before_s <= kept_waiting_s()
