"""A run ends because of its bad records before the same step, and with the same message, as an undisturbed run."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omniload.base.errors import ConfigError, IntegrityError
from omniload.machine.messages import (
    AppendJournal,
    ChangeAsked,
    LoaderReplaced,
    PublishPlans,
    ReadAhead,
    SamplesReported,
    Started,
    StepTaken,
)
from omniload.mix.edits.edit import SetWeights
from omniload.mix.journal.records import StepRecord
from omniload.mix.schema.records import OnError
from omniload.mix.state import MixState
from tests.support.plane.builders import a_mix, a_planner, a_table

STEPS = 8
SOURCES = ("code", "web")


@dataclass
class Run:
    """Steps of a run, over all of its lives."""

    plans: dict = field(default_factory=dict)
    cursors: dict = field(default_factory=dict)
    """Positions after each step, by source."""
    ended: str = ""
    """The reason why the run ended, without the fault of a record."""
    lives: int = 0
    taken: int = 0
    """Steps that the rank has, from the first on."""


def record_at(records, position):
    """Return the tokens of a record, or ``None`` for a bad one; each epoch has another order of records."""
    epoch, place = divmod(position, len(records))
    return records[(place + 3 * epoch) % len(records)]


def reported(read, records, most):
    """Return a loader's report about the first ``most`` records that it was asked for."""
    stop = min(read.stop, read.start + most)
    found = [record_at(records, position) for position in range(read.start, stop)]
    given = np.array([tokens is not None for tokens in found], np.bool_)
    positions_N = np.arange(read.start, stop)
    table = replace(
        a_table([tokens for tokens in found if tokens is not None], start=read.start),
        stop=stop,
        positions_N=positions_N[given],
        bad_N=positions_N[~given],
        reason="" if given.all() else f"record {positions_N[~given][0]}: is none",
        places=tuple(f"position {position}" for position in positions_N[~given].tolist()),
    )
    return SamplesReported(source=read.source, table=table)


def run_of(records_S, limits, most, breaks=(), mix_changes=()):
    """Return the result of a run whose lives end after some steps, and whose loaders are lost after others.

    ``breaks`` maps steps to whether the run is resumed there, or its loader of the second source is lost.
    """
    sources = {
        name: {
            "type": "parquet",
            "path": f"{name}/*.parquet",
            "tokens": "tokens",
            "on_error": {"policy": "skip", "limit": limit},
        }
        for name, limit in zip(SOURCES, limits, strict=True)
    }
    mix = a_mix(rows=2, sources=sources, weights={"code": 2.0, "web": 1.0}, **dict(mix_changes))
    epoch = [len(records) for records in records_S]
    run, step, state = Run(), 0, None
    breaks = dict(breaks)
    while step < STEPS and not run.ended:
        planner = a_planner(mix, epoch=epoch, state=state)
        run.lives += 1
        try:
            commands = list(planner.handle(Started()))
            while True:
                step, is_over = _until_broken(planner, commands, run, step, records_S, most, breaks)
                if is_over:
                    break
        except (IntegrityError, ConfigError) as error:
            run.ended = str(error).split("; what is wrong")[0]
            break
        state = MixState.from_json(planner.state_at(step), SOURCES, planner.fingerprint)
    return run


def _until_broken(planner, commands, run, step, records_S, most, breaks):
    """Run to the next break; return its step, and whether the run resumes there or has all of its steps."""
    while step < STEPS:
        while commands:
            command = commands.pop(0)
            if isinstance(command, AppendJournal):
                assert_folds(command, planner)
                run.cursors[command.before.step] = [c[0] for c in command.after.cursors_S]
            if isinstance(command, PublishPlans):
                # Of steps that no rank asks for, either more or fewer are planned.
                wanted = [plan for plan in command.plans if plan.step < STEPS]
                run.plans |= {plan.step: plan.membership_digest() for plan in wanted}
            if isinstance(command, ReadAhead):
                count = most[(command.start + command.source) % len(most)]
                report = reported(command, records_S[command.source], count)
                commands += planner.handle(report)
        assert step in run.plans, "a step is there, or the run says why not"
        run.taken = step + 1
        commands += planner.handle(StepTaken(step=step, dp_rank=0))
        step += 1
        if (how := breaks.pop(step, None)) == "resumed":
            return step, True
        if how == "lost":
            commands[:] = [c for c in commands if not isinstance(c, ReadAhead) or c.source != 1]
            commands += planner.handle(LoaderReplaced(sources=(1,)))
    return step, True


