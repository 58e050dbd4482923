"""The Ray runtime: the steps of the local runtime, and the end of every process it started.

Each test starts a Ray of its own, which takes seconds, so there are few tests and each checks much.
"""

import json
import os
import signal
import stat
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import pytest

from omniload.actors.local.plane import LocalPlane
from omniload.actors.opening import open_plane
from omniload.base.errors import ConfigError, IntegrityError, StateError
from omniload.base.linux.huge_pages import gives_memory_back
from omniload.batch.digest import batch_digest, combined
from omniload.client import Client
from omniload.mix.config import MixConfig
from omniload.mix.journal.place import JOURNAL_NAME
from tests.support.every_process import every_process
from tests.support.plane.corpora import a_corpus, a_mixed_corpus, with_masks, write_texts

pytest.importorskip("ray")
from omniload.actors.ray.environment import ray
from omniload.actors.ray.hosts.node import start_node
from omniload.actors.ray.hosts.node_plan import NodePlan
from omniload.actors.ray.plane import RayPlane
from omniload.actors.ray.release import Release
from omniload.actors.reaper_process import marks_of
from tests.support.plane.local_runs import a_spec
from tests.support.programs import finished

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.usefixtures("leaves_nothing_behind"),
]

STEPS = 5


def local_steps(spec, count=STEPS):
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        return [client.next_batch() for _ in range(count)]


def with_runtime(mix, **changes):
    return mix.model_copy(update={"runtime": mix.runtime.model_copy(update=changes)})


def scores_in(batches):
    """Return the keys of a step's pieces with their scores, on all ranks."""
    return sorted(
        (key, m.columns_K["scores"][k].tolist())
        for batch in batches
        for m in batch.microbatches
        for k, key in enumerate(m.keys_K4.tolist())
    )


def fails_after_prefetched(client):
    """Take batches until an error comes; batches that were built earlier may come first."""
    return list(islice(client, 100))


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def left_of(pids):
    """Return the remaining processes; a killed one may take a moment on a busy machine."""
    there = [psutil.Process(pid) for pid in pids if not is_gone(pid)]
    return psutil.wait_procs(there, timeout=60)[1]


def listening():
    return {
        (at.pid, at.laddr.ip)
        for at in psutil.net_connections("tcp")
        if at.status == psutil.CONN_LISTEN
    }


def processes_of(mark):
    """Return this process and those of its planes, also by parents: titles of Ray's agents overwrite their marks."""
    marked = {p.pid for p in every_process() if mark in marks_of(p)}
    return marked | {p.pid for p in psutil.Process().children(recursive=True)} | {os.getpid()}


def lines_of(pids):
    """Return the command line of each remaining process; one may have ended since it was found."""
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid).cmdline())
    return [line for line in found if line]


def has_huge_pages(pid):
    return "THP_enabled:\t1" in Path(f"/proc/{pid}/status").read_text()


def kill(plane, role):
    os.kill(plane.pids()[role], signal.SIGKILL)


