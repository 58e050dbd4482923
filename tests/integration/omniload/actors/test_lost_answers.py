"""Ray's errors, on two nodes, for actors that are killed, interrupted, lost with their node, or never had a process."""

import json
import sys

import pytest

from tests.support.plane.front_ranks import environment, results_of
from tests.support.plane.two_hosts import NO_TOKEN, begin_bare_node, head_of
from tests.support.programs import finished

pytestmark = pytest.mark.ray
LIMIT_S = 240
PROGRAM = """
import json, os, signal, threading
import psutil
from omniload.actors.ray.environment import ray
from omniload.actors.ray.errors.verdict import verdict_of
from omniload.actors.ray.hosts.starting import Start, actor_of

LARGE = 1 << 20  # lies on the actor's node until it is fetched

class Role:
    def pid(self): return os.getpid()
    def answers(self, size): return bytes(size)
    def stay(self): threading.Event().wait()
    def is_interrupted(self): raise KeyboardInterrupt

def started(node):
    return actor_of(Role, "", Start(place=node, threads=4)).remote()

def told(answer):
    try:
        ray.get(answer, timeout=60)
    except ray.exceptions.RayError as error:
        kind = getattr(error, "cause", None) or error
        return [verdict_of(error).value, type(kind).__name__]
    return ["answered"]

ray.init(configure_logging=False, log_to_driver=False)
here = ray.get_runtime_context().get_node_id()
(there,) = (node["NodeID"] for node in ray.nodes() if node["NodeID"] != here)
found = {}

role = started(here)
stays, pid = role.stay.remote(), ray.get(role.pid.remote())
os.kill(pid, signal.SIGKILL)
found["of one that is killed"], found["behind that"] = told(stays), told(role.pid.remote())

role = started(here)
found["of one that is interrupted"] = told(role.is_interrupted.remote())
found["which goes on"] = told(role.pid.remote())

role = started(there)
answers = [role.answers.remote(size) for size in (LARGE, 9)]
ray.wait(answers, num_returns=2, fetch_local=False)
stays = role.stay.remote()
for process in psutil.process_iter(["name", "cmdline"]):
    if process.info["name"] == "raylet" and any(there in word for word in process.info["cmdline"]):
        process.kill()
found["that lay on a node that is lost"], found["that had come from it"] = map(told, answers)
found["of an actor there"] = told(stays)
found["of one that is to be there"] = told(started(there).pid.remote())
print(json.dumps(found))
"""


@pytest.mark.soak  # a node counts as lost after ten seconds without heartbeats
def test_what_is_told_of_each_loss_is_what_ray_means_by_it(scratch):
    env = environment(TMPDIR=str(scratch), **NO_TOKEN)
    env |= {"RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 2})}
    nodes, head = [], ()
    try:
        for folder in ("a", "b"):
            nodes.append(begin_bare_node("", *head, folder=scratch / folder, env=env))
            head = (head_of(nodes[-1]),)
        env |= {"RAY_ADDRESS": head[0], "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        done = finished([sys.executable, "-c", PROGRAM], limit_s=LIMIT_S, env=env)
    finally:
        for node in reversed(nodes):
            node.communicate(timeout=LIMIT_S)

    (found,) = results_of(done.stdout) or [done.stderr[-3000:]]
    assert found == {
        "of one that is killed": ["ended", "ActorDiedError"],
        "behind that": ["ended", "ActorDiedError"],
        "of one that is interrupted": ["unheard", "TaskCancelledError"],
        "which goes on": ["answered"],
        "that lay on a node that is lost": ["unheard", "ObjectReconstructionFailedError"],
        "that had come from it": ["answered"],
        "of an actor there": ["ended", "ActorDiedError"],
        "of one that is to be there": ["ended", "ActorUnschedulableError"],
    }
