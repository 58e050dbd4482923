"""Ranks join and leave while a simulated job runs, with kills and late messages: the same samples in every step.

The model is ``reference_digests``, which has no ranks.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.mix.edits.edit import RetireSource, SetWeights
from tests.support.examples import few
from tests.support.plane.builders import a_mix
from tests.support.plane.drawn_runs import epochs, worlds
from tests.support.plane.edits.promises import saved_state
from tests.support.plane.reference import reference_digests
from tests.support.plane.simulation import Simulation

STEPS = 7
NAMES = ("web", "code")

SIZES = [1, 2, 3, 4, 8]


@st.composite
def mixes(draw):
    return a_mix(
        sources=NAMES,
        rows=8,
        length=16,
        micro_rows=draw(st.sampled_from([1, 2, 8])),
        pack={"method": draw(st.sampled_from(["best_fit", "concat_and_split", "none"]))},
        runtime={"prefetch_steps": draw(st.sampled_from([1, 4, 16])), "elastic": True},
        balance={"method": draw(st.sampled_from(["greedy_swap", "none"]))},
    )


elastic_worlds = worlds(dp=SIZES, moves=[0, 1, 4, 20], impatient=[False, True])
resizes = st.lists(st.tuples(st.sampled_from(SIZES), st.booleans()), max_size=4)


def simulated(mix, lengths, world, **more):
    steps = {"num_steps": STEPS}
    simulation = Simulation(mix=mix, epochs=lengths, **{**steps, **world, **more})
    return simulation, simulation.run()


def trained(simulation):
    """Return the pieces of all steps, each as often as it was handed out."""
    return sorted(
        (step, *key)
        for (step, _), batch in simulation.batches.items()
        for microbatch in batch.microbatches
        for key in microbatch.keys_K4.tolist()
    )


@given(
    mixes(),
    elastic_worlds,
    resizes,
    elastic_worlds,
    resizes,
    st.lists(epochs, min_size=2, max_size=2),
    st.data(),
)
def test_every_step_is_the_one_that_the_mix_alone_decides_whatever_ranks_there_are(
    mix, world, others, elsewhere, later, lengths, data
):
    """No piece is lost or repeated, and a run resumes with other ranks, which change too."""
    run, digests = simulated(mix, lengths, world, resizes=others)

    assert digests == reference_digests(mix, lengths, num_steps=STEPS)
    assert run.published == list(range(STEPS))
    assert not run.resizes
    unbroken, _ = simulated(mix, lengths, {"dp": 1, "seed": 0})
    assert trained(run) == trained(unbroken)

    at = data.draw(st.sampled_from(sorted(run.states)))
    resumed, rest = simulated(mix, lengths, elsewhere, resizes=later, state=saved_state(run, at))
    assert rest == digests[at:]
    assert all(
        resumed.states[step] == run.states.get(step, resumed.states[step])
        for step in resumed.states
    )


@few(10, soak=200)
@given(mixes(), elastic_worlds, resizes, st.lists(epochs, min_size=2, max_size=2))
def test_ranks_and_the_mix_may_change_in_one_run(mix, world, others, lengths):
    changes = [(SetWeights(weights={"web": 3.0}), None), (RetireSource(name="code"), 5)]

    simulation, digests = simulated(mix, lengths, world, resizes=others, changes=changes)

    assert digests == reference_digests(simulation.history, lengths, num_steps=STEPS)


def test_the_histories_stop_ranks_in_mid_step_and_kill_planners_between_changes():
    lengths = [[[9], [5, 30], [44]], [[12]] * 7]
    mix = a_mix(rows=8, length=16, runtime={"prefetch_steps": 4, "elastic": True})
    others = [(3, True), (4, True), (2, True)]

    runs = [
        simulated(
            mix,
            lengths,
            {"dp": 4, "seed": seed, "planner_kills": 2, "num_constructors": 2},
            resizes=others,
        )[0]
        for seed in range(16)
    ]

    assert sum(run.redone for run in runs) > 5
    assert sum(run.planners_killed for run in runs) > 10
    assert {world.dp for run in runs for world in run.worlds} == {2, 3, 4}


@pytest.mark.parametrize("seed", range(2, 6))
def test_sources_move_while_ranks_change_and_moves_time_out(seed):
    lengths = [[[9], [20, 3], [5]] * 30, [[4]] * 500]
    mix = a_mix(rows=8, length=16, runtime={"prefetch_steps": 2, "elastic": True})
    world = {"dp": 4, "seed": seed, "num_loaders": 3, "num_constructors": 2}
    world |= {"moves": 40, "impatient": True, "kills": 2, "planner_kills": 2, "repeat_share": 0.2}
    others = [(3, True), (4, True), (2, False), (4, True)]

    simulation, digests = simulated(mix, lengths, world, resizes=others, num_steps=30)

    assert digests == reference_digests(mix, lengths, num_steps=30)
    assert simulation.moved > 0
    assert not simulation.resizes


def test_the_histories_move_sources_on_before_all_have_heard_of_a_move_and_give_others_up():
    lengths = [[[9], [20, 3], [5]] * 30, [[4]] * 500]
    mix = a_mix(rows=8, length=16, runtime={"prefetch_steps": 2, "elastic": True})
    world = {"dp": 2, "num_loaders": 3, "moves": 40, "impatient": True}

    runs = [simulated(mix, lengths, world | {"seed": seed})[0] for seed in range(6)]

    assert sum(run.moved_on for run in runs) > 10
    assert sum(run.given_up for run in runs) > 10
