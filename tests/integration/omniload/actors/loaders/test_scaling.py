"""Sources move between the loaders of a running plane of actors: the steps equal those of an unchanged plane."""

import os
import signal
from itertools import islice

import psutil
import pytest

from omniload.actors.local.plane import LocalPlane
from omniload.actors.opening import open_plane
from omniload.batch.digest import batch_digest, combined
from omniload.client import Client
from tests.support.plane.corpora import a_mixed_corpus
from tests.support.plane.local_runs import a_spec

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.usefixtures("leaves_nothing_behind"),
]

EACH = 8
"""Steps between two changes: more than are built ahead."""


def is_gone(pid):
    try:
        return psutil.Process(pid).wait(60) is None
    except psutil.NoSuchProcess:
        return True


@pytest.mark.timeout(600)  # six processes, each started in up to a minute on a busy machine
def test_sources_move_live_though_the_old_loader_and_the_planner_are_killed(tmp_path):
    mix = a_mixed_corpus(tmp_path, rows=6, micro_rows=1)
    with LocalPlane(a_spec(tmp_path, mix, dp=1)) as plane, Client(plane.handle(0)) as client:
        local = [combined([batch_digest(batch)]) for batch in islice(client, 4 * EACH)]

    runtime = mix.runtime.model_copy(update={"loaders": 1, "prefetch_steps": 4})
    spread = a_spec(tmp_path, mix.model_copy(update={"runtime": runtime}), dp=2)
    with open_plane(spread) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(2)]
        mover, digests = plane.mover(), []

        def train():
            steps = ([batch_digest(c.next_batch()) for c in clients] for _ in range(EACH))
            digests.extend(map(combined, steps))

        train()
        added = mover.split([0], reads=1)
        assert set(plane.pids()) == {"loader-0", added, "planner", "constructor-0"}
        train()
        before = plane.pids()
        for role in ("loader-0", "planner"):
            os.kill(before[role], signal.SIGKILL)
        mover.move([1], added)  # whether or not the lost ones already have successors
        train()
        mover.retire("loader-0")
        train()
        after = plane.pids()

    assert digests == local
    assert set(after) == {added, "planner", "constructor-0"}
    assert after[added] == before[added]
    assert all(is_gone(pid) for pid in before.values())
