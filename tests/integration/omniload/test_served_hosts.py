"""Ranks of other hosts join a served plane: a network namespace for each host, as in ``test_front_hosts``."""

import json
import subprocess
import time
from contextlib import contextmanager, suppress
from functools import partial

import pytest
import yaml

from omniload.actors.heartbeat_board import FolderBoard
from omniload.base.errors import UnavailableError
from tests.house.modules import ROOT
from tests.support.plane.front_ranks import RANK, a_mix_file, environment, results_of
from tests.support.plane.two_hosts import (
    ADDRESSES,
    NO_TOKEN,
    begin_bare_node,
    cut,
    end_all_on,
    head_of,
    mend,
    on,
    processes_on,
)

pytestmark = pytest.mark.ray
PROCESS = ROOT / "tests" / "support" / "plane" / "processes" / "served_rank.py"
RESOURCES = "RAY_OVERRIDE_RESOURCES"
"""Variable by which Ray gets further resources of a node, in addition to ``ray start --resources``."""
GROUP = """
import sys, ray
ray.init(sys.argv[1], namespace="of the user")
bundles = [{"CPU": 1, "readers": 1}]
group = ray.util.placement_group(bundles, name="of the job", lifetime="detached")
sys.stdin.read()
ray.util.remove_placement_group(group)
"""
"""A placement group of the user's own, on the host that has readers."""
STEPS = 10
LIMIT_S = 120


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return a_mix_file(folder, loaders=1, bind="10.77.0.0/16", ports="22000-22063")


@pytest.fixture(scope="module")
def unbroken(warm_python, mix):
    words = [warm_python.path, str(RANK), str(mix), json.dumps({"steps": STEPS})]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True)
    (result,) = results_of(done.stdout)
    return {step: sorted(map(tuple, rows)) for step, rows in result["seen"]}


class EndedError(AssertionError):
    """A process has ended without a report."""


