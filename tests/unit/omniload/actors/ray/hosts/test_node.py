"""A Ray that starts slowly or not at all: tried once more, and then reported with a remedy."""

import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from omniload.base.clock import FakeClock
from omniload.base.errors import StateError, UnavailableError

pytest.importorskip("ray")
from omniload.actors.ray import cluster as ray_cluster
from omniload.actors.ray.answers import wait_for_head
from omniload.actors.ray.cluster import PrivateCluster, connect
from omniload.actors.ray.hosts import node as ray_node
from omniload.actors.ray.hosts.node_plan import NodePlan


@pytest.fixture(autouse=True)
def reachable(monkeypatch):
    """Make this host reach itself, without a connection."""
    monkeypatch.setattr("omniload.actors.ray.cluster.require_reachable", lambda address: None)


class FakeNode:
    """A node of Ray that has joined itself after some looks."""

    gcs_address = "127.0.0.2:1"

    def __init__(self, looks=0, dead=()):
        self._looks, self._dead = looks, list(dead)
        self._node_id = "0" * 56
        self.killed = False

    def get_gcs_client(self):
        return self

    def check_alive(self, numbers, timeout):
        self._looks -= 1
        return [self._looks < 0]

    def dead_processes(self):
        return self._dead

    def kill_all_processes(self, **_):
        self.killed = True


@pytest.fixture
def clock(monkeypatch):
    fake = FakeClock()
    monkeypatch.setattr(ray_node, "SystemClock", lambda: fake)
    return fake


def test_a_node_may_take_longer_to_join_than_ray_itself_allows(clock):
    ray_node.look_often(FakeNode(looks=4000))

    assert 60 < clock.now_s() < 120


def test_a_node_that_never_joins_is_left_to_ray_after_two_minutes(clock):
    ray_node.look_often(FakeNode(looks=10**9))

    assert clock.now_s() == pytest.approx(120, abs=0.1)


def test_a_node_whose_process_has_ended_is_not_waited_for(clock):
    dead = [("raylet", SimpleNamespace(returncode=-9))]

    with pytest.raises(RuntimeError, match="raylet ended with -9 while the node started"):
        ray_node.look_often(FakeNode(looks=10**9, dead=dead))

    assert clock.now_s() == 0


class FakeReaper:
    """A reaper that only counts."""

    begun, closed = 0, 0

    def __init__(self, mark, folders):
        FakeReaper.begun += 1

    def close(self):
        FakeReaper.closed += 1


@pytest.fixture
def outcomes(monkeypatch, tmp_path):
    """The result of each start of the node, in order; every reaper and folder must be gone in the end."""
    script = []

    def start_node(plan):
        outcome = script.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(FakeReaper, "begun", 0)
    monkeypatch.setattr(FakeReaper, "closed", 0)
    monkeypatch.setattr(ray_cluster, "Reaper", FakeReaper)
    monkeypatch.setattr(ray_cluster, "start_node", start_node)
    monkeypatch.setattr(ray_cluster, "connect", lambda *_: None)
    monkeypatch.setattr(ray_cluster.tempfile, "gettempdir", lambda: str(tmp_path))
    yield script
    assert FakeReaper.begun == FakeReaper.closed
    assert list(tmp_path.iterdir()) == []


def test_ray_ties_what_it_starts_to_no_thread_that_may_end_before_the_plane(monkeypatch):
    tied = []

    class Node:
        def __init__(self, parameters, *, spawn_reaper, **_):
            tied.append(spawn_reaper)

    monkeypatch.setattr("ray._private.node.Node", Node)
    plan = NodePlan(folder="/tmp/a", address="127.0.0.1", workers=0, object_store_bytes=0)

    ray_node.start_node(plan)
    thread = threading.Thread(target=ray_node.start_node, args=(plan,))
    thread.start()
    thread.join(60.0)

    assert tied == [True, False]


@pytest.mark.parametrize(
    ("address", "told"),
    [("127.0.0.5", {"RAY_prestart_worker_first_driver": "0"}), ("10.0.0.5", {})],
    ids=["alone", "others may join"],
)
def test_a_raylet_of_one_host_answers_who_opens_the_plane_before_the_workers_that_it_starts(
    monkeypatch, address, told
):
    started = []

    def start(command, **named):
        started.append(named["env_updates"] or {})

    monkeypatch.setattr("ray._private.services.start_ray_process", start)
    monkeypatch.setattr(ray_node, "_leave_out_services", lambda _node: None)
    services = ray_node.import_module("ray._private.services")

    with ray_node._no_agents(SimpleNamespace(node_ip_address=address)):
        services.start_ray_process(["raylet"], env_updates={"A": "1"})
        services.start_ray_process(["raylet"], env_updates=None)

    assert started == [{"A": "1"} | told, told]


