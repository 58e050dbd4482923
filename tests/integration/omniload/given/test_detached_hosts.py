"""A detached plane of several hosts, with ranks that have peers: attached to from another host than its opener's."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import psutil
import pytest

from tests.support.plane.front_ranks import environment, results_of, samples
from tests.support.plane.given.given_ray import DRIVER
from tests.support.plane.two_hosts import (
    NO_TOKEN,
    begin_bare_node,
    head_of,
    on,
    processes_on,
)
from tests.support.ports import free_port
from tests.support.programs import finished

pytestmark = [pytest.mark.ray, pytest.mark.soak]
LIMIT_S = 240


@contextmanager
def a_ray_of(hosts, scratch):
    """Start a node of one Ray on each host; yield the variables of its users, and the nodes."""
    env = environment(TMPDIR=str(scratch), OWN_RAYLETS="yes", **NO_TOKEN)
    env |= {"RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 6})}
    nodes, head = [], ()
    try:
        for host in hosts:
            nodes.append(begin_bare_node(host, *head, folder=scratch / host[-1], env=env))
            head = (head_of(nodes[-1]),)
        yield env | {"RAY_ADDRESS": head[0]}, nodes
    finally:
        for node in reversed(nodes):
            node.communicate(timeout=LIMIT_S)


class Job:
    """A run whose drivers have their ranks on hosts."""

    def __init__(self, env, mix, scratch, **keywords):
        self.env, self.mix, self.scratch, self.drivers = env, mix, scratch, 0
        self.run = scratch / "run"
        self.keywords = {"run_dir": str(self.run), "runtime_lifetime": "detached", **keywords}

    def driver(self, hosts, takes, state=None, end="kill"):
        """Let a driver with a rank on each of some hosts take steps; return the report of each rank."""
        self.drivers += 1
        job = {"takes": takes, "end": end, "world_size": len(hosts), "steps": 6, "silent_after": 3}
        job |= self.keywords | {"address": str(self.scratch / f"meet-{self.drivers}")}
        job |= {} if state is None else {"state": state}
        ranks = [
            on(
                host,
                *(sys.executable, DRIVER, self.mix, json.dumps(job | {"rank": rank})),
                env=self.env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank, host in enumerate(hosts)
        ]
        done = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
        told = [result for out, _ in done for result in results_of(out)]
        assert len(told) == len(hosts), [faults[-3000:] for _, faults in done]
        assert not [each for each in told if "error" in each], told
        return told

    def stop(self, host):
        words = (sys.executable, "-m", "omniload", "mix", "stop", self.run)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return on(host, *words, env=self.env, **pipes).communicate(timeout=LIMIT_S)


def test_ranks_of_two_hosts_go_on_with_a_plane_whose_opener_is_on_either(
    hosts, mix, unbroken, scratch
):
    here, there = hosts
    with a_ray_of(hosts, scratch) as (env, _):
        job = Job(env, mix, scratch)
        first = job.driver([here, there], takes=2)
        log = (scratch / "run" / "logs" / "opener.log").read_text
        # Rank 0 is on the other host now, and the opener is in its old place.
        second = job.driver([there, here], takes=2, state=first[0]["state"])
        assert "continue at step 2" in log()
        third = job.driver([there], takes=2, state=second[0]["state"])
        assert "continue at step 4" in log()
        assert samples([*first, *second, *third]) == unbroken
        assert "has ended; no rank was there" in job.stop(there)[0]


def test_a_plane_that_was_lost_with_its_openers_host_is_opened_anew_on_another(
    hosts, mix, unbroken, scratch
):
    here, there = hosts
    with a_ray_of(hosts, scratch) as (env, _):
        job = Job(env, mix, scratch)
        first = job.driver([there, here], takes=2)
        (raylet,) = [each for each in processes_on(there) if each.name() == "raylet"]
        raylet.kill()
        psutil.wait_procs([raylet], timeout=10)

        second = job.driver([here], takes=4, state=first[0]["state"])

        assert samples([*first, *second]) == unbroken
        assert "has ended; " in job.stop(here)[0]


@pytest.mark.parametrize("sizes", [{"dp": 2, "cp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}])
def test_ranks_with_peers_go_on_as_those_of_a_plane_of_their_own(
    given, mix, tmp_path, warm_python, sizes
):
    """Each rank along dp has two peers: slices of its rows along cp, the same batches along tp, columns along pp."""

    def driver(**keywords):
        words = ["-m", "torch.distributed.run", "--nproc-per-node", "4"]
        words += ["--master-port", str(free_port()), str(DRIVER), str(mix)]
        job = {"mesh": sizes, "steps": 6, "silent_after": 3, **keywords}
        done = finished(
            [warm_python.path, *words, json.dumps(job)],
            limit_s=LIMIT_S,
            env=given | warm_python.for_launchers,
        )
        told = sorted(results_of(done.stdout), key=lambda each: each["rank"])
        assert len(told) == 4, done.stderr[-3000:]
        assert not [each for each in told if "error" in each], told
        return told

    alone = driver(takes=6)
    detached = {"run_dir": str(tmp_path / "run"), "runtime_lifetime": "detached"}
    first = driver(takes=2, **detached)
    second = driver(takes=4, state=first[0]["state"], **detached)

    assert "continue at step 2" in (tmp_path / "run" / "logs" / "opener.log").read_text()
    for whole, *parts in zip(alone, first, second, strict=True):
        assert [*parts[0]["seen"], *parts[1]["seen"]] == whole["seen"]
    states = [each["state"] for each in second]
    assert states == [states[0]] * 4
    assert len({json.dumps(each["seen"]) for each in alone}) == (2 if "tp" in sizes else 4)
    words = [sys.executable, "-m", "omniload", "mix", "stop", detached["run_dir"]]
    subprocess.run(words, env=os.environ | given, check=True, capture_output=True)
