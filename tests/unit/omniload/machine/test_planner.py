"""The Planner machine, with scripted events."""

from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest

from omniload.base.errors import ConfigError, StateError
from omniload.machine.messages import (
    AppendJournal,
    ConstructorReplaced,
    EndOfData,
    LoaderReplaced,
    PublishPlans,
    ReadAhead,
    ReleaseSamples,
    ReleaseSteps,
    Republish,
    SamplesReported,
    Started,
    StepsTaken,
    StepTaken,
    TakeOver,
)
from omniload.machine.plans import ahead
from omniload.mix.edits.edit import SkipShard
from omniload.mix.edits.history import History
from tests.support.plane.builders import a_mix, a_planner, a_table, released_by


def a_small_mix(prefetch=2, **changes):
    """One source, two rows of ten tokens a step, nothing looked ahead."""
    settings = {
        "sources": ("web",),
        "rows": 2,
        "length": 10,
        "micro_rows": 1,
        "pack": {"lookahead_rows": 0},
        "runtime": {"prefetch_steps": prefetch},
    }
    return a_mix(**(settings | changes))


def report(lengths, *, start=0, stop=256, source=0, bad=()):
    """Report one sample for each position from ``start``; the rest of the range gave none."""
    table = replace(a_table(lengths, start=start), stop=stop, bad_N=np.array(bad, np.int64))
    return SamplesReported(source=source, table=table)


def of_kind(commands, kind):
    return [command for command in commands if isinstance(command, kind)]


def steps_of(commands):
    return [plan.step for plan in plans_of(commands)]


def plans_of(commands):
    return [plan for command in of_kind(commands, PublishPlans) for plan in command.plans]


def a_running_planner(lengths=(10,) * 40, mix=None, **changes):
    """Return a planner that has started and had its first report, and its commands."""
    planner = a_planner(mix or a_small_mix(), **changes)
    planner.handle(Started())
    return planner, planner.handle(report(lengths))


def test_it_first_asks_for_a_probe_of_every_source():
    commands = a_planner(a_mix()).handle(Started())

    assert commands == (
        ReadAhead(source=0, start=0, stop=16),
        ReadAhead(source=1, start=0, stop=16),
    )


def test_with_many_sources_what_the_first_plan_needs_is_read_before_the_rest():
    names = [f"s{i}" for i in range(200)]
    planner = a_planner(a_mix(sources=names, rows=200, pack={"lookahead_rows": 0}))

    first = of_kind(planner.handle(Started()), ReadAhead)
    answers = [planner.handle(report([32], stop=1, source=s)) for s in range(200)]

    assert [(read.source, read.start, read.stop) for read in first] == [
        (s, 0, 1) for s in range(200)
    ]
    assert [commands for commands in answers if commands] == answers[-1:]
    assert steps_of(answers[-1])[:1] == [0]
    assert len({read.source for read in of_kind(answers[-1], ReadAhead)}) > 100
    assert max(read.stop for read in of_kind(answers[-1], ReadAhead)) > 1


def test_with_many_sources_one_with_too_little_for_the_first_plan_is_read_on_at_once():
    names = [f"s{i}" for i in range(200)]
    planner = a_planner(a_mix(sources=names, rows=200, pack={"lookahead_rows": 0}))
    planner.handle(Started())

    enough = planner.handle(report([32], stop=1, source=0))
    (read,) = planner.handle(report([1], stop=1, source=1))

    assert enough == ()
    assert (read.source, read.start, read.stop, read.is_lacked) == (1, 1, 17, True)


@pytest.mark.parametrize(
    "settings",
    [{"pack": {"method": "none"}}, {"mix": {"level": "sample"}}],
    ids=["whole", "counted"],
)
def test_with_many_sources_and_weights_by_sample_all_are_read_on_for_the_first_plan(
    settings,
):
    names = [f"s{i}" for i in range(200)]
    planner = a_planner(a_mix(sources=names, rows=2_000, **settings))
    asked = of_kind(planner.handle(Started()), ReadAhead)
    rounds = 0
    while not planner.planned:
        rounds += 1
        answers = [
            report([8] * (r.stop - r.start), start=r.start, stop=r.stop, source=r.source)
            for r in asked
        ]
        asked = [r for answer in answers for r in of_kind(planner.handle(answer), ReadAhead)]
        assert asked or planner.planned

    assert rounds <= 4  # one after the other they would be hundreds


