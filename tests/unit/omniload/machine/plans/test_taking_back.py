"""A planner takes back steps that no rank has, and plans them as if it had known the change from the start."""

import numpy as np
import pytest

from omniload.base.errors import ConfigError
from omniload.base.ragged import Ragged
from omniload.machine.data_constructor import DataConstructor
from omniload.machine.messages import (
    AppendJournal,
    ChangeAsked,
    ConstructorReplaced,
    EndOfData,
    KeepEdits,
    PublishPlans,
    ReadAhead,
    ResizeAsked,
    SamplesReported,
    Started,
    StepTaken,
)
from omniload.machine.plans.building import BuildSteps, SlicesFetched
from omniload.machine.plans.fences import (
    AskFences,
    CutJournal,
    FenceTold,
    NewEdition,
    WithdrawalAsked,
    WithdrawalEnded,
)
from omniload.mix.columns import ColumnRanges, SampleColumns
from omniload.mix.edits.edit import SetWeights, SkipShard
from omniload.plan.world import Edition, RanksServed
from tests.support.plane.builders import a_mix, a_plan, a_planner, tokens_of
from tests.support.plane.reference import read_range

EPOCHS = [[[(7 * s + 3 * i) % 13 + 1] for i in range(50)] for s in range(2)]
CHANGE = SetWeights(weights={"web": 0.0, "code": 1.0})


def a_small_mix(prefetch=6, **changes):
    settings = {
        "sources": ("web", "code"),
        "rows": 2,
        "length": 16,
        "micro_rows": 1,
        "runtime": {"prefetch_steps": prefetch, "elastic": True},
        "pack": {"overlong": "truncate"},
    }
    return a_mix(**(settings | changes))


class Driven:
    """A planner that is answered at once, and the plans that it has journaled and published."""

    def __init__(self, mix, **changes):
        self.planner = a_planner(mix, epoch=[50, 50], **changes)
        self.records, self.published, self.told = {}, [], []
        self.tell(Started())

    def tell(self, event):
        waiting = list(self.planner.handle(event))
        while waiting:
            match command := waiting.pop(0):
                case ReadAhead(source=s, start=start, stop=stop, without=without):
                    table, _ = read_range(s, EPOCHS[s], start, stop, without)
                    report = SamplesReported(source=s, table=table, without=without)
                    waiting += self.planner.handle(report)
                case AppendJournal(plan=plan):
                    assert plan.step not in self.records, "it is cut first"
                    self.records[plan.step] = command.record
                case CutJournal(step=step):
                    self.records = {s: each for s, each in self.records.items() if s < step}
                case PublishPlans(plans=plans):
                    self.published += [plan.step for plan in plans]
                case _:
                    self.told.append(command)
        return self

    def take(self, steps):
        for step in range(steps):
            self.tell(StepTaken(step=step, dp_rank=0))
        return self

    def change(self, given_to, change=CHANGE, at=None):
        self.tell(WithdrawalAsked(at=at, constructors=1))
        asked = [each for each in self.told if isinstance(each, AskFences)]
        if asked:
            self.tell(FenceTold(number=0, turn=asked[-1].edition[1], step=given_to))
        return self.tell(ChangeAsked(change=change, at=at))


def due(mix, edits, steps, **changes):
    """Return the records of a planner that knew the edits from the start, as far as one step is taken at a time."""
    return Driven(mix, edits=edits, **changes).take(steps).records


@pytest.fixture(autouse=True)
def one_step_at_once(monkeypatch):
    monkeypatch.setattr("omniload.mix.config._TOKENS_AT_ONCE", 1)


@pytest.mark.parametrize("given_to", [3, 4, 6, 8])
@pytest.mark.parametrize("at_once", [1, 3])
def test_steps_from_the_fence_on_are_those_of_a_run_that_knew_the_change_from_the_start(
    given_to, at_once, monkeypatch
):
    monkeypatch.setattr("omniload.mix.config._TOKENS_AT_ONCE", 32 * at_once)
    mix = a_small_mix()
    run = Driven(mix).take(3).change(given_to).take(9)

    edits = run.planner.history.edits
    assert [edit.step for edit in edits] == [given_to]
    assert run.records == {s: r for s, r in due(mix, edits, 9).items() if s in run.records}
    assert sorted(run.records) == list(range(max(run.records) + 1))


def test_the_journal_is_cut_before_the_edit_is_kept_and_constructors_hear_of_it_before_its_steps():
    run = Driven(a_small_mix()).take(2)
    run.tell(WithdrawalAsked(at=None, constructors=1))
    run.tell(FenceTold(number=0, turn=1, step=4))

    commands = run.planner.handle(ChangeAsked(change=CHANGE))

    kinds = [type(command) for command in commands[:5]]
    assert kinds == [CutJournal, KeepEdits, NewEdition, AppendJournal, PublishPlans]
    assert commands[0] == CutJournal(step=4)
    assert commands[2].edition == Edition(turn=1, since=4)
    assert [plan.step for plans in commands[2].windows for plan in plans][-1] == 3


def test_a_change_of_a_later_step_takes_no_more_back_than_it_has_to():
    run = Driven(a_small_mix()).take(2).change(given_to=3, at=6)

    assert run.planner.history.edits[0].step == 6
    assert run.planner.handle(WithdrawalEnded()) == ()
    (edition,) = [each.edition for each in run.told if isinstance(each, NewEdition)]
    assert edition == Edition(turn=1, since=6)


