"""A source that cannot be read on ends the run before the first step that needs more of it, and no step before."""

from dataclasses import replace

import pytest

from omniload.base.errors import IntegrityError
from omniload.machine.messages import (
    AppendJournal,
    ChangeAsked,
    EndOfData,
    ReadAhead,
    SamplesReported,
    Started,
    StepTaken,
)
from omniload.machine.plans.unread import ReadFailed
from omniload.mix.edits.edit import SetWeights, SkipShard
from tests.support.plane.builders import a_mix, a_planner
from tests.support.plane.reference import read_range, shard_of

EPOCHS = [[[(7 * s + 3 * i) % 13 + 1] for i in range(600)] for s in range(2)]
DAMAGED, FROM = 1, 200
"""The shard of the first source that cannot be read, from a position on: code, because sources are in order."""
FAULT = "code/1.parquet: row group 3: is damaged; replace it"
OTHER_MIX = SetWeights(weights={"code": 0.0, "web": 1.0})


class Driven:
    """A planner whose loaders read ahead at once, and cannot read one shard."""

    def __init__(self, damaged=DAMAGED, **changes):
        mix = a_mix(
            version=2,
            rows=2,
            length=16,
            micro_rows=1,
            runtime={"prefetch_steps": 6},
            pack={"overlong": "truncate"},
        )
        self.planner = a_planner(mix, epoch=[600, 600], **changes)
        self.damaged, self.records, self.failed, self.ended = damaged, {}, [], False
        self.tell(Started())

    def tell(self, event):
        waiting = list(self.planner.handle(event))
        while waiting:
            match waiting.pop(0):
                case ReadAhead() as read:
                    waiting += self.planner.handle(self.answer(read))
                case AppendJournal(plan=plan) as kept:
                    self.records[plan.step] = kept.record
                case EndOfData():
                    self.ended = True
        return self

    def answer(self, read):
        damaged = (
            p >= FROM and shard_of(EPOCHS[0], p) == self.damaged
            for p in range(read.start, read.stop)
        )
        if read.source == 0 and self.damaged not in read.without and any(damaged):
            self.failed.append(read)
            return failure_of(read)
        table, _ = read_range(read.source, EPOCHS[read.source], read.start, read.stop, read.without)
        return SamplesReported(source=read.source, table=table, without=read.without)

    def take(self, first, stop):
        for step in range(first, stop):
            self.tell(StepTaken(step=step, dp_rank=0))
        return self


def failure_of(read):
    return ReadFailed(
        source=read.source, start=read.start, without=read.without, error=IntegrityError(FAULT)
    )


@pytest.fixture(autouse=True)
def one_step_at_once(monkeypatch):
    monkeypatch.setattr("omniload.mix.config._TOKENS_AT_ONCE", 1)
    # Short reads, so that the read of the damaged shard is none of the first.
    monkeypatch.setattr("omniload.machine.queue._FIRST_READ", 2)
    monkeypatch.setattr("omniload.machine.queue._SMALL_READ", 4)
    monkeypatch.setattr("omniload.machine.queue._FEW_READ", 4)


def test_every_step_that_needs_none_of_it_comes_before_the_run_ends():
    whole, run = Driven(damaged=None), Driven()
    planned = sorted(run.records)

    with pytest.raises(IntegrityError, match=FAULT):
        run.take(0, 100)

    last = max(run.records)
    assert run.planner.ranks.slowest == last + 1, "ranks have every step that is planned"
    assert last > max(planned) + 3, "it was read ahead of"
    whole.take(0, last + 1)
    assert run.records == {step: whole.records[step] for step in run.records}
    assert len(run.failed) == 1


def test_a_run_that_ends_before_needs_nothing_of_it():
    endless = Driven()
    with pytest.raises(IntegrityError):
        endless.take(0, 100)
    steps = max(endless.records) + 1

    run = Driven(num_steps=steps).take(0, steps)

    assert run.failed, "it was read ahead, and could not be"
    assert run.ended
    assert run.records == endless.records


@pytest.mark.parametrize(
    "change", [SkipShard(file="code/1.parquet", source="code", number=DAMAGED, of=3), OTHER_MIX]
)
def test_an_edit_that_leaves_it_out_has_the_run_go_on(change):
    run, step = Driven(), 0
    while not run.failed:
        run.take(step, step + 1)
        step += 1
    assert run.planner.unread == ("code",)

    run.tell(ChangeAsked(change=change))

    assert run.planner.unread == ()
    run.take(step, 120)
    assert max(run.records) >= 120


@pytest.mark.parametrize("otherwise", [{"start": 1}, {"without": (DAMAGED,)}])
def test_a_read_that_was_asked_for_otherwise_meanwhile_says_nothing(otherwise):
    planner = a_planner(a_mix(version=2, rows=2, length=16, micro_rows=1), epoch=[600, 600])
    under_way = list(planner.handle(Started()))

    assert planner.handle(failure_of(replace(under_way[0], **otherwise))) == ()

    published = []
    while under_way and len(published) < 2:
        match under_way.pop(0):
            case ReadAhead(source=s, start=start, stop=stop):
                table, _ = read_range(s, EPOCHS[s], start, stop)
                under_way += planner.handle(SamplesReported(source=s, table=table))
            case AppendJournal(plan=plan):
                published.append(plan.step)
    assert published == [0, 1]
