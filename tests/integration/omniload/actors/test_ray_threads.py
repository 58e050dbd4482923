"""Threads of one process that join a plane as ranks, each with a handle of its own."""

import json
import sys

import pytest

from omniload.actors.local.plane import LocalPlane
from omniload.actors.opening import open_plane
from omniload.actors.plane import PlaneSpec
from omniload.batch.digest import batch_digest, combined
from omniload.client import Client
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.corpora import a_mixed_corpus
from tests.support.programs import finished

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.scripts_start_warm,
    pytest.mark.usefixtures("leaves_nothing_behind"),
]

STEPS, LIMIT_S = 9, 120
RANKS = f"""
import json, sys, threading
from omniload.actors.address import PlaneAddress
from omniload.actors.ray.rank.joining import handle_in
from omniload.batch.digest import batch_digest, combined
from omniload.client import Client

address = PlaneAddress.model_validate_json(sys.stdin.read())
both, taken = threading.Barrier(2, timeout={LIMIT_S}), [[], []]

def take(rank):
    both.wait()
    with Client(handle_in(address, rank)) as client:
        taken[rank] = [batch_digest(client.next_batch({LIMIT_S})) for _ in range({STEPS})]

def again(rank):
    handle_in(address, rank).close()

for target in (take, again):  # the Ray that both had left is joined once more
    threads = [threading.Thread(target=target, args=[rank]) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(json.dumps([str(combined(both)) for both in zip(*taken, strict=True)]))
"""


def test_two_threads_join_a_plane_at_once_and_have_the_steps_of_a_local_run(tmp_path):
    mix = a_mixed_corpus(tmp_path, rows=6, micro_rows=1)
    alone = PlaneSpec(mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of())
    with LocalPlane(alone) as plane, Client(plane.handle(0)) as client:
        local = [str(combined([batch_digest(client.next_batch())])) for _ in range(STEPS)]

    spec = PlaneSpec(mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of(dp=2))
    with open_plane(spec) as plane:
        done = finished(
            [sys.executable, "-c", RANKS],
            limit_s=4 * LIMIT_S,
            input=plane.address.model_dump_json(),
        )

    # A thread that fails is reported only there; a busy machine is reported there too.
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert json.loads(done.stdout) == local
