"""Checkpoints that a crash, a disk or another release spoiled."""

import pytest

from omniload.base.errors import IntegrityError, StateError
from tests.support.trainer.killed_saves import killed_saves
from tests.support.trainer.moe_builders import a_config, a_run
from trainer_integration.checkpoint import checkpoints as checkpoint_module
from trainer_integration.checkpoint.checkpoints import Checkpoints
from trainer_integration.checkpoint.file_digests import read_sealed_json, write_sealed_json
from trainer_integration.checkpoint.folder import steps_in

LOADER = {"version": 1, "next_step": 1}


@pytest.fixture
def run():
    return a_run()


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path, a_config().model_dump())


def spoil(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("at", [9, 300, -1], ids=["header", "middle", "last_byte"])
def test_one_wrong_bit_in_a_tensor_file_is_an_error_that_names_the_file(run, checkpoints, at):
    path = checkpoints.save(1, *run, LOADER)
    (shard,) = path.glob("shard-*")
    before = run[0].embedding_VD.detach().clone()
    spoil(shard, at)

    with pytest.raises(IntegrityError, match=rf"{shard.name} has checksum .*earlier checkpoint"):
        checkpoints.load(*run)

    assert run[0].embedding_VD.equal(before)


def test_one_wrong_bit_in_the_loader_state_is_an_error(run, checkpoints):
    path = checkpoints.save(1, *run, LOADER)
    spoil(path / "loader.json", 3)

    with pytest.raises(IntegrityError, match=r"loader\.json has checksum"):
        checkpoints.load(*run)


def test_one_wrong_bit_in_the_meta_file_is_an_error(run, checkpoints):
    path = checkpoints.save(1, *run, LOADER)
    spoil(path / "meta.json", 40)

    with pytest.raises(IntegrityError, match=r"meta\.json"):
        checkpoints.load(*run)


@pytest.mark.parametrize("name", ["loader.json", "shard-00001-model-00001-of-00001.safetensors"])
def test_a_missing_file_is_an_error(run, checkpoints, name):
    path = checkpoints.save(1, *run, LOADER)
    (path / name).unlink()

    with pytest.raises(IntegrityError, match=f"{name} is missing"):
        checkpoints.load(*run)


def test_a_missing_meta_file_is_an_error(run, checkpoints):
    path = checkpoints.save(1, *run, LOADER)
    (path / "meta.json").unlink()

    with pytest.raises(IntegrityError, match=r"meta\.json cannot be read"):
        checkpoints.load(*run)


def test_a_tensor_file_that_was_not_saved_with_it_is_an_error(run, checkpoints):
    path = checkpoints.save(1, *run, LOADER)
    (shard,) = path.glob("shard-*")
    (path / "shard-00002-model-00001-of-00001.safetensors").write_bytes(shard.read_bytes())

    with pytest.raises(IntegrityError, match=r"shard-00002.*not saved with it"):
        checkpoints.load(*run)


def test_a_checkpoint_of_another_release_is_refused_with_both_versions(run, checkpoints):
    path = checkpoints.save(1, *run, LOADER)
    write_sealed_json(path / "meta.json", read_sealed_json(path / "meta.json") | {"version": 2})

    with pytest.raises(StateError, match="has version 2, this code reads 1"):
        checkpoints.load(*run)


def test_a_save_killed_before_its_commit_is_never_seen_and_swept_by_the_next(
    run, checkpoints, tmp_path, monkeypatch
):
    class KilledError(Exception):
        pass

    def killed(file, value):
        raise KilledError

    checkpoints.save(1, *run, LOADER)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "write_sealed_json", killed)
        with pytest.raises(KilledError):
            checkpoints.save(2, *run, LOADER)
    left = [entry.name for entry in tmp_path.iterdir()]

    assert "step-00000002.partial" in left
    assert steps_in(tmp_path) == (1,)
    assert steps_in(tmp_path) == (1,)
    restored = checkpoints.load(*run)
    assert restored is not None
    assert restored.step == 1
    checkpoints.save(3, *run, LOADER)
    assert {entry.name for entry in tmp_path.iterdir()} == {"step-00000001", "step-00000003"}


def test_a_file_of_a_checkpoints_name_and_strange_names_are_not_checkpoints(tmp_path):
    (tmp_path / "step-00000009").write_text("a file")
    (tmp_path / "step-00000008.partial").mkdir()
    (tmp_path / "step-8").mkdir()
    (tmp_path / "step-00000007").mkdir()

    assert steps_in(tmp_path) == (7,)


def test_of_saves_beside_training_that_are_killed_the_newest_whole_one_loads(tmp_path):
    # A hundred of them: python -m benchmarks.trainer.checkpoint_stall.
    assert len(killed_saves(tmp_path, 6)) == 6