@pytest.mark.parametrize(("steps_known", "is_lacked"), [(2, True), (3, False)])
def test_a_read_says_whether_the_next_plan_waits_for_it(steps_known, is_lacked):
    first = of_kind(a_planner(a_small_mix()).handle(Started()), ReadAhead)

    _, commands = a_running_planner(lengths=(10,) * 2 * steps_known)

    assert [read.is_lacked for read in first] == [True]
    assert steps_of(commands) == [0, 1]
    assert [read.is_lacked for read in of_kind(commands, ReadAhead)] == [is_lacked]


def test_it_waits_until_every_source_can_supply_the_step():
    planner = a_planner(a_mix(rows=2, length=10, micro_rows=1, pack={"lookahead_rows": 0}))
    planner.handle(Started())

    assert steps_of(planner.handle(report([10] * 40))) == []
    assert steps_of(planner.handle(report([10] * 40, source=1))) == [0, 1, 2, 3]


@pytest.mark.parametrize(("epoch", "seen", "most"), [(1, 16, 1024), (1000, 300, 4000)])
def test_a_read_goes_over_a_source_a_few_times_at_most(epoch, seen, most):
    mix = a_small_mix(rows=500, length=100, micro_rows=100)
    planner = a_planner(mix, epoch=[epoch])
    planner.handle(Started())

    (read,) = of_kind(planner.handle(report([1] * seen, stop=seen)), ReadAhead)

    assert (read.start, read.stop) == (seen, seen + most)


def test_an_answer_under_way_is_not_asked_for_again():
    planner = a_planner(a_small_mix())
    planner.handle(Started())

    assert planner.handle(Started()) == ()


def test_it_plans_as_far_ahead_as_it_may_and_no_further():
    planner, commands = a_running_planner()

    assert steps_of(commands) == [0, 1]
    assert planner.state.step == 2


def test_a_step_taken_lets_it_plan_one_more():
    planner, _ = a_running_planner()

    assert steps_of(planner.handle(StepTaken(step=0, dp_rank=0))) == [2]


def test_the_journal_record_comes_before_its_plan():
    _, commands = a_running_planner()

    kinds = [type(c) for c in commands if isinstance(c, AppendJournal | PublishPlans)]
    assert kinds == [AppendJournal, PublishPlans] * 2
    records = of_kind(commands, AppendJournal)
    assert [r.record["digest"] for r in records] == [
        plan.membership_digest() for plan in plans_of(commands)
    ]


def test_a_repeated_report_is_ignored():
    planner, _ = a_running_planner()
    tokens = planner._queues[0].tokens

    assert planner.handle(report([10] * 40)) == ()
    assert planner._queues[0].tokens == tokens


def test_bad_records_count_with_the_step_that_goes_past_them_and_not_as_they_are_read():
    mix = a_small_mix(prefetch=1)
    # Each of 40 records fills a row, and two are a step. No step has passed the bad records after them.
    table = replace(report([10] * 40).table, positions_N=np.arange(40) * 2)
    table = replace(table, stop=256, bad_N=np.array([1, 5, 7, 79, 81]))
    planner = a_planner(mix)
    planner.handle(Started())
    commands = list(planner.handle(SamplesReported(source=0, table=table)))
    for step in range(3):
        commands += planner.handle(StepTaken(step=step, dp_rank=0))

    records = [command.record for command in of_kind(commands, AppendJournal)]

    ends = [record["drawn"]["web"][0] for record in records]
    assert [record.get("bad", {}).get("web", 0) for record in records] == [
        sum(start <= bad < end for bad in (1, 5, 7, 79, 81)) for start, end in pairwise([0, *ends])
    ]
    assert sum(record.get("bad", {}).get("web", 0) for record in records) == 3
    assert all(record["bad"] for record in records if "bad" in record)