class Process:
    """The server, or a rank, on a host."""

    def __init__(self, python, host, scratch, *words, **more):
        self.process = on(
            host,
            *(python, PROCESS, *words),
            env=environment(TMPDIR=str(scratch), **more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def told(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        _, faults = self.process.communicate()
        raise EndedError(f"ended with {self.process.returncode}: {faults[-3000:]}")

    def tell(self, *words):
        print(*words, file=self.process.stdin, flush=True)


def step_of(ranks):
    """Let each rank take its next batch; return the step, and the rows of all ranks."""
    for rank in ranks:
        rank.tell("next")
    told = [rank.told() for rank in ranks]
    assert not [said for said in told if "error" in said]
    (step,) = {batch["step"] for batch in told}
    assert all(batch["rows"] for batch in told)
    return step, sorted(tuple(row) for batch in told for row in batch["rows"])


def kill_raylet(host):
    """Kill the only raylet of a host."""
    (raylet,) = [process for process in processes_on(host) if process.name() == "raylet"]
    raylet.kill()


def said_of_its_raylet(rank):
    """Let a rank run until it names the reason for its end, and wait until it has ended."""
    rank.tell("next")
    while "error" not in (said := rank.told()):  # a process that is killed ends a moment later
        rank.tell("next")
    assert rank.process.wait(LIMIT_S) == UnavailableError.exit_code
    return said


def wait_for(scratch, role, host):
    """Wait until a role is on a host, by the board of the serving host; return its heartbeat."""
    until_s = time.monotonic() + LIMIT_S
    while True:
        lives = {name: beat for name, beat in beats_on(scratch).items() if name.startswith(role)}
        for beat in lives.values():
            if beat.host == host:
                return beat
        assert time.monotonic() < until_s, lives


def beats_on(scratch):
    (planner,) = scratch.glob("omniload-ray-*/board/planner.json")
    return FolderBoard(planner.parent).read()


def hosts_of(scratch, ranks):
    """Return the hosts of ranks by the board of the serving host, or nothing until all of them are on it."""
    found = beats_on(scratch)
    return {rank: found[rank].host for rank in ranks} if ranks <= found.keys() else {}


@pytest.fixture
def served(warm_python):
    """Return the context manager that serves a plane: see ``serving``.

    Ranks started for real are in ``test_stopped_hosts.py``.
    """
    return partial(serving, warm_python.path)


@contextmanager
def serving(python, host, mix, scratch, world_size, address=None, **more):
    """Serve a plane on a host; yield a function that starts ranks, and end all that remain."""
    begun, address = [], address or scratch / "plane"

    def start(host, *words):
        begun.append(Process(python, host, scratch, *words, **more))
        return begun[-1]

    try:
        server = start(host, "serve", mix, address, world_size)
        assert "pid" in (said := server.told()), said
        yield lambda there, *numbers: start(there, "join", address, *numbers)
        server.process.terminate()
        assert server.process.wait(LIMIT_S) == 0
    finally:
        for each in reversed(begun):
            each.process.kill()
            each.process.communicate()


def test_ranks_of_another_host_die_and_come_back_and_steps_hold_what_an_unbroken_run_has(
    hosts, mix, scratch, unbroken, served
):
    here, there = hosts
    with served(here, mix, scratch, 3, f"{ADDRESSES[0]}:22100") as join:
        ranks = [join(host, rank, 3, 0, 1) for rank, host in enumerate([here, there, there])]
        seen = dict(step_of(ranks) for _ in range(3))

        until_s = time.monotonic() + LIMIT_S
        while not (beats := hosts_of(scratch, {"rank dp=1", "rank dp=2"})):
            assert time.monotonic() < until_s, "no heartbeat of the other host came"
        assert beats == {"rank dp=1": ADDRESSES[1], "rank dp=2": ADDRESSES[1]}

        twin = join(there, 1, 3, 0, 1)
        twin.tell("next")
        assert "rank dp=1 of 1 of this data plane was taken by process" in twin.told()["message"]

        for rank in ranks:  # step 3 has begun, and is never committed
            rank.tell("next")
        for dead in ranks[1:]:
            dead.process.kill()
        assert ranks[0].told()["step"] == 3
        ranks[0].tell("resize", 0, 1, 3, 2)
        seen |= dict(step_of(ranks[:1]) for _ in range(3))

        ranks[0].tell("resize", 0, 3, 6, 3)
        ranks[1:] = [join(there, rank, 3, 6, 3) for rank in (1, 2)]
        seen |= dict(step_of(ranks) for _ in range(4))
        for rank in ranks:
            _, faults = rank.process.communicate(timeout=LIMIT_S)
            assert rank.process.returncode == 0, faults[-3000:]

    assert seen == unbroken
    # Another process cleans up after the killed ranks.
    until_s = time.monotonic() + LIMIT_S
    while left := list(scratch.glob("omniload-ray-*")):
        assert time.monotonic() < until_s, left


def test_a_host_that_vanishes_takes_its_ranks_along_and_the_others_go_on_until_it_is_back(
    hosts, mix, scratch, unbroken, served
):
    here, there = hosts
    with served(here, mix, scratch, 2) as join:
        stays, lost = join(here, 0, 2), join(there, 1, 2)
        seen = dict(step_of([stays, lost]) for _ in range(3))

        cut(there)
        try:
            stays.tell("resize", 0, 1, 3)
            seen |= dict(step_of([stays]) for _ in range(4))
        finally:
            mend(there)
        stays.tell("resize", 0, 2, 7)
        back = join(there, 1, 2, 7, 2)
        seen |= dict(step_of([stays, back]) for _ in range(3))

    assert seen == unbroken


def test_a_rank_whose_own_raylet_is_killed_is_told_at_once_and_comes_back(
    hosts, mix, scratch, unbroken, served
):
    here, there = hosts
    with served(here, mix, scratch, 2) as join:
        stays, lost = join(here, 0, 2), join(there, 1, 2)
        seen = dict(step_of([stays, lost]) for _ in range(3))

        kill_raylet(there)
        assert "Ray has ended on this host: its raylet" in said_of_its_raylet(lost)["message"]
        stays.tell("resize", 0, 1, 3, 1)
        seen |= dict(step_of([stays]) for _ in range(3))

        stays.tell("resize", 0, 2, 6, 2)
        back = join(there, 1, 2, 6, 2)
        seen |= dict(step_of([stays, back]) for _ in range(4))

    assert seen == unbroken


def test_a_rank_of_large_batches_whose_own_raylet_is_killed_is_told_so_and_not_ended_by_ray(
    hosts, mix, scratch, served
):
    content = yaml.safe_load(mix.read_text())
    # Batches of a hundred kilobytes and more for each rank, because smaller answers come without a raylet.
    content["pack"]["length"], content["batch"] = 1024, {"tokens": 1 << 17, "micro_tokens": 8192}
    large = mix.with_name("large.yaml")
    large.write_text(yaml.safe_dump(content))
    here, there = hosts
    said = ""
    for attempt in range(3):
        (folder := scratch / str(attempt)).mkdir()
        with served(here, large, folder, 2) as join:
            stays, lost = join(here, 0, 2), join(there, 1, 2)
            for _ in range(3):
                step_of([stays, lost])

            kill_raylet(there)
            # A rank that is receiving a batch at that moment is ended within Ray, which cannot be prevented.
            with suppress(EndedError):
                said = said_of_its_raylet(lost)["message"]
                break
    assert "Ray has ended on this host" in said


@pytest.fixture
def served_in_a_ray_of_others(warm_python):
    """Return the context manager that serves a plane in a running Ray; see ``serving_in_a_ray_of_others``."""
    return partial(serving_in_a_ray_of_others, warm_python.path)


@contextmanager
def serving_in_a_ray_of_others(python, hosts, mix, scratch, has_group=False, **runtime):
    """Start a node of a Ray on each host, and a plane of two ranks there; yield the start of ranks, and the nodes.

    If ``has_group`` is set, these are followed by the process that holds the placement group.
    """
    content, given = yaml.safe_load(mix.read_text()), scratch / "given.yaml"
    content["sources"] = {  # their paths start at the folder of the mix
        name: source | {"path": str(mix.parent / source["path"])}
        for name, source in content["sources"].items()
    }
    nodes, head = [], ()
    try:
        for host in hosts:
            env = environment(**({RESOURCES: '{"readers": 1}'} if head else {}))
            node = begin_bare_node(host, *head, folder=scratch / host[-1], env=env, python=python)
            nodes.append(node)
            head = (head_of(node),)
        if has_group:  # while the plane opens and waits for it
            words = (python, "-c", GROUP, head[0])
            nodes.append(on(hosts[0], *words, env=environment(**NO_TOKEN), stdin=subprocess.PIPE))
        place = {"kind": "ray", "address": head[0], "bind": "", "ports": ""}
        content["runtime"] |= place | runtime
        given.write_text(yaml.safe_dump(content))
        with serving(python, hosts[0], given, scratch, 2, OWN_RAYLETS="1", **NO_TOKEN) as join:
            yield join, nodes
    finally:
        for node in reversed(nodes):
            node.communicate(timeout=LIMIT_S)


def test_in_a_ray_that_runs_already_ranks_join_from_each_of_its_hosts_and_hear_of_its_end(
    hosts, mix, scratch, unbroken, served_in_a_ray_of_others
):
    place = {"loaders": {"placement_group": "of the job", "cpus": 1}, "wait": 60}
    with served_in_a_ray_of_others(hosts, mix, scratch, True, place=place) as (join, nodes):
        ranks = [join(host, rank, 2) for rank, host in enumerate(hosts)]
        seen = dict([step_of(ranks)])
        wait_for(scratch, "loader-0", ADDRESSES[1])
        # This removes the group, and everything in it.
        nodes.pop().communicate(timeout=LIMIT_S)
        seen |= dict(step_of(ranks) for _ in range(STEPS // 2 - 1))
        wait_for(scratch, "loader-0+", ADDRESSES[0])
        ranks.pop().process.kill()
        ranks[0].tell("resize", 0, 2, STEPS // 2, 1)
        ranks.append(join(hosts[1], 1, 2, STEPS // 2, 1))
        seen |= dict(step_of(ranks) for _ in range(STEPS // 2))

        kill_raylet(hosts[1])
        assert "Ray has ended on this host" in said_of_its_raylet(ranks[1])["message"]

    assert seen == unbroken


def test_batches_of_ranks_on_a_node_of_a_ray_are_read_and_built_there_and_elsewhere_once_it_is_gone(
    hosts, mix, scratch, unbroken, served_in_a_ray_of_others
):
    here, there = hosts
    loaders = {"resources": {"readers": 1}, "cpus": 1, "memory": "1MiB"}
    place = {"loaders": loaders, "constructors": {"cpus": 1}, "wait": 60}
    with served_in_a_ray_of_others(hosts, mix, scratch, constructors=2, place=place) as (join, _):
        ranks = [join(host, rank, 2) for rank, host in enumerate(hosts)]
        seen = dict([step_of(ranks)])
        assert wait_for(scratch, "loader-0", ADDRESSES[1]).name == "loader-0"
        beat = wait_for(scratch, "constructor-1", ADDRESSES[1])
        assert beat.pid in {process.pid for process in processes_on(there)}
        seen |= dict(step_of(ranks) for _ in range(3))

        end_all_on(there)
        ranks[0].tell("resize", 0, 1, 4, 1)
        seen |= dict(step_of(ranks[:1]) for _ in range(3))
        wait_for(scratch, "constructor-1", ADDRESSES[0])
        assert wait_for(scratch, "loader-0", ADDRESSES[0]).name != "loader-0"

        ranks[0].tell("resize", 0, 2, 7, 2)
        ranks[1] = join(here, 1, 2, 7, 2)
        seen |= dict(step_of(ranks) for _ in range(3))

    assert seen == unbroken


@pytest.mark.soak  # 40 s: the time that Ray gives connections to a host that is gone
def test_a_rank_that_is_cut_off_says_so_and_ends(hosts, mix, scratch, served):
    here, there = hosts
    with served(here, mix, scratch, 1) as join:
        rank = join(there, 0, 1)
        step_of([rank])
        cut(there)
        try:
            for _ in range(STEPS):
                rank.tell("next")
            while "error" not in (said := rank.told()):
                pass
            rank.process.wait(LIMIT_S)
        finally:
            mend(there)
    assert said["error"] == "UnavailableError"
    assert "cannot be reached" in said["message"]
