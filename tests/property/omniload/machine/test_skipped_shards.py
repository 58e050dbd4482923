"""Shards are left out of a simulated job while it runs: the samples are a function of mix, seed and edits alone.

The model is ``reference_digests``, which filters the records known before a step by the edits of that step.
"""

from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import ConfigError
from omniload.mix.edits.edit import SetWeights, SkipShard, Undo
from omniload.mix.edits.history import History
from tests.property.omniload.machine.test_edits import (
    NAMES,
    STEPS,
    keys_by_step,
    mixes,
    require_decided_and_resumed,
    require_replayed,
    simulated,
    six_epochs,
    skipping,
    skips,
    three_epochs,
    weights,
)
from tests.property.omniload.machine.test_edits import changes as other_changes
from tests.support.examples import few
from tests.support.plane.builders import a_mix
from tests.support.plane.drawn_runs import worlds
from tests.support.plane.edits.promises import taken_in
from tests.support.plane.reference import SHARDS, reference_digests, shard_of

steps = st.none() | st.integers(0, STEPS - 1)


def skipped(name, number):
    return SkipShard(file=f"{name}/{number}.parquet", source=name, number=number, of=SHARDS)


@st.composite
def changes(draw):
    """Changes, most of which leave a shard out or take that back; each source keeps shard 0, which gives samples."""
    asked = draw(other_changes())
    for _ in range(draw(st.integers(1, 4))):
        name, number = draw(st.sampled_from(NAMES)), draw(st.integers(1, SHARDS - 1))
        at = draw(st.integers(0, len(asked)))
        asked.insert(at, (skipped(name, number), draw(steps)))
        if draw(st.booleans()):
            asked.insert(at + 1, (Undo(), draw(steps)))
    return asked


@given(mixes(), changes(), worlds(), worlds(), six_epochs, st.data())
def test_a_run_that_leaves_shards_out_is_what_mix_and_edits_decide_and_goes_on_in_another_world(
    mix, asked, world, other, lengths, data
):
    run, digests = simulated(mix, lengths, world, changes=asked)

    require_decided_and_resumed(run, digests, lengths, other, data)


@few(10, soak=200)
@given(mixes(), changes(), worlds(), six_epochs)
def test_a_replay_that_knows_them_from_the_start_gives_the_same_steps(mix, asked, world, lengths):
    require_replayed(mix, asked, world, lengths)


@given(mixes(), worlds(), three_epochs, st.integers(0, STEPS - 2), st.integers(1, SHARDS - 1))
def test_of_a_shard_only_what_is_begun_is_drawn_and_of_the_others_each_record_once_in_order(
    mix, world, lengths, step, number
):
    name = NAMES[1]
    source = mix.names.index(name)
    history = History(mix).edited(skipped(name, number), step)
    simulation, _ = simulated(mix, lengths, world, edits=history.edits)
    until = max(simulation.states)
    last = simulation.states[until]
    trained = [k for at, keys in keys_by_step(simulation).items() if at < until for k in keys]
    waiting = {(mix.names.index(row[0]), *row[1:3]) for row in last["carried"]}
    drawn = {k[:3] for k in trained} | waiting
    # The record at the step's cursor may have begun; earlier records may be of any shard.
    begun = (
        tuple(simulation.states[step]["sources"][name]["cursor"])
        if step in simulation.states
        else (0, 0, 0)
    )
    first_free = begun[0] + (begun[1:] != (0, 0))

    assert len({*trained}) == len(trained)
    for s, position, _ in drawn:
        assert s != source or position < first_free or shard_of(lengths[s], position) != number
    if mix.pack.method == "concat_and_split" or step not in simulation.states:
        return
    for s, of in enumerate(mix.names):
        reached = tuple(last["sources"][of]["cursor"])
        due = {
            (s, p, i)
            for p in range(reached[0] + 1)
            for i in range(len(lengths[s][p % len(lengths[s])]))
            if (p, i) < reached[:2] or ((p, i) == reached[:2] and reached[2])
            if s != source or p < first_free or shard_of(lengths[s], p) != number
        }
        assert {key for key in drawn if key[0] == s} == due


@few(10, soak=200)
@given(mixes(), changes(), worlds(), worlds(), six_epochs, skips, st.data())
def test_steps_are_skipped_of_a_run_that_leaves_shards_out(
    mix, asked, world, other, lengths, skip, data
):
    """Pieces that are carried over the skipped steps may be of a shard that is left out during those steps."""
    plain, _ = simulated(mix, lengths, world, changes=asked)
    history = skipping(plain, *skip)
    for change in (skipped(NAMES[1], 1), skipped(NAMES[2], 2), SetWeights(weights={NAMES[0]: 3})):
        if data.draw(st.booleans()):
            at = data.draw(st.integers(skip[0], STEPS))
            with suppress(ConfigError):
                history = history.edited(change, at)

    first, digests = simulated(mix, lengths, world, edits=history.edits)

    assert digests == reference_digests(history, lengths, num_steps=STEPS)
    saved = {step: taken_in(first, step, history) for step in first.states}
    at = data.draw(st.sampled_from(sorted(saved)))
    _, rest = simulated(mix, lengths, other, state=saved[at], edits=history.edits)
    assert rest == digests[at:]


@few(5, soak=50)
@given(st.sampled_from([1, 4]), st.integers(0, 1 << 30))
def test_loaders_hold_nothing_of_a_shard_that_is_left_out(prefetch, seed):
    """A shard may be larger than memory, and all of it may lie between two drawn records."""
    mix = a_mix(sources=NAMES, rows=2, length=16, runtime={"prefetch_steps": prefetch})
    large = 20_000
    lengths = [[[4] if shard == 0 else [large] for shard in range(SHARDS)]] * 3
    history = History(mix)
    for name in NAMES:
        for number in range(1, SHARDS):
            history = history.edited(skipped(name, number), 0)

    simulation, digests = simulated(mix, lengths, {"seed": seed}, edits=history.edits)

    assert digests == reference_digests(history, lengths, num_steps=STEPS)
    assert simulation.most_held < 4 * large


@given(mixes(), worlds(), three_epochs, st.lists(weights, min_size=1, max_size=2))
def test_undone_at_its_own_step_a_shard_was_never_left_out(mix, world, lengths, given_weights):
    history = History(mix).edited(SetWeights(weights={NAMES[0]: 1 + sum(given_weights)}), 2)
    before = history
    history = history.edited(skipped(NAMES[0], 1), 5).edited(Undo(), 5)
    _, digests = simulated(mix, lengths, world, edits=history.edits)

    assert digests == reference_digests(before, lengths, num_steps=STEPS)
