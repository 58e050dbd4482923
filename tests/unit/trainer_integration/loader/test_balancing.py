"""cost_fn=: ranks that cost alike, and the loss that goes with it."""

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from omniload.base.errors import ConfigError
from tests.support.trainer.loaders import Numbers, plain
from trainer_integration import DataLoader, token_mean

COSTS = np.random.default_rng(0).lognormal(0, 1, 10_000)


class Reversed(DistributedSampler):
    """A sampler of the user's own."""

    def __iter__(self):
        return reversed(list(super().__iter__()))


def ranks_of(samples, ranks, *, kind=DistributedSampler, loader=DataLoader, epoch=0, **keywords):
    made = []
    for rank in range(ranks):
        sampler = kind(Numbers(samples), ranks, rank, shuffle=True)
        sampler.set_epoch(epoch)
        made.append(loader(Numbers(samples), sampler=sampler, **keywords))
    return made


def steps(loaders):
    return [list(step) for step in zip(*map(plain, loaders), strict=True)]


def members(taken):
    return [sorted(chain.from_iterable(step)) for step in taken]


def loads(step):
    return [COSTS[samples].sum() for samples in step]


@pytest.mark.parametrize("kind", [DistributedSampler, Reversed])
@pytest.mark.parametrize("drop_last", [False, True])
@given(
    samples=st.integers(1, 60),
    ranks=st.integers(1, 4),
    size=st.integers(1, 5),
    epoch=st.integers(0, 2),
)
def test_each_step_is_of_torchs_samples_and_ranks_have_as_many(
    kind, drop_last, samples, ranks, size, epoch
):
    form = {"kind": kind, "epoch": epoch, "batch_size": size, "drop_last": drop_last}
    theirs = steps(ranks_of(samples, ranks, loader=torch.utils.data.DataLoader, **form))
    ours = steps(ranks_of(samples, ranks, cost_fn=COSTS.__getitem__, **form))

    assert [[len(part) for part in step] for step in ours] == [
        [len(part) for part in step] for step in theirs
    ]
    assert members(ours) == members(theirs)


@pytest.mark.parametrize("counts", ["equal", "free"])
def test_the_dearest_rank_of_a_step_is_nearer_to_the_mean(counts):
    form = {"batch_size": 16}
    theirs = steps(ranks_of(2_560, 4, loader=torch.utils.data.DataLoader, **form))
    ours = steps(ranks_of(2_560, 4, cost_fn=COSTS.__getitem__, cost_counts=counts, **form))

    even = sum(COSTS[:2_560]) / 4
    before, after = (sum(max(loads(step)) for step in each) for each in (theirs, ours))
    assert before > 1.2 * even
    assert after < 1.01 * even
    assert members(ours) == members(theirs)
    assert all(part for step in ours for part in step)


def test_a_place_is_found_again_without_asking_for_costs_before_it():
    asked = []

    def cost(index):
        asked.append(index)
        return COSTS[index]

    whole = ranks_of(400, 2, batch_size=4, cost_fn=cost)[1]
    batches = iter(whole)
    for _ in range(30):
        next(batches)
    state, expected = whole.state_dict(), plain(batches)
    asked.clear()
    again = ranks_of(400, 2, batch_size=4, cost_fn=cost)[1]
    again.load_state_dict(state)

    assert plain(again) == expected
    assert len(asked) == 20 * 4 * 2


def test_attributes_are_torchs():
    loader = ranks_of(40, 2, batch_size=4, cost_fn=COSTS.__getitem__)[0]

    assert (loader.batch_size, type(loader.sampler), len(loader)) == (4, DistributedSampler, 5)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"cost_fn": 3}, "is no function"),
        ({"cost_fn": len, "cost_counts": "odd"}, "not one of"),
        ({"cost_fn": len}, "found SequentialSampler"),
        ({"cost_fn": len, "batch_size": None}, "found NoneType"),
    ],
)
def test_what_cannot_be_dealt_is_refused(keywords, said):
    with pytest.raises(ConfigError, match=said):
        DataLoader(Numbers(8), **{"batch_size": 2, **keywords})


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_a_cost_that_is_none_is_told_with_its_index(cost):
    loader = ranks_of(8, 2, batch_size=2, cost_fn=lambda _: cost)[0]

    with pytest.raises(ConfigError, match=r"cost_fn\(\d\) returned"):
        next(iter(loader))


def test_alone_the_loss_is_the_mean_over_tokens():
    assert token_mean(torch.tensor(12.0), 4).item() == 3.0


def test_a_step_without_tokens_is_refused():
    with pytest.raises(ValueError, match="0 tokens on 1 rank"):
        token_mean(torch.tensor(0.0), 0)
