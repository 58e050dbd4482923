import threading

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from omniload.base.errors import StateError
from tests.support.trainer.fake_gpus import a_rank_of_many, fake_tensors
from tests.support.trainer.moe_builders import a_config, a_model, a_run, an_optimizer, train_on
from trainer_integration.checkpoint.checkpoints import Checkpoints
from trainer_integration.checkpoint.saving import BackgroundSaver

LOADER = {"version": 1, "next": 1}
WAIT_S = 30


class HeldUp(Checkpoints):
    """Writes only once it is let, and notes where what it writes lies."""

    def __init__(self, folder):
        super().__init__(folder, a_config().model_dump())
        self.may_write = threading.Event()
        self.places = []

    def write(self, step, tensors, *rest):
        assert self.may_write.wait(WAIT_S)
        self.places.append({name: tensor.data_ptr() for name, tensor in tensors.items()})
        return super().write(step, tensors, *rest)


@pytest.fixture
def run():
    return a_run()


def test_what_is_trained_while_a_save_is_written_is_not_in_it(run, tmp_path):
    model, optimizer = run
    checkpoints = HeldUp(tmp_path)
    saver = BackgroundSaver(checkpoints)
    before = [p.detach().clone() for p in model.parameters()]

    saver.start(1, checkpoints.tensors_at(1, model, optimizer), LOADER, {"tokens": 5})
    train_on(model, optimizer, 1)
    assert not saver.is_ready
    checkpoints.may_write.set()
    assert saver.finish().step == 1

    other = a_model(seed=5)
    restored = checkpoints.load(other, an_optimizer(other))
    assert (restored.step, restored.loader_state, restored.progress) == (1, LOADER, {"tokens": 5})
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))


def test_the_copy_of_the_last_save_is_used_again(run, tmp_path):
    model, optimizer = run
    checkpoints = HeldUp(tmp_path)
    checkpoints.may_write.set()
    saver = BackgroundSaver(checkpoints)
    for step in (1, 2):
        saver.start(step, checkpoints.tensors_at(step, model, optimizer), LOADER, {})
        saver.finish()

    first, second = checkpoints.places
    assert first == second
    assert first["model.embedding_VD"] != model.embedding_VD.data_ptr()


def test_a_save_that_fails_is_told_when_it_is_waited_for_and_the_next_may_follow(run, tmp_path):
    model, optimizer = run
    checkpoints = Checkpoints(tmp_path, a_config().model_dump())
    tensors = checkpoints.tensors_at(1, model, optimizer)
    saver = BackgroundSaver(checkpoints)
    checkpoints.save(1, model, optimizer, LOADER)

    saver.start(1, tensors, LOADER, {})
    with pytest.raises(StateError, match="exists already"):
        saver.finish()

    saver.start(2, tensors, LOADER, {})
    assert saver.finish().step == 2


def test_the_copy_of_what_lies_on_a_gpu_lies_on_the_host_also_of_a_shard(monkeypatch):
    """Of shards, torch would put the copy back to where the shards lie: a second model on each GPU."""
    taken = []

    class Noted:
        def write(self, _step, tensors, *_rest):
            taken.append(tensors)

    with a_rank_of_many(2, 1, device="cuda") as groups, fake_tensors(monkeypatch):
        whole = torch.empty(6, 4, device="cuda")
        part = torch.empty(3, 4, device="cuda")
        shard = DTensor.from_local(part, groups.mesh["dp"], (Shard(0),), run_check=False)
        saver = BackgroundSaver(Noted())
        for step in (1, 2):
            saver.start(step, {"whole": whole, "shard": shard}, LOADER, {})
            saver.finish()

    first, second = taken
    assert first["whole"].device.type == first["shard"].to_local().device.type == "cpu"
    assert first["shard"].placements == shard.placements
    assert (first["shard"].shape, first["shard"].to_local().shape) == ((6, 4), (3, 4))
    assert all(first[name] is second[name] for name in first)