def assert_folds(command, planner):
    """A planner that takes over folds the journal and must reach the planned state, counts included."""
    names = command.names
    record = StepRecord.from_json(command.record, names)
    assert record.bad_after == {
        s: command.after.bad_of(s)
        for s in range(len(names))
        if command.after.bad_of(s) != command.before.bad_of(s)
    }
    after = MixState.from_json(
        command.after.to_json(names, planner.fingerprint), names, planner.fingerprint
    )
    assert after.bad_S == command.after.bad_S
    assert after.digest() == record.after


def too_many_at(run, records_S, limits):
    """Return the first step that exceeds the allowed number of bad records in an epoch, and the sources that do.

    For each source, return the position of the first bad record that exceeds the limit.
    """
    for step, cursors in sorted(run.cursors.items())[:STEPS]:
        over = {}
        for name, records, limit, cursor in zip(SOURCES, records_S, limits, cursors, strict=True):
            for at in range(0, cursor, len(records)):
                epoch = range(at, min(at + len(records), cursor))
                bad = [p for p in epoch if record_at(records, p) is None]
                if len(bad) > limit:
                    over.setdefault(name, bad[limit])
        if over:
            return step, over
    return STEPS, {}


records = st.lists(st.one_of(st.none(), st.integers(8, 30)), min_size=1, max_size=16).filter(any)
breaks = st.dictionaries(st.integers(1, STEPS - 1), st.sampled_from(["resumed", "lost"]))


@given(
    st.tuples(records, records),
    st.tuples(*(st.integers(0, 6) for _ in SOURCES)),
    st.lists(st.integers(8, 40), min_size=1, max_size=6),
    st.lists(st.integers(8, 40), min_size=1, max_size=6),
    breaks,
    st.sampled_from(["best_fit", "concat_and_split"]),
)
@example(
    ([None, 9, None, 9, 9] * 4, [9]), (3, 0), [40], [3], {1: "resumed", 2: "resumed"}, "best_fit"
)
def test_a_broken_run_ends_where_an_unbroken_one_does(
    records_S, limits, most, most_of_other, breaks, method
):
    changes = {"pack": {"method": method}}.items()
    free = run_of(records_S, (10**6, 10**6), most, mix_changes=changes)
    whole = run_of(records_S, limits, most, mix_changes=changes)

    broken = run_of(records_S, limits, most_of_other, breaks, changes)

    end, over = too_many_at(free, records_S, limits)
    assert sorted(broken.plans) == list(range(end)), "ends before the first step that has too many"
    assert broken.plans == whole.plans
    assert bool(broken.ended) == bool(whole.ended) == bool(over)
    # If two sources exceed their limits in one step, the run may name either.
    assert len(over) == 2 or broken.ended == whole.ended
    assert all(
        any(
            run.ended.startswith(f"sources.{name}: ")
            and run.ended.endswith(f", the last of them position {position}")
            for name, position in over.items()
        )
        for run in (broken, whole)
        if over
    )


@pytest.mark.parametrize(("limit", "ends"), [("19%", True), ("20%", False), (1, True), (2, False)])
def test_a_percentage_counts_over_lives_as_a_number_does(limit, ends):
    records_S = [[None, 20, 20, 20, 20] * 2, [7]]
    at_every_step = dict.fromkeys(range(1, STEPS), "resumed")

    run = run_of(records_S, (limit, 0), [4], at_every_step)

    assert bool(run.ended) == ends
    if ends:
        assert "sources.code: 2 records could not be decoded, more than on_error.limit" in run.ended
    else:
        assert run.lives == STEPS


def test_a_source_of_bad_records_alone_is_not_read_to_its_end():
    bad = [None] * 1_000_000
    planner = a_planner(
        a_mix(
            sources={
                "web": {
                    "type": "parquet",
                    "path": "web/*.parquet",
                    "tokens": "tokens",
                    "on_error": {"policy": "skip"},
                }
            }
        ),
        epoch=[len(bad)],
    )
    commands = list(planner.handle(Started()))
    while (read := commands[-1]).stop < 101:
        commands += planner.handle(reported(read, bad, 10**6))

    with pytest.raises(
        IntegrityError, match=r"101 records .*limit 100, the last of them .* is none"
    ):
        planner.handle(reported(read, bad, 10**6))
    assert read.stop < 1_000


CAPPED = {"all": {"weight": 1, "of": {"code": 2, "web": 1}, "max_repetition": 2}}


