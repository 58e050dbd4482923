"""Ranks change in the planner and in a data constructor: steps placed again, steps released, and refusals."""

import json

import pytest

from omniload.base.errors import ConfigError, StateError
from omniload.machine.data_constructor import DataConstructor
from omniload.machine.messages import (
    AppendJournal,
    AppendWorld,
    PublishPlans,
    ReadAhead,
    ResizeAsked,
    SamplesReported,
    ServeWorld,
    Started,
    StepTaken,
)
from omniload.machine.plans.building import BatchesBuilt, BuildSteps, SlicesFetched
from omniload.mix.columns import ColumnRanges
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.world import RanksServed, World
from tests.support.plane.builders import a_mix, a_plan, a_planner, a_table, released_by


def a_running_planner(*, elastic=True, prefetch_steps=4, **changes):
    """Return a planner of four ranks that has planned as far as it may, and its published plans."""
    mix = a_mix(
        sources=["web"],
        rows=8,
        length=32,
        runtime={"prefetch_steps": prefetch_steps, "elastic": elastic},
    )
    planner = a_planner(mix, dp=4, **changes)
    return planner, delivered(planner, planner.handle(Started()))


def delivered(planner, commands):
    """Answer every read; return all commands."""
    found, commands = [], list(commands)
    while commands:
        command = commands.pop(0)
        found.append(command)
        if isinstance(command, ReadAhead):
            lengths = [32] * (command.stop - command.start)
            table = a_table(lengths, start=command.start)
            commands += planner.handle(SamplesReported(source=command.source, table=table))
    return found


def of_kind(commands, kind):
    return [command for command in commands if isinstance(command, kind)]


def take(planner, step, ranks=range(4), generation=0):
    commands = []
    for rank in ranks:
        taken = StepTaken(step=step, dp_rank=rank, generation=generation)
        commands += delivered(planner, planner.handle(taken))
    return commands


def test_steps_that_are_planned_are_placed_again_and_hold_what_they_held():
    planner, begun = a_running_planner()
    planned = {plan.step: plan for c in of_kind(begun, PublishPlans) for plan in c.plans}
    take(planner, 0)

    commands = planner.handle(ResizeAsked(dp=3, step=1))

    noted, served, *rest = commands
    assert noted == AppendWorld(world=World(tree=ClientPlaceTree.of(dp=3), generation=1, step=1))
    assert isinstance(served, ServeWorld)
    again = {plan.step: plan for window in served.windows for plan in window}
    assert min(again) == 1
    for step in set(again) & set(planned):
        assert again[step].membership_digest() == planned[step].membership_digest()
        assert set(again[step].dp_ranks_R.tolist()) == {0, 1, 2}
        assert again[step].loss_tokens == planned[step].loss_tokens
    assert of_kind(rest, AppendJournal) == []


def test_steps_that_come_later_are_placed_on_the_ranks_of_now():
    planner, _ = a_running_planner()
    planner.handle(ResizeAsked(dp=2, step=0))

    later = of_kind(take(planner, 0, range(2), generation=1), PublishPlans)

    assert {rank for c in later for plan in c.plans for rank in plan.dp_ranks_R.tolist()} == {0, 1}


def test_the_same_question_of_the_other_ranks_changes_nothing():
    planner, _ = a_running_planner()
    planner.handle(ResizeAsked(dp=3, step=0))

    assert planner.handle(ResizeAsked(dp=3, step=0)) == ()
    assert planner.handle(ResizeAsked(dp=3, step=0, generation=1)) == ()


def test_what_ranks_of_a_world_that_is_over_say_is_not_heeded():
    planner, _ = a_running_planner(prefetch_steps=1)
    planner.handle(ResizeAsked(dp=1, step=0))

    assert planner.handle(StepTaken(step=0, dp_rank=0)) == ()
    assert planner.handle(StepTaken(step=0, dp_rank=3)) == ()
    assert of_kind(take(planner, 0, [0], generation=1), PublishPlans)


def test_a_step_that_every_rank_has_is_held_until_all_have_the_next_one():
    planner, _ = a_running_planner(prefetch_steps=3)  # steps are released one by one

    assert released_by(take(planner, 0)) == [0]
    assert released_by(take(planner, 1)) == [1]

    planner.handle(ResizeAsked(dp=3, step=1))
    assert planner.ranks.slowest == 1
    assert json.loads(json.dumps(planner.state_at(1)))["step"] == 1


@pytest.mark.parametrize("step", [0, 30])
def test_a_step_that_cannot_be_given_to_others_is_refused_and_nothing_changes(step):
    planner, _ = a_running_planner()
    for each in range(3):
        take(planner, each)

    with pytest.raises(
        StateError, match=rf"dp 3 cannot begin at step {step}: steps 2 to 7 can be given"
    ):
        planner.handle(ResizeAsked(dp=3, step=step))

    assert planner.world.dp == 4


def test_ranks_of_a_plane_that_was_opened_for_ranks_that_stay_cannot_change():
    planner, _ = a_running_planner(elastic=False)

    with pytest.raises(ConfigError, match=r"open it with elastic=True"):
        planner.handle(ResizeAsked(dp=3, step=0))


def test_more_ranks_than_rows_are_refused():
    planner, _ = a_running_planner()

    with pytest.raises(ConfigError, match=r"fewer than the 9 data-parallel ranks"):
        planner.handle(ResizeAsked(dp=9, step=0))


def test_a_planner_that_takes_over_serves_the_ranks_that_were_noted():
    world = World(tree=ClientPlaceTree.of(dp=2), generation=3, step=0)

    planner = a_planner(a_mix(runtime={"elastic": True}), world=world, life=1)

    (serve,) = of_kind(planner.handle(Started()), ServeWorld)

    assert serve == ServeWorld(world=world, windows=())


def a_constructor():
    return DataConstructor(dp_ranks=(0, 1), names=["web", "code"], row_length=8)


ROWS = [[(0, 0, 0, 0, 8, 8)], [(0, 1, 0, 0, 8, 8)]]
FOR_ONE = RanksServed(dp_ranks=(0,), generation=1)


def test_a_constructor_of_other_ranks_builds_anew_and_has_nothing_of_the_ranks_before():
    constructor = a_constructor()
    (fetch,) = constructor.handle(BuildSteps(plans=[a_plan(ROWS, dp_ranks=[0, 1])]))

    assert constructor.handle(BuildSteps(plans=(), served=FOR_ONE)) == (BatchesBuilt(steps=()),)
    late = SlicesFetched(steps=fetch.steps, slices=ColumnRanges.of([]), generation=fetch.generation)

    assert constructor.handle(late) == ()
    assert not constructor.has(0)
    (again,) = constructor.handle(BuildSteps(plans=[a_plan(ROWS)], served=FOR_ONE))
    assert again.generation == 1


def test_a_constructor_builds_nothing_for_ranks_that_are_gone_or_for_none():
    constructor = a_constructor()
    constructor.handle(BuildSteps(plans=(), served=FOR_ONE))
    before = RanksServed(dp_ranks=(0, 1))

    assert constructor.handle(BuildSteps(plans=[a_plan(ROWS)], served=before)) == (
        BatchesBuilt(steps=(0,)),
    )
    nobody = RanksServed(dp_ranks=(), generation=2)
    assert constructor.handle(BuildSteps(plans=[a_plan(ROWS)], served=nobody)) == (
        BatchesBuilt(steps=(0,)),
    )
    assert constructor.num_steps == 0
