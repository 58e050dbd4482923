"""The identity of a launch, and locks that end with their holder."""

import errno
import fcntl
import os
from contextlib import closing
from pathlib import Path

import pytest

from omniload.actors import claim as claims
from omniload.actors.claim import LOCK_NAME, claim, launch_of
from omniload.actors.gate import Gate
from omniload.actors.plane import PlaneSpec
from omniload.base.errors import ConfigError, UnavailableError
from omniload.base.linux.file_lock import FileLock, is_locked
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.builders import a_mix

TORCH = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    "environment",
    [{}, {"MASTER_ADDR": "10.0.0.1"}, {"SLURM_JOB_ID": "7"}, TORCH | {"MASTER_PORT": ""}],
)
def test_a_process_outside_of_a_launch_is_part_of_none(environment):
    assert launch_of(environment) is None


def test_launches_differ_by_what_tells_them_apart():
    launches = [TORCH, TORCH | {"MASTER_PORT": "29501"}, TORCH | {"TORCHELASTIC_RUN_ID": "a"}]
    launches += [SLURM, SLURM | {"SLURM_STEP_ID": "1"}]

    assert len({launch_of(environment) for environment in launches}) == len(launches)
    assert launch_of(TORCH | SLURM) == launch_of(TORCH | {"RANK": "3"})


def test_a_lock_names_its_holder_until_it_lets_go(tmp_path):
    path = tmp_path / "lock"
    held = FileLock(path)

    with pytest.raises(BlockingIOError, match=rf"process {os.getpid()} on "):
        FileLock(path)
    held.close()
    held.close()
    FileLock(path).close()


def a_spec_of(run_dir):
    return PlaneSpec(mix=a_mix(), base_dir=Path("/"), tree=ClientPlaceTree.of(), run_dir=run_dir)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_run_folder_on_a_file_system_without_locks_is_refused_with_how_to_have_them(
    tmp_path, monkeypatch, code
):
    def flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ConfigError, match=rf"{LOCK_NAME} cannot be locked .* -o flock, NFS 3"):
        claim(a_spec_of(tmp_path))


def test_a_plane_that_waits_for_a_change_of_its_mix_says_so_once(tmp_path, caplog, monkeypatch):
    changing, looks = FileLock(tmp_path / LOCK_NAME, shared=True), []

    def look(place):
        looks.append(place)
        if len(looks) == 3:
            changing.close()
        return is_locked(place)

    monkeypatch.setattr(claims, "is_locked", look)

    end_claim = claim(a_spec_of(tmp_path))
    end_claim()

    (told,) = caplog.messages
    said = "is being changed by a command, such as omniload mix add: waiting at most 60 s"
    assert told.startswith(f"the mix of {tmp_path} {said}")


def test_a_change_of_a_mix_that_takes_too_long_is_told_by_its_kind(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "_CHANGED_S", -1.0)

    with (
        closing(FileLock(tmp_path / LOCK_NAME, shared=True)),
        pytest.raises(
            UnavailableError, match="by a command, such as omniload mix add, and has been for "
        ),
    ):
        claim(a_spec_of(tmp_path))


def test_a_gate_that_is_closed_lets_nobody_in_and_waits_for_those_inside():
    gate = Gate()
    with gate.inside():
        assert not gate.close(0.0)
        with pytest.raises(UnavailableError, match="was closed"):
            gate.check()

    assert gate.close(0.0)
    with pytest.raises(UnavailableError, match="was closed"), gate.inside():
        pass
