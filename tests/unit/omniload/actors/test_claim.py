"""What a launch is known by, and locks that go with their holder."""

import os

import pytest

from omniload.actors.claim import launch_of
from omniload.actors.gate import Gate
from omniload.base.errors import UnavailableError
from omniload.base.linux.file_lock import FileLock

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


def test_a_gate_that_is_closed_lets_nobody_in_and_waits_for_those_inside():
    gate = Gate()
    with gate.inside():
        assert not gate.close(0.0)
        with pytest.raises(UnavailableError, match="was closed"):
            gate.check()

    assert gate.close(0.0)
    with pytest.raises(UnavailableError, match="was closed"), gate.inside():
        pass
