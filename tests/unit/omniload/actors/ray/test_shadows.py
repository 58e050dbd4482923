"""Shadows are notified of the place to begin: often enough, never twice at once, and without a wait for them."""

from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from omniload.actors.ray.shadows import Shadows
from omniload.base.errors import StateError, UnavailableError
from omniload.machine.messages import TakeOver
from omniload.machine.roster.members import Member

ONE, OTHER = Member("loader-0", 1), Member("loader-1", 1)
OUTSTANDING = TakeOver(ranges={0: (3, 9), 1: (4, 9), 2: (5, 9)}, without={1: (4, (7,))})


class Method:
    """A method of an actor: its calls, and answers that the test gives."""

    def __init__(self):
        self.asked, self.answers = [], []

    def remote(self, argument):
        self.asked.append(argument)
        self.answers.append(Future())
        return SimpleNamespace(future=lambda answer=self.answers[-1]: answer)


@pytest.fixture
def crew():
    planner = SimpleNamespace(outstanding=Method())
    return SimpleNamespace(
        planner=planner,
        holding=lambda _role: planner,
        sources_of={"loader-0": (0, 1), "loader-1": (2,)},
        actors={member: SimpleNamespace(decode_ahead=Method()) for member in (ONE, OTHER)},
    )


@pytest.fixture
def leader(crew):
    made = Shadows(crew)
    made.lead = partial(made.lead, later=lambda call: call())
    return made


def test_each_shadow_is_told_of_its_own_sources(crew, leader):
    leader.lead([ONE, OTHER], 0.0)
    assert crew.planner.outstanding.asked == [[0, 1, 2]]

    crew.planner.outstanding.answers[0].set_result(OUTSTANDING)

    first, second = (crew.actors[member].decode_ahead for member in (ONE, OTHER))
    assert first.asked == [TakeOver(ranges={0: (3, 9), 1: (4, 9)}, without={1: (4, (7,))})]
    assert second.asked == [TakeOver(ranges={2: (5, 9)})]


def test_they_are_told_once_a_second_and_at_once_where_one_is_new(crew, leader):
    def lead(shadows, now_s):
        leader.lead(shadows, now_s)
        for answer in crew.planner.outstanding.answers:
            if not answer.done():
                answer.set_result(OUTSTANDING)
        return len(crew.planner.outstanding.asked)

    assert [lead([ONE], s) for s in (0.0, 0.25, 0.75, 1.0, 1.25)] == [1, 1, 1, 2, 2]
    assert [lead([ONE, OTHER], s) for s in (1.5, 1.75)] == [3, 3]
    # A shadow that is gone is no reason, and without a shadow no call is made.
    assert [lead([OTHER], 2.0), lead([], 9.0)] == [3, 3]


def test_a_shadow_that_decodes_is_told_nothing_more_until_it_has(crew, leader):
    decode_ahead = crew.actors[ONE].decode_ahead
    for now_s in (0.0, 1.0, 2.0):
        leader.lead([ONE], now_s)
        crew.planner.outstanding.answers[-1].set_result(OUTSTANDING)
    assert len(decode_ahead.asked) == 1

    decode_ahead.answers[0].set_result(None)
    leader.lead([ONE], 3.0)
    crew.planner.outstanding.answers[-1].set_result(OUTSTANDING)

    assert len(decode_ahead.asked) == 2


def test_a_planner_that_has_not_answered_is_not_asked_again_and_one_that_is_lost_is(crew, leader):
    leader.lead([ONE], 0.0)
    leader.lead([ONE], 5.0)
    assert len(crew.planner.outstanding.asked) == 1

    crew.planner.outstanding.answers[0].set_exception(UnavailableError("it has ended"))
    leader.lead([ONE], 6.0)

    assert len(crew.planner.outstanding.asked) == 2


def test_shadows_are_there_once_each_has_decoded_and_a_new_one_is_not(crew, leader):
    assert leader.have_decoded([])
    leader.lead([ONE], 0.0)
    crew.planner.outstanding.answers[0].set_result(OUTSTANDING)
    assert not leader.have_decoded([ONE])

    crew.actors[ONE].decode_ahead.answers[0].set_result(None)

    assert leader.have_decoded([ONE])
    assert not leader.have_decoded([ONE, OTHER])


def test_a_shadow_that_took_over_or_ended_meanwhile_is_told_nothing_and_counts_no_more(
    crew, leader
):
    leader.lead([ONE], 0.0)
    leader.lead([], 0.25)
    crew.planner.outstanding.answers[0].set_result(OUTSTANDING)
    assert crew.actors[ONE].decode_ahead.asked == []

    leader.lead([OTHER], 1.25)
    crew.planner.outstanding.answers[1].set_result(OUTSTANDING)
    crew.actors[OTHER].decode_ahead.answers[0].set_exception(UnavailableError("it has ended"))

    assert not leader.have_decoded([OTHER])


def test_a_shadow_whose_role_is_retired_before_the_planner_answers_is_told_nothing(crew, leader):
    leader.lead([ONE, OTHER], 0.0)
    other = crew.actors.pop(OTHER)
    crew.sources_of.pop("loader-1")

    crew.planner.outstanding.answers[0].set_result(OUTSTANDING)

    assert len(crew.actors[ONE].decode_ahead.asked) == 1
    assert other.decode_ahead.asked == []


def test_a_fault_is_said_once_and_not_brought_about_at_every_turn(crew, leader, caplog):
    decode_ahead = crew.actors[ONE].decode_ahead
    for now_s in (0.0, 1.0, 2.0):
        leader.lead([ONE], now_s)
        crew.planner.outstanding.answers[-1].set_result(OUTSTANDING)
        if not decode_ahead.answers[-1].done():
            decode_ahead.answers[-1].set_exception(StateError("a fault"))
    for now_s in (3.0, 4.0):
        leader.lead([ONE], now_s)
        crew.planner.outstanding.answers[-1].set_exception(StateError("no such step"))

    assert len(decode_ahead.asked) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "loader-0+1 has not decoded ahead: a fault",
        "shadows stay where they are: no such step",
    ]