# Six processes start one after another, each in up to a minute on a busy machine.
@pytest.mark.timeout(900)
def test_two_ranks_get_the_steps_of_a_local_run_though_roles_are_killed_and_stopped(tmp_path):
    mix = with_masks(a_mixed_corpus(tmp_path, rows=6, micro_rows=1), ["ids"])
    alone = local_steps(a_spec(tmp_path, mix, run_dir=tmp_path / "alone"), 7 * STEPS)
    local = [batch_digest(batch) for batch in alone]

    spread = with_runtime(mix, loaders=2, constructors=9, shadows=1)
    with open_plane(a_spec(tmp_path, spread, dp=2, run_dir=tmp_path / "run")) as plane:
        assert isinstance(plane, RayPlane)
        pids = plane.pids()
        folder = str(plane._cluster.folder)
        assert {psutil.Process(pid).nice() for pid in pids.values()} == {psutil.Process().nice()}
        assert {has_huge_pages(pids[f"loader-{n}"]) for n in (0, 1)} <= {not gives_memory_back()}
        with pytest.raises(
            StateError,
            match=r"another data plane open, in the Ray at 127\.0\.0\.1:\d+ .* close that plane",
        ):
            RayPlane(a_spec(tmp_path, spread))
        for wrong in ((2, 0), (0, 1), (-1, 0)):
            with pytest.raises(ConfigError, match="this plane has"):
                plane.handle(*wrong)
        clients = [Client(plane.handle(rank)) for rank in range(2)]
        steps = [[client.next_batch() for client in clients] for _ in range(STEPS)]
        state = clients[1].state_dict()
        for role, number in (
            ("loader-0", signal.SIGKILL),
            ("loader-1", signal.SIGSTOP),
            (
                "constructor-0",
                signal.SIGTERM,
            ),  # the signal by which a person or a pre-empted job ends a process
            ("planner", signal.SIGKILL),
            ("constructor-1", signal.SIGSTOP),
            ("planner", signal.SIGSTOP),
        ):
            lost = plane.pids()[role]
            os.kill(lost, number)
            # More steps than were prefetched, so the last of them come from the planner that took over.
            steps += [[client.next_batch(120) for client in clients] for _ in range(STEPS)]
            assert plane.pids()[role] != lost
            assert left_of([lost]) == []  # a stopped one is ended before another acts
        assert clients[0].state_dict()["step"] == 7 * STEPS
        assert plane.holders()["planner"] == "planner+2"

    assert [combined(map(batch_digest, batches)) for batches in steps] == local
    journals = [(tmp_path / run / JOURNAL_NAME).read_bytes() for run in ("run", "alone")]
    assert max(journals, key=len).startswith(min(journals, key=len))
    assert [scores_in(batches) for batches in steps] == [scores_in([batch]) for batch in alone]
    for batches in steps:
        labels = sum(int(m.loss_mask_RT.sum()) for batch in batches for m in batch.microbatches)
        assert {batch.loss_tokens for batch in batches} == {labels}
    assert sorted(pids) == ["constructor-0", "constructor-1", "loader-0", "loader-1", "planner"]
    assert len(set(pids.values()) | {os.getpid()}) == 6
    assert left_of(pids.values()) == []
    assert not Path(folder).exists()
    logs = tmp_path / "run" / "logs"
    assert {
        f"{role}.log" for role in (*pids, "keeper", "rank-dp=0", "rank-dp=1", "loader-0+1")
    } <= {path.name for path in logs.iterdir()}
    assert "loader-0 is replaced: " in (logs / "keeper.log").read_text()
    with LocalPlane(a_spec(tmp_path, mix)) as plane, Client(plane.handle(0)) as client:
        for _ in range(STEPS):
            client.next_batch()
        assert json.loads(json.dumps(client.state_dict())) == json.loads(json.dumps(state))


