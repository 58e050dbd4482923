"""Loops written by the contracts of torchtitan and Megatron, over our loaders."""

from itertools import count

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

from omniload.base.errors import ConfigError, StateError, UnavailableError
from omniload.front.loader import Loader
from omniload.source.sample_data.corpus import build_sample_corpus
from tests.frameworks.conftest import MIX
from tests.support.trainer.host_ranks import run_ranks
from tests.support.trainer.loaders import Numbers, Stream, StreamWithState
from trainer_integration import DataLoader
from trainer_integration.hosts.megatron import MegatronIterator
from trainer_integration.hosts.torchtitan import TitanLoader

# DCP warns of running without a process group.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mix")
    build_sample_corpus(folder / "corpus", size=120_000, vocab_size=512)
    (folder / "mix.yaml").write_text(MIX, encoding="utf-8")
    return folder / "mix.yaml"


class DataloaderExhaustedError(Exception):
    """torchtitan's own error at the end of the data."""


def batches_of(loader):
    """torchtitan's generator: the end of the data is an error of its own."""
    data = iter(loader)
    while True:
        try:
            batch = next(data)
        except StopIteration as end:
            raise DataloaderExhaustedError from end
        yield batch


def titan(loader, rank=0, world_size=1):
    return TitanLoader(loader, dp_rank=rank, dp_world_size=world_size)


def digest(batch):
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    inputs, labels = batch
    return [inputs["input"].tolist(), inputs["positions"].tolist(), labels.tolist()]


@pytest.mark.parametrize("kind", ["map", "stream", "stream with state", "mix"])
def test_torchtitan_saves_by_dcp_and_resumes(kind, mix, tmp_path):
    def make():
        made = {
            "map": lambda: DataLoader(Numbers(12), 2, shuffle=True, num_workers=1),
            "stream": lambda: DataLoader(Stream(12), 2),
            "stream with state": lambda: DataLoader(StreamWithState(12), 2),
            "mix": lambda: DataLoader(mix, steps=6),
        }
        return titan(made[kind]())

    loader, unbroken = make(), []
    assert isinstance(loader, Stateful)
    batches = batches_of(loader)
    for number in range(6):
        unbroken.append(digest(next(batches)))
        if number == 2:
            dcp.save({"dataloader": loader}, checkpoint_id=tmp_path / "step-3", no_dist=True)
    with pytest.raises(DataloaderExhaustedError):
        next(batches)
    loader.close()
    resumed = make()
    resumed.load_state_dict({})
    dcp.load({"dataloader": resumed}, checkpoint_id=tmp_path / "step-3", no_dist=True)

    assert [digest(batch) for batch in resumed] == unbroken[3:]
    resumed.close()


def test_two_ranks_keep_a_key_each_in_one_checkpoint(warm_python, tmp_path):
    run_ranks(warm_python.path, "titan_rank.py", 2, str(tmp_path))


def test_torchtitan_is_told_what_does_not_fit():
    state = titan(DataLoader(Numbers(8)), 0, 2).state_dict()
    assert (state["version"], state["dp_world_size"]) == (1, 2)

    with pytest.raises(StateError, match="of 2 data-parallel ranks, this run has 4"):
        titan(DataLoader(Numbers(8)), 0, 4).load_state_dict(state)
    with pytest.raises(StateError, match=r"holds \['dp_rank_0'\], and nothing for dp_rank_1"):
        titan(DataLoader(Numbers(8)), 1, 2).load_state_dict(state)
    with pytest.raises(StateError, match="is damaged"):
        titan(DataLoader(Numbers(8)), 0, 2).load_state_dict(state | {"dp_rank_0": b"no state"})
    with pytest.raises(StateError, match="version 9"):
        titan(DataLoader(Numbers(8)), 0, 2).load_state_dict(state | {"version": 9})
    with pytest.raises(ConfigError, match="dp_rank is 2 of 2"):
        titan(DataLoader(Numbers(8)), 2, 2)


