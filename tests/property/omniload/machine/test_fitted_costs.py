"""A cost that is fitted to measured times decides where rows go, as its edits say, and never the samples of a step.

Measured times belong to one run, and no other run may have them. Whatever they were, and whichever role was killed
meanwhile, a run that makes the same edits deals every row in the same way.
"""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omniload.batch.digest import batch_digest
from omniload.mix.edits.edit import FitCost, SetWeights
from omniload.mix.edits.edits_file import edits_in
from omniload.mix.journal.times import MeasuredTimes
from tests.support.examples import few
from tests.support.plane.builders import a_mix
from tests.support.plane.drawn_runs import worlds
from tests.support.plane.edits.promises import saved_state
from tests.support.plane.reference import reference_digests
from tests.support.plane.simulation import Simulation

STEPS = 24
NAMES = ("code", "web")
EPOCHS = [[[n % 16 + 1] for n in range(5, 40)], [[16, 1, 3], [2], [9, 9]] * 5]


def a_fitting_mix(every, **changes):
    rows = {"rows": 8, "length": 16, "micro_rows": 1, "sources": NAMES}
    return a_mix(**(rows | changes), balance={"fit_every": every, "linear": 1})


def measured(seed):
    """Return the times that each read finds: from a cost that changes each time."""
    chance = random.Random(seed)

    def times(_first):
        linear, quadratic = chance.choice([(1, 0), (1, 0.1), (0, 1), (3, 1)])
        rows = np.random.default_rng(chance.randrange(1 << 30)).integers(1, 17, (64, 4))
        tokens_M, squares_M = (np.sum(rows**power, 1).astype(float) for power in (1, 2))
        return MeasuredTimes(
            ranks_M=np.arange(64) % 2,
            tokens_M=tokens_M,
            squares_M=squares_M,
            seconds_M=linear * tokens_M + quadratic * squares_M,
        )

    return times


def simulated(mix, world, **more):
    simulation = Simulation(mix=mix, epochs=EPOCHS, num_steps=STEPS, **world, **more)
    return simulation, simulation.run()


def fits_of(simulation):
    return [edit for edit in simulation.history.edits if isinstance(edit.change, FitCost)]


def dealt(simulation, first=0, ranks=None):
    """Return the digest of each rank's batch of each step, for the steps with ``ranks`` ranks."""
    sizes = {step: sum(s == step for s, _ in simulation.batches) for step, _ in simulation.batches}
    return {
        at: batch_digest(batch)
        for at, batch in simulation.batches.items()
        if at[0] >= first and ranks in (None, sizes[at[0]])
    }


@few(8, soak=200)
@given(every=st.integers(1, 5), ahead=st.sampled_from([1, 2, 8]), world=worlds(dp=[2, 4]))
def test_machine_fits_deal_rows_by_their_edits_alone_and_leave_each_step_its_samples(
    every, ahead, world
):
    mix = a_fitting_mix(every, runtime={"prefetch_steps": ahead})

    simulation, digests = simulated(mix, world, times=measured(world["seed"]))

    assert digests == reference_digests(mix, EPOCHS, num_steps=STEPS)
    edits = simulation.history.edits
    assert edits == tuple(fits_of(simulation))
    alone = {"dp": world["dp"], "num_constructors": 1, "seed": 1}
    again, _ = simulated(mix, alone, edits=edits)
    assert dealt(again) == dealt(simulation)
    for step in (1, 7, 18):
        state = saved_state(simulation, step)
        resumed, _ = simulated(mix, alone, edits=edits, state=state)
        assert dealt(resumed) == dealt(simulation, step)
        assert edits_in(simulation.states[step]) == edits[: state.mix_revision]


@few(8, soak=200)
@given(seed=st.integers(0, 1 << 30), sizes=st.lists(st.sampled_from([1, 2, 4]), min_size=1))
def test_machine_fits_hold_for_other_ranks_from_the_steps_that_they_held_from(seed, sizes):
    elastic = {"prefetch_steps": 4, "elastic": True}
    mix = a_fitting_mix(1, micro_rows=2, runtime=elastic)
    resizes = [(dp, at_once) for dp, at_once in zip(sizes, [True, False] * 9, strict=False)]

    simulation, digests = simulated(
        mix, {"dp": 2, "seed": seed}, times=measured(seed), resizes=resizes
    )

    assert digests == reference_digests(mix, EPOCHS, num_steps=STEPS)
    for dp in {2, *sizes}:
        alone, _ = simulated(mix, {"dp": dp}, edits=simulation.history.edits)
        found = dealt(simulation, ranks=dp)
        assert found == {at: digest for at, digest in dealt(alone).items() if at in found}


@few(8, soak=200)
@given(seed=st.integers(0, 1 << 30), at=st.integers(0, STEPS - 1))
def test_machine_fits_wait_for_an_edit_of_a_step_to_come(seed, at):
    mix = a_fitting_mix(1, runtime={"prefetch_steps": 2})
    change = SetWeights(weights={"web": 3.0})

    simulation, digests = simulated(
        mix, {"dp": 2, "seed": seed}, times=measured(seed), changes=[(change, at)]
    )

    assert digests == reference_digests(simulation.history, EPOCHS, num_steps=STEPS)
    # An earlier fit may be of a step that was taken back for the change: it stays, and only deals rows.
    edits = simulation.history.edits
    asked = [n for n, edit in enumerate(edits) if edit.change == change]
    steps = [edit.step for edit in edits[asked[0] if asked else 0 :]]
    assert steps == sorted(steps)


def test_machine_fits_are_made_where_times_are_reported_and_the_mix_asks_for_them():
    mix = a_fitting_mix(2, runtime={"prefetch_steps": 2})
    as_declared = a_mix(rows=8, length=16, micro_rows=1, sources=NAMES, balance={"linear": 1})

    fitted, _ = simulated(mix, {"dp": 2}, times=measured(3))
    silent, _ = simulated(mix, {"dp": 2})
    plain, _ = simulated(as_declared, {"dp": 2}, times=measured(3))

    assert len(fits_of(fitted)) > 1
    assert dealt(fitted) != dealt(silent) == dealt(plain)
    assert silent.history.edits == plain.history.edits == ()