def test_tokens_lost_to_overlong_documents_are_counted():
    mix = a_small_mix(pack={"overlong": "truncate", "lookahead_rows": 0})

    planner, _ = a_running_planner([25] * 20, mix=mix)

    assert sum(planner.lost_in(step) for step in range(planner.planned)).tolist() == [4 * 15]


def test_it_waits_for_the_slowest_rank():
    planner, _ = a_running_planner(dp=2)

    assert planner.handle(StepTaken(step=0, dp_rank=1)) == ()
    assert steps_of(planner.handle(StepTaken(step=0, dp_rank=0))) == [2]


def test_one_message_tells_what_all_ranks_of_a_constructor_took():
    planner, _ = a_running_planner(dp=3)

    assert planner.handle(StepsTaken(steps={(0, 0): 0, (2, 0): 1})) == ()
    assert planner.handle(StepsTaken(steps={(1, 0): 1}, generation=1)) == ()  # of no present rank
    assert steps_of(planner.handle(StepsTaken(steps={(0, 0): 0, (2, 0): 1, (1, 0): 0}))) == [2]
    # All of a message counts, whatever its first words bring.
    assert steps_of(planner.handle(StepsTaken(steps={(1, 0): 1, (0, 0): 1}))) == [3]


def test_a_step_is_kept_until_every_cp_peer_has_its_slice():
    planner, _ = a_running_planner(mix=a_small_mix(length=12), lengths=[12] * 40, cp=2)

    assert planner.handle(StepTaken(step=0, dp_rank=0, cp_rank=0)) == ()
    commands = planner.handle(StepTaken(step=0, dp_rank=0, cp_rank=1))
    assert released_by(commands) == [1]


def test_a_repeated_or_old_take_changes_nothing():
    planner, _ = a_running_planner()
    planner.handle(StepTaken(step=0, dp_rank=0))
    planner.handle(StepTaken(step=1, dp_rank=0))

    assert planner.handle(StepTaken(step=1, dp_rank=0)) == ()
    assert planner.handle(StepTaken(step=0, dp_rank=0)) == ()
    assert planner.ranks.slowest == 2


def test_what_was_taken_by_all_is_released_and_samples_still_carried_are_kept():
    mix = a_small_mix()
    planner, _ = a_running_planner([8, 8, 9, 9, 10, 10, 10, 10, 10, 10], mix=mix)

    commands = planner.handle(StepTaken(step=0, dp_rank=0))

    # Data constructors hear of it with the plans, and loaders after them.
    told = [type(each) for each in commands if isinstance(each, PublishPlans | ReleaseSamples)]
    assert told == [PublishPlans, ReleaseSamples]
    assert released_by(commands) == [1]
    # Step 0 used positions 0 and 2; position 1 found no room and is carried.
    assert of_kind(commands, ReleaseSamples) == [ReleaseSamples(floors={0: 1})]


def test_a_release_without_plans_is_told_at_once():
    planner, _ = a_running_planner([10] * 4)

    commands = planner.handle(StepTaken(step=0, dp_rank=0))

    assert plans_of(commands) == []
    assert of_kind(commands, ReleaseSteps) == [ReleaseSteps(step=1)]
    assert len(of_kind(commands, ReleaseSamples)) == 1


def test_a_release_tells_which_source_rises_and_when():
    stages = [
        {"from_step": 0, "weights": {"web": 1}},
        {"from_step": 40, "weights": {"web": 1, "code": 3}},
    ]
    mix = a_small_mix(sources=("code", "web"), mix={"stages": stages})
    planner, _ = a_running_planner(mix=mix)
    planner.handle(report([10] * 40, source=1))

    (let_go,) = of_kind(planner.handle(StepTaken(step=0, dp_rank=0)), ReleaseSamples)

    # Two steps are planned, and four more are read for.
    assert let_go.ahead.step == 2 + 4
    assert let_go.ahead.coming.steps == (6, 39, 40)
    assert let_go.ahead.coming.shares_S == {0: (0.0, 0.0, 0.75)}


