"""Ranks of a framework's job as processes of this environment, without its launcher."""

import os
import subprocess
from pathlib import Path

from tests.support.ports import free_port

__all__ = ["run_ranks", "variables_of_ranks"]

LIMIT_S = 240


def variables_of_ranks(world_size):
    """Return the variables that a launcher gives to each rank."""
    shared = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def run_ranks(python, script, world_size, *arguments, env=None):
    """Run a script of this folder as every rank of a job, by this Python; fail with the output of the ranks."""
    line = [python, Path(__file__).with_name("processes") / script, *arguments]
    ranks = [
        subprocess.Popen(
            line,
            env={**os.environ, **(env or {}), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for variables in variables_of_ranks(world_size)
    ]
    try:
        said = [process.communicate(timeout=LIMIT_S)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0] * world_size, "\n".join(said)
    return said
