"""Dynamic sampling over random rewards, ranks and kills equals a plain loop over all prompts, with each group once."""

import json
import random
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plane.sampling import (
    Ranks,
    as_told,
    expected_batches,
    kept_of,
    some_steps,
)

MOST_ROUNDS = 99
WORLDS = st.integers(1, 3)


@st.composite
def runs(draw):
    """Return steps of prompts, and options of a sampler."""
    steps = some_steps(draw(st.lists(st.integers(0, 7), min_size=1, max_size=8)))
    settings = {
        "groups": draw(st.integers(1, 5)),
        "surplus": draw(st.sampled_from(["carry", "drop"])),
        "max_rounds": MOST_ROUNDS,
    }
    return steps, settings, draw(st.integers(0, 1 << 32))


def rewards_by(seed, num_answers=3):
    """Return rewards of each prompt; about half of the prompts have equal rewards."""
    return lambda key: random.Random(f"{seed} {key}").choice(
        [[1.0] * num_answers, [-1.0] * num_answers, [1.0] + [-1.0] * (num_answers - 1)]
    )


def rollout_by(rewards_of):
    return lambda prompts: np.array([rewards_of(prompt.key) for prompt in prompts])


def trained(batches):
    return [key for batch in batches for _, key, _ in as_told(batch)]


@given(runs(), WORLDS)
def test_batches_are_those_of_a_plain_loop_and_every_group_is_counted_once(run, num_ranks):
    steps, settings, seed = run
    rewards_of = rewards_by(seed)
    ranks = Ranks(steps, num_ranks, **settings)
    step_of = {key[:3]: number for number, step in enumerate(steps) for key, _ in step}

    found = ranks.batches(rollout_by(rewards_of))

    wanted, left = expected_batches(steps, rewards_of, settings["groups"], settings["surplus"])
    assert [
        (batch[0].rounds, Counter(step_of[key] for _, key, _ in as_told(batch))) for batch in found
    ] == [(rounds, Counter(of)) for rounds, of in wanted]
    keys = trained(found)
    worth = set().union(*(kept_of(step, rewards_of) for step in steps))
    assert len(set(keys)) == len(keys)
    assert set(keys) <= worth
    shares = [[len(part) for part in batch] for batch in found]
    assert all(sum(share) == settings["groups"] for share in shares)
    assert all(max(share) - min(share) <= 1 for share in shares)
    counts = ranks.samplers[0].counts
    assert all(each.is_whole() for each in counts.values())
    assert sum(each.drawn for each in counts.values()) == sum(map(len, steps))
    assert sum(each.kept for each in counts.values()) == len(keys)
    assert sum(each.waiting for each in counts.values()) == len(left)
    for name, number in (("easy", 0), ("hard", 1)):
        rewards = [rewards_of(k[:3]) for step in steps for k, _ in step if k[0] == number]
        if rewards:
            assert counts[name].all_right == sum(set(each) == {1.0} for each in rewards)
            assert counts[name].all_wrong == sum(set(each) == {-1.0} for each in rewards)
            assert counts[name].right_answers == sum(each.count(1.0) for each in rewards)


LIVES = st.lists(st.tuples(WORLDS, st.integers(0, 4), st.integers(0, 8), st.booleans()), max_size=5)
"""Ranks, requested batches, steps that the data has by then, and whether the life ends by a kill."""


@given(runs(), LIVES)
def test_a_run_that_is_killed_and_resumed_on_other_ranks_goes_on_alike_and_replays(run, lives):
    steps, settings, seed = run
    rollout = rollout_by(rewards_by(seed))
    whole = Ranks(steps, 1, **settings).batches(rollout)
    with tempfile.TemporaryDirectory() as folder:
        told, digests, state = {}, {}, None
        for num_ranks, num_batches, num_steps, is_killed in [*lives, (2, MOST_ROUNDS, 8, False)]:
            there = steps[: max(num_steps, state["loader"]["step"] if state else 0)]
            ranks = Ranks(there, num_ranks, run_dir=Path(folder), state=state, **settings)
            for _ in range(num_batches):
                batch = ranks.next_batch(rollout)
                if batch[0] is not None:
                    assert told.setdefault(batch[0].number, as_told(batch)) == as_told(batch)
                    assert digests.setdefault(batch[0].number, batch[0].digest) == batch[0].digest
                if (
                    not is_killed
                ):  # a killed life has trained on batches that no checkpoint contains
                    state = json.loads(json.dumps(ranks.state_dict()))
                if batch[0] is None:
                    break
        counts = ranks.samplers[0].counts
        replayed = Ranks(steps, 3, run_dir=Path(folder), **settings).batches() if told else []

    assert [told[number] for number in range(len(told))] == [as_told(each) for each in whole]
    assert [as_told(batch) for batch in replayed] == [as_told(each) for each in whole]
    assert [batch[0].digest for batch in replayed] == [each[0].digest for each in whole]
    assert [digests[number] for number in range(len(told))] == [each[0].digest for each in whole]
    groups = [group for batch in replayed for part in batch for group in part.groups]
    assert all(group.rewards is None for group in groups)
    assert sum(each.drawn for each in counts.values()) == sum(map(len, steps))
    assert all(each.is_whole() for each in counts.values())