@pytest.mark.parametrize(
    ("code", "changes", "said"),
    [
        ([20] * 10 + [40] + [20] * 9, {"pack": {"overlong": "refuse"}}, "40 tokens"),
        ([20] * 6, {"mix": {"stages": [{"from_step": 0, "weights": CAPPED}]}}, "2 times its 6 rec"),
    ],
)
@pytest.mark.parametrize("ahead", [1, 2, 8])
@pytest.mark.parametrize("breaks", [{}, dict.fromkeys(range(1, STEPS), "resumed")])
def test_a_run_that_is_refused_a_step_gives_out_all_before_it_however_many_are_ahead(
    code, changes, said, ahead, breaks
):
    """Earlier, ``prefetch_steps`` decided how many steps were lost, up to all of them."""
    records_S, changes = [code, [20] * 40], {"version": 2, **changes}
    first = run_of(records_S, (0, 0), [4], mix_changes=changes)

    changes["runtime"] = {"prefetch_steps": ahead}
    run = run_of(records_S, (0, 0), [40], breaks, changes)

    assert said in run.ended
    assert (run.ended, run.plans) == (first.ended, first.plans)
    assert f"step {run.taken} " in run.ended
    assert run.taken == len(run.plans) > 2


def a_skipping_mix(names, limit, **changes):
    source = {"type": "parquet", "tokens": "tokens", "on_error": {"policy": "skip", "limit": limit}}
    sources = {name: {**source, "path": f"{name}/*.parquet"} for name in names}
    return a_mix(sources=sources, rows=2, length=10, micro_rows=1, **changes)


def all_read(planner, commands, records_S):
    """Answer each read as a whole; return the further commands of the planner."""
    said, commands = [], list(commands)
    while commands:
        said.append(command := commands.pop(0))
        if isinstance(command, ReadAhead):
            commands += planner.handle(reported(command, records_S[command.source], 10**6))
    return said


def test_an_edit_before_ranks_come_to_the_end_has_the_run_go_on_with_its_count():
    """Earlier, this life of the run ended, although a resume would have continued it."""
    records_S = [[10] * 40, [10, None, 10, None] * 10]
    mix = a_skipping_mix(SOURCES, 1, runtime={"prefetch_steps": 8}, pack={"lookahead_rows": 0})
    planner = a_planner(mix, epoch=[40, 40])
    plans = all_read(planner, planner.handle(Started()), records_S)
    end = planner.planned
    assert 0 < end < 8, "the steps before the end are there, and the end is known"

    change = ChangeAsked(change=SetWeights(weights={"web": 0.0}))
    plans += all_read(planner, planner.handle(change), records_S)
    for step in range(20):
        plans += all_read(planner, planner.handle(StepTaken(step=step, dp_rank=0)), records_S)

    assert planner.planned > 20
    state = MixState.from_json(planner.state_at(20), SOURCES, planner.fingerprint)
    assert state.bad_of(1) == sum(c.bad.get(1, 0) for c in plans if isinstance(c, AppendJournal))


def test_of_many_sources_only_the_one_that_was_reported_is_looked_at_again(monkeypatch):
    """Earlier, a step of 1,000 sources with bad records took seconds instead of 0.1 s."""
    names = [f"s{i:02}" for i in range(30)]
    planner = a_planner(a_skipping_mix(names, 100), epoch=[100] * 30)
    records_S = [[None, 10] * 50] * 30
    reads = [
        command
        for command in all_read(planner, planner.handle(Started()), records_S)
        if isinstance(command, ReadAhead) and command.source == 7
    ]
    looked, most_of = [], OnError.most_of
    monkeypatch.setattr(OnError, "most_of", lambda *given: looked.append(given) or most_of(*given))

    said = planner.handle(StepTaken(step=0, dp_rank=0))
    passed = sum(len(c.bad) for c in said if isinstance(c, AppendJournal))
    assert len(looked) <= passed, "a step looks at those of which it goes past any"

    looked.clear()
    more = replace(reads[-1], start=reads[-1].stop, stop=reads[-1].stop + 4)
    planner.handle(reported(more, records_S[7], 4))
    assert len(looked) == 1


@pytest.mark.parametrize("ahead", [1, 4])
def test_steps_that_are_planned_together_count_on_from_one_another(ahead):
    """Earlier, each had the count before the first one, and a run within its limit could end."""
    epoch = [10, None, None, *[10] * 17]
    mix = a_skipping_mix(["web"], 2, runtime={"prefetch_steps": ahead})
    planner = a_planner(mix, epoch=[len(epoch)])
    plans = all_read(planner, planner.handle(Started()), [epoch])
    for step in range(60):
        plans += all_read(planner, planner.handle(StepTaken(step=step, dp_rank=0)), [epoch])

    after = [c.after for c in plans if isinstance(c, AppendJournal)]
    assert len(after) >= 60
    for state in after:
        number, place = divmod(state.cursors_S[0][0], len(epoch))
        gone_past = [record_at(epoch, number * len(epoch) + at) for at in range(place)]
        assert state.bad_of(0) == gone_past.count(None)
