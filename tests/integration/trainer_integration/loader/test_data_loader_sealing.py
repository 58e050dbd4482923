"""A sealed batch against what torch's own pickler for processes makes of it."""

import multiprocessing
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils import collate, worker

from tests.support.trainer.loaders import came_from
from trainer_integration.loader.transport.room import Room
from trainer_integration.loader.transport.sealing import SealingCollate


class Pair(NamedTuple):
    left: torch.Tensor
    right: bytes


@pytest.fixture
def in_worker(monkeypatch):
    """Be worker 0: torch's collate knows no other way to ask."""
    info = worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)
    monkeypatch.setattr(worker, "_worker_info", info)
    monkeypatch.setattr(
        collate, "default_collate_fn_map", table := dict(collate.default_collate_fn_map)
    )
    monkeypatch.setattr(
        "trainer_integration.loader.transport.sealing.default_collate_fn_map", table
    )


def sent(batch, room, collate_fn=lambda batch: batch):
    """Return a batch as the consumer gets it."""
    return pickle.loads(ForkingPickler.dumps(SealingCollate(collate_fn, room)(batch)))


def many(*shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


BATCHES = {
    "tensor": many(100, 40),
    "small": many(3),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "bool": many(5000) % 2 == 0,
    "half": many(3000, dtype=torch.bfloat16),
    "complex": many(3000, dtype=torch.complex64),
    "transposed": many(60, 70).T,
    "columns": many(60, 70)[:, 1:],
    "channels last": many(4, 3, 16, 16).to(memory_format=torch.channels_last),
    "row of many": many(1000, 1000)[3],
    "expanded": many(1).expand(5000),
    "gradient": many(1000).requires_grad_(),
    "sparse": many(30, 30).to_sparse(),
    "conjugate": many(3000, dtype=torch.complex64).conj(),
    "nested": {"a": [many(2000), ("text", 1, None, many(2))], "p": Pair(many(900), b"x")},
    "array": np.arange(5000),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.usefixtures("in_worker")
@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_arrives_as_torch_sends_it(name):
    room = Room(1, 1 << 20)
    got = sent(BATCHES[name], room)
    expected = pickle.loads(ForkingPickler.dumps(BATCHES[name]))

    same(got, expected)


def same(got, expected):
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert got.dtype is expected.dtype
        assert got.layout is expected.layout
        assert got.requires_grad == expected.requires_grad
        assert torch.equal(got.to_dense(), expected.to_dense())
        if expected.layout is torch.strided:
            assert got.stride() == expected.stride()
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key, value in expected.items():
            same(got[key], value)
    elif isinstance(expected, list | tuple):
        for ours, theirs in zip(got, expected, strict=True):
            same(ours, theirs)
    elif isinstance(expected, np.ndarray):
        assert np.array_equal(got, expected)
    else:
        assert got == expected


@pytest.mark.usefixtures("in_worker")
@pytest.mark.parametrize("length", [4, 4000])
def test_views_of_one_storage_stay_views_of_one(length):
    numbers = many(length)
    first, again, tail = sent([numbers, numbers, numbers[1:]], Room(1, 1 << 20))
    first[2] = -1

    assert again is first
    assert tail[1] == -1
    assert tail.tolist() == first.tolist()[1:]


@pytest.mark.usefixtures("in_worker")
def test_torchs_collate_stacks_straight_into_the_shared_memory(monkeypatch):
    room, samples = Room(1, 1 << 20), [many(700), many(700) + 1]
    copies = []
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *a, **k: copies.append(a))
    got = sent([(sample, 3) for sample in samples], room, default_collate)

    assert torch.equal(got[0], torch.stack(samples))
    assert got[1].tolist() == [3, 3]
    assert room.held == 1
    assert copies == []


@pytest.mark.usefixtures("in_worker")
def test_memory_that_a_collate_keeps_is_not_given_away():
    kept = []

    def keeping(batch):
        kept.append(default_collate(batch))
        return kept[0]

    room = Room(1, 1 << 20)
    seal = SealingCollate(keeping, room)
    first = pickle.loads(ForkingPickler.dumps(seal([many(1000)])))
    del first
    seal([many(1000) + 5])

    assert torch.equal(kept[0], many(1, 1000))


@pytest.mark.usefixtures("in_worker")
def test_what_finds_no_room_goes_torchs_way():
    room = Room(1, 4096)
    first, second = sent([many(1000), many(1000) + 1], room)

    assert room.held == 1
    assert first.tolist() == many(1000).tolist()
    assert second.tolist() == (many(1000) + 1).tolist()


class Torn:
    def __reduce__(self):
        raise LookupError("torn")


@pytest.mark.usefixtures("in_worker")
@pytest.mark.parametrize(
    ("batch", "collate_fn"),
    [([many(1000), Torn()], list), ([many(1000), many(1001)], default_collate)],
    ids=["pickling", "stacking"],
)
def test_a_batch_that_fails_leaves_no_block_behind(batch, collate_fn):
    room = Room(1, 8192)
    seal = SealingCollate(collate_fn, room)
    for _ in range(4):
        with pytest.raises((LookupError, RuntimeError)):
            seal(batch)
    seal._own.collect()

    assert seal._own.take(8192) is not None


def test_messages_of_a_worker_that_began_with_another_python_come_in_order_too(spawns_warm):
    sizes = [100_000, 10]  # a short one behind a long one overtakes it while the thread writes

    assert came_from(multiprocessing.get_context("spawn"), sizes) == list(enumerate(sizes))
