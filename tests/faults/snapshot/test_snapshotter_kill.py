"""kill -9 of a snapshotter at every line of every operation: it was done, or it was never begun."""

import json
import shutil
import sys

import pytest

from tests.house.modules import ROOT
from tests.support.fusefs.model import fast_directory
from tests.support.programs import finished

pytestmark = pytest.mark.slow


@pytest.fixture
def folder():
    """In memory: every kill point copies the state, and every change is synced."""
    made = fast_directory("omniload-snapshotter-")
    yield made
    shutil.rmtree(made, ignore_errors=True)


def test_wherever_it_is_killed_an_operation_was_done_or_never_begun(folder):
    done = finished(
        [sys.executable, "-m", "tests.support.snapshot.snapshotter_kill", str(folder)],
        limit_s=240,
        cwd=ROOT,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert set(told) == {"prepare", "view", "lazy", "commit", "remove", "label"}
    assert {name: both for name, both in told.items() if min(both) < 2} == {}