def test_it_reads_on_before_it_runs_dry():
    _, commands = a_running_planner([10] * 6)

    (read,) = of_kind(commands, ReadAhead)
    assert (read.source, read.start) == (0, 256)


def test_a_starved_step_asks_for_more_and_is_planned_when_it_comes():
    planner, commands = a_running_planner([10])

    (read,) = of_kind(commands, ReadAhead)
    assert steps_of(commands) == []
    assert read.start == 256
    more = report([10] * (read.stop - read.start), start=read.start, stop=read.stop)
    assert steps_of(planner.handle(more))[0] == 0


def test_a_starved_step_is_drawn_again_only_once_more_is_known_of_what_it_waits_for():
    # Weights count samples, so the single known token of each sample decides nothing about a step.
    planner = a_planner(a_mix(pack={"lookahead_rows": 0}, mix={"level": "sample"}))
    planner.handle(Started())
    planner.handle(report([1] * 16, stop=16))

    with patch.object(ahead, "steps_together", wraps=ahead.steps_together) as draw:
        planner.handle(report([1], stop=16, source=1))
        of_two = draw.call_count
        for start in range(16, 64, 8):
            planner.handle(report([1] * 8, start=start, stop=start + 8))
        of_others = draw.call_count - of_two
        commands = planner.handle(report([32] * 48, start=16, stop=64, source=1))

    assert (of_two, of_others) == (1, 0)
    assert steps_of(commands)[0] == 0


def test_the_number_of_steps_ends_the_data():
    planner, commands = a_running_planner(num_steps=1)

    assert steps_of(commands) == [0]
    assert of_kind(commands, EndOfData) == [EndOfData(step=1)]
    assert steps_of(planner.handle(StepTaken(step=0, dp_rank=0))) == []


def test_a_fault_that_is_found_once_every_step_is_planned_ends_nothing():
    planner = a_planner(epoch=[3, 3], num_steps=0)
    planner.handle(Started())

    assert planner.handle(report((), stop=3)) == ()  # no sample in a whole source


def test_the_end_is_told_once_every_step_is_planned_though_none_is_taken():
    _, commands = a_running_planner(mix=a_small_mix(prefetch=2), num_steps=2)

    assert steps_of(commands) == [0, 1]
    assert of_kind(commands, EndOfData) == [EndOfData(step=2)]


def test_no_steps_end_the_data_at_once():
    assert EndOfData(step=0) in a_planner(a_small_mix(), num_steps=0).handle(Started())


def test_a_run_resumed_behind_its_last_step_ends_at_once():
    first, _ = a_running_planner()
    resumed = a_planner(a_small_mix(), state=first.state, num_steps=1)

    assert resumed.handle(Started()) == (EndOfData(step=2),)


def test_the_end_of_the_sources_leaves_no_token_without_a_row():
    planner = a_planner(a_small_mix(prefetch=50, mix={"stop": "first_exhausted"}), epoch=[40])
    commands = [*planner.handle(Started()), *planner.handle(report([3, 4] * 20))]

    assert len(planner.state.carried) == 0
    plans = plans_of(commands)
    assert sum(int(plan.pieces.lengths_P.sum()) for plan in plans) == 20 * (3 + 4)
    assert of_kind(commands, EndOfData) == [EndOfData(step=len(plans))]


def test_a_source_that_is_not_repeated_is_not_read_beyond_its_end():
    mix = a_small_mix(prefetch=2, mix={"stop": "each_once"})

    commands = a_planner(mix, epoch=[3]).handle(Started())

    assert [(c.start, c.stop) for c in of_kind(commands, ReadAhead)] == [(0, 3)]


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted", "each_once"])
def test_a_source_that_gives_nothing_is_no_source_that_has_ended(stop):
    planner = a_planner(a_small_mix(mix={"stop": stop}), epoch=[3])
    planner.handle(Started())

    with pytest.raises(ConfigError, match="none of its 3 records gives a sample"):
        planner.handle(report([], stop=3))


