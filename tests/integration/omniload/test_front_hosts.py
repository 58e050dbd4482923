"""``omniload.open`` on two hosts: network namespaces with an address each, and one rank or two in each."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import yaml

from omniload.actors.reaper_process import MARKS
from tests.docs.snippets import blocks_of
from tests.house.modules import ROOT
from tests.support.every_process import every_process
from tests.support.plane.front_ranks import RANK, a_mix_file, environment, results_of, samples
from tests.support.plane.two_hosts import (
    ADDRESSES,
    NO_TOKEN,
    begin_bare_node,
    begin_ray,
    cut,
    head_of,
    mend,
    on,
    processes_on,
    slowed,
    wait_for_ray,
)

pytestmark = pytest.mark.ray
LIMIT_S = 240
GONE_S = 45
"""Longest time that any part of a plane may outlive its owner; Ray's own processes live for most of a minute."""


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    return a_mix_file(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def alone(warm_python, mix):
    words = [warm_python.path, str(RANK), str(mix), json.dumps({"steps": 4})]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True)
    return samples(results_of(done.stdout))


def test_torchrun_on_two_hosts_hands_out_the_samples_of_one_process_on_ports_of_a_range(
    warm_python, hosts, mix, alone
):
    keywords = json.dumps({"steps": 4, "bind": "10.77.0.0/16", "ports": "21000-21063"})
    job = ["--nnodes", 2, "--nproc-per-node", 2, "--master-addr", ADDRESSES[0], "--master-port"]
    processes = [
        on(
            host,
            *(warm_python.path, "-m", "torch.distributed.run", *job, 29511, "--node-rank", number),
            *(RANK, mix, keywords),
            env=environment(**warm_python.for_launchers),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number, host in enumerate(hosts)
    ]
    done = [process.communicate(timeout=LIMIT_S) for process in processes]

    found = [result for out, _ in done for result in results_of(out)]
    assert len(found) == 4, [err[-2000:] for _, err in done]
    assert samples(found) == alone
    assert all(result["seen"] for result in found)


@contextmanager
def two_ranks(hosts, mix, mark, scratch, **more):
    """Start a rank on each host, without an agent; the ranks train until they are ended."""
    job = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29512", "WORLD_SIZE": "2"}
    job |= {MARKS: mark, "TMPDIR": str(scratch)}
    keywords = json.dumps({"bind": "auto", "plan": "tells its first"} | more)
    ranks = [
        on(
            host,
            *(sys.executable, RANK, mix, keywords),
            env=environment(**job, RANK=str(number)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number, host in enumerate(hosts)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def marked_with(mark):
    found = []
    for process in every_process():
        with suppress(psutil.Error):
            if mark in process.environ().get(MARKS, ""):
                found.append(process)
    return found


# `make test` covers ranks and openers that are killed on one host, and hosts that are killed.
@pytest.mark.soak
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_leaves_nothing_on_its_host_and_the_other_is_told(
    hosts, mix, killed, scratch
):
    mark = f"test-{os.getpid()}-{killed}"
    with two_ranks(hosts, mix, mark, scratch) as ranks:
        for rank in ranks:
            assert rank.stdout.readline().startswith('{"pid"'), rank.communicate()[1][-3000:]
        assert len(list(scratch.glob("omniload-ray-*"))) == 2
        ranks[killed].send_signal(signal.SIGKILL)
        until_s = time.monotonic() + GONE_S
        while left := alive(set(marked_with(mark)) & set(processes_on(hosts[killed]))):
            assert time.monotonic() < until_s, [p.cmdline() for p in left]
        out, err = ranks[1 - killed].communicate(timeout=60)
        (result,) = results_of(out)
        assert result["error"] == "UnavailableError", err[-2000:]
        assert "start again from the last checkpoint" in result["message"]
    until_s = time.monotonic() + GONE_S
    while left := [*alive(marked_with(mark)), *scratch.glob("omniload-ray-*")]:
        assert time.monotonic() < until_s, left


def alive(processes):
    found = []
    for process in processes:
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextmanager
def bare_nodes(hosts, scratch, env):
    """Start a node on each host without services that no data plane uses; yield the head's address, and the nodes."""
    nodes, head = [], ()
    try:
        for host in hosts:
            nodes.append(begin_bare_node(host, *head, folder=scratch / host[-1], env=env))
            head = (head_of(nodes[-1]),)
        yield head[0], nodes
    finally:
        for node in reversed(nodes):
            node.communicate(timeout=LIMIT_S)


@contextmanager
def users_nodes(hosts, scratch, env):
    """Start a node on each host, as users do."""
    head = f"{ADDRESSES[0]}:21999"
    places = (["--head", "--port=21999", "--include-dashboard=false"], [f"--address={head}"])
    begun = []
    try:
        for host, place in zip(hosts, places, strict=True):
            marked = env | {MARKS: str(scratch)}
            begun.append(begin_ray(host, *place, folder=scratch / host[-1], env=marked))
            wait_for_ray(begun[-1])
        yield head, begun
    finally:
        for node in begun:
            node.send_signal(signal.SIGINT)
        for process in marked_with(str(scratch)):
            with suppress(psutil.NoSuchProcess):  # the signal has ended it meanwhile
                process.kill()
        for node in begun:
            node.communicate(timeout=60)


TRAIN = f"""
import contextlib, os, runpy, sys
from tests.support.plane.processes.served_rank import see_own_raylets

see_own_raylets()
os.environ["RAY_ADDRESS"] = open("head").read()
sys.argv = [{str(RANK)!r}, "mix.yaml", '{{"steps": 4}}']
with open(f"rank-{{os.environ['RANK']}}", "w") as out, contextlib.redirect_stdout(out):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A stand-in for the page's ``train.py``, which also selects the Ray of its host on this machine."""


# Each node that a user starts takes 20 s of processor time. `make test` covers ranks on the nodes of a given Ray
# elsewhere (test_served_hosts), and the page's script for Slurm (test_external_launchers).
@pytest.mark.soak
@pytest.mark.parametrize("begun", [bare_nodes, users_nodes])
def test_the_pages_launcher_for_a_ray_that_runs_already_uses_both_hosts_and_the_ray_outlives_it(
    hosts, mix, alone, scratch, monkeypatch, begun
):
    page = blocks_of(ROOT / "docs/how-to/running/several-hosts.md")
    (launcher,) = (block.text for block in page if "import ray\n" in block.text)
    (scratch / "launch.py").write_text(launcher)
    (scratch / "train.py").write_text(TRAIN)
    content = yaml.safe_load(mix.read_text())
    # Each process of a role loads all its modules there, so two sources have one loader.
    content["runtime"] |= {"kind": "ray", "address": "auto", "loaders": 1}
    for source in content["sources"].values():
        source["path"] = str(mix.parent / source["path"])
    (scratch / "mix.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.chdir(scratch)  # as the folder of an image, in which each node begins
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = environment(TMPDIR=str(scratch), PATH=path, RAY_OVERRIDE_RESOURCES='{"ranks": 1}')
    with begun(hosts, scratch, env) as (head, nodes):
        (scratch / "head").write_text(head)
        launched = on(
            hosts[0],
            *(sys.executable, "launch.py", len(hosts)),
            env=env | NO_TOKEN | {"RAY_ADDRESS": head},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        said, _ = launched.communicate(timeout=LIMIT_S)
        assert launched.returncode == 0, said[-3000:]
        assert [node.poll() for node in nodes] == [None, None]
    found = [each for n in range(2) for each in results_of((scratch / f"rank-{n}").read_text())]
    assert samples(found) == alone
    assert all(result["seen"] for result in found)
    assert list(scratch.glob("omniload-ray-*")) == []


def told_first(ranks):
    """Wait until each rank has a batch."""
    for rank in ranks:
        assert rank.stdout.readline().startswith('{"pid"'), rank.communicate()[1][-3000:]


@pytest.mark.soak  # a minute: the time before a rank reports a wait, and a cut wire for the same time
def test_hosts_that_are_cut_off_for_less_than_the_limit_go_on_where_they_were_over_a_slow_wire(
    hosts, mix, scratch
):
    steps = 600  # more than are taken while the wire is cut
    words = [sys.executable, str(RANK), str(mix), json.dumps({"steps": steps})]
    whole = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True)

    with two_ranks(hosts, mix, "", scratch, steps=steps) as ranks:
        told_first(ranks)
        cut(hosts[1])
        try:
            assert "its host, or the network to it, does not answer" in lines_of_waits(ranks)[0]
        finally:
            mend(hosts[1])
        with slowed(hosts, "600kbit") as held_back:
            done = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
            assert held_back() > 0

    found = [result for out, _ in done for result in results_of(out)]
    assert [len(result.get("seen", ())) for result in found] == [steps] * 2, found
    assert samples(found) == samples(results_of(whole.stdout))


def lines_of_waits(ranks):
    """Return the first line in which each rank reports a wait."""
    lines = [next((said for said in rank.stderr if "has waited" in said), "") for rank in ranks]
    assert all(lines), "ranks ended, and none has waited"
    return lines


@pytest.mark.soak  # 80 s: the time after which Ray gives a host up
def test_hosts_that_are_cut_off_for_longer_end_while_they_are_and_say_why(hosts, mix, scratch):
    with two_ranks(hosts, mix, "", scratch) as ranks:
        told_first(ranks)
        cut(hosts[1])
        try:
            done = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
        finally:
            mend(hosts[1])

    errors = [result for out, _ in done for result in results_of(out)]
    assert [error["error"] for error in errors] == ["UnavailableError"] * 2, done
    assert "the host that was chosen for it is gone, or cut off" in errors[0]["message"]
    assert "cannot be reached: its host or the network failed" in errors[1]["message"]
