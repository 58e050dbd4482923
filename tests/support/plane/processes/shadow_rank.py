"""A plane of one rank that obeys commands on standard input, one per line.

shadow_rank.py MIX RUN NODES KEYWORDS      it waits for NODES nodes first; keywords of the runtime as JSON

    take N      the digests of the next N steps
    whole       waits until every role is held and every shadow stands by
    where       the host of each role, from the status of the run
    holders     the member that holds each role
    kill ROLE   SIGKILL for its process
    environ ROLE NAME...      variables of the environment of the member that holds it
"""

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from omniload.actors.opening import open_plane
from omniload.actors.plane import PlaneSpec
from omniload.actors.ray.cluster import node_here
from omniload.actors.ray.environment import RayError, ray
from omniload.actors.ray.given.attached import AttachedCluster
from omniload.actors.ray.hosts.nodes import nodes_with_room
from omniload.actors.status_file import read_status
from omniload.batch.digest import batch_digest
from omniload.client import Client
from omniload.mix.config import load_mix
from omniload.mix.runtime import RuntimeConfig
from omniload.plan.place_tree import ClientPlaceTree

ANSWER = "answer: "
WHOLE_WITHIN_S, ANSWERED_WITHIN_S = 240, 300


def wait_until(done):
    until_s = time.monotonic() + WHOLE_WITHIN_S
    while not done():
        assert time.monotonic() < until_s, f"not whole within {WHOLE_WITHIN_S} s"
        time.sleep(0.1)
    return True


def wait_for_nodes(address, count):
    """Wait until the cluster has ``count`` nodes that this one reaches; until then their actors would start here."""
    cluster = AttachedCluster(address)
    try:
        wait_until(lambda: len(nodes_with_room()) == count)
        wait_until(lambda: all(map(is_reached, nodes_with_room())))
    finally:
        cluster.close()


def is_reached(node):
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    try:
        return (
            ray.get(ray.remote(num_cpus=0, scheduling_strategy=there)(node_here).remote()) == node
        )
    except RayError:
        return False


def environ_of(member, names):
    asked = ray.get_actor(member).__ray_call__.remote(lambda _: [os.environ.get(n) for n in names])
    return ray.get(asked)


def answers(plane, client, run):
    return {
        "take": lambda count: [batch_digest(client.next_batch()) for _ in range(int(count))],
        "whole": lambda: wait_until(plane.is_whole),
        "where": lambda: {role.name: role.host for role in read_status(run).roles},
        "holders": plane.holders,
        "environ": lambda role, *names: environ_of(plane.holders()[role], names),
        "kill": lambda role: os.kill(plane.pids()[role], signal.SIGKILL),
    }


def answer_all(lines, able, within_s):
    """Answer each line. If a question gets no answer in time, print the stacks of all threads and end this process."""
    for line in lines:
        faulthandler.dump_traceback_later(within_s, exit=True)
        word, *more = line.split()
        sys.stdout.write(f"{ANSWER}{json.dumps(able[word](*more))}\n")
        sys.stdout.flush()
        faulthandler.cancel_dump_traceback_later()


def main(mix_file, run, nodes, keywords):
    wait_for_nodes(keywords["address"], nodes)
    mix, base_dir = load_mix(mix_file)
    runtime = RuntimeConfig.model_validate(mix.runtime.model_dump() | {"kind": "ray"} | keywords)
    spec = PlaneSpec(
        mix=mix.model_copy(update={"runtime": runtime}),
        base_dir=base_dir,
        tree=ClientPlaceTree.of(),
        run_dir=run,
    )
    with open_plane(spec) as plane, Client(plane.handle(0)) as client:
        answer_all(sys.stdin, answers(plane, client, run), ANSWERED_WITHIN_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