def test_a_source_that_gives_nothing_says_what_is_wrong_with_a_record_that_was_left_out():
    """Earlier, the message advised a change of transforms although all records were bad."""
    planner = a_planner(a_small_mix(), epoch=[3])
    planner.handle(Started())
    told = report([], stop=3, bad=[0, 1, 2])
    told = replace(told, table=replace(told.table, reason="a.npy: record 0: holds token id -5"))

    with pytest.raises(
        ConfigError, match=r"of those that could not be decoded: a\.npy: record 0: "
    ):
        planner.handle(told)


def ends_at(stop, epoch, *, sources=("web",), lengths=((10,) * 60,)):
    mix = a_small_mix(prefetch=50, sources=sources, mix={"stop": stop})
    planner = a_planner(mix, epoch=epoch)
    commands = list(planner.handle(Started()))
    for s, column in enumerate(lengths):
        commands += planner.handle(report(column, source=s))
    return [command.step for command in of_kind(commands, EndOfData)]


def test_the_run_stops_with_the_last_sample_of_a_source_in_a_step_that_may_be_short():
    assert ends_at("first_exhausted", [10]) == [5]
    assert ends_at("first_exhausted", [11]) == [6]
    assert ends_at("each_once", [11]) == [6]


def test_the_run_stops_once_the_last_source_repeats():
    two = {"sources": ("web", "code"), "lengths": ((10,) * 60, (10,) * 60)}

    (first,) = ends_at("first_exhausted", [5, 20], **two)
    (last,) = ends_at("all_exhausted", [5, 20], **two)

    assert first == 5
    assert last == 20
    assert ends_at("each_once", [5, 20], **two) == [13]


def test_a_source_that_is_not_drawn_from_any_more_does_not_keep_the_run_from_ending():
    stages = [
        {"from_step": 0, "weights": {"web": 1, "code": 1}},
        {"from_step": 3, "weights": {"code": 1}},
    ]
    mix = a_small_mix(
        prefetch=30, sources=("web", "code"), mix={"stop": "all_exhausted", "stages": stages}
    )
    planner = a_planner(mix, epoch=[8, 50])
    commands = list(planner.handle(Started()))
    for s in range(2):
        commands += planner.handle(report([10] * 60, source=s))

    (end,) = of_kind(commands, EndOfData)
    assert 3 < end.step < 8


def test_a_run_without_end_goes_on_over_epochs():
    assert ends_at("never", [3]) == []


@pytest.mark.parametrize(
    ("lengths", "pack"), [([], {}), ([11] * 200, {"overlong": "drop", "lookahead_rows": 0})]
)
def test_a_source_that_gives_nothing_usable_is_refused(lengths, pack):
    planner = a_planner(a_small_mix(pack=pack), epoch=[100])
    planner.handle(Started())

    with pytest.raises(ConfigError, match=r"sources\.web: none of its 100 records gives a sample"):
        planner.handle(report(lengths))


def test_a_source_whose_split_is_empty_is_refused_with_its_share():
    planner = a_planner(a_small_mix(splits={"eval": 0.999}), epoch=[100])
    planner.handle(Started())

    with pytest.raises(ConfigError, match=r"drawn share of 0\.001 and gives .* change its splits"):
        planner.handle(report([]))


def test_a_source_that_was_just_drawn_empty_is_not_barren():
    planner = a_planner(a_small_mix(), epoch=[2])
    planner.handle(Started())

    commands = planner.handle(report([10, 10, 10, 10]))

    assert steps_of(commands) == [0, 1]
    assert planner._queues[0].tokens == 0
    assert len(of_kind(commands, ReadAhead)) == 1


def test_a_source_of_long_and_short_documents_is_not_barren():
    mix = a_small_mix(pack={"overlong": "drop", "lookahead_rows": 0})
    planner = a_planner(mix, epoch=[3])
    planner.handle(Started())
    planner.handle(report([10, 11, 11]))

    commands = planner.handle(report([10, 11, 11, 10, 11, 11, 10, 11], start=256, stop=300))

    assert steps_of(commands) == [0, 1]


