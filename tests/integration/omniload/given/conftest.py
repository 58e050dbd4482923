"""Fixtures of tests in a given Ray: the Ray, a mix, and the batches of an unbroken run."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.plane.front_ranks import RANK, a_mix_file, environment, results_of, samples
from tests.support.plane.given.given_ray import a_ray

STEPS = 6


@pytest.fixture(scope="module")
def given():
    """Variables of processes that use a Ray of six cores."""
    with (
        tempfile.TemporaryDirectory(prefix="test", dir="/tmp") as folder,
        a_ray(Path(folder), CPU=6) as env,
    ):
        yield env


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    """A mix whose data plane is in that Ray."""
    return a_mix_file(tmp_path_factory.mktemp("corpus"), kind="ray", address="auto", loaders=1)


@pytest.fixture(scope="module")
def unbroken(mix):
    """Rows of every step in a run of one process."""
    keywords = {"steps": STEPS, "runtime_kind": "auto", "runtime_address": "", "arrays": "numpy"}
    words = [sys.executable, str(RANK), str(mix), json.dumps(keywords)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return samples(results_of(done.stdout))
