"""The steps that a constructor hands out, and the plans that a planner may take back."""

import pytest

from omniload.machine.plans.fences import FencesLate, FenceTold, Giving, Withdrawal
from omniload.plan.world import Edition


def told(number, step, turn=1):
    return FenceTold(number=number, turn=turn, step=step)


def asked(kept_to=0, constructors=2):
    withdrawal = Withdrawal.of(0, kept_to)
    withdrawal.ask(constructors)
    return withdrawal


def test_nothing_is_given_out_behind_a_fence_until_its_edition_has_come():
    giving = Giving()
    giving.gave(4)

    assert giving.fence((0, 1)) == 5
    assert [giving.may_give(step) for step in (4, 5)] == [True, False]
    assert giving.turn_to(Edition(turn=1, since=6))
    assert giving.may_give(6)


def test_word_of_an_earlier_edition_comes_late_and_is_not_heard():
    giving = Giving()
    giving.turn_to(Edition(life=1, since=3))

    assert giving.fence((0, 7)) == 0
    assert giving.may_give(9)
    assert not giving.turn_to(Edition(life=0, turn=7, since=1))
    assert giving.edition == Edition(life=1, since=3)


def test_an_earlier_edition_does_not_end_a_later_fence():
    giving = Giving()
    giving.fence((0, 2))

    giving.turn_to(Edition(turn=1, since=0))

    assert not giving.may_give(0)


def test_a_second_question_moves_no_fence_back():
    giving = Giving()
    giving.gave(2)

    assert giving.fence((0, 1)) == giving.fence((0, 2)) == 3
    giving.turn_to(Edition(turn=1, since=3))
    assert not giving.may_give(3)


def test_a_step_that_was_lent_counts_as_given_once_it_is_confirmed_however_often():
    giving = Giving(edition=Edition(turn=3))

    assert giving.fence((0, 2)) == 0, "to lend is not to give"
    assert [giving.confirm(6, (0, 3)), giving.confirm(6, (0, 3))] == [True, True]

    assert giving.fence((0, 4)) == 7
    assert giving.confirm(6, (0, 3)), "the answer may have been lost"


@pytest.mark.parametrize("edition", [(0, 1), (0, 3), (1, 0)])
def test_what_was_lent_under_another_edition_does_not_stand(edition):
    giving = Giving(edition=Edition(turn=2))

    assert not giving.confirm(6, edition)
    assert giving.given_to == 0


def test_what_was_lent_does_not_stand_behind_a_fence():
    giving = Giving()
    giving.gave(5)
    giving.fence((0, 1))

    assert giving.confirm(5, (0, 0))
    assert not giving.confirm(6, (0, 0))
    giving.turn_to(Edition(turn=1, since=6))
    assert not giving.confirm(6, (0, 0)), "it is planned anew"
    assert giving.confirm(6, (0, 1))


def test_the_greatest_answer_is_where_plans_are_taken_back_to():
    withdrawal = asked()
    withdrawal.hear(told(0, 3))
    assert not withdrawal.is_settled
    assert withdrawal.opens_at(8) == 8

    withdrawal.hear(told(1, 5))

    assert withdrawal.is_settled
    assert withdrawal.opens_at(8) == 5
    assert withdrawal.opens_at(4) == 4, "what is not planned is open"


@pytest.mark.parametrize(
    "event", [FencesLate(turn=0), told(1, 5, turn=0)], ids=["late", "an answer"]
)
def test_word_of_an_earlier_question_does_not_count(event):
    withdrawal = asked()
    withdrawal.hear(told(0, 3))

    withdrawal.hear(event)

    assert not withdrawal.is_settled


def test_a_constructor_that_is_late_keeps_every_plan():
    withdrawal = asked()
    withdrawal.hear(told(0, 3))

    withdrawal.hear(FencesLate(turn=1))
    withdrawal.hear(told(1, 3))

    assert withdrawal.is_settled
    assert withdrawal.opens_at(8) == 8
    assert withdrawal.renew(8) == Edition(turn=1, since=8)


def test_steps_that_are_kept_are_not_taken_back_whatever_is_answered():
    withdrawal = asked(kept_to=6, constructors=1)

    withdrawal.hear(told(0, 2))

    assert withdrawal.opens_at(8) == 6


def test_an_edition_ends_the_fence_that_was_asked_for():
    withdrawal = asked(constructors=1)
    assert withdrawal.is_fenced

    withdrawal.renew(4)

    assert not withdrawal.is_fenced
    assert withdrawal.opens_at(8) == 8


@pytest.mark.parametrize(
    ("changed", "since"),
    [([], 8), ([9], 8), ([5, 7], 5)],
    ids=["none", "behind what is planned", "earlier than it"],
)
def test_who_takes_over_tells_anew_what_a_change_may_have_had_planned_anew(changed, since):
    withdrawal = Withdrawal.of(1, 8, changed)

    assert withdrawal.edition == Edition(life=1, since=since)
    assert withdrawal.kept_to == 8, "ranks may have been given all of it"
