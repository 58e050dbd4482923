"""Places of constructors when ranks come and go: with all their ranks, or where the plane is served."""

import pytest

from omniload.actors.ray.hosts.beside_ranks import Moves, RanksOn
from omniload.machine.roster.members import Member

ROLE, HOME, AWAY = "constructor-1", "node-a", "node-b"
FIRST, SECOND, THIRD = (Member(ROLE, number) for number in range(3))


class TestRanksOn:
    def test_a_constructor_has_the_node_of_its_ranks_once_all_of_them_are_known(self):
        on = RanksOn()
        for rank, node in enumerate([HOME, AWAY, AWAY, HOME]):
            assert on.of([(0,), (1, 2), (2, 3), ()], 0)[2] is None
            on.note(rank, 0, node)

        assert on.of([(0,), (1, 2), (2, 3), ()], 0) == [HOME, AWAY, "", None]

    def test_ranks_of_another_generation_say_nothing_of_this_one(self):
        on = RanksOn()
        on.note(0, 1, AWAY)
        on.note(0, 0, HOME)  # late

        assert on.of([(0,)], 1) == [AWAY]
        assert on.of([(0,)], 2) == [None]
        on.note(1, 2, HOME)
        assert on.of([(0,), (1,)], 2) == [None, HOME]


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def moves(clock):
    made = Moves(HOME, clock)
    assert made.place(FIRST) == HOME
    return made


def wanted(moves, holder, node, generation=0):
    return moves.wanted({ROLE: holder}, generation, {ROLE: node})


def test_a_constructor_whose_ranks_are_elsewhere_moves_there_and_is_asked_for_its_heartbeats(moves):
    assert wanted(moves, FIRST, None) == []
    assert wanted(moves, FIRST, HOME) == []
    assert wanted(moves, FIRST, AWAY) == [FIRST]

    assert moves.place(SECOND) == AWAY
    moves.forget(FIRST)

    assert moves.away() == [SECOND]
    assert wanted(moves, SECOND, AWAY) == []


@pytest.mark.parametrize("node", [HOME, ""])
def test_it_comes_home_where_its_ranks_are_there_or_on_several_hosts(moves, node):
    wanted(moves, FIRST, AWAY)
    moves.place(SECOND)

    assert wanted(moves, SECOND, node, 1) == [SECOND]
    assert moves.place(THIRD) == HOME
    moves.forget(SECOND)
    assert moves.away() == []


def test_one_that_follows_a_lost_one_is_at_home_for_a_while_or_until_ranks_change(moves, clock):
    wanted(moves, FIRST, AWAY)
    moves.place(SECOND)
    moves.forget(SECOND)
    assert moves.place(THIRD) == HOME

    clock.now_s += 29
    assert wanted(moves, THIRD, AWAY) == []
    assert wanted(moves, THIRD, AWAY, 1) == [THIRD]
    clock.now_s += 1
    assert wanted(moves, THIRD, AWAY) == [THIRD]


def test_a_node_that_takes_none_is_tried_some_times_and_not_at_once(moves, clock):
    tried = 0
    for life in range(1, 300):
        if wanted(moves, FIRST, AWAY):
            assert moves.place(Member(ROLE, life)) == AWAY
            moves.forget(Member(ROLE, life))
            tried += 1
            assert wanted(moves, FIRST, AWAY) == []
        clock.now_s += 1

    assert tried == 5


def test_a_move_that_nobody_was_started_for_is_forgotten(moves):
    wanted(moves, FIRST, AWAY)
    wanted(moves, FIRST, HOME)

    assert moves.place(SECOND) == HOME


def test_a_move_that_the_roster_did_not_make_is_none_for_whoever_follows(moves):
    wanted(moves, FIRST, AWAY)
    moves.stay(ROLE)

    assert moves.place(SECOND) == HOME
    moves.forget(FIRST)
    assert wanted(moves, SECOND, AWAY) == [SECOND]
