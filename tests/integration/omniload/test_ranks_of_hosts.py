"""A rank ends on another host than the planner, and the planner is lost too; hosts are network namespaces.

The wire between them is a slow one.
"""

import json
import signal
import subprocess
import time

import pytest
import yaml

from omniload.actors.heartbeat_board import FolderBoard
from tests.house.modules import ROOT
from tests.support.plane.front_ranks import a_mix_file, environment
from tests.support.plane.two_hosts import ADDRESSES, end_all_on, on, processes_on, slowed

pytestmark = pytest.mark.ray
PROCESS = ROOT / "tests" / "support" / "plane" / "processes" / "served_rank.py"
AHEAD = 4
LATE_S = 120
"""Many times the limit of a rank's heartbeats: the wait of a rank without help."""
LIMIT_S = 240


@pytest.fixture
def ranks(hosts, tmp_path, scratch, warm_python):
    """A rank next to the planner, and two on the other host; the first of these has started that host's node of Ray."""
    mix = a_mix_file(tmp_path, loaders=1, prefetch_steps=AHEAD, batch_timeout=LATE_S)
    content = yaml.safe_load(mix.read_text())
    content["batch"]["tokens"] = 3 * content["batch"]["micro_tokens"]
    mix.write_text(yaml.safe_dump(content))
    job = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29515", "WORLD_SIZE": "3"}
    job |= {"TMPDIR": str(scratch)}
    started = [
        on(
            hosts[number > 0],
            *(warm_python.path, PROCESS, "open", mix, json.dumps({"bind": "auto"})),
            env=environment(**job, RANK=str(number)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for number in range(3)
    ]
    try:
        yield started
    finally:
        for host in hosts:
            end_all_on(host)
        for rank in started:
            rank.communicate(timeout=LIMIT_S)


def tell(rank, steps):
    for _ in range(steps):
        print("next", file=rank.stdin, flush=True)


def hear(rank, steps):
    told = []
    # Lines of Ray come in between, from the planner that is killed.
    while len(told) < steps:
        line = rank.stdout.readline()
        assert line, "the rank has ended"
        told += [json.loads(line)] if line.startswith("{") else []
    assert not [result for result in told if "error" in result], told
    return [result["step"] for result in told]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_that_ends_on_another_host_beside_the_planner_keeps_no_step_from_the_others(
    ranks, hosts, scratch
):
    for rank in ranks:
        tell(rank, 2)
    for rank in ranks:
        hear(rank, 2)
    with slowed(hosts, "200kbit") as held_back:
        # These are all planned steps.
        tell(ranks[2], AHEAD)
        hear(ranks[2], AHEAD)
        boards = [FolderBoard(path).read() for path in scratch.glob("omniload-ray-*/board")]
        (planner,) = [board["planner"].pid for board in boards if "planner" in board]

        (process,) = [p for p in processes_on(hosts[0]) if p.pid == planner]
        process.send_signal(signal.SIGKILL)
        ranks[2].kill()

        began_s = time.monotonic()
        for rank in ranks[:2]:
            tell(rank, AHEAD + 1)
        heard = [hear(rank, AHEAD + 1) for rank in ranks[:2]]
        print(f"waited {time.monotonic() - began_s:.1f} s")  # noqa: T201 -- a figure for whoever asks

        assert heard == [list(range(2, 2 + AHEAD + 1))] * 2
        assert held_back() > 0
