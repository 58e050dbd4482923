"""Steps that a constructor cannot build: the planner hears of each, whatever is lost or changes meanwhile."""

from concurrent.futures import Future

import pytest

from omniload.actors.heartbeat_board import Activity
from omniload.actors.roles import constructor as module
from omniload.actors.roles.build_order import BuildOrder
from omniload.actors.roles.constructor import ConstructorShell
from omniload.base.errors import IntegrityError, StateError, UnavailableError
from omniload.machine.data_constructor import DataConstructor
from omniload.machine.messages import StepsTaken
from omniload.plan.world import Edition, RanksServed, WorldRank
from tests.support.plane.builders import a_plan

ERROR = IntegrityError("bad record")
BUILT = Future()
BUILT.set_result(1)


@pytest.fixture
def shell(monkeypatch):
    """A constructor whose rank has reported one step; a question without an answer waits a moment."""
    monkeypatch.setattr(module, "_ASKED_AGAIN_S", 1e-3)
    machine = DataConstructor(dp_ranks=[0], names=["web"], row_length=8)
    shell = ConstructorShell(machine, list, Activity("constructor-0"))
    shell.taken(3, WorldRank(0))
    return shell


def an_order(*steps, heard=0, **served):
    plans = [a_plan([[[0, 1, 0, 0, 5, 5]]], step=step) for step in steps]
    served = RanksServed(dp_ranks=(0,), **served)
    return BuildOrder(plans=plans, served=served, released_to=0, heard=heard)


def fail(shell, *orders):
    """Let orders that came with a question fail one after another, after their answers."""
    building = [Future() for _ in orders]
    for each, order in zip(building, orders, strict=True):
        shell.told_beside(each, order)
    for each in building:
        each.set_exception(ERROR)


def test_a_failed_build_answers_the_question_beside_it_or_every_later_one(shell):
    """Any of these answers may be lost on its way, and the planner then asks again with what it had heard."""
    building = Future()

    assert shell.told_beside(building, an_order(4)) == (1, StepsTaken(steps={(0, 0): 3}))
    building.set_exception(ERROR)
    for heard in (1, 1, 0):
        with pytest.raises(IntegrityError, match="bad record"):
            shell.told(heard)
        with pytest.raises(IntegrityError, match="bad record"):
            shell.told_beside(BUILT, an_order(5, heard=heard))


def test_the_first_failure_of_the_present_ranks_is_told_until_there_are_other_ranks(shell):
    shell.build((), RanksServed(dp_ranks=(0,), generation=1))
    shell.taken(3, WorldRank(0, generation=1))
    of_before, of_now, behind_it = Future(), Future(), Future()
    for building, generation in ((of_before, 0), (of_now, 1), (behind_it, 1)):
        shell.told_beside(building, an_order(4, generation=generation))

    of_before.set_exception(StateError("its ranks are gone"))
    assert shell.told(0)[0] == 2
    of_now.set_exception(ERROR)
    behind_it.set_exception(UnavailableError("it was let go of"))
    with pytest.raises(IntegrityError, match="bad record"):
        shell.told_beside(BUILT, an_order(5, generation=1))

    shell.build((), RanksServed(dp_ranks=(0,), generation=2))
    shell.taken(3, WorldRank(0, generation=2))
    assert shell.told(0)[0] == 3


# A planner sends plans that stay again, together with those that it takes back; a planner that takes over does not.
EDITIONS = [(Edition(turn=1, since=9), False), (Edition(life=1, since=6), True)]


@pytest.mark.parametrize(("edition", "stands"), EDITIONS)
@pytest.mark.parametrize("comes", ["before", "late"])
def test_a_failure_is_told_until_an_edition_replaces_its_plan(shell, edition, stands, comes):
    building = Future()
    shell.told_beside(building, an_order(4))
    turn = RanksServed(dp_ranks=(0,), edition=edition)
    if comes == "before":
        building.set_exception(ERROR)
    shell.build((), turn)
    if comes == "late":
        building.set_exception(ERROR)

    if stands:
        with pytest.raises(IntegrityError, match="bad record"):
            shell.told(0, turn.number)
    else:
        assert shell.told(0, turn.number)[0] == 1


def test_a_question_that_overtakes_its_plans_hears_of_no_failure_that_they_end(shell):
    """The planner has heard of it and passed it over; what it asks then may overtake the plans that it tells."""
    fail(shell, an_order(4))
    turn = RanksServed(dp_ranks=(0,), edition=Edition(turn=1, since=4))

    assert shell.told(1, turn.number)[0] == 1
    shell.build((), turn)

    assert shell.told(1, turn.number)[0] == 1


def test_a_failure_of_newer_plans_than_the_question_is_told_and_told_again(shell):
    """The planner passes an answer to such a question over, as of plans before, and asks once more."""
    edition = Edition(turn=1, since=4)
    order = an_order(4, edition=edition)
    shell.build((), order.served)

    fail(shell, order)

    for served in (RanksServed(dp_ranks=(0,)), order.served):
        with pytest.raises(IntegrityError, match="bad record"):
            shell.told(1, served.number)
