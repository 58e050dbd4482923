"""Saves that do not fit: refused before a byte is written, or told and cleared away where the room went meanwhile."""

import errno
import os
import shutil
from types import SimpleNamespace

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from fusefs.stores.local.store import LocalStore
from fusefs.stores.memory import MemoryStore
from fusefs.stores.protocol import Usage
from omniload.base.errors import StateError, UnavailableError
from tests.support.disks import a_tmpfs
from tests.support.fusefs.builders import object_paths, some_files
from tests.support.fusefs.faulty_store import FaultyStore
from tests.support.trainer.moe_builders import (
    a_batch,
    a_config,
    a_microbatch,
    a_model,
    an_optimizer,
    rows_of,
)
from trainer_integration.checkpoint import checkpoints as checkpoint_module
from trainer_integration.checkpoint.checkpoints import Checkpoints
from trainer_integration.checkpoint.place import StorePlace
from trainer_integration.checkpoint.save_errors import own_errors
from trainer_integration.checkpoint.striped.writer import StripedCheckpoints
from trainer_integration.training.step import train_step

LOADER = {"version": 1, "next_step": 1}
TOLD = r"step-00000001 needs \d+ bytes .*, \d+ bytes .* free.*; make room, .*--resume latest"


@pytest.fixture
def run():
    model = a_model(vocab_size=20_000)  # about 7 MiB with the optimiser's state
    optimizer = an_optimizer(model)
    train_step(model, optimizer, a_batch(0, [a_microbatch(rows_of(0))]))
    return model, optimizer


def checkpoints_in(folder):
    return Checkpoints(folder, a_config().model_dump())


def test_a_save_that_does_not_fit_a_disk_is_refused_before_it_is_begun(run, tmp_path):
    with a_tmpfs(tmp_path, "4M"):
        with pytest.raises(StateError, match=TOLD) as told:
            checkpoints_in(tmp_path).save(1, *run, LOADER)

        assert told.value.exit_code == 4, "which a launcher does not try again"
        assert told.value.__cause__ is None, "no write has failed"
        assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_during_a_save_is_told_and_the_half_is_removed(
    run, tmp_path, monkeypatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40))
    with a_tmpfs(tmp_path, "4M"):
        with pytest.raises(StateError, match=TOLD):
            checkpoints_in(tmp_path).save(1, *run, LOADER)

        assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_at_the_commit_leaves_the_checkpoint_before(run, tmp_path, monkeypatch):
    def full(file, value):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    checkpoints_in(tmp_path).save(1, *run, LOADER)
    monkeypatch.setattr(checkpoint_module, "write_sealed_json", full)
    with pytest.raises(StateError, match=TOLD.replace("1 needs", "2 needs")):
        checkpoints_in(tmp_path).save(2, *run, LOADER)

    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_save_that_does_not_fit_a_store_is_refused_before_it_is_begun(run):
    store = MemoryStore()
    store.usage = lambda: Usage(total_bytes=8 << 20, free_bytes=4 << 20)
    with some_files(store) as files:
        with pytest.raises(StateError, match=TOLD):
            StripedCheckpoints(StorePlace(files, "run"), {}).save(1, *run, LOADER)

        assert object_paths(store) == []


def test_a_store_that_fills_up_during_a_save_is_told_and_the_half_is_removed(run, tmp_path):
    class Unknowing(LocalStore):
        def usage(self):
            return None

    with a_tmpfs(tmp_path, "4M"), some_files(Unknowing(str(tmp_path))) as files:
        place = StorePlace(files, "run")
        with pytest.raises(
            StateError, match=r"needs .* an unknown number of bytes is free: rank 0"
        ):
            StripedCheckpoints(place, {}).save(1, *run, LOADER)

        assert place.steps() == place.unfinished() == ()


def test_a_store_that_says_itself_that_it_is_full_is_believed(run):
    def full(*_):
        return OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    store = FaultyStore(MemoryStore(), {("create", 3): full})
    with some_files(store) as files, pytest.raises(StateError, match="make room"):
        StripedCheckpoints(StorePlace(files, "run"), {}).save(1, *run, LOADER)


@pytest.mark.parametrize(
    ("fault", "told", "words"),
    [
        (OSError(errno.EIO, "bad disk"), UnavailableError, "bad disk; try again"),
        (RuntimeError("No space left on device (os error 28)"), StateError, "make room"),
        (RuntimeError("odd"), StateError, "RuntimeError: odd; nothing was saved"),
        (StateError("of a rank"), StateError, "of a rank"),
    ],
)
def test_no_exception_of_torch_that_is_no_error_leaves_a_save(fault, told, words):
    failures = {0: (RuntimeError("the peer is gone"), None), 1: (fault, None)}
    if not isinstance(fault, StateError):
        del failures[0]

    with (
        pytest.raises(told, match=words),
        own_errors("step-1", "nothing was saved", need=9, room=lambda: 3),
    ):
        raise CheckpointException("save", failures)
