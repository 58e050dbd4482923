"""A live role that a rank cannot reach for a moment: the rank asks again, and no sample changes."""

import json
import os
import shutil
import sys

import pytest

from omniload.actors.local.plane import LocalPlane
from omniload.actors.opening import open_plane
from omniload.actors.plane import PlaneSpec
from omniload.batch.digest import batch_digest
from omniload.client import Client
from omniload.machine.roster import roster
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.corpora import a_mixed_corpus
from tests.support.programs import finished

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.scripts_start_warm,
    pytest.mark.usefixtures("leaves_nothing_behind"),
    pytest.mark.skipif(
        shutil.which("ss") is None or os.geteuid() != 0,
        reason="NOT TESTED: connections are ended by ss -K of iproute2, as root",
    ),
]

STEPS, LIMIT_S = 10, 120
RANK = f"""
import json, os, signal, subprocess, sys, threading
import psutil
from omniload.actors.address import PlaneAddress
from omniload.actors.ray.rank import handle
from omniload.actors.ray.rank.joining import handle_in
from omniload.batch.digest import batch_digest
from omniload.client import Client

address, constructor = PlaneAddress.model_validate_json(sys.stdin.read()), int(sys.argv[1])
told, plain = [], handle.error_of

def error_of(answer):
    told.append(type(plain(answer)).__name__)
    return plain(answer)

def cut_off():
    there = psutil.Process(constructor).net_connections("tcp")
    ports = {{c.laddr.port for c in there if c.status == "LISTEN"}}
    for c in psutil.Process().net_connections("tcp"):
        if c.raddr and c.raddr.port in ports:
            ends = f"( sport = :{{c.laddr.port}} and dport = :{{c.raddr.port}} )"
            subprocess.run(["ss", "-K", "-H", "-t", ends], capture_output=True, check=True)

handle.error_of, looks, steps = error_of, threading.Event(), []
rank = handle_in(address, 0)
with Client(rank) as client:
    steps.append(batch_digest(client.next_batch({LIMIT_S})))
    while len(steps) < {STEPS}:
        # The batch is at hand: what is asked for as it is taken is answered by nobody, and lost on the way.
        while not rank.is_ready(len(steps)):
            looks.wait(0.01)
        os.kill(constructor, signal.SIGSTOP)
        try:
            steps.append(batch_digest(client.next_batch({LIMIT_S})))
            cut_off()
        finally:
            os.kill(constructor, signal.SIGCONT)
        steps += [batch_digest(client.next_batch({LIMIT_S})) for _ in range(2)]
print(json.dumps([steps, told]))
"""


def test_a_constructor_that_a_rank_cannot_reach_is_asked_again_and_hands_out_the_same_steps(
    tmp_path, monkeypatch
):
    # By default, a process that is stopped for a tenth of a second is replaced, and a busy machine takes longer to
    # end connections.
    monkeypatch.setattr(roster, "_STOPPED_S", float(LIMIT_S))
    mix = a_mixed_corpus(tmp_path, rows=6, micro_rows=1)
    spec = PlaneSpec(mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of())
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        local = [batch_digest(client.next_batch()) for _ in range(STEPS)]

    runtime = mix.runtime.model_copy(update={"kind": "ray", "prefetch_steps": 1})
    mix = mix.model_copy(update={"runtime": runtime})
    spec = PlaneSpec(mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of())
    with open_plane(spec) as plane:
        pids = plane.pids()
        done = finished(
            [sys.executable, "-c", RANK, str(pids["constructor-0"])],
            limit_s=LIMIT_S,
            input=plane.address.model_dump_json(),
        )
        assert plane.pids() == pids  # no role was replaced

    assert done.returncode == 0, done.stderr[-3000:]
    steps, told = json.loads(done.stdout)
    assert steps == local
    assert "ActorUnavailableError" in told
