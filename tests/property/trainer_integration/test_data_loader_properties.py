"""A loader resumed at any place continues as torch's would have without the break."""

import json

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data import DataLoader as TorchLoader

from tests.support.examples import few
from tests.support.trainer.loaders import (
    Numbers,
    Stream,
    StreamWithState,
    plain,
    resumed_equals_unbroken,
)
from trainer_integration import DataLoader


class Eager(Sampler):
    """Draws from the global generator as soon as its order is requested."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(torch.randperm(self.length).tolist())

    def __len__(self):
        return self.length


def seeded():
    return torch.Generator().manual_seed(5)


SAMPLERS = {
    "sequential": lambda n: {},
    "shuffle": lambda n: {"shuffle": True},
    "shuffle by generator": lambda n: {"shuffle": True, "generator": seeded()},
    "replacement": lambda n: {
        "sampler": RandomSampler(range(n), replacement=True, num_samples=2 * n, generator=seeded())
    },
    "more than once": lambda n: {"sampler": RandomSampler(range(n), num_samples=n + 3)},
    "subset": lambda n: {"sampler": SubsetRandomSampler(range(0, n, 2))},
    "weighted": lambda n: {"sampler": WeightedRandomSampler([1.0] * n, n)},
    "distributed": lambda n: {"sampler": DistributedSampler(range(n), num_replicas=2, rank=1)},
    "eager": lambda n: {"sampler": Eager(n)},
    "list": lambda n: {"sampler": list(range(n))[::-1]},
}


@st.composite
def places(draw):
    length = draw(st.integers(1, 40))
    size = draw(st.one_of(st.none(), st.integers(1, 7)))
    drop_last = size is not None and draw(st.booleans())
    return draw(st.sampled_from(sorted(SAMPLERS))), length, size, drop_last


@given(places(), st.integers(0, 2), st.data())
@few(60, soak=1500)
def test_a_map_dataset_resumes_at_every_place_under_every_sampler(place, epoch, data):
    name, length, size, drop_last = place

    def made(kind):
        keywords = SAMPLERS[name](length)
        return kind(Numbers(length), batch_size=size, drop_last=drop_last, **keywords)

    position = data.draw(st.integers(0, len(made(TorchLoader))))

    resumed_equals_unbroken(
        lambda: made(TorchLoader),
        lambda: made(DataLoader),
        lambda: made(DataLoader),
        epoch=epoch,
        position=position,
    )


@given(
    st.sampled_from(sorted(SAMPLERS)), st.integers(2, 30), st.lists(st.integers(0, 4), max_size=5)
)
@example("shuffle by generator", 3, [0, 0])
@few(30, soak=600)
def test_a_state_of_a_resumed_epoch_resumes_again(name, length, steps):
    def made(kind):
        return kind(Numbers(length), batch_size=2, **SAMPLERS[name](length))

    torch.manual_seed(3)
    expected = plain(made(TorchLoader))
    torch.manual_seed(3)
    loader, got = made(DataLoader), []
    for step in steps:
        batches = iter(loader)
        got += plain(batch for _, batch in zip(range(step), batches, strict=False))
        state = json.loads(json.dumps(loader.state_dict()))
        if state["stage"] == "finished":
            break
        loader = made(DataLoader)
        loader.load_state_dict(state)
    else:
        got += plain(loader)

    assert got == expected


@given(
    st.sampled_from([Stream, StreamWithState]),
    st.integers(0, 20),
    st.one_of(st.none(), st.integers(1, 4)),
    st.integers(0, 1),
    st.data(),
)
@few(40, soak=1000)
def test_an_iterable_dataset_resumes_with_its_state_or_by_reading_again(
    kind, length, size, epoch, data
):
    position = data.draw(st.integers(0, length if size is None else -(-length // size)))

    resumed_equals_unbroken(
        lambda: TorchLoader(kind(length), batch_size=size),
        lambda: DataLoader(kind(length), batch_size=size),
        lambda: DataLoader(kind(length), batch_size=size),
        epoch=epoch,
        position=position,
    )


@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 30))
@few(16, soak=300)
def test_batch_samplers_of_torch_resume_too(length, size, position):
    def made(kind):
        sampler = RandomSampler(range(length), generator=seeded())
        return kind(Numbers(length), batch_sampler=BatchSampler(sampler, size, drop_last=False))

    resumed_equals_unbroken(
        lambda: made(TorchLoader),
        lambda: made(DataLoader),
        lambda: made(DataLoader),
        epoch=0,
        position=min(position, len(made(DataLoader))),
    )
