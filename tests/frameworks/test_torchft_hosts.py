"""Replicas of torchft on two hosts: one is lost with its host in mid-step and comes back, the steps stay."""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from tests.house.modules import ROOT
from tests.support.plane.corpora import a_mixed_corpus
from tests.support.plane.two_hosts import ADDRESSES, cut, mend, on, two_hosts

pytest.importorskip("torchft")
pytest.importorskip("ray")

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: network namespaces need root"),
]
PROCESSES = ROOT / "tests" / "support" / "plane" / "processes"
STEPS, LOST_IN, BACK_IN = 14, 3, 6
LIMIT_S = 120


class Process:
    """A process on a host, which tells lines of JSON and goes on when it is told."""

    def __init__(self, stack, host, scratch, script, *words):
        mine = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SLURM_"))}
        self.steps = {}
        self.process = on(
            host,
            # gloo listens, and replicas send their state, where the name of their machine leads.
            *("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host),
            *(sys.executable, PROCESSES / script, *words),
            env=mine | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A pipe that nobody reads fills up with torchft's lines.
            stderr=subprocess.DEVNULL,
        )
        stack.callback(self.process.communicate)
        stack.callback(self.process.kill)

    def told(self, key):
        """Return what it says under a key; steps that it commits meanwhile are kept."""
        for line in self.process.stdout:
            said = json.loads(line) if line.startswith("{") else {}
            if "step" in said:
                self.steps[said["step"]] = [tuple(row) for row in said["rows"]]
            if key in said:
                return said[key]
        return None

    def go(self):
        print(file=self.process.stdin, flush=True)


@pytest.fixture
def hosts():
    with two_hosts() as names:
        known = [" ".join(line) for line in zip(ADDRESSES, names, strict=True)]
        for name in names:
            Path("/etc/netns", name, "hosts").write_text(
                "\n".join(["127.0.0.1 localhost", *known, ""])
            )
        yield names


@pytest.fixture
def mix(tmp_path):
    content = a_mixed_corpus(tmp_path).model_dump(mode="json", exclude_none=True)
    content["runtime"] |= {"loaders": 1, "bind": "10.77.0.0/16"}
    (tmp_path / "mix.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "mix.yaml"


def test_a_replica_of_torchft_is_lost_with_its_host_and_comes_back_and_steps_hold_what_they_hold(
    hosts, mix
):
    words = [sys.executable, PROCESSES / "front_rank.py", mix, json.dumps({"steps": STEPS})]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    alone = subprocess.run(words, env=env, capture_output=True, text=True, check=True, timeout=300)
    (whole,) = [json.loads(line) for line in alone.stdout.splitlines() if line.startswith("{")]
    here, there = hosts
    with tempfile.TemporaryDirectory(prefix="ft", dir="/tmp") as folder, ExitStack() as stack:
        scratch = Path(folder)

        def start(host, script, *words):
            return Process(stack, host, scratch, script, *words)

        plane = f"{ADDRESSES[0]}:22100"
        assert start(here, "served_rank.py", "serve", mix, plane, 3).told("pid")
        light = start(here, "torchft_replica.py", "lighthouse", ADDRESSES[0]).told("address")

        def replica(name, host, waits_in):
            at = ADDRESSES[host is there]
            return start(
                host,
                *("torchft_replica.py", "train", name, light, plane, at, STEPS, waits_in),
            )

        stay = [replica(name, here, BACK_IN) for name in "ab"]
        lost = replica("c", there, -LOST_IN)
        for each in (*stay, lost):
            assert each.told("is_up")
        for each in (*stay, lost):
            each.go()
        assert lost.told("waits"), "it was to be lost in mid-step"
        cut(there)
        lost.process.kill()
        for each in stay:
            assert each.told("waits")
        mend(there)
        back = replica("d", there, STEPS)
        assert back.told("is_up")
        for each in (back, *stay):
            each.go()
        done = [*stay, lost, back]
        for each in done:
            each.told("nothing more")
        ended = [each.process.wait(LIMIT_S) for each in (*stay, back)]

    assert ended == [0, 0, 0]
    seen = {s: sorted(r for e in done for r in e.steps.get(s, ())) for s in range(STEPS)}
    assert seen == {step: sorted(map(tuple, rows)) for step, rows in whole["seen"]}
    assert sorted(lost.steps) == list(range(LOST_IN))
    assert STEPS - 1 in back.steps  # from which step on, the lighthouse decides
