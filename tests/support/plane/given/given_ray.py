"""A running Ray on this host, and jobs that connect to it before they open a plane."""

import json
import subprocess
import sys
from contextlib import contextmanager

from tests.house.modules import ROOT
from tests.support.plane.front_ranks import environment
from tests.support.plane.two_hosts import NO_TOKEN, begin_bare_node, head_of

__all__ = ["DRIVER", "a_ray", "begin_job", "end_of", "run_job"]

PROCESSES = ROOT / "tests" / "support" / "plane" / "processes"
JOB, DRIVER = PROCESSES / "ray_job.py", PROCESSES / "detached_driver.py"
LIMIT_S = 240


@contextmanager
def a_ray(folder, **resources):
    """Start a Ray with these resources; yield the variables of processes that use it."""
    env = environment(TMPDIR=str(folder), **NO_TOKEN) | {
        "RAY_OVERRIDE_RESOURCES": json.dumps(resources)
    }
    node = begin_bare_node("", folder=folder / "ray", env=env)
    try:
        # Loopback stays unchanged. Otherwise Ray would look for its head at the address at which other hosts reach
        # this one.
        yield env | {"RAY_ADDRESS": head_of(node), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    finally:
        node.communicate()


def begin_job(env, *words, program=JOB, **keywords):
    """Start a job; see ``ray_job.py``, or the arguments of another program."""
    return subprocess.Popen(
        [sys.executable, str(program), *map(str, words), json.dumps(keywords)],
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def end_of(job):
    """Wait for the end of a job; return its last report."""
    said, faults = job.communicate(timeout=LIMIT_S)
    told = [line for line in said.splitlines() if line.startswith("{")]
    assert told, faults[-3000:]
    return json.loads(told[-1])


def run_job(env, *words, program=JOB, **keywords):
    """Run a job; return its last report."""
    return end_of(begin_job(env, *words, program=program, **keywords))
