"""Finite runs through all machines: the trained tokens, whatever ranks, packing, weights and interruptions.

The oracle is the data: every token of ``tokens_of`` shows its sample, so trained tokens are compared with those of
the records and not with a plan.
"""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plane.builders import PACKS, a_mix, tokens_of, with_packs
from tests.support.plane.drawn_runs import records
from tests.support.plane.drawn_runs import worlds as places
from tests.support.plane.edits.promises import require_journal_folds, saved_state
from tests.support.plane.finite_runs import (
    MANY,
    memberships,
    simulated,
    starved_draws,
    steps_of,
    trained,
    windows,
)
from tests.support.plane.simulation import Simulation

STOPS = ("first_exhausted", "all_exhausted", "each_once")
LENGTH = 16

epochs = st.lists(records, max_size=12).map(lambda rows: [*rows, [9]])

packs = st.sampled_from([None, None, *PACKS])


@st.composite
def mixes(draw, stop=None):
    names = ("books", "code", "web")[: draw(st.integers(1, 3))]

    def weights():
        return {name: draw(st.integers(1, 5)) for name in names}

    stages = [
        {"from_step": 0, "weights": weights()},
        {"from_step": 2, "weights": weights(), "ramp_steps": 2},
    ]
    mix = a_mix(
        sources=names,
        rows=8,
        length=LENGTH,
        micro_rows=draw(st.sampled_from([1, 2, 8])),
        pack={
            "method": draw(st.sampled_from(["best_fit", "concat_and_split", "none"])),
            "lookahead_rows": draw(st.integers(0, 2)),
            "overlong": draw(st.sampled_from(["split", "truncate"])),
        },
        mix={
            "stages": stages,
            "level": draw(st.sampled_from(["token", "sample"])),
            "stop": stop or draw(st.sampled_from(STOPS)),
        },
        runtime={"prefetch_steps": draw(st.sampled_from([1, 2, 4, 8, 13, 40]))},
    )
    return with_packs(mix, [draw(packs) for _ in names])


@st.composite
def worlds(draw, stop=None):
    mix = draw(mixes(stop))
    return {"mix": mix, "epochs": [draw(epochs) for _ in mix.names], **draw(places())}


def held(world, source, *, position=0):
    """Return the tokens of one epoch of a source in its order, as far as the mix keeps them."""
    kept = LENGTH if world["mix"].pack.overlong == "truncate" else MANY
    return [
        token
        for at, record in enumerate(world["epochs"][source], start=position)
        for sub, length in enumerate(record)
        for token in tokens_of(source, at, sub, length)[:kept].tolist()
    ]


@given(worlds("each_once"), st.integers(1, 20))
def test_every_document_of_every_source_is_trained_on_exactly_once(world, first_read):
    simulation, _ = simulated(world, first_read)

    assert trained(simulation) == Counter(
        t for s in range(len(world["epochs"])) for t in held(world, s)
    )


@given(worlds("first_exhausted"), st.integers(1, 20))
def test_up_to_the_first_end_nothing_is_trained_on_twice_and_nothing_drawn_is_left_out(
    world, first_read
):
    simulation, _ = simulated(world, first_read)

    found = trained(simulation)
    counts = [
        [found.pop(token, 0) for token in held(world, s)] for s in range(len(world["epochs"]))
    ]
    assert not found, "tokens of a second epoch"
    for of_source in counts:
        assert set(of_source) <= {0, 1}
        assert of_source == sorted(of_source, reverse=True), "what is drawn is a prefix"
    assert sum(all(of_source) for of_source in counts) == 1, "the one that ends first, and it alone"


@given(worlds("all_exhausted"), st.integers(1, 20))
def test_up_to_the_last_end_every_document_is_trained_on_and_one_source_exactly_once(
    world, first_read
):
    simulation, _ = simulated(world, first_read)

    found = trained(simulation)
    repeated = []
    for s, epoch in enumerate(world["epochs"]):
        assert all(found[token] == 1 for token in held(world, s))
        repeated.append(found[held(world, s, position=len(epoch))[0]])
    assert 0 in repeated, "the one that ended last"


@given(worlds(), st.integers(1, 20))
def test_all_steps_are_full_but_the_last_and_every_rank_takes_part_in_each(world, first_read):
    simulation, _ = simulated(world, first_read)

    rows = []
    for batches in steps_of(simulation):
        rows.append(sum(len(m.tokens_RT) for b in batches for m in b.microbatches))
        assert len({len(batch.microbatches) for batch in batches}) == 1
        labels = sum(int(m.loss_mask_RT.sum()) for b in batches for m in b.microbatches)
        assert {batch.loss_tokens for batch in batches} == {labels}
    assert set(rows[:-1]) <= {world["mix"].rows_per_step}
    assert 1 <= rows[-1] <= world["mix"].rows_per_step


@given(worlds(), st.integers(1, 20), places(), st.data())
def test_a_finite_run_that_is_resumed_anywhere_elsewhere_ends_with_the_same_steps(
    world, first_read, elsewhere, data
):
    first, digests = simulated(world, first_read)
    at = data.draw(st.sampled_from(sorted(first.states)))
    again = data.draw(st.integers(1, 20))

    _, rest = simulated(world | elsewhere, again, state=saved_state(first, at))

    assert rest == digests[at:]


@given(worlds(), st.integers(1, 20))
def test_the_journal_of_a_finite_run_folds_to_its_states(world, first_read):
    require_journal_folds(simulated(world, first_read)[0])


@given(worlds(), st.integers(0, 20))
def test_the_end_is_the_same_however_much_is_known_ahead(world, known):
    assert memberships(world, known) == memberships(world, 200)


@given(worlds(), st.integers(0, 20), st.sampled_from([2, 3, 8, 40]))
def test_steps_that_are_drawn_together_are_those_that_are_drawn_one_by_one(world, known, most):
    together = windows(world, known, most)

    assert [step for window in together for step in window] == memberships(world, 200)
    assert max(map(len, together), default=1) <= most


@pytest.mark.parametrize("stop", STOPS)
def test_only_the_steps_in_which_a_source_ends_are_drawn_one_by_one(stop):
    mix = a_mix(sources=("books", "web"), rows=2, length=LENGTH, micro_rows=1, mix={"stop": stop})
    world = {"mix": mix, "epochs": [[[LENGTH]] * 20, [[LENGTH]] * 40]}

    lengths = [len(window) for window in windows(world, 200, 8)]

    assert sum(lengths) >= 19
    # Each end costs a shorter window before it, and the step of the end.
    assert len(lengths) <= sum(lengths) // 8 + 1 + 2 * len(world["epochs"]), lengths


@given(worlds(), st.lists(st.integers(0, 9), min_size=3, max_size=3), st.integers(1, 30))
def test_a_draw_that_starves_waits_for_no_source_but_those_that_it_names(world, known, more):
    for starved, with_more_of_others in starved_draws(world, known, more):
        assert with_more_of_others == starved


def test_a_last_step_of_one_row_is_placed_on_eight_ranks():
    mix = a_mix(sources=("web",), rows=8, length=LENGTH, micro_rows=1, mix={"stop": "each_once"})
    simulation = Simulation(mix=mix, epochs=[[[16]] * 9], num_steps=MANY, dp=8)
    simulation.run()

    first, last = steps_of(simulation)
    rows = [sum(len(m.tokens_RT) for m in batch.microbatches) for batch in last]
    assert sorted(rows) == [0] * 7 + [1]
    assert {batch.loss_tokens for batch in last} == {15}
    assert all(np.isfinite((batch.imbalance, batch.bound)).all() for batch in first + last)