def test_a_stage_that_began_by_epochs_holds_though_the_planner_is_killed_without_a_folder(tmp_path):
    mix = a_corpus(tmp_path, rows=6, micro_rows=2)
    first, *others = mix.names
    weights = dict.fromkeys(mix.names, 1.0)
    waits = {"from_epochs": {first: 0.5}, "weights": {first: 9.0} | dict.fromkeys(others, 1.0)}
    content = mix.model_dump() | {"version": 2}
    content["mix"] |= {"stages": [{"weights": weights}, waits]}
    mix = MixConfig.model_validate(content)
    steps = 40
    with LocalPlane(a_spec(tmp_path, mix)) as plane, Client(plane.handle(0)) as client:
        whole = [batch_digest(client.next_batch()) for _ in range(steps)]
        edits = client.state_dict()["edits"]
    assert [edit["change"]["kind"] for edit in edits] == ["begin"]
    assert 0 < edits[0]["step"] < steps // 2

    with open_plane(a_spec(tmp_path, with_runtime(mix, kind="ray"))) as plane:
        client = Client(plane.handle(0))
        found = [batch_digest(client.next_batch()) for _ in range(steps // 2)]
        kill(plane, "planner")
        found += [batch_digest(client.next_batch()) for _ in range(steps // 2)]
        again = client.state_dict()["edits"]

    assert found == whole
    assert again == edits


def test_three_ranks_of_two_cp_peers_resume_a_local_run_though_the_planner_is_killed(tmp_path):
    mix = a_corpus(tmp_path, rows=6, micro_rows=2, masked=True)
    with LocalPlane(a_spec(tmp_path, mix)) as plane, Client(plane.handle(0)) as client:
        client.next_batch()
        client.next_batch()
        state = json.loads(json.dumps(client.state_dict()))
        rest = [client.next_batch() for _ in range(3 + 2 * STEPS)]

    spec = a_spec(tmp_path, with_runtime(mix, kind="ray"), dp=3, cp=2, state=state)
    with open_plane(spec) as plane:
        peers = {(d, c): Client(plane.handle(d, c)) for d in range(3) for c in range(2)}
        # One rank reads to its end before the others begin; the others must not lack anything that it read.
        taken = {peer: [peers[peer].next_batch()] for peer in peers}
        for peer in reversed(peers):
            taken[peer] += [peers[peer].next_batch() for _ in range(2)]
        kill(plane, "planner")  # without a folder of the run, its journal is in the plane
        for _ in range(2 * STEPS):
            for peer, client in peers.items():
                taken[peer].append(client.next_batch())

    for step, whole in enumerate(rest):
        found = []
        for d in range(3):
            both = (taken[d, 0][step], taken[d, 1][step])
            assert both[0].step == whole.step
            for first, second in zip(*(batch.microbatches for batch in both), strict=True):
                rows = np.empty((len(first.tokens_RC), 3, mix.pack.length), np.float64)
                for part in (first, second):
                    rows[:, 2, part.indices_C] = part.aligned_RC["weight"]
                    rows[:, 0, part.indices_C] = part.tokens_RC
                    rows[:, 1, part.indices_C] = part.labels_RC
                found += rows.tolist()
        expected = [
            row
            for m in whole.microbatches
            for row in np.stack((m.tokens_RT, m.labels_RT, m.aligned_RT["weight"]), axis=1).tolist()
        ]
        assert whole.loss_tokens == sum(int(m.loss_mask_RT.sum()) for m in whole.microbatches)
        assert sorted(found) == sorted(expected)
        of_ranks = [sizes_of(taken[d, c][step].microbatches) for d in range(3) for c in range(2)]
        assert {key: size for held in of_ranks for key, size in held.items()} == sizes_of(
            whole.microbatches
        )


def sizes_of(parts):
    """Return the values of pieces in the column of whole records, by their keys."""
    return {
        tuple(key): part.columns_K["size"][i].tolist()
        for part in parts
        for i, key in enumerate(part.keys_K4.tolist())
    }


def test_a_bad_record_crosses_ray_as_the_error_it_is(tmp_path):
    mix = with_runtime(a_mixed_corpus(tmp_path), kind="ray")
    write_texts(tmp_path / "text" / "1.jsonl", ["good", None, "good"])

    with (
        open_plane(a_spec(tmp_path, mix)) as plane,
        Client(plane.handle(0)) as client,
        pytest.raises(IntegrityError, match=r"1\.jsonl.*on_error") as caught,
    ):
        fails_after_prefetched(client)
    plane.close()  # closed a second time, which has no effect

    assert type(caught.value) is IntegrityError


def test_roles_that_run_other_code_of_the_same_version_are_refused_with_both_places(
    tmp_path, monkeypatch
):
    own = Release.own()
    older = replace(own, code="0" * 16, place="/old on a")
    monkeypatch.setattr(Release, "own", lambda: older)

    with pytest.raises(ConfigError) as caught:
        RayPlane(a_spec(tmp_path, with_runtime(a_mixed_corpus(tmp_path), kind="ray")))

    of_role, of_this = f"runs omniload {own} ({own.place})", f"this process {older} (/old on a)"
    assert f"loader-0 {of_role}, {of_this}, so their samples may differ" in str(caught.value)


def test_a_source_that_cannot_be_opened_is_refused_by_name_and_leaves_no_ray(tmp_path):
    mix = with_runtime(a_mixed_corpus(tmp_path), kind="ray")
    for file in (tmp_path / "text").iterdir():
        file.unlink()

    with pytest.raises(ConfigError, match=r"sources\.text\.path: .* matches no file"):
        open_plane(a_spec(tmp_path, mix))

    assert not ray.is_initialized()


def test_a_ray_whose_inside_has_changed_is_started_by_its_promised_way(tmp_path, monkeypatch):
    def moved(*_, **__):
        raise TypeError("Node() takes other arguments now")

    monkeypatch.setattr("ray._private.node.Node.__init__", moved)
    assert (
        start_node(
            NodePlan(folder=str(tmp_path), address="127.0.0.1", workers=1, object_store_bytes=0)
        )
        is None
    )
    monkeypatch.undo()
    monkeypatch.setattr("omniload.actors.ray.cluster.start_node", lambda _: None)
    # One loader, because each process of a role loads all its modules here, which takes seconds.
    mix = with_runtime(a_mixed_corpus(tmp_path), loaders=1)
    expected = [batch_digest(batch) for batch in local_steps(a_spec(tmp_path, mix))]

    with (
        RayPlane(a_spec(tmp_path, mix, run_dir=tmp_path / "run")) as plane,
        Client(plane.handle(0)) as client,
    ):
        found = [batch_digest(client.next_batch()) for _ in range(STEPS)]

    assert found == expected


def test_no_process_is_started_that_no_data_plane_asks_and_no_other_user_or_host_gets_in(tmp_path):
    mix = a_mixed_corpus(tmp_path)
    before = listening()

    with RayPlane(a_spec(tmp_path, mix)) as plane:
        folder = str(plane._cluster.folder)
        # Ray makes its own folder accessible to all users, including sockets.
        assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
        started = [
            " ".join(p.info["cmdline"] or [])
            for p in psutil.process_iter(["cmdline"])
            if folder in " ".join(p.info["cmdline"] or [])
        ]
        ours = processes_of(plane.address.namespace)
        titles = {line[0] for line in lines_of(ours)}
        lines = [" ".join(line) for line in lines_of(ours - {os.getpid()})]
        places = {(pid, address) for pid, address in listening() - before if pid in ours}
        # A user who runs tasks next to the plane may give them an environment; Ray's agent exists then.
        asked = ray.remote(lambda: os.environ.get("OF_A_TASK"))
        with_environment = asked.options(runtime_env={"env_vars": {"OF_A_TASK": "1"}}).remote()
        assert ray.get(with_environment, timeout=120) == "1"

    assert len({pid for pid, _ in places}) >= 5
    assert {address for _, address in places} <= {"127.0.0.1", "::ffff:127.0.0.1"}
    assert any("gcs_server" in line for line in started)
    assert not [line for line in started if "dashboard.py" in line or "monitor.py" in line]
    assert len([line for line in lines if "late_agent.py" in line.partition(" --")[0]]) == 1
    # A running agent shows only its title.
    assert "ray::RuntimeEnvAgent" not in titles
    assert not [line for line in lines if "dashboard/agent.py" in line or "DashboardAgent" in line]


EARLY = """
import os
import psutil
import ray
from omniload.actors.ray.cluster import PrivateCluster

cluster = PrivateCluster(object_store_bytes=100 << 20, workers=1)
print(cluster.address, flush=True)
input()
print(cluster.ended_service() or "none has ended", flush=True)
raylet = next(child for child in psutil.Process().children() if child.name() == "raylet")
raylet.kill()
os.waitid(os.P_PID, raylet.pid, os.WEXITED | os.WNOWAIT)
print(cluster.ended_service())
cluster.close()
"""
OUTSIDER = """
import ray, sys
import ray._private.ray_constants
ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
ray.init(address=sys.argv[1], configure_logging=False, log_to_driver=False, _node_ip_address="127.0.0.1")
print("joined")
"""


def test_a_ray_of_a_program_that_had_imported_ray_lets_no_outsider_in_and_says_which_server_ended():
    outside = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    opener = subprocess.Popen(
        [sys.executable, "-c", EARLY],
        env=outside,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        address = opener.stdout.readline().strip()
        outsider = finished([sys.executable, "-c", OUTSIDER, address], limit_s=120, env=outside)
    finally:
        told, _ = opener.communicate("\n", timeout=120)

    assert address.startswith("127.0.0.1:")
    assert "none has ended" in told  # Ray reports more
    assert "raylet ended with -9" in told
    assert outsider.returncode != 0
    assert "joined" not in outsider.stdout


STOPPED = """
import sys

import psutil
from omniload.actors.ray import cluster
from omniload.base.errors import UnavailableError

start = cluster.start_node

def halfway(plan):
    node = start(plan)
    (head,) = [each for each in psutil.Process().children() if each.name() == sys.argv[1]]
    head.suspend()
    print(head.pid, flush=True)
    return node

cluster.start_node = halfway
cluster._CONNECTED_WITHIN_S, cluster._TOLD_AFTER_S, cluster._LEAVE_S = 2.0, 1.0, 0.0
try:
    cluster.PrivateCluster(object_store_bytes=100 << 20, workers=1)
except UnavailableError as error:
    print(error, flush=True)
"""


@pytest.mark.scripts_start_warm
@pytest.mark.parametrize("server", ["gcs_server", "raylet"])
def test_a_server_that_is_stopped_as_its_opener_connects_is_named_and_ended_with_the_process(
    server,
):
    opener = subprocess.Popen(
        [sys.executable, "-c", STOPPED, server],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pid = int(opener.stdout.readline())
    head = psutil.Process(pid)

    told, logged = opener.communicate(timeout=120)

    said = f"its {server}, process {pid}, is stopped (kill -CONT {pid} resumes it)"
    assert f"has not connected this process within 1 of 2 s: {said}" in logged
    assert f"has not connected this process within 2 s: {said}; end this process" in told
    head.wait(120)