class RerunDataIterator:
    """Megatron wraps an external iterator so."""

    def __init__(self, iterable):
        self.iterable = iterable

    def __next__(self):
        return next(self.iterable)


def megatron_loop(iterator, steps, microbatches, folder=None, save_at=None):
    """Train by Megatron's contract; save as ``maybe_save_dataloader_state`` does."""
    seen, wrapped = [], RerunDataIterator(iterator)
    for step in range(steps):
        for _ in range(microbatches):
            batch = next(wrapped)
            seen.append(batch["tokens"].tolist() if isinstance(batch, dict) else batch.tolist())
        if step == save_at:
            state = {"dataloader_state_dict": wrapped.iterable.save_state()}
            torch.save(state, folder / "train_dataloader_dprank000.pt")
    return seen


@pytest.mark.parametrize("kind", ["map", "mix"])
def test_megatrons_hook_saves_a_place_that_is_restored(kind, mix, tmp_path):
    def make():
        # Eleven batches of two are no whole number of steps: an epoch ends inside one.
        generator = torch.Generator().manual_seed(4)
        loader = (
            DataLoader(mix, steps=8)
            if kind == "mix"
            else DataLoader(Numbers(10), 2, shuffle=True, generator=generator)
        )
        return loader, MegatronIterator(loader)

    loader, iterator = make()
    unbroken = megatron_loop(iterator, 4, 2, tmp_path, save_at=1)
    loader.close()
    loader, iterator = make()
    saved = torch.load(tmp_path / "train_dataloader_dprank000.pt", weights_only=True)
    iter(iterator)  # a wrapper may ask early
    iterator.restore_state(saved["dataloader_state_dict"])

    assert megatron_loop(iterator, 2, 2) == unbroken[4:]
    loader.close()


def test_a_microbatch_of_a_mix_has_megatrons_names_and_masks(mix):
    with DataLoader(mix) as loader:
        made = next(MegatronIterator(loader, attention_mask=True))
    with DataLoader(mix) as loader:
        batch = next(iter(loader))

    assert torch.equal(made["loss_mask"] > 0, batch.labels >= 0)
    assert made["labels"].min() >= 0
    assert torch.equal(made["labels"][batch.labels >= 0], batch.labels[batch.labels >= 0])
    assert torch.equal(made["attention_mask"], ~batch.attention_mask)
    assert torch.equal(made["cu_seqlens"], batch.cu_seqlens)


def test_what_a_mix_holds_out_is_evaluated_on_again_and_again(mix):
    held = mix.with_name("held.yaml")
    held.write_text(mix.read_text() + "splits: {eval: 0.3}\n", encoding="utf-8")
    with DataLoader(held, split="eval", steps=3) as loader:
        seen = [[digest(batch) for batch in titan(loader)] for _ in range(2)]
        iterator = MegatronIterator(loader)  # two evaluations of four microbatches each
        tokens = [next(iterator)["tokens"].tolist() for _ in range(8)]

    assert len(seen[0]) == 3
    assert seen[0] == seen[1]
    assert tokens == [made[0] for made in [*seen[0] * 2, *seen[0][:2]]]


@pytest.mark.parametrize("loop", [iter, lambda made: iter(titan(made)), MegatronIterator])
def test_a_loop_that_asks_on_behind_an_error_has_every_batch_of_a_mix(loop, mix, monkeypatch):
    turns = count()

    def late(loader, timeout=None):
        if next(turns) == 1:
            raise UnavailableError("it is not there yet")
        return next_batch(loader, timeout)

    next_batch = Loader.next_batch
    monkeypatch.setattr(Loader, "next_batch", late)
    with DataLoader(mix, steps=3) as loader:
        batches = loop(loader)
        next(batches)
        with pytest.raises(UnavailableError):
            next(batches)

        assert len(list(batches)) == 2


@pytest.mark.parametrize("made", [MegatronIterator, titan])
def test_labels_of_models_that_shift_are_refused(made, mix):
    with DataLoader(mix, labels="unshifted") as loader, pytest.raises(ConfigError, match="shifted"):
        next(iter(made(loader)))
