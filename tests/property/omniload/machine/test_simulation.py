"""For any ranks, loaders, constructors, prefetching and order of messages: the same batches."""

import json
from typing import get_args
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.machine import queue
from omniload.mix.deficit import integer_weights
from omniload.mix.journal.reading import state_before
from omniload.mix.journal.records import StepRecord
from omniload.mix.schedule import weights_at
from omniload.mix.state import MixState
from omniload.plan.balance_methods import BalanceMethod
from tests.support.plane.builders import a_mix, with_overlong
from tests.support.plane.drawn_runs import epochs, worlds
from tests.support.plane.edits.promises import saved_state
from tests.support.plane.reference import reference_digests
from tests.support.plane.simulation import Simulation

STEPS = 5

overlongs = st.sampled_from([None, "split", "truncate", "drop"])


@st.composite
def mixes(draw):
    names = ("web", "code", "books")[: draw(st.integers(1, 3))]
    pack = {
        "method": draw(st.sampled_from(["best_fit", "concat_and_split", "none"])),
        "overlong": draw(st.sampled_from(["split", "truncate", "drop"])),
        "lookahead_rows": draw(st.integers(0, 2)),
    }
    weights = {name: draw(st.integers(1, 5)) for name in names}
    later = {name: draw(st.integers(0, 5)) for name in names[1:]} | {names[0]: 1}
    stages = [
        {"from_step": 0, "weights": weights},
        {"from_step": 2, "weights": later, "ramp_steps": 2},
    ]
    level = draw(st.sampled_from(["token", "sample"]))
    mix = a_mix(
        sources=names,
        rows=8,
        length=16,
        micro_rows=draw(st.sampled_from([1, 2, 8])),
        pack=pack,
        mix={"stages": stages, "level": level},
        runtime={"prefetch_steps": draw(st.sampled_from([1, 2, 4, 8, 13, 40]))},
        balance={"method": draw(st.sampled_from(get_args(BalanceMethod)))},
    )
    return with_overlong(mix, [draw(overlongs) for _ in names])


@st.composite
def runs(draw):
    mix = draw(mixes())
    lost = {"kills": [0, 1, 2, 5], "planner_kills": [0, 1, 2, 5], "repeat_share": [0.0, 0.2, 0.5]}
    counts = {"dp": [1, 2, 3, 4, 8], "num_loaders": [1, 2, 3, 4], "shadows": [0, 1, 2]}
    drawn = draw(worlds(**counts, **lost, moves=[0, 1, 4, 20], short_reads=[0.0, 0.5, 1.0]))
    return drawn | {"mix": mix, "epochs": [draw(epochs) for _ in mix.names], "num_steps": STEPS}


def simulated(first_read, **world):
    """Run a simulation whose first reads are short, so that it reads often."""
    simulation = Simulation(**world)
    with patch.object(queue, "_FIRST_READ", first_read):
        digests = simulation.run()
    return simulation, digests


@given(runs(), st.integers(1, 20), st.integers(0, STEPS - 1), runs())
def test_every_step_is_the_one_that_the_mix_alone_decides_and_a_run_resumes_in_another_world(
    world, first_read, at, other
):
    """Each run is checked for all promises, because making a run takes longer than the checks."""
    run, digests = simulated(first_read, **world)

    assert digests == reference_digests(world["mix"], world["epochs"], num_steps=STEPS)
    assert run.published == list(range(STEPS))
    require_labels_as_batches_say(run)
    require_each_row_once(run)
    require_journal_folds(run)

    elsewhere = other | {
        "mix": world["mix"],
        "epochs": world["epochs"],
        "state": saved_state(run, at),
    }
    resumed, rest = simulated(first_read, **elsewhere)
    assert rest == digests[at:]
    for step in resumed.states:
        assert resumed.states[step] == run.states.get(step, resumed.states[step])


def require_labels_as_batches_say(run):
    for step in range(STEPS):
        batches = [run.batches[step, rank] for rank in range(run.dp)]
        labels = sum(int(m.loss_mask_RT.sum()) for batch in batches for m in batch.microbatches)
        assert {batch.loss_tokens for batch in batches} == {labels}


def require_each_row_once(run):
    """Check that no row is repeated or missing."""
    for step in range(STEPS):
        rows = [
            len(microbatch.tokens_RT)
            for rank in range(run.dp)
            for microbatch in run.batches[step, rank].microbatches
        ]
        assert sum(rows) == run.mix.rows_per_step
        assert max(rows) <= run.mix.rows_per_microbatch


def require_journal_folds(run):
    """Check that the journal folds to the planner's own states, by the stages of the file alone."""
    stages, names = run.mix.mix.stages, run.mix.names
    steps = [StepRecord.from_json(json.loads(json.dumps(r)), names) for r in run.journal]
    for step, state in run.states.items():
        folded = state_before(
            step,
            MixState.start(len(names)),
            steps,
            lambda before: integer_weights(weights_at(stages, names, before.step)),
        )
        assert folded.to_json(names, run.planner.fingerprint) == state


@pytest.mark.parametrize("seed", range(4))
def test_buffers_do_not_grow_with_the_length_of_the_run(seed):
    world = {
        "mix": a_mix(rows=8, length=16, micro_rows=4),
        "epochs": [[[5], [9, 30], [], [44]], [[12]] * 7],
        "dp": 2,
        "seed": seed,
    }

    short, _ = simulated(8, **world, num_steps=25)
    long, _ = simulated(8, **world, num_steps=150)

    assert long.most_held <= 2 * short.most_held


@pytest.mark.parametrize("seed", range(3))
def test_a_piece_carried_from_a_source_that_lost_its_weight_is_still_there_after_a_resume(seed):
    stages = [
        {"from_step": 0, "weights": {"web": 1, "code": 1}},
        {"from_step": 2, "weights": {"web": 1}},
    ]
    mix = a_mix(rows=8, length=16, micro_rows=4, mix={"stages": stages}, pack={"lookahead_rows": 4})
    world = {"mix": mix, "epochs": [[[9]], [[9]]], "num_steps": STEPS, "seed": seed}
    first, digests = simulated(4, **world)
    assert first.states[2]["carried"]

    state = saved_state(first, 2)
    assert 1 in state.carried.sources_P.tolist()
    _, rest = simulated(4, **world, state=state)

    assert rest == digests[2:]


@pytest.mark.parametrize(("seed", "kills"), [(7, 0), (8, 0), (12, 0), (3, 2), (4, 5)])
def test_sources_that_move_between_loaders_all_the_time_change_no_step(seed, kills):
    runtime = {"prefetch_steps": 2}
    mix = a_mix(sources=("web", "code"), rows=8, length=16, micro_rows=2, runtime=runtime)
    epochs = [[[9], [20, 3], [5]] * 30, [[4]] * 500]
    world = {"mix": mix, "epochs": epochs, "num_steps": 40, "dp": 2, "seed": seed, "moves": 40}
    world |= {"kills": kills, "planner_kills": kills, "num_loaders": 3}

    simulation, digests = simulated(2, **world)

    assert simulation.moved > 0
    assert digests == reference_digests(mix, epochs, num_steps=40)
