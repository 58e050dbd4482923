import pytest

from omniload.base.errors import IntegrityError, StateError
from trainer_integration.checkpoint.file_digests import FileDigest, write_sealed_json
from trainer_integration.checkpoint.folder import (
    LOADER,
    META,
    loader_state_of,
    path_of,
    steps_in,
)


def a_checkpoint(folder, step, *, version=1):
    path = path_of(folder, step)
    path.mkdir(parents=True)
    (path / LOADER).write_bytes(b'{"step": 3}')
    files = {LOADER: FileDigest.of(path / LOADER).to_json()}
    write_sealed_json(path / META, {"version": version, "files": files})
    return path


def test_committed_checkpoints_are_found_among_half_written_ones(tmp_path):
    a_checkpoint(tmp_path, 9)
    a_checkpoint(tmp_path, 10)
    (tmp_path / "step-00000011.partial").mkdir()
    (tmp_path / "notes").mkdir()

    assert steps_in(tmp_path) == (9, 10)


def test_a_folder_that_is_not_there_holds_no_checkpoint(tmp_path):
    assert steps_in(tmp_path / "none") == ()


def test_the_loader_state_comes_back_as_it_was_saved(tmp_path):
    assert loader_state_of(a_checkpoint(tmp_path, 3)) == {"step": 3}


def test_a_changed_loader_state_is_refused(tmp_path):
    path = a_checkpoint(tmp_path, 3)
    (path / LOADER).write_bytes(b'{"step": 4}')

    with pytest.raises(IntegrityError, match=r"loader\.json has checksum .*earlier checkpoint"):
        loader_state_of(path)


def test_a_checkpoint_of_another_release_is_refused(tmp_path):
    with pytest.raises(StateError, match="version 7, this code reads 1"):
        loader_state_of(a_checkpoint(tmp_path, 3, version=7))
