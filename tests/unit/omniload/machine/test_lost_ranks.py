"""A planner that took over, and ranks that never report to it: its waits, and the steps of the other ranks."""

import pytest

from omniload.base.errors import IntegrityError
from omniload.machine.messages import (
    AppendJournal,
    PublishPlans,
    RanksLost,
    ReadAhead,
    ResizeAsked,
    SamplesReported,
    Started,
    StepTaken,
)
from tests.support.plane.builders import a_mix, a_planner, a_table, released_by

AHEAD = 3
"""Steps ahead, so few that steps are planned and released one by one."""


def answered(planner, commands):
    """Answer every read; return all commands."""
    found, commands = [], list(commands)
    while commands:
        found.append(command := commands.pop(0))
        if isinstance(command, ReadAhead):
            table = a_table([32] * (command.stop - command.start), start=command.start)
            commands += planner.handle(SamplesReported(source=command.source, table=table))
    return found


def told(planner, *events):
    return [command for event in events for command in answered(planner, planner.handle(event))]


def taken(step, *ranks, generation=0):
    return [StepTaken(step=step, dp_rank=rank, generation=generation) for rank in ranks]


def lost(*ranks, generation=0):
    return RanksLost(ranks=tuple((rank, 0) for rank in ranks), generation=generation)


def steps_in(commands):
    return [plan.step for c in commands if isinstance(c, PublishPlans) for plan in c.plans]


@pytest.fixture(params=[True, False], ids=["elastic", "ranks that stay"])
def planner(request):
    """A planner of three ranks that took over at step 0; the previous planner had reached step 4."""
    mix = a_mix(
        sources=["web"],
        rows=6,
        length=32,
        runtime={"prefetch_steps": AHEAD, "elastic": request.param},
    )
    before = a_planner(mix, dp=3)
    planned = told(before, Started(), *taken(0, 0, 1, 2))
    known = [c.after for c in planned if isinstance(c, AppendJournal)]
    assert known[-1].step == 4
    after = a_planner(mix, dp=3, known=known, life=1)
    told(after, Started())
    return after


def test_others_have_the_step_in_which_a_rank_ended_that_told_only_the_planner_before(planner):
    assert steps_in(told(planner, *taken(3, 0, 1))) == []  # it holds them up: they want step 4

    assert steps_in(told(planner, lost(2))) == [3, 4, 5, 6]
    assert planner.ranks.slowest == 4
    assert planner.ranks.unheard == set()
    assert planner.waits().ranks == ("rank dp=0", "rank dp=1", "rank dp=2")


def test_a_journal_that_has_lost_a_step_that_a_rank_has_is_told(planner):
    # The journal ended before step 4, although each step is in the journal before any rank hears of it.
    with pytest.raises(
        IntegrityError, match=r"rank dp=1 has taken step 4, and the run's journal, .* before step 4"
    ):
        told(planner, *taken(3, 0), *taken(4, 1))

    assert planner.ranks.slowest == 0


def test_a_lost_rank_holds_the_others_up_behind_what_was_planned(planner):
    told(planner, lost(2), *taken(3, 0, 1))

    assert steps_in(told(planner, *taken(6, 0, 1))) == []
    assert planner.ranks.slowest == 4
    assert planner.waits().ranks == ("rank dp=2",)


def test_what_the_ranks_that_are_heard_may_ask_for_is_not_let_go(planner):
    commands = told(planner, lost(2), *taken(2, 0, 1))

    least = 3 - planner.mix.runtime.elastic
    assert set(released_by(commands)) == {least}
    assert planner.state_at(least)["step"] == least


def test_a_rank_that_was_believed_lost_and_tells_what_it_has_is_waited_for_again(planner):
    told(planner, *taken(1, 0, 1), lost(2))
    told(planner, *taken(1, 2), *taken(3, 0, 1))

    assert planner.ranks.slowest == 2
    assert planner.waits().ranks == ("rank dp=2",)


def test_of_what_was_let_go_meanwhile_nothing_comes_back(planner):
    told(planner, lost(2), *taken(3, 0, 1), *taken(0, 2))

    assert planner.ranks.slowest == 4


def test_where_no_rank_is_left_everything_stays(planner):
    assert told(planner, lost(0), lost(1, 2)) == []
    assert planner.ranks.slowest == 0
    assert planner.ranks.unheard == {(1, 0), (2, 0)}


def test_a_rank_that_was_heard_is_as_far_as_it_said(planner):
    told(planner, *taken(1, 0, 1, 2))

    assert planner.ranks.unheard == set()
    assert told(planner, lost(2)) == []
    assert planner.ranks.slowest == 2


def test_ranks_of_a_world_that_begins_now_have_nothing_to_tell():
    mix = a_mix(
        sources=["web"], rows=6, length=32, runtime={"prefetch_steps": AHEAD, "elastic": True}
    )
    planner = a_planner(mix, dp=3, life=1)
    told(planner, Started())
    assert len(planner.ranks.unheard) == 3

    told(planner, ResizeAsked(dp=2, step=1))

    assert planner.ranks.unheard == set()
    assert told(planner, lost(1), lost(1, generation=1)) == []
    assert planner.ranks.slowest == 1


def test_a_first_planner_knows_where_its_ranks_began():
    planner = a_planner(dp=2)

    assert planner.ranks.unheard == set()