def test_a_change_behind_all_that_is_planned_asks_nobody():
    run = Driven(a_small_mix())

    assert run.planner.handle(WithdrawalAsked(at=30, constructors=1)) == ()


def test_a_step_that_a_rank_was_given_is_refused_with_the_first_that_may_be_changed():
    run = Driven(a_small_mix())

    with pytest.raises(ConfigError, match=r"step 3 is planned already.*the first.*is 4"):
        run.change(given_to=4, at=3)


@pytest.mark.parametrize(
    "event",
    [ConstructorReplaced(number=0), ResizeAsked(dp=2, step=2)],
    ids=["a constructor is lost", "ranks change"],
)
def test_what_was_planned_by_then_stays(event):
    run = Driven(a_small_mix()).take(2).tell(event)
    planned = run.planner.planned

    assert run.planner.handle(WithdrawalAsked(at=None, constructors=1)) == ()
    assert run.planner.open_from(None) == planned


def test_a_constructor_that_is_lost_meanwhile_keeps_every_plan():
    run = Driven(a_small_mix()).take(2)
    run.tell(WithdrawalAsked(at=None, constructors=2))
    run.tell(ConstructorReplaced(number=0))

    assert run.planner.is_settled
    run.tell(ChangeAsked(change=CHANGE)).tell(WithdrawalEnded())

    assert run.planner.history.edits[0].step == 8
    assert run.told[-1].edition == Edition(turn=1, since=run.planner.planned)


def test_a_planner_that_takes_over_says_so_and_keeps_what_was_planned_before_it():
    state = a_planner(a_small_mix()).state
    planner = a_planner(a_small_mix(), epoch=[50, 50], life=2, state=state)

    first, *_ = planner.handle(Started())

    assert first == NewEdition(edition=Edition(life=2, since=0), windows=())


def test_steps_before_the_end_of_a_run_are_changed_once_all_are_planned():
    mix = a_small_mix()
    run = Driven(mix, num_steps=8).take(4)
    assert EndOfData(step=8) in run.told

    run.change(given_to=6).take(8)

    edits = run.planner.history.edits
    assert [edit.step for edit in edits] == [6]
    assert run.records == due(mix, edits, 8, num_steps=8)


def test_a_shard_that_is_left_out_from_the_fence_on_is_left_out_of_what_was_read_for_later_steps():
    mix = a_small_mix(version=2)
    shard = SkipShard(file="web/1.parquet", source="web", number=1, of=3)

    run = Driven(mix).take(3).change(given_to=4, change=shard).take(7)

    assert run.records == due(mix, run.planner.history.edits, 7)


# Data constructors.

A, B = [0, 1, 0, 0, 5, 5], [1, 5, 0, 0, 9, 12]


def a_constructor():
    return DataConstructor(dp_ranks=[0], names=["web", "code"], row_length=16)


def told(constructor, rows, edition=None, step=3):
    plans = [a_plan(rows, step=step)] if rows else []
    served = RanksServed(dp_ranks=(0,), edition=edition or Edition())
    return constructor.handle(BuildSteps(plans=plans, served=served))


def answer(fetch):
    tokens = [
        tokens_of(r.source, p, 0, stop)[start:]
        for r in fetch.requests
        for p, start, stop in zip(r.positions_N, r.starts_N, r.stops_N, strict=True)
    ]
    columns = [SampleColumns(tokens=Ragged.of([np.asarray(t)])) for t in tokens]
    return SlicesFetched(steps=fetch.steps, slices=ColumnRanges.of(columns), edition=fetch.edition)


def built(constructor, rows, edition=None, step=3):
    (fetch,) = told(constructor, rows, edition, step)
    constructor.handle(answer(fetch))


def keys_in(batch):
    return [key[:2] for m in batch.microbatches for key in m.keys_K4.tolist()]


def test_a_step_that_is_withheld_is_built_and_not_there():
    constructor = a_constructor()
    built(constructor, [[A]])

    assert constructor.giving.fence((0, 1)) == 0
    assert not constructor.has(3)

    told(constructor, [], Edition(turn=1, since=4))
    assert constructor.has(3)


def test_a_step_that_was_given_to_a_rank_stands():
    constructor = a_constructor()
    built(constructor, [[A]])
    constructor.batch_of(3, 0)

    assert constructor.giving.fence((0, 1)) == 4
    assert constructor.has(3)


def test_plans_of_another_edition_take_the_place_of_those_from_its_step_on():
    constructor = a_constructor()
    built(constructor, [[A]], step=2)
    built(constructor, [[A]], step=3)

    built(constructor, [[B]], Edition(turn=1, since=3))

    assert keys_in(constructor.batch_of(2, 0)) == [[0, 1]]
    assert keys_in(constructor.batch_of(3, 0)) == [[1, 5]]


def test_what_comes_late_of_an_earlier_edition_builds_nothing():
    constructor = a_constructor()
    (late,) = told(constructor, [[A]])
    (fetch,) = told(constructor, [[B]], Edition(turn=1, since=3))

    constructor.handle(answer(late))
    assert not constructor.has(3)
    constructor.handle(answer(fetch))
    told(constructor, [[A]])

    assert keys_in(constructor.batch_of(3, 0)) == [[1, 5]]
