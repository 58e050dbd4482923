"""States that torchdata wrote: its own loader says which batches are left."""

import copy
import re

import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from omniload.base.errors import StateError
from trainer_integration import DataLoader

SAMPLES = range(103)
STOP = 5
PLACE = {"_snapshot_step", "_steps_since_snapshot", "_iterator_finished"}


def left_of(loader, state):
    loader.load_state_dict(copy.deepcopy(state))
    return [batch.tolist() for batch in loader]


def saved(workers, steps=STOP, **keywords):
    """Return torchdata's state after some batches, and the batches that its iterator then gives."""
    loader = StatefulDataLoader(SAMPLES, num_workers=workers, **keywords)
    batches = iter(loader)
    for _ in range(steps):
        next(batches)
    state = loader.state_dict()
    return state, [batch.tolist() for batch in batches]


def shuffled(seed=3):
    return {"shuffle": True, "generator": torch.Generator().manual_seed(seed)}


def dealt():
    sampler = DistributedSampler(SAMPLES, num_replicas=2, rank=1, seed=5)
    sampler.set_epoch(4)
    return {"sampler": sampler}


@pytest.mark.parametrize("order", [dict, shuffled, dealt], ids=["stored", "shuffled", "dealt"])
@pytest.mark.parametrize(("theirs", "ours"), [(0, 0), (0, 2), (2, 0), (2, 1)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_batches_that_are_left_are_those_of_torchdata(order, theirs, ours, drop_last):
    state, left = saved(theirs, batch_size=4, drop_last=drop_last, **order())
    given = order()
    if "generator" in given:
        given["generator"].manual_seed(99)  # the state sets it

    loader = DataLoader(SAMPLES, batch_size=4, num_workers=ours, drop_last=drop_last, **given)

    assert left_of(loader, state) == left
    assert len(left) > STOP


@pytest.mark.parametrize("every", [2, 3, 100])
def test_batches_behind_the_last_snapshot_of_workers_count_too(every):
    state, left = saved(2, batch_size=4, snapshot_every_n_steps=every, **shuffled())

    assert left_of(DataLoader(SAMPLES, batch_size=4, **shuffled(99)), state) == left


def test_one_that_shuffles_by_itself_goes_on_with_a_generator_to_set():
    state, left = saved(2, batch_size=4, shuffle=True)

    with pytest.raises(
        StateError, match=r"make the DataLoader with generator=torch\.Generator\(\)"
    ):
        DataLoader(SAMPLES, batch_size=4, shuffle=True).load_state_dict(state)

    loader = DataLoader(SAMPLES, batch_size=4, shuffle=True, generator=torch.Generator())
    assert left_of(loader, state) == left
    # From here on the state is ours.
    loader = DataLoader(SAMPLES, batch_size=4, shuffle=True, generator=torch.Generator())
    loader.load_state_dict(copy.deepcopy(state))
    batches = iter(loader)
    begun = [next(batches).tolist() for _ in range(3)]
    other = DataLoader(SAMPLES, batch_size=4, shuffle=True, generator=torch.Generator())
    assert begun + left_of(other, loader.state_dict()) == left


def test_a_state_of_an_epoch_that_ended_begins_the_next():
    loader = StatefulDataLoader(SAMPLES, batch_size=50)
    list(loader)

    assert [len(b) for b in left_of(DataLoader(SAMPLES, batch_size=50), loader.state_dict())] == [
        *(50, 50, 3)
    ]


class Stateful(IterableDataset):
    def __iter__(self):
        return iter(range(9))


class Counting:
    def __len__(self):
        return len(SAMPLES)

    def __getitem__(self, at):
        return at

    def state_dict(self):
        return {"read": 1}

    def load_state_dict(self, state):
        pass


def of(dataset, **keywords):
    loader = StatefulDataLoader(dataset, batch_size=4, **keywords)
    next(iter(loader))
    return loader.state_dict(), DataLoader(dataset, batch_size=4, **keywords)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: of(Stateful()), "of an iterable dataset"),
        (
            lambda: (of(Stateful(), num_workers=1)[0], DataLoader(SAMPLES, batch_size=4)),
            "of an iterable dataset, whose place lies in iterators of its workers",
        ),
        (lambda: of(Counting()), "holds one of the dataset's own"),
        (lambda: of(Counting(), num_workers=1), "holds one of the dataset's own"),
        (
            lambda: of(SAMPLES, sampler=WeightedRandomSampler([1.0] * 103, 103)),
            "does not say what WeightedRandomSampler had drawn",
        ),
        (
            lambda: of(SAMPLES, sampler=torch.utils.data.RandomSampler(SAMPLES, replacement=True)),
            "with replacement=True",
        ),
        (lambda: (saved(0, batch_size=4)[0], DataLoader(SAMPLES, batch_size=5)), "batch_size is 5"),
        (lambda: (saved(2, batch_size=4)[0], DataLoader(SAMPLES, batch_size=3)), "batch_size is 3"),
        # One batch of 4 is no short one of 8, and so are five of 20 none of 24.
        (
            lambda: (saved(0, 1, batch_size=4)[0], DataLoader(SAMPLES, batch_size=8)),
            "after 4 samples in 1 batch, and batch_size is 8",
        ),
        (
            lambda: (saved(2, batch_size=20)[0], DataLoader(SAMPLES, batch_size=24)),
            "batch_size is 24",
        ),
    ],
)
def test_what_it_does_not_hold_exactly_is_refused_with_the_reason(made, says):
    state, loader = made()

    with pytest.raises(StateError, match=re.escape(says)):
        loader.load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_one_is_refused_by_name(workers):
    state, left = saved(workers, batch_size=4, **shuffled())

    def places(value, path=()):
        yield path
        for key, below in value.items() if isinstance(value, dict) else ():
            yield from places(below, (*path, key))

    refused = 0
    for path in places(state):
        for wrong in (None, -1, 4, "x", [], 1 << 63):
            broken = copy.deepcopy(state)
            at = broken
            for key in path[:-1]:
                at = at[key]
            if not path:
                continue
            at[path[-1]] = wrong
            loader = DataLoader(SAMPLES, batch_size=4, **shuffled())
            try:
                found = left_of(loader, broken)
            except StateError:
                refused += 1
            else:  # a key that says nothing of the place; or the place itself: it has no digest
                assert found == left or path[-1] in PLACE
    assert refused > 30
