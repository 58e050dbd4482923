"""Amounts: every source gives exactly the requested amount, whatever ranks, packing, kills and resumes.

The oracle is the data: the size of an amount is counted from the records, without code of the package.
"""

from collections import Counter
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from omniload.mix.state import MixState
from omniload.plan.membership import Exhausted, Starved, membership_of
from tests.support.plane.builders import PACKS, a_mix, tokens_of, with_packs
from tests.support.plane.drawn_runs import records
from tests.support.plane.drawn_runs import worlds as places
from tests.support.plane.edits.promises import require_journal_folds, saved_state
from tests.support.plane.finite_runs import (
    MANY,
    memberships,
    simulated,
    starved_draws,
    trained,
    windows,
)
from tests.support.plane.reference import known_ahead

LENGTH = 16

sources = st.lists(records, max_size=12).map(lambda rows: [*rows, [9]])
quarters = st.integers(1, 12).map(lambda n: n / 4)

packs = st.sampled_from([None, None, *PACKS])


@st.composite
def amounts(draw, num_records):
    """One amount, of at least one record."""
    kind = draw(st.sampled_from(["epochs", "samples", "tokens"]))
    if kind == "epochs":
        return {kind: draw(quarters.filter(lambda n: n * num_records >= 1))}
    return {kind: draw(st.integers(1, 60 if kind == "samples" else 400))}


@st.composite
def worlds(draw, whole_epochs=False):
    names = ("books", "code", "web")[: draw(st.integers(1, 3))]
    epochs = [draw(sources) for _ in names]
    wanted = {
        name: {"epochs": 1} if whole_epochs else draw(amounts(len(rows)))
        for name, rows in zip(names, epochs, strict=True)
    }
    mix = a_mix(
        version=2,
        sources=names,
        rows=8,
        length=LENGTH,
        micro_rows=draw(st.sampled_from([1, 2, 8])),
        pack={
            "method": draw(st.sampled_from(["best_fit", "concat_and_split", "none"])),
            "lookahead_rows": draw(st.integers(0, 2)),
            "overlong": draw(st.sampled_from(["split", "truncate"])),
        },
        mix={"amounts": wanted},
        runtime={"prefetch_steps": draw(st.sampled_from([1, 2, 4, 13]))},
    )
    mix = with_packs(mix, [draw(packs) for _ in names])
    return {"mix": mix, "epochs": epochs, **draw(places())}


def wanted_of(world, source):
    """Count the tokens of an amount in the records of its source, one after another."""
    mix = world["mix"]
    amount, rows = mix.mix.amounts[mix.names[source]], world["epochs"][source]
    truncates = mix.pack.overlong == "truncate"
    found: Counter[int] = Counter()
    position = samples = tokens = 0
    while True:
        if amount.epochs and position >= Fraction(amount.epochs) * len(rows) // 1:
            return found
        for sub, length in enumerate(rows[position % len(rows)]):
            kept = tokens_of(source, position, sub, length)[: LENGTH if truncates else MANY]
            samples += 1
            for begin in range(0, len(kept), LENGTH):  # samples that are drawn at once
                found.update(kept[begin : begin + LENGTH].tolist())
                tokens += len(kept[begin : begin + LENGTH])
                if amount.tokens and tokens >= amount.tokens:
                    return found
            if amount.samples and samples == amount.samples:
                return found
        position += 1


@given(worlds(), st.integers(1, 20), places(), st.data())
def test_of_every_source_exactly_its_amount_is_trained_on_wherever_the_run_is_resumed(
    world, first_read, elsewhere, data
):
    """The journal must also fold to the planner's states: each run is checked for all promises."""
    run, digests = simulated(world, first_read)

    wanted = sum((wanted_of(world, s) for s in range(len(world["epochs"]))), Counter())
    assert trained(run) == wanted
    require_journal_folds(run)

    if not run.states:  # a part of an epoch whose records give no sample
        assert not wanted
        return
    at = data.draw(st.sampled_from(sorted(run.states)))
    first_read = data.draw(st.integers(1, 20))
    _, rest = simulated(world | elsewhere, first_read, state=saved_state(run, at))
    assert rest == digests[at:]


@given(worlds(whole_epochs=True), st.integers(1, 20))
def test_one_epoch_of_every_source_is_every_document_exactly_once(world, first_read):
    simulation, _ = simulated(world, first_read)

    found = trained(simulation)
    assert set(found.values()) == {1}
    assert found == sum((wanted_of(world, s) for s in range(len(world["epochs"]))), Counter())


@given(worlds(), st.integers(0, 20))
def test_the_steps_are_the_same_however_much_is_known_ahead(world, known):
    assert memberships(world, known) == memberships(world, 400)


@given(worlds(), st.integers(0, 40), st.sampled_from([2, 3, 8, 40]))
def test_steps_that_are_drawn_together_are_those_that_are_drawn_one_by_one(world, known, most):
    together = windows(world, known, most)

    assert [step for window in together for step in window] == memberships(world, 400)


@given(worlds(), st.lists(st.integers(0, 9), min_size=3, max_size=3), st.integers(1, 30))
def test_a_draw_that_starves_waits_for_no_source_but_those_that_it_names(world, known, more):
    for starved, with_more_of_others in starved_draws(world, known, more):
        assert with_more_of_others == starved


@given(
    st.lists(st.integers(1, 16), min_size=12, max_size=30),
    st.lists(st.integers(1, 16), min_size=12, max_size=30),
    st.integers(60, 200),
)
def test_all_sources_are_as_far_as_each_other_in_every_step(one, other, tokens):
    mix = a_mix(
        version=2,
        rows=2,
        length=LENGTH,
        micro_rows=1,
        pack={"lookahead_rows": 0, "method": "concat_and_split"},
        mix={"amounts": {"code": {"epochs": 2}, "web": {"tokens": tokens}}},
    )
    world = {"mix": mix, "epochs": [[[n] for n in one], [[n] for n in other]]}
    wanted = (2 * len(one), tokens)
    state = MixState.start(2)

    while True:
        ahead = known_ahead(state, world["epochs"], 400)
        found = membership_of(mix, state, ahead, [len(one), len(other)])
        if isinstance(found, Exhausted):
            break
        assert not isinstance(found, Starved)
        state = found.after
        parts = [drawn / whole for drawn, whole in zip(state.drawn_S, wanted, strict=True)]
        # One draw of either source: a record, and sixteen tokens.
        assert abs(parts[0] - parts[1]) <= 1 / wanted[0] + 2 * LENGTH / wanted[1] + 1e-6
    assert state.drawn_S[0] == wanted[0]
    assert tokens <= state.drawn_S[1] < tokens + LENGTH


def test_the_rest_of_a_last_sample_is_waited_for_where_it_is_not_known_yet():
    mix = a_mix(
        version=2,
        sources=("web",),
        rows=2,
        length=LENGTH,
        micro_rows=1,
        pack={"lookahead_rows": 0},
        mix={"amounts": {"web": {"samples": 1}}},
    )
    world = {"mix": mix, "epochs": [[[5 * LENGTH]]]}

    steps = memberships(world, 0)

    assert [len(pieces) for pieces, *_ in steps] == [2, 2, 1]