def test_the_state_at_a_step_is_what_it_was_before_that_step():
    planner, _ = a_running_planner()

    assert planner.state_at(0)["sources"]["web"]["cursor"] == [0, 0, 0]
    assert planner.state_at(1)["sources"]["web"]["cursor"] == [1, 1, 0]
    assert [planner.state_at(k)["step"] for k in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("step", [0, 9])
def test_a_state_that_is_not_held_is_a_state_error(step):
    planner, _ = a_running_planner()
    planner.handle(StepTaken(step=1, dp_rank=0))

    assert (
        planner.state_at(1)["step"] == 1
    )  # for a rank that takes step 1 back after an interruption
    with pytest.raises(StateError, match=rf"before step {step} is not held, only steps 1 to "):
        planner.state_at(step)


def test_a_step_of_a_later_planner_counts_as_the_last_of_this_ones_own():
    """Of a planner that is believed dead and lives: it goes on from its own last state until the journal refuses it."""
    planner, _ = a_running_planner()

    commands = planner.handle(StepTaken(step=7, dp_rank=0))

    assert steps_of(commands) == [2, 3]
    assert planner.state_at(4)["step"] == 4


def test_a_resumed_planner_reads_from_what_is_carried_on():
    mix = a_small_mix()
    planner, _ = a_running_planner([8, 8, 9, 9, 10, 10, 10, 10, 10, 10], mix=mix)
    state = planner._steps.state_before(1)

    (read,) = a_planner(mix, state=state).handle(Started())

    assert state.carried.positions_P.tolist() == [1]
    assert (read.start, read.source) == (1, 0)


def test_a_resumed_planner_plans_the_next_step_as_the_first_one_did():
    mix, lengths = a_small_mix(), [8, 8, 9, 9, 10, 10, 10, 10, 10, 10]
    first, commands = a_running_planner(lengths, mix=mix)
    second = a_planner(mix, state=first._steps.state_before(1))
    second.handle(Started())

    again = second.handle(report(lengths[1:], start=1))

    digests = {plan.step: plan.membership_digest() for plan in plans_of(commands)}
    assert plans_of(again)[0].membership_digest() == digests[1]


def test_every_row_of_a_plan_goes_to_a_rank_and_a_microbatch():
    mix = a_small_mix(rows=8, micro_rows=2)

    _, commands = a_running_planner(mix=mix, dp=2)

    plan = plans_of(commands)[0]
    assert np.bincount(plan.dp_ranks_R).tolist() == [4, 4]
    assert plan.num_microbatches == 2
    assert plan.tokens_S == (80,)
    assert plan.loss_tokens == 72
    assert plan.imbalance >= plan.bound >= 1.0


def test_it_says_which_sources_hold_up_the_next_plan():
    mix = a_mix(rows=2, length=10, micro_rows=1, pack={"lookahead_rows": 0})
    planner = a_planner(mix)
    planner.handle(Started())
    both = planner.waits()
    planner.handle(report([10] * 40))

    assert both.sources == (0, 1)
    assert planner.waits().sources == (1,)
    assert planner.waits().text == f"waits for samples of 1 source ({mix.names[1]})"


def test_it_says_which_ranks_hold_up_the_next_plan():
    planner, _ = a_running_planner(dp=2, cp=2)
    planner.handle(StepTaken(step=0, dp_rank=0, cp_rank=1))

    waits = planner.waits()

    assert waits.text == "is 2 steps ahead of 3 ranks that have not taken step 0"
    assert waits.ranks == ("rank dp=0 cp=0", "rank dp=1 cp=0", "rank dp=1 cp=1")


def test_of_ranks_that_tell_once_for_several_steps_no_more_is_said_than_is_known():
    planner, _ = a_running_planner(mix=a_small_mix(prefetch=8))
    assert planner.mix.steps_at_once == 4

    # It may be at step 3 already: steps that came together are reported with the last of them.
    assert planner.waits().text == (
        "is 8 steps or less ahead of 1 rank that has not reported step 0 yet: they report once in 4 steps"
    )


def test_it_says_that_the_run_ends():
    planner, _ = a_running_planner(num_steps=1)

    assert "where the run ends" in planner.waits().text
    assert (planner.waits().ranks, planner.waits().sources) == ((), ())


def test_a_run_of_so_many_steps_ends_where_they_are_planned_though_no_rank_took_one_yet():
    planner, _ = a_running_planner(num_steps=2)

    assert planner.waits().text == "has planned every step before 2, where the run ends"
    assert planner.waits().ranks == ()


def test_a_source_that_a_draw_ran_out_of_holds_up_the_next_plan():
    """Weights by samples: how many tokens a step needs of a source is not known before it is drawn."""
    mix = a_mix(
        rows=2, length=10, micro_rows=1, mix={"level": "sample"}, pack={"lookahead_rows": 0}
    )
    planner = a_planner(mix)
    planner.handle(Started())
    planner.handle(report([1] * 40))

    commands = planner.handle(report([1], source=1, stop=1))

    assert [command.source for command in of_kind(commands, ReadAhead)] == [1]
    assert planner.waits().sources == (1,)
    assert planner.waits().text == f"waits for samples of 1 source ({mix.names[1]})"


def test_small_steps_are_planned_together_once_there_is_room_for_all_of_them():
    planner, commands = a_running_planner([10] * 200, mix=a_small_mix(prefetch=4))

    assert [len(c.plans) for c in of_kind(commands, PublishPlans)] == [2, 2]
    assert of_kind(planner.handle(StepTaken(step=0, dp_rank=0)), PublishPlans) == []
    later = planner.handle(StepTaken(step=1, dp_rank=0))
    assert steps_of(later) == [4, 5]
    assert [len(c.plans) for c in of_kind(later, PublishPlans)] == [2]


def test_steps_that_are_planned_together_are_journaled_before_any_is_published():
    _, commands = a_running_planner([10] * 200, mix=a_small_mix(prefetch=4))

    kinds = [type(c) for c in commands if isinstance(c, AppendJournal | PublishPlans)]
    assert kinds[:3] == [AppendJournal, AppendJournal, PublishPlans]


def test_no_more_steps_are_planned_together_than_there_are():
    _, commands = a_running_planner([10] * 200, mix=a_small_mix(prefetch=80), num_steps=35)

    assert [len(c.plans) for c in of_kind(commands, PublishPlans)] == [32, 3]
    assert of_kind(commands, EndOfData) == [EndOfData(step=35)]


def test_what_steps_that_go_together_used_is_let_go_together():
    planner, _ = a_running_planner([10] * 200, mix=a_small_mix(prefetch=4))

    assert released_by(planner.handle(StepTaken(step=0, dp_rank=0))) == []
    assert planner.state_at(0)["step"] == 0
    assert released_by(planner.handle(StepTaken(step=1, dp_rank=0))) == [2]
    with pytest.raises(StateError, match="is not held"):
        planner.state_at(0)


def test_the_slowest_rank_is_known_whatever_order_ranks_go_in():
    planner, _ = a_running_planner(dp=3)

    slowest = []
    for rank, step in [(0, 0), (0, 1), (2, 0), (1, 1), (2, 1), (1, 0)]:
        planner.handle(StepTaken(step=step, dp_rank=rank))
        slowest.append(planner.ranks.slowest)

    assert slowest == [0, 0, 0, 1, 2, 2]


def test_another_loader_takes_over_what_is_needed_and_is_asked_what_is_under_way():
    planner = a_planner(a_small_mix())
    planner.handle(Started())
    assert planner.handle(LoaderReplaced(sources=(0,))) == (
        TakeOver(ranges={0: (0, 0)}),
        ReadAhead(source=0, start=0, stop=16),
    )

    planner, _ = a_running_planner()
    for step in range(6):
        planner.handle(StepTaken(step=step, dp_rank=0))
    takes_over, *asked = planner.handle(LoaderReplaced(sources=(0,)))

    ((start, stop),) = takes_over.ranges.values()
    assert stop == 256, "the end of what was reported"
    assert 0 < start <= planner.state_at(planner.released_to)["sources"]["web"]["cursor"][0]
    assert asked == []


def test_another_constructor_builds_every_step_that_not_all_ranks_have_taken():
    planner, commands = a_running_planner(num_steps=5)
    published = [c.plans for c in of_kind(commands, PublishPlans)]
    for step in range(4):
        published += [
            c.plans for c in of_kind(planner.handle(StepTaken(step=step, dp_rank=0)), PublishPlans)
        ]
    held = tuple(plans for plans in published if plans[-1].step >= 4)

    again = planner.handle(ConstructorReplaced(number=1))

    assert again == (Republish(number=1, released_to=4, windows=held, end=5),)
    assert [plan.step for plans in held for plan in plans] == [4]


def skipping_a_shard(mix, number):
    """Return the edit that leaves a shard of three out from the start."""
    change = SkipShard(file="web/1.parquet", source="web", number=number, of=3)
    return History(mix).edited(change, 0).edits


def test_reads_say_which_shards_they_leave_out_also_to_a_loader_that_takes_over():
    mix = a_small_mix()
    planner = a_planner(mix, edits=skipping_a_shard(mix, 1))

    (asked,) = of_kind(planner.handle(Started()), ReadAhead)
    told = planner.handle(LoaderReplaced(sources=(0,)))

    assert asked.without == (1,)
    assert of_kind(told, TakeOver)[0].without == {0: (0, (1,))}
    assert of_kind(told, ReadAhead)[0].without == (1,)


def test_files_that_remain_and_give_no_sample_stop_the_run_once_all_of_them_were_read():
    mix = a_small_mix()
    planner = a_planner(mix, epoch=[100], edits=skipping_a_shard(mix, 1))
    (asked,) = of_kind(planner.handle(Started()), ReadAhead)

    nothing = replace(report([], stop=asked.stop), without=(1,))
    (further,) = of_kind(planner.handle(nothing), ReadAhead)
    with pytest.raises(
        ConfigError, match="100 records outside the files that edits leave out gives"
    ):
        planner.handle(replace(report([], start=further.start, stop=116), without=(1,)))


def test_a_planner_that_takes_over_reads_on_once_it_hears_how_far_ranks_are():
    stages = [
        {"from_step": 0, "weights": {"code": 1, "web": 1}},
        {"from_step": 12, "weights": {"web": 1}},  # little of code is read ahead
    ]
    mix = a_small_mix(prefetch=16, sources=("code", "web"), mix={"stages": stages})
    first = a_planner(mix, num_steps=16)
    first.handle(Started())
    first.handle(report((10,) * 40))
    steps = of_kind(first.handle(report((10,) * 40, source=1)), AppendJournal)
    assert len(steps) >= 8
    planner = a_planner(mix, known=[step.after for step in steps[:8]], life=1, num_steps=16)
    planner.handle(Started())
    # Enough for one step, as if no rank had any step, because this comes before ranks report their steps.
    assert of_kind(planner.handle(report((10,) * 4, stop=4)), ReadAhead) == []
    asked = planner.handle(StepTaken(step=7, dp_rank=0))

    assert [(read.source, read.start) for read in of_kind(asked, ReadAhead)] == [(0, 4)]


def test_how_full_is_what_is_read_ahead_is_told_of_sources_short_of_their_target():
    planner = a_planner(a_small_mix(), epoch=[10_000], num_steps=None)
    planner.handle(Started())
    assert planner.filled() == {0: 0.0}

    planner.handle(report([10] * 6, stop=6))
    assert 0.0 < planner.filled()[0] < 1.0

    planner.handle(report([10] * 60, start=6, stop=66))
    assert planner.filled() == {}


def test_a_planner_that_has_planned_all_reads_nothing_ahead():
    planner = a_planner(a_small_mix(), epoch=[10_000], num_steps=1)
    planner.handle(Started())
    planner.handle(report([10] * 6, stop=6))

    assert planner.has_ended
    assert planner.filled() == {}
