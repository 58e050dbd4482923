import errno
import os
import stat
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from omniload.base.errors import StateError
from tests.support.trainer.moe_builders import a_config, a_run, train_on
from trainer_integration.checkpoint import checkpoints
from trainer_integration.checkpoint.checkpoints import Checkpoints
from trainer_integration.checkpoint.folder import path_of, steps_in
from trainer_integration.checkpoint.saving import ALONE

LOADER = {"version": 1, "cursors": {"web": [3, 1 << 40]}, "note": "caf\u00e9"}


def checkpoints_in(folder, **changes):
    return Checkpoints(folder, a_config().model_dump(), **changes)


def test_a_run_that_is_resumed_goes_on_to_the_last_bit(tmp_path):
    model, optimizer = a_run(steps=2)
    checkpoints_in(tmp_path).save(2, model, optimizer, LOADER)
    resumed, resumed_optimizer = a_run(seed=9, steps=0)

    restored = checkpoints_in(tmp_path).load(resumed, resumed_optimizer)

    assert restored is not None
    assert restored.step == 2
    assert restored.loader_state == LOADER
    for step in (2, 3):
        expected, found = (
            train_on(model, optimizer, step),
            train_on(resumed, resumed_optimizer, step),
        )
        assert found.figures == expected.figures
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True)
    )


def test_loading_into_a_used_optimiser_replaces_its_state(tmp_path):
    model, optimizer = a_run(steps=2)
    checkpoints_in(tmp_path).save(2, model, optimizer, LOADER)
    weights = model.embedding_VD.detach().clone()
    train_on(model, optimizer, 2)

    checkpoints_in(tmp_path).load(model, optimizer)

    assert torch.equal(model.embedding_VD, weights)
    assert optimizer.state[model.embedding_VD]["step"] == 2


def test_saving_does_not_disturb_the_run(tmp_path):
    quiet, saved = a_run(steps=2), a_run(steps=2)
    checkpoints_in(tmp_path).save(2, saved[0], saved[1], LOADER)

    expected, found = train_on(*quiet, 2), train_on(*saved, 2)

    assert found.figures == expected.figures
    assert torch.equal(quiet[0].embedding_VD, saved[0].embedding_VD)


def test_nothing_in_a_checkpoint_needs_pickle(tmp_path):
    model, optimizer = a_run(steps=2)

    path = checkpoints_in(tmp_path).save(2, model, optimizer, LOADER)

    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}
    meta = orjson.loads((path / "meta.json").read_bytes())
    assert set(meta["files"]) == {file.name for file in path.iterdir()} - {"meta.json"}
    (shard,) = path.glob("*.safetensors")
    with safe_open(shard, "pt") as tensors:
        assert "model.embedding_VD" in tensors.keys()  # noqa: SIM118 -- not a mapping
        assert "optimizer.state.embedding_VD.exp_avg_sq" in tensors.keys()  # noqa: SIM118


def test_an_empty_folder_holds_no_checkpoint(tmp_path):
    model, optimizer = a_run(steps=0)

    assert steps_in(tmp_path) == ()
    assert steps_in(tmp_path / "absent") == ()
    assert checkpoints_in(tmp_path).load(model, optimizer) is None


def test_the_newest_are_kept_and_the_rest_removed(tmp_path):
    model, optimizer = a_run(steps=1)
    checkpoints = checkpoints_in(tmp_path, keep=2)

    for step in (5, 10, 15):
        checkpoints.save(step, model, optimizer, LOADER)

    assert steps_in(tmp_path) == (10, 15)
    assert {entry.name for entry in tmp_path.iterdir()} == {"step-00000010", "step-00000015"}


def test_an_older_checkpoint_can_be_asked_for(tmp_path):
    model, optimizer = a_run(steps=1)
    checkpoints = checkpoints_in(tmp_path)
    checkpoints.save(1, model, optimizer, {"version": 1, "next": 1})
    checkpoints.save(2, model, optimizer, {"version": 1, "next": 2})

    restored = checkpoints.load(model, optimizer, step=1)

    assert restored is not None
    assert restored.loader_state["next"] == 1
    with pytest.raises(StateError, match=r"no checkpoint of step 7; it has \[1, 2\]"):
        checkpoints.load(model, optimizer, step=7)


def test_a_checkpoint_is_never_overwritten(tmp_path):
    model, optimizer = a_run(steps=1)
    checkpoints_in(tmp_path).save(1, model, optimizer, LOADER)

    with pytest.raises(StateError, match="step-00000001 exists already"):
        checkpoints_in(tmp_path).save(1, model, optimizer, LOADER)


def test_an_optimiser_of_torchs_that_has_not_stepped_cannot_be_saved(tmp_path):
    model = torch.nn.Linear(4, 2)

    with pytest.raises(StateError, match="no state at step 0"):
        checkpoints_in(tmp_path).save(0, model, torch.optim.AdamW(model.parameters()), LOADER)

    assert list(tmp_path.iterdir()) == []


def test_a_fresh_optimiser_of_torchs_gets_what_a_used_one_had(tmp_path):
    model, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    used, fresh = (torch.optim.AdamW(m.parameters(), lr=0.5) for m in (model, other))
    model(torch.ones(1, 4)).sum().backward()
    used.step()
    other(torch.ones(1, 4)).sum().backward()  # gradients are no hindrance

    checkpoints_in(tmp_path).save(1, model, used, LOADER)
    checkpoints_in(tmp_path).load(other, fresh)

    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert {name: value.tolist() for name, value in fresh.state[theirs].items()} == {
            name: value.tolist() for name, value in used.state[mine].items()
        }
        assert fresh.state[theirs]["step"] == 1
    assert fresh.param_groups[0]["lr"] == 0.5


def test_a_file_system_that_syncs_no_folders_takes_checkpoints(tmp_path, monkeypatch):
    sync = os.fsync

    def refuses_folders(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuses_folders)
    model, optimizer = a_run(steps=1)

    checkpoints_in(tmp_path).save(1, model, optimizer, LOADER)

    assert steps_in(tmp_path) == (1,)


def test_another_model_is_refused_with_both_values(tmp_path):
    model, optimizer = a_run(steps=1)
    checkpoints_in(tmp_path).save(1, model, optimizer, LOADER)
    changed = Checkpoints(tmp_path, a_config(top_k=1, hidden=32).model_dump())

    with pytest.raises(StateError, match=r"hidden was 24 and is 32; top_k was 2 and is 1"):
        changed.load(model, optimizer)


def test_a_slow_rank_may_find_the_folder_committed_already(tmp_path, monkeypatch):
    class Peers:
        """What rank 1 of two has of the group, while rank 0 is as fast as can be."""

        writing = path_of(tmp_path, 2).with_name("step-00000002.partial")

        def all_gather(self, *_, **__):
            self.writing.rename(path_of(tmp_path, 2))
            monkeypatch.setattr(Path, "glob", self.gone)

        def gone(self, *_):
            """As of a folder that is renamed while it is listed."""
            raise FileNotFoundError(self.writing)

        def barrier(self, **_):
            self.writing.mkdir()

    peers = Peers()
    monkeypatch.setattr(dist, "get_rank", lambda _: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(dist, "all_gather", peers.all_gather)
    monkeypatch.setattr(dist, "barrier", peers.barrier)
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: None)
    monkeypatch.setattr(checkpoints, "dcp_save", lambda *_, **__: None)
    monkeypatch.setattr(checkpoints, "require_room", lambda *_, **__: None)

    saved = checkpoints_in(tmp_path, groups=replace(ALONE, world=object())).write(2, {}, LOADER)

    assert saved.is_dir()
