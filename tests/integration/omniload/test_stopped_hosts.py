"""Stopped roles in a job of two hosts, each with a network namespace and a process namespace."""

import json
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import yaml

from omniload.actors.heartbeat_board import FolderBoard
from tests.house.modules import ROOT
from tests.support.plane.front_ranks import RANK, a_mix_file, environment, results_of, samples
from tests.support.plane.two_hosts import ADDRESSES, cut, end_all_on, mend, on, processes_on

pytestmark = pytest.mark.ray
PROCESS = ROOT / "tests" / "support" / "plane" / "processes" / "served_rank.py"
APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Command that gives a host its own process numbers; on one machine it would otherwise see all processes."""
AHEAD = 8
"""Steps ahead: more than are built when a role is stopped, so ranks get later steps from its successor."""
NEVER_S = 600.0
"""Limit of heartbeats so long that a stopped role is not noticed by a missing one."""
LIMIT_S = 120
ASTRAY_S = 40
"""Time after two starts on a wrong host, and the next one, half a minute later."""


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    runtime = {"loaders": 1, "shadows": 1, "constructors": 2, "silent_after": NEVER_S}
    return a_mix_file(tmp_path_factory.mktemp("corpus"), **runtime)


@pytest.fixture(scope="module")
def steps(mix):
    """Return the samples of each step in one undisturbed process."""
    words = [sys.executable, str(RANK), str(mix), json.dumps({"steps": 16 * AHEAD})]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True)
    return samples(results_of(done.stdout))


class AstrayError(Exception):
    """Ray starts every actor for another host on this host."""


class Job:
    """A rank on each host, each of which takes a step on command."""

    def __init__(self, hosts, mix, scratch):
        self.hosts, self.scratch, self.said = hosts, scratch, scratch / "said"
        job = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29514", "WORLD_SIZE": "2"}
        job |= {"TMPDIR": str(scratch)}
        keywords = json.dumps({"bind": "auto"})
        with self.said.open("w") as said:
            self.ranks = [
                on(
                    host,
                    *(*APART, sys.executable, PROCESS, "open", mix, keywords),
                    env=environment(**job, RANK=str(number)),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=said,
                )
                for number, host in enumerate(hosts)
            ]
        self.seen = []

    def tell(self, rank):
        print("next", file=self.ranks[rank].stdin, flush=True)

    def hear(self, rank):
        for line in self.ranks[rank].stdout:
            if line.startswith("{"):
                told = json.loads(line)
                assert "error" not in told, told
                self.seen.append({"seen": [[told["step"], told["rows"]]]})
                return
        raise AssertionError(f"rank {rank} has ended: {self.log()[-6000:]}")

    def take(self, steps):
        for _ in range(steps):
            for each in (self.tell, self.hear):
                each(0)
                each(1)

    def log(self):
        return self.said.read_text()

    def wait_for(self, pattern):
        """Wait for a line of the job; return the match of the pattern in it."""
        until_s = time.monotonic() + LIMIT_S
        while not (found := re.findall(pattern, self.log())):
            assert time.monotonic() < until_s, f"no {pattern} in {self.log()[-6000:]}"
            time.sleep(0.05)
        return found

    def beats(self):
        """Return the last heartbeat of each role, on either host, and the folder that contains it."""
        boards = [FolderBoard(path) for path in self.scratch.glob("omniload-ray-*/board")]
        return {beat.name: beat for board in boards for beat in board.read().values()}

    def process_of(self, role):
        """Wait until a role gives heartbeats; return its process."""
        until_s = time.monotonic() + LIMIT_S
        while (beat := self.beats().get(role)) is None:
            assert time.monotonic() < until_s, f"{role} is not among {sorted(self.beats())}"
            time.sleep(0.05)
        host = self.hosts[ADDRESSES.index(beat.host)]
        return next(p for p in processes_on(host) if number_inside(p) == beat.pid)

    def loader_on(self, host):
        """Wait until a loader, or a shadow of a loader, is on a host; return its name."""
        until_s = time.monotonic() + ASTRAY_S
        while time.monotonic() < until_s:
            for name, beat in sorted(self.beats().items()):
                if name.startswith("loader") and beat.host == ADDRESSES[host]:
                    return name
            time.sleep(0.05)
        raise AstrayError

    def watch(self):
        """Wait until a watch exists on the second host; return its process."""
        until_s = time.monotonic() + LIMIT_S
        while True:
            for process in processes_on(self.hosts[1]):
                with suppress(psutil.Error):
                    if "HostWatch" in "".join(process.cmdline()):
                        return process
            assert time.monotonic() < until_s, "no process looks for stopped ones"
            time.sleep(0.05)

    def stop(self, role):
        """Stop a role, wait until it is noticed and replaced, and take more steps than were ahead."""
        process = self.process_of(role)
        number = number_inside(process)
        process.send_signal(signal.SIGSTOP)
        # The line has no number if the role's host has not reported a heartbeat of it yet.
        self.wait_for(
            rf"{re.escape(role)} is replaced: (?:its process|process {number}) is stopped"
        )
        self.take(AHEAD)


def number_inside(process):
    """Return the number of a process in its own namespace."""
    with suppress(OSError):
        status = Path(f"/proc/{process.pid}/status").read_text()
        return int(re.search(r"^NSpid:.*\s(\d+)$", status, re.MULTILINE)[1])
    return None


@contextmanager
def a_job(hosts, mix, scratch, *, ends=True):
    """Start a job, and end it: in its normal way if it ``ends``, or in any state."""
    job = Job(hosts, mix, scratch)
    try:
        yield job
        if ends:
            for rank in job.ranks:
                rank.stdin.close()
            assert [rank.wait(LIMIT_S) for rank in job.ranks] == [0, 0], job.log()[-6000:]
    finally:
        for host in hosts:
            end_all_on(host)
        for rank in job.ranks:
            rank.wait(LIMIT_S)
            rank.stdin.close()
            rank.stdout.close()


def test_a_constructor_of_another_host_that_is_stopped_is_replaced_and_steps_hold_the_same(
    hosts, mix, scratch, steps
):
    with a_job(hosts, mix, scratch) as job:
        job.take(2)
        job.stop("constructor-1")
        job.stop("constructor-1+1")

    seen = samples(job.seen)
    assert len(seen) == 2 + 2 * AHEAD
    assert seen.items() <= steps.items()


@pytest.mark.soak  # 60 s: one after another, and the time before a rank reports a wait
def test_each_role_of_a_job_of_two_hosts_that_is_stopped_is_noticed(hosts, mix, scratch, steps):
    with a_job(hosts, mix, scratch) as job:
        job.take(2)
        for role in ("planner", "constructor-0", "planner+1"):
            job.stop(role)

        # The process that looks for stopped processes there, and a role at the same time: another one looks.
        job.watch().send_signal(signal.SIGSTOP)
        job.stop("constructor-1")

        # All wait for a rank, and the roles that wait name it.
        rank = job.process_of("rank dp=1")
        rank.send_signal(signal.SIGSTOP)
        job.tell(1)
        for _ in range(2 * AHEAD):
            job.tell(0)
        (said, *_) = job.wait_for("has waited .*")
        assert f"rank dp=1 (process {number_inside(rank)}, " in said
        assert "is stopped, or its machine is too busy to run it" in said
        rank.send_signal(signal.SIGCONT)
        for _ in range(2 * AHEAD - 1):
            job.tell(1)
        for _ in range(2 * AHEAD):
            job.hear(0)
            job.hear(1)

    seen = samples(job.seen)
    assert len(seen) == 2 + 6 * AHEAD
    assert seen.items() <= steps.items()


@pytest.mark.soak  # 20 s, and 40 for each Ray that does not respect affinity
def test_a_shadow_on_another_host_that_is_stopped_is_replaced_and_so_is_the_loader_it_became(
    hosts, mix, scratch, steps
):
    # Ray may start actors for a newly joined host on the opener's host, again and again. Shadows then stay at home
    # for a while, as they should, and another job is tried.
    for number in range(3):
        (folder := scratch / str(number)).mkdir()
        with a_job(hosts, mix, folder) as job:
            job.take(2)
            with suppress(AstrayError):
                # The shadow, its loader on the first host, and the loader that was the next shadow.
                for host in (1, 0, 1):
                    job.stop(job.loader_on(host))
                break
    else:
        raise AssertionError(job.log()[-6000:])

    seen = samples(job.seen)
    assert len(seen) == 2 + 3 * AHEAD
    assert seen.items() <= steps.items()


@pytest.mark.soak  # 10 s: the time before a rank reports a wait
def test_no_constructor_is_lost_with_the_way_to_its_host_for_longer_than_roles_may_be_silent(
    hosts, mix, scratch, steps
):
    content, brief = yaml.safe_load(mix.read_text()), mix.with_name("brief.yaml")
    content["runtime"] |= {"silent_after": 3.0, "shadows": 0}
    brief.write_text(yaml.safe_dump(content))
    with a_job(hosts, brief, scratch) as job:
        job.take(2)
        job.watch()
        cut(hosts[1])
        try:
            for _ in range(4 * AHEAD):
                job.tell(0)
                job.tell(1)
            job.wait_for("its host, or the network to it, does not answer")
        finally:
            mend(hosts[1])
        for _ in range(4 * AHEAD):
            job.hear(0)
            job.hear(1)

    seen = samples(job.seen)
    assert len(seen) == 2 + 4 * AHEAD
    assert seen.items() <= steps.items()
    assert "is replaced" not in job.log()


@pytest.mark.soak  # 60 s: as long as Ray looks for its head
def test_a_host_whose_rank_asks_for_nothing_is_left_by_all_once_the_opener_was_killed(
    hosts, mix, scratch
):
    with a_job(hosts, mix, scratch, ends=False) as job:
        job.take(2)
        job.watch()
        job.ranks[0].kill()
        until_s = time.monotonic() + LIMIT_S
        while left := processes_on(hosts[1]):
            assert time.monotonic() < until_s, left
            time.sleep(0.2)
