"""The ranks of a run from a step on: the request that changes them, and the request that is out of date."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import ConfigError, StateError
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.world import Edition, RanksServed, World, require_rows
from tests.support.plane.builders import a_mix


def a_world(dp=4, **changes):
    return World(tree=ClientPlaceTree.of(dp=dp, cp=2), **changes)


def test_the_first_rank_that_counts_others_makes_a_world_and_the_rest_find_it():
    made = a_world().followed_by(dp=3, step=17)

    assert (made.dp, made.step, made.generation) == (3, 17, 1)
    assert made.tree.size_of("cp") == 2
    assert made.followed_by(dp=3, step=17) is made
    assert made.followed_by(dp=3, step=17, generation=1) is made


def test_a_generation_may_be_any_later_number():
    assert a_world(generation=3).followed_by(dp=4, step=9, generation=41).generation == 41


def test_a_rank_of_an_earlier_generation_is_refused_with_what_to_do():
    held = a_world(dp=2, generation=5, step=20)

    with pytest.raises(
        StateError, match=r"dp 3 from step 17 as generation 4, which is over.*join again"
    ):
        held.followed_by(dp=3, step=17, generation=4)


def test_ranks_of_one_generation_that_count_differently_are_refused():
    held = a_world(dp=3, generation=1, step=17)

    with pytest.raises(
        StateError, match=r"generation 1, which has dp 3 from step 17.*same step boundary"
    ):
        held.followed_by(dp=3, step=18, generation=1)


@given(st.integers(1, 40), st.integers(1, 9))
def test_every_rank_has_one_constructor_whatever_their_numbers(dp, num_constructors):
    world = a_world(dp=dp, generation=2, step=5)

    served = [world.served_by(number, num_constructors) for number in range(num_constructors)]

    assert sorted(rank for each in served for rank in each.dp_ranks) == list(range(dp))
    for number, each in enumerate(served):
        assert (each.generation, each.step) == (2, 5)
        assert {world.constructor_of(r, num_constructors) for r in each.dp_ranks} <= {number}


def test_what_a_constructor_serves_is_found_without_a_look_at_every_rank():
    many = 1 << 40

    assert a_world(dp=many).served_by(7, many) == RanksServed(dp_ranks=(7,))


def test_a_constructor_without_ranks_is_served_none():
    assert a_world(dp=1).served_by(1, 2) == RanksServed(dp_ranks=())


def test_a_world_is_kept_as_plain_json():
    world = a_world(dp=3, generation=7, step=1 << 40)

    assert World.from_json(world.to_json()) == world


@pytest.mark.parametrize(
    "damage",
    [
        {"sizes": None},
        {"sizes": {"dp": 0}},
        {"sizes": {"sp": 2}},
        {"step": -1},
        {"generation": "1"},
    ],
)
def test_a_damaged_world_is_refused(damage):
    with pytest.raises(StateError, match=r"a world in the journal is damaged"):
        World.from_json(a_world().to_json() | damage)


@pytest.mark.parametrize(
    ("before", "step", "stands"),
    [
        (Edition(life=1, turn=2, since=5), 9, True),  # itself
        (Edition(life=1, turn=1), 4, False),  # sent again with plans that were taken back
        (Edition(turn=3), 4, True),  # of an earlier planner, which does not send it again
        (Edition(turn=3), 5, False),
        (Edition(life=2), 5, True),  # a later one, whose word has overtaken this
    ],
)
def test_a_plan_of_an_edition_before_stands_where_its_planner_is_gone_and_those_of_the_next_begin_behind_it(
    before, step, stands
):
    assert Edition(life=1, turn=2, since=5).keeps(before, step) is stands


def test_a_batch_of_fewer_rows_than_ranks_is_refused_with_what_it_takes():
    with pytest.raises(ConfigError, match=r"is 4 rows .* fewer than the 5 .* to 160 or more"):
        require_rows(a_mix(), ClientPlaceTree.of(dp=5))


def test_rows_that_cannot_be_sliced_evenly_are_refused():
    with pytest.raises(ConfigError, match=r"length 32 is not a multiple of 2 \* cp = 6"):
        require_rows(a_mix(), ClientPlaceTree.of(cp=3))


def test_a_batch_that_fits_is_accepted():
    require_rows(a_mix(), ClientPlaceTree.of(dp=4, cp=2))
