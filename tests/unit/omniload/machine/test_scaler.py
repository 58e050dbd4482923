"""The scaler: which change is due, when, and why."""

from itertools import pairwise

import pytest

from omniload.machine.scaler import (
    LoadersSeen,
    MergeLoader,
    MoveSources,
    Scaler,
    SplitLoader,
)
from omniload.machine.scaling.meters import WorkMeter

ONE = {"loader-0": (0, 1, 2)}
TWO = {"loader-0": (0, 1), "loader-1": (2,)}
EVEN = {0: 0.4, 1: 0.3, 2: 0.3}


def a_scaler(**changes):
    return Scaler(**{"least": 1, "most": 4, "cost_S": {0: 1e-6, 1: 1e-6, 2: 2e-6}, **changes})


def looks(
    scaler,
    seconds,
    busy,
    sources_of=ONE,
    *,
    from_s=0.0,
    soon=None,
    now=EVEN,
    waited=(),
    filled=None,
):
    """Look every 5 s; return when each change was due, and the change."""
    found = []
    for at in range(int(seconds) // 5 + 1):
        seen = LoadersSeen(
            now_s=from_s + at * 5,
            sources_of=sources_of,
            busy_S=busy,
            tokens_S=dict.fromkeys(busy, 100_000.0),
            shares_S=now,
            soon_S=now if soon is None else soon,
            waited=frozenset(waited),
            filled_S=filled,
        )
        found += [(seen.now_s, command) for command in scaler.handle(seen)]
    return found


def first(*args, **kwargs):
    """Return when the first change was due, and the change."""
    return next(iter(looks(*args, **kwargs)), (None, None))


def test_a_loader_of_too_much_work_is_split_in_half_once_it_stays_so():
    due_s, split = first(a_scaler(), 150, {0: 0.5, 1: 0.4, 2: 0.1})

    assert isinstance(split, SplitLoader)
    assert (split.role, set(split.sources)) == ("loader-0", {1, 2})
    assert "loader-0 has the work of 0.9" in split.why
    assert due_s >= 75  # the average passes 0.85 at 57 s


def test_a_burst_changes_nothing():
    scaler = a_scaler()

    assert looks(scaler, 10, {0: 2.0, 1: 1.0}) == []
    assert looks(scaler, 600, {0: 0.3, 1: 0.3}, from_s=15) == []


def test_sources_go_to_a_loader_with_room_before_another_is_started():
    _, move = first(a_scaler(), 90, {0: 0.9, 1: 0.4, 2: 0.2}, TWO)

    assert move == MoveSources(role="loader-0", sources=(1,), to="loader-1", why=move.why)


@pytest.mark.parametrize(("busy", "most"), [({0: 2.0, 1: 0.01, 2: 0.02}, 4), ({0: 2.0, 1: 1.0}, 1)])
def test_what_cannot_relieve_a_loader_is_not_done(busy, most):
    assert looks(a_scaler(most=most), 300, busy) == []


def test_two_loaders_of_little_work_become_one_after_a_while():
    due_s, merge = first(a_scaler(), 200, {0: 0.1, 1: 0.1, 2: 0.1}, TWO)

    assert merge == MergeLoader(role="loader-1", sources=(2,), to="loader-0", why=merge.why)
    assert due_s == 120
    assert looks(a_scaler(least=2), 900, {0: 0.1}, TWO) == []


def test_a_loader_that_the_planner_waits_for_is_relieved_earlier():
    busy = {0: 0.4, 1: 0.3}

    assert looks(a_scaler(), 300, busy) == []
    assert isinstance(first(a_scaler(), 120, busy, waited=["loader-0"])[1], SplitLoader)


def test_a_loader_is_there_before_the_stage_that_needs_it():
    scaler, busy = a_scaler(), {0: 0.4, 1: 0.1, 2: 0.1}
    assert looks(scaler, 300, busy) == []

    due_s, split = first(scaler, 60, busy, from_s=305, soon={0: 0.4, 1: 0.9, 2: 0.6})

    assert due_s == 325
    assert set(split.sources) == {1, 2}


def test_a_source_that_was_never_read_counts_by_the_cost_that_is_known():
    now, busy = {0: 0.5, 1: 0.5}, {0: 0.3, 1: 0.2}
    soon = {0: 0.3, 1: 0.2, 2: 0.5}  # of 200,000 tokens a second
    light, heavy = a_scaler(cost_S={2: 2e-6}), a_scaler(cost_S={2: 5e-6})
    for scaler in (light, heavy):
        assert looks(scaler, 300, busy, now=now) == []

    assert looks(light, 60, busy, from_s=305, now=now, soon=soon) == []
    _, split = first(heavy, 60, busy, from_s=305, now=now, soon=soon)
    assert set(split.sources) == {0, 1}


def test_changes_follow_each_other_slowly_and_an_allowance_ends_them():
    swings = []
    scaler = a_scaler(most=3)
    for turn in range(40):
        busy = {0: 0.8, 1: 0.7} if turn % 2 else {0: 0.1, 1: 0.1}
        of = ONE if turn % 2 else {"loader-0": (0, 2), "loader-1": (1,)}
        swings += looks(scaler, 145, busy, of, from_s=turn * 150)

    due_s = [at for at, _ in swings]
    assert len(due_s) <= 3 + 6000 / 600
    assert len(due_s) >= 5
    assert all(b - a >= 30 for a, b in pairwise(due_s))


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


def meets(scaler, filled, seconds=120, of=ONE, *, from_s=0.0, busy=0.1, soon=None):
    """Look as above at sources of little work, of which so much is read ahead."""
    busy_S = dict.fromkeys(EVEN, busy)
    return looks(scaler, seconds, busy_S, of, from_s=from_s, soon=soon, filled=filled)


SLOW = {0: 0.0, 1: 0.05, 2: 0.1}
"""How full sources are whose reads wait for each other."""


def test_a_loader_that_runs_empty_is_split_though_it_has_little_to_do():
    due_s, split = meets(a_scaler(), SLOW)[0]

    assert isinstance(split, SplitLoader)
    assert set(split.sources) == {1, 2}
    assert "loader-0 runs empty: of what it is to read ahead of 3 sources" in split.why
    assert due_s >= 55  # full until something else is heard: below 0.3 after 37 s


def test_of_one_source_that_runs_empty_nothing_moves():
    assert meets(a_scaler(), {0: 0.0}, 600) == []
    assert meets(a_scaler(), dict.fromkeys(EVEN, 0.5), 600) == []


def test_what_runs_empty_goes_to_a_loader_that_is_full_before_another_is_started():
    three = {"loader-0": (0, 1), "loader-1": (2,)}

    _, move = meets(a_scaler(), {0: 0.0, 1: 0.1}, of=three)[0]
    _, split = meets(a_scaler(), {0: 0.0, 1: 0.1, 2: 0.8}, of=three)[0]

    assert move == MoveSources(role="loader-0", sources=(1,), to="loader-1", why=move.why)
    assert isinstance(split, SplitLoader)


def test_where_moving_fills_nothing_it_is_done_once_unless_more_is_drawn():
    scaler, after = a_scaler(), {"loader-0": (0, 1), "loader-1": (2,)}
    assert len(meets(scaler, SLOW)) == 1

    assert meets(scaler, SLOW, 3600, of=after, from_s=125) == []
    more = meets(
        scaler, SLOW, 60, of=after, from_s=3730, soon={s: 1.6 * x for s, x in EVEN.items()}
    )
    assert len(more) == 1


def test_where_moving_has_helped_it_is_done_again():
    scaler, after = a_scaler(), {"loader-0": (0, 1), "loader-1": (2,)}
    assert len(meets(scaler, {0: 0.0, 1: 0.0, 2: 0.0})) == 1

    _, split = meets(scaler, {0: 0.2, 1: 0.2}, 120, of=after, from_s=125)[0]
    assert split.role == "loader-0"


def test_parts_of_a_loader_that_ran_empty_stay_apart_while_as_much_is_drawn_of_them():
    scaler, after = a_scaler(), {"loader-0": (0, 1), "loader-1": (2,)}
    assert len(meets(scaler, SLOW)) == 1

    assert meets(scaler, {}, 1800, of=after, from_s=125) == []
    rarer = {s: share / 3 for s, share in EVEN.items()}
    [(_, merge)] = meets(scaler, {}, 150, of=after, from_s=1930, soon=rarer)
    assert isinstance(merge, MergeLoader)


def test_parts_of_a_loader_that_ran_empty_before_anything_was_drawn_of_them_become_one_again():
    scaler, after = a_scaler(), {"loader-0": (0, 1), "loader-1": (2,)}
    none = dict.fromkeys(EVEN, 0.0)
    assert len(meets(scaler, SLOW, soon=none)) == 1

    assert isinstance(meets(scaler, {}, 600, of=after, from_s=125, soon=none)[0][1], MergeLoader)


def test_parts_of_a_loader_that_ran_empty_are_tried_as_one_once_they_were_full_for_an_hour():
    scaler, after = a_scaler(), {"loader-0": (0, 1), "loader-1": (2,)}
    assert len(meets(scaler, SLOW)) == 1

    # One of them is not full for a moment, so the hour starts again.
    assert meets(scaler, {}, 3000, of=after, from_s=125) == []
    assert meets(scaler, {2: 0.5}, 60, of=after, from_s=3130) == []
    assert meets(scaler, {}, 3000, of=after, from_s=3195) == []
    due_s, merge = meets(scaler, {}, 1000, of=after, from_s=6200)[0]
    assert isinstance(merge, MergeLoader)
    assert due_s >= 3190 + 3600

    assert isinstance(meets(scaler, SLOW, from_s=7300)[0][1], SplitLoader)
    assert meets(scaler, {}, 7200, of=after, from_s=7425) == []


@pytest.mark.parametrize(
    ("filled", "busy", "merges"),
    [(None, 0.15, False), ({}, 0.15, True), ({2: 0.5}, 0.15, False), ({2: 0.5}, 0.1, False)],
)
def test_two_that_are_always_full_become_one_sooner_and_two_of_which_one_is_not_never(
    filled, busy, merges
):
    found = meets(a_scaler(), filled, 200, of=TWO, busy=busy)

    assert [type(command) for _, command in found] == [MergeLoader] * merges
    assert all("what they read ahead is full" in command.why for _, command in found)