def test_a_start_that_fails_once_is_tried_once_more(outcomes, caplog):
    node = FakeNode()
    outcomes += [Exception("The current node timed out during startup. This\ncould"), node]

    cluster = PrivateCluster(object_store_bytes=0, workers=1)
    cluster.close()

    assert outcomes == []
    assert "started once more: Exception: The current node timed out during startup" in caplog.text
    assert node.killed


def test_a_start_that_fails_twice_is_unavailable_with_the_remedy(outcomes):
    outcomes += [Exception("timed out"), RuntimeError("Ray's raylet ended"), FakeNode()]

    with pytest.raises(UnavailableError, match=r"twice: RuntimeError: Ray's raylet .* free cores"):
        PrivateCluster(object_store_bytes=0, workers=1)

    assert len(outcomes) == 1


def test_ctrl_c_is_no_reason_to_start_once_more(outcomes):
    outcomes += [KeyboardInterrupt(), FakeNode()]

    with pytest.raises(KeyboardInterrupt):
        PrivateCluster(object_store_bytes=0, workers=1)

    assert len(outcomes) == 1


@pytest.fixture
def stuck(monkeypatch):
    """A Ray that does not connect until this is set; waits for it are over at once."""
    answers = threading.Event()
    monkeypatch.setattr(ray_cluster.ray, "init", lambda **_: answers.wait(60.0))
    monkeypatch.setattr(ray_cluster, "wait_for_future", lambda *_: False)
    yield answers
    answers.set()
    assert wait_for_head(60.0)


def test_a_ray_that_does_not_connect_a_process_is_told_and_given_up(stuck, caplog):
    with pytest.raises(
        UnavailableError,
        match=r"127\.0\.0\.2:1 has not connected this process within 150 s: none of its servers .* start again",
    ):
        connect("127.0.0.2:1", "job")
    assert "has not connected this process within 10 of 150 s: none of its servers" in caplog.text

    with pytest.raises(StateError, match="still waits for a Ray that did not answer"):
        connect("127.0.0.2:1", "job")


def test_a_ray_of_an_unknown_version_that_does_not_start_is_told_and_given_up(
    stuck, outcomes, monkeypatch, caplog
):
    monkeypatch.setattr(ray_cluster, "_LEAVE_S", 0.0)
    outcomes.append(None)  # the node that starts here is not ours

    with pytest.raises(
        UnavailableError,
        match="the Ray that this process starts has not connected this process within 150 s: none of its servers",
    ):
        PrivateCluster(object_store_bytes=0, workers=1)

    assert "within 10 of 150 s: none of its servers" in caplog.text
    assert FakeReaper.closed == 0
    FakeReaper.closed = 1
    (left,) = Path(ray_cluster.tempfile.gettempdir()).iterdir()
    shutil.rmtree(left)


def test_a_ray_of_an_unknown_version_is_not_left_by_the_thread_that_started_it(
    outcomes, monkeypatch
):
    started = []

    def init(**_):
        started.append(threading.current_thread())
        return SimpleNamespace(address_info={"gcs_address": "127.0.0.1:1"})

    monkeypatch.setattr(ray_cluster.ray, "init", init)
    outcomes.append(None)

    cluster = PrivateCluster(object_store_bytes=0, workers=1)

    assert cluster.address == "127.0.0.1:1"
    (thread,) = started
    assert thread.is_alive()
    cluster.close()
    thread.join(60.0)
    assert not thread.is_alive()


def test_a_ray_that_was_given_up_is_left_to_the_reaper_as_its_end_would_end_this_process(
    stuck, outcomes, monkeypatch
):
    monkeypatch.setattr(ray_cluster, "connect", connect)
    monkeypatch.setattr(ray_cluster, "_LEAVE_S", 0.0)
    node = FakeNode()
    outcomes.append(node)

    with pytest.raises(UnavailableError, match="has not connected this process"):
        PrivateCluster(object_store_bytes=0, workers=1)

    assert (FakeReaper.begun, FakeReaper.closed, node.killed) == (1, 0, False)
    FakeReaper.closed = 1
    (left,) = Path(ray_cluster.tempfile.gettempdir()).iterdir()
    shutil.rmtree(left)
