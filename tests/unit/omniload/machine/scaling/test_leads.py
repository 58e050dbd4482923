"""Read-ahead of a source with slow reads, and its use of a loader's memory."""

from dataclasses import dataclass

import pytest

from omniload.machine.scaling.coming import Demand
from omniload.machine.scaling.leads import Leads, ReadPace
from omniload.mix.edits.history import History
from omniload.mix.state import MixState
from tests.support.plane.builders import a_mix

MEMORY = 1 << 20
PLANS, MOST = 4, 64
"""Read ahead of any source, and of a slow one at most."""
CALM = 64


@dataclass
class Weighed:
    token_bytes: float
    sample_tokens: float = 6.0


HISTORY = History(a_mix(weights={"web": 3.0, "code": 1.0}, loader={"memory": MEMORY}), ())


def demand_of(leads, *token_bytes):
    """Return a step's demand of sources whose tokens have these sizes."""
    known_S = [Weighed(each) for each in token_bytes]
    return leads.demand(HISTORY, MixState.start(2), 1, known_S)


def plans_of(leads, source):
    """Return how many plans ahead a source is read."""
    light = 0.001, 0.001
    usual = demand_of(Leads(), *light).targets_S[source]
    return demand_of(leads, *light).targets_S[source] / usual * PLANS


def after(*took_plans):
    leads = Leads()
    for each in took_plans:
        leads.note(0, each)
    return plans_of(leads, 0)


@pytest.mark.parametrize("took_plans", [0.0, 0.3, 2.0, 2.4])
def test_a_source_whose_reads_are_over_before_its_samples_are_is_read_as_any_other(took_plans):
    leads = Leads()
    leads.note(0, took_plans)

    assert demand_of(leads, 5.0, 5.0) == Demand.of(
        HISTORY, MixState.start(2), 1, [Weighed(5.0)] * 2
    )


def test_one_that_takes_longer_is_read_so_much_further_ahead_up_to_a_limit():
    assert after(10.0) == 14
    assert after(10.0, 20.0) == 26
    assert after(1e9) == after(60.0) == MOST


def test_it_is_read_less_far_ahead_after_many_quick_reads_in_a_row_and_not_before():
    slow, quick = 20.0, [1.0] * (CALM - 1)

    assert after(slow, *quick) == 26
    assert after(slow, *quick, 11.0, *quick) == 26  # more than half of that was needed once
    assert after(slow, *quick, 1.0) == PLANS
    assert after(slow, *quick, 6.0) == 9  # as far as the longest of these takes
    assert after(slow, *quick, 1.0, slow) == 26


def test_slow_reads_that_come_in_turn_with_quick_ones_change_nothing_from_the_second_on():
    leads, seen = Leads(), []
    for _ in range(10):
        for took_plans in (20.0, *[0.5] * (CALM // 2)):
            leads.note(0, took_plans)
            seen.append(plans_of(leads, 0))

    assert set(seen) == {26}


@pytest.mark.parametrize("others", [0.001, 5.0, 40.0, 1e6])
@pytest.mark.parametrize("own", [0.001, 5.0, 200.0, 1e6])
def test_what_is_read_further_ahead_takes_the_room_that_other_sources_leave(own, others):
    leads = Leads()
    leads.note(0, 30.0)
    demand, widened = demand_of(Leads(), own, others), demand_of(leads, own, others)

    # The allowance of the other source is unchanged.
    assert widened.bounds_of(1, others) == demand.bounds_of(1, others)
    least, most = widened.bounds_of(0, own)
    before = demand.bounds_of(0, own)
    assert before[0] <= least <= most <= 2 * widened.targets_S[0]
    taken = [
        most * weight if most > need else 0.0
        for (_, most), need, weight in zip(
            [(least, most), demand.bounds_of(1, others)], demand.needs_S, (own, others), strict=True
        )
    ]
    assert sum(taken) <= MEMORY / 2 * (1 + 1e-9)
    if own * widened.targets_S[0] < MEMORY / 100:
        assert most == 2 * widened.targets_S[0]


def test_reads_are_counted_in_steps_of_the_job_but_for_quick_ones_and_before_its_pace_is_known():
    times, now_s = ReadPace(), 0.0
    assert times.steps_of(0, asked_s=0.0, now_s=1.0) == 0
    for step in range(1, 101):
        times.reach(step, now_s := 1.0 + step * 0.02)

    assert times.steps_of(0, asked_s=now_s - 0.04, now_s=now_s) == 0
    # Its first: read all the time so far.
    assert times.steps_of(1, asked_s=now_s - 0.5, now_s=now_s) == 0
    assert times.steps_of(0, asked_s=now_s, now_s=now_s + 0.5) == pytest.approx(25)


def test_a_source_that_is_read_all_the_time_is_not_read_further_ahead():
    times = ReadPace()
    for step in range(400):
        times.reach(step, step * 0.02)
    now_s, found = 8.0, []
    for rest_s in [0.001] * 100 + [1.0] * 100:
        found.append(times.steps_of(0, asked_s=now_s, now_s=now_s + 1.0))
        now_s += 1.0 + rest_s

    assert found[:100] == [0.0] * 100
    assert found[-1] == pytest.approx(50)


def test_a_source_that_is_not_drawn_is_read_no_further_for_what_its_reads_took_once():
    leads = Leads()
    leads.note(2, 30.0)

    found = demand_of(leads, 5.0, 5.0, 5.0)
    assert found.targets_S[2] == 0
    assert found == demand_of(Leads(), 5.0, 5.0, 5.0)
