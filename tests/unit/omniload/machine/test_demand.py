"""Read-ahead of each source: some plans' worth, within the memory."""

from dataclasses import dataclass

import pytest

from omniload.machine.messages import PublishPlans, ReadAhead, SamplesReported, Started, StepTaken
from omniload.machine.scaling.coming import Demand
from omniload.mix.edits.history import History
from omniload.mix.state import MixState
from tests.support.plane.builders import a_mix, a_planner, a_table

MEMORY = 1 << 20


@dataclass
class Seen:
    sample_tokens: float
    token_bytes: float = 5.0


def a_demand(num_sources=2):
    weights = {"code": 3.0, "web": 1.0}
    mix = a_mix(
        sources=tuple(weights), weights=weights, rows=4, length=32, loader={"memory": MEMORY}
    )
    state = MixState.start(len(weights))
    return Demand.of(History(mix, ()), state, 1, [Seen(6.0)] * num_sources)


def test_several_plans_of_light_samples_are_known_ahead_of_each_source_by_its_share():
    demand = a_demand()

    assert demand.bounds_of(0, 5.0) == (demand.targets_S[0], 2 * demand.targets_S[0])
    assert demand.targets_S[0] == pytest.approx(3 * demand.targets_S[1], rel=0.02)
    # This is also true while the size of a token is unknown.
    assert demand.bounds_of(1, 0.0) == (demand.targets_S[1], 2 * demand.targets_S[1])


@pytest.mark.parametrize("token_bytes", [500.0, 2_000.0, 20_000.0, 2e6])
def test_of_heavy_samples_as_many_as_memory_holds_and_what_a_plan_needs_at_least(token_bytes):
    demand = a_demand()

    held_bytes = 0.0
    for s in (0, 1):
        least, most = demand.bounds_of(s, token_bytes)
        assert demand.needs_S[s] <= least <= most <= 2 * demand.targets_S[s]
        held_bytes += (most if most > demand.needs_S[s] else 0) * token_bytes
    assert held_bytes <= MEMORY / 2
    if token_bytes == 2e6:
        assert [demand.bounds_of(s, token_bytes) for s in (0, 1)] == [
            (n, n) for n in demand.needs_S
        ]


def test_a_source_that_is_not_drawn_yet_is_asked_for_nothing():
    demand = a_demand(num_sources=3)

    assert demand.needs_S[2] == demand.targets_S[2] == 0
    assert demand.bounds_of(2, 1e6) == (0, 0)


def read_ahead(planner, token_bytes, steps, most_known):
    """Answer every read with samples of such a weight and take steps; return the most that was known ahead of plans."""
    commands, ahead, known = list(planner.handle(Started())), 0, 0
    for step in range(steps):
        commands += planner.handle(StepTaken(step=step, dp_rank=0)) if step else ()
        while commands:
            command = commands.pop(0)
            if isinstance(command, PublishPlans):
                ahead -= sum(sum(plan.tokens_S) for plan in command.plans)
            if not isinstance(command, ReadAhead):
                continue
            # As a loader that reads slowly: a few of the requested records.
            stop = min(command.stop, command.start + most_known)
            table = a_table([6] * (stop - command.start), start=command.start)
            size_bytes = int(6 * token_bytes) * len(table)
            commands += planner.handle(
                SamplesReported(source=command.source, table=table, size_bytes=size_bytes)
            )
            ahead += 6 * len(table)
            known = max(known, ahead)
    return known


@pytest.mark.parametrize("answered", [1, 7, 1000])
def test_a_planner_asks_for_no_more_heavy_samples_than_fit(answered):
    mix = a_mix(rows=4, length=32, loader={"memory": MEMORY}, runtime={"prefetch_steps": 2})

    light = read_ahead(a_planner(mix), 5.0, 6, answered)
    heavy = read_ahead(a_planner(mix), 2_000.0, 6, answered)

    # A plan needs 160 tokens, four are known ahead, and half of the memory holds 262 of the heavy ones; a row of
    # drawn ones waits for a step, and of each source a read ends with a whole record.
    assert light >= 640
    assert heavy <= 262 + 32 + 2 * 6


def test_no_step_waits_for_more_than_it_needs_of_samples_that_fit_no_memory():
    mix = a_mix(rows=4, length=32, loader={"memory": MEMORY}, runtime={"prefetch_steps": 2})
    planner = a_planner(mix)

    commands, planned = list(planner.handle(Started())), []
    while commands:
        command = commands.pop(0)
        if isinstance(command, PublishPlans):
            planned += [plan.step for plan in command.plans]
        if isinstance(command, ReadAhead):
            table = a_table([6], start=command.start)
            report = SamplesReported(source=command.source, table=table, size_bytes=1 << 30)
            commands += planner.handle(report)

    assert planned == [0, 1]


def needs_of(seen, steps=8, **changes):
    mix = a_mix(weights={"web": 3.0, "code": 1.0}, **changes)
    return Demand.of(
        History(mix, ()), MixState.start(2), steps, [Seen(each) for each in seen]
    ).needs_S


def test_rows_drawn_by_number_need_tokens_by_the_lengths_that_samples_had_so_far():
    # Eight steps of four rows: 24 samples of code and 8 of web, as of each the same tokens are drawn.
    alone = {"pack": {"method": "none"}}
    assert needs_of([6.0, 6.0], **alone) == [48, 144]
    assert sum(needs_of([10.0, 30.0], **alone)[s] / (10, 30)[s] for s in (0, 1)) == pytest.approx(
        32, rel=0.1
    )
    assert needs_of([6.0, 20.0], mix={"level": "sample"}, **alone) == [8 * 6, 24 * 20]
    # A longer sample has several rows.
    assert needs_of([1e6, 1e6], **alone) == [8 * 32, 24 * 32]


def test_samples_drawn_by_number_need_the_tokens_of_their_rows_together():
    needs = needs_of([6.0, 20.0], mix={"level": "sample"})

    assert sum(needs) == pytest.approx((8 * 4 + 1) * 32, rel=0.01)
    assert needs[1] / 20 == pytest.approx(3 * needs[0] / 6, rel=0.1)


def test_while_samples_of_a_source_were_not_seen_it_is_unknown_what_draws_by_number_need():
    assert needs_of([6.0, 0.0], pack={"method": "none"}) == [1, 1]


@pytest.mark.parametrize("changes", [{"pack": {"method": "none"}}, {"mix": {"level": "sample"}}])
def test_steps_drawn_by_number_are_planned_together_once_samples_were_seen(changes):
    """Ranks take each step before the next read is answered; windows of one step would go on for ever."""
    mix = a_mix(sources=["web"], rows=32, runtime={"prefetch_steps": 16}, **changes)
    planner = a_planner(mix, epoch=[100_000])
    commands, sizes = list(planner.handle(Started())), []
    while len(sizes) < 50:
        command = commands.pop(0)
        if isinstance(command, PublishPlans):
            sizes.append(len(command.plans))
            for plan in command.plans:
                commands += planner.handle(StepTaken(step=plan.step, dp_rank=0))
        if isinstance(command, ReadAhead):
            table = a_table([6] * (command.stop - command.start), start=command.start)
            commands += planner.handle(SamplesReported(source=command.source, table=table))

    assert sizes[-20:] == [8] * 20
