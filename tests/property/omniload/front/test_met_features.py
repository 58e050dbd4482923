"""Features that have tests of their own, where they meet: in one mix, held to a plain reading of its files.

Formats, masks, bad records, conditions, equal records, splits, transforms, packing of the mix and of each source,
weights, amounts, stages with ramps, orders; then ranks, readers, memory, caches and states, which change none of it.
"""

import json
from collections import Counter, defaultdict
from itertools import chain

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import omniload
from omniload.actors.local.plane import LocalPlane
from omniload.batch.digest import batch_digest, combined
from omniload.client import Client
from omniload.mix.config import load_mix
from tests.support.examples import few
from tests.support.plane.edits.mix_commands import json_of
from tests.support.plane.local_runs import a_spec
from tests.support.plane.sources.met_features import MetMix, Sample, met_mixes

seldom = settings(few(6, soak=300), suppress_health_check=[HealthCheck.function_scoped_fixture])
STEPS = 9


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def written(folder, drawn):
    mix = MetMix.written(folder, drawn)
    # A source that gives nothing is refused, which has tests of its own.
    assume(all(mix.samples().values()))
    return mix


def require_sound(batch):
    """Find that nothing of the padding is trained on, and that places begin anew with each document."""
    is_padding = batch.source_ids.reshape(-1) < 0
    places = np.concatenate([np.arange(n) for n in np.diff(batch.cu_seqlens)])
    assert not batch.tokens.reshape(-1)[is_padding].any()
    assert (batch.labels.reshape(-1)[is_padding] == -100).all()
    assert np.array_equal(batch.position_ids.reshape(-1)[~is_padding], places[~is_padding])
    assert batch.loss_tokens == np.count_nonzero(batch.labels != -100)


def samples_of(batches):
    """Put the pieces of samples together again; return how often each came, by the number of its source."""
    found = defaultdict(dict)
    for batch in batches:
        pieces = batch.pieces()
        labels = batch.labels.reshape(-1)[batch.source_ids.reshape(-1) >= 0].tolist()
        for piece in pieces:
            *sample, first = piece.key
            assert first not in found[tuple(sample)]
            found[tuple(sample)][first] = piece.tokens.tolist(), labels[: len(piece.tokens)]
            del labels[: len(piece.tokens)]
    drawn = defaultdict(Counter)
    for (source, *_), pieces in found.items():
        parts = zip(*(pieces[first] for first in sorted(pieces)), strict=True)
        drawn[source][Sample(*(tuple(chain.from_iterable(each)) for each in parts))] += 1
    return drawn


@given(data=st.data())
@seldom
def test_every_sample_comes_once_with_its_labels_in_as_many_steps_as_were_planned(tmp_path, data):
    mix = written(tmp_path, data.draw(met_mixes(ends=True)))

    with omniload.open(mix.path, arrays="numpy") as loader:
        batches = list(loader)
    plan = json_of("plan", mix.path)

    for batch in batches:
        require_sound(batch)
    drawn, expected = samples_of(batches), mix.samples()
    assert {name: drawn[s] for s, name in enumerate(sorted(expected))} == {
        name: Counter(samples) for name, samples in expected.items()
    }
    assert json_of("check", mix.path)["rows_per_step"] == mix.rows
    assert (plan["steps"], plan["steps_error"]) == (len(batches), 0.0)
    for name, samples in expected.items():
        assert plan["total"][name]["tokens"] == sum(len(each.tokens) for each in samples)
        assert plan["total"][name]["samples"] == pytest.approx(len(samples))


def steps_of(mix_path, dp, state=None):
    """Return what the steps of a run hold, by their number, and the states before them."""
    mix, folder = load_mix(mix_path)
    held, states = {}, {}
    with LocalPlane(a_spec(folder, mix, dp=dp, state=state, num_steps=STEPS)) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(dp)]
        while True:
            states[clients[0].next_step] = json.dumps(clients[0].state_dict())
            batches = [client.next_batch() for client in clients]
            if batches[0] is None:
                return held, states
            digest = combined(batch_digest(batch) for batch in batches)
            held[batches[0].step] = digest, batches[0].loss_tokens, batches[0].tokens_by_source


@given(data=st.data())
@seldom
def test_steps_are_the_same_on_other_ranks_run_in_other_ways_and_from_any_state(tmp_path, data):
    mix = written(tmp_path, data.draw(met_mixes(ends=data.draw(st.booleans()))))
    ranks = st.integers(1, mix.rows)

    held, states = steps_of(mix.path, data.draw(ranks))

    assert steps_of(mix.otherwise(0), data.draw(ranks)) == (held, states)
    for way in (1, 2):
        at = data.draw(st.sampled_from(sorted(held)))
        rest = steps_of(mix.otherwise(way), data.draw(ranks), json.loads(states[at]))
        assert rest == (
            {step: told for step, told in held.items() if step >= at},
            {step: state for step, state in states.items() if step >= at},
        )
