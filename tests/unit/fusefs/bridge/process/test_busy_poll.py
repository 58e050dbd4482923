"""When a loop looks for the next request before it sleeps."""

import hypothesis.strategies as st
from hypothesis import given

from fusefs.bridge.process.busy_poll import LOOKS, BusyPoll


def waits(busy, answers):
    """Carry out waits; in each the request is there while the loop looks, or not. Return the looks of each."""
    looks = []
    for comes_soon in answers:
        looks.append(busy.looks())
        if looks[-1]:
            (busy.found if comes_soon else busy.slept)()
    return looks


def test_a_loop_whose_requests_come_soon_always_looks():
    assert set(waits(BusyPoll(2), [True] * 1000)) == {LOOKS}


def test_a_pause_now_and_then_costs_no_look_of_the_requests_behind_it():
    assert set(waits(BusyPoll(2), [False, *[True] * 20] * 50)) == {LOOKS}


def test_a_loop_whose_requests_come_late_sleeps_at_once():
    looks = waits(BusyPoll(2), [False] * 10_000)

    assert sum(map(bool, looks)) < 120


def test_requests_that_come_soon_again_are_found_by_a_trial():
    busy = BusyPoll(2)
    waits(busy, [False] * 500)

    looks = waits(busy, [True] * 300)

    assert set(looks[150:]) == {LOOKS}


def test_on_a_single_core_nobody_could_ask_meanwhile():
    assert set(waits(BusyPoll(1), [True, False] * 100)) == {0}


@given(st.lists(st.booleans(), max_size=2000))
def test_looks_in_vain_are_few_beside_the_waits_and_the_looks_that_were_not(answers):
    busy = BusyPoll(2)
    looks = waits(busy, answers)

    paired = list(zip(looks, answers, strict=True))
    in_vain = sum(1 for looked, soon in paired if looked and not soon)
    not_in_vain = sum(1 for looked, soon in paired if looked and soon)

    assert in_vain <= 8 + len(answers) / 100 + 8 * not_in_vain
