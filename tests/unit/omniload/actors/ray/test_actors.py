"""Additions of Ray's actor classes to the shells: the threads and queues in which they carry out calls."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from omniload.actors.heartbeat_board import FolderBoard
from omniload.actors.plane import PlaneSpec
from omniload.actors.ray import actors as actors_module
from omniload.actors.ray import planner_actor as planner_module
from omniload.actors.ray.actors import ConstructorActor, LoaderActor
from omniload.actors.ray.links.of_constructor import LoaderHolders, Loaders
from omniload.actors.ray.planner_actor import PlannerActor
from omniload.actors.roles.build_order import BuildOrder
from omniload.base.clock import FakeClock
from omniload.base.errors import ConfigError, IntegrityError, StateError
from omniload.base.ragged import Ragged
from omniload.batch.rows import build_rows
from omniload.machine.data_constructor import DataConstructor
from omniload.machine.messages import ReadAhead
from omniload.machine.progress import Progress
from omniload.mix.columns import ColumnRanges, SampleColumns
from omniload.mix.runtime import RuntimeConfig
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.world import RanksServed, WorldRank
from tests.support.plane.builders import a_mix, a_plan, tokens_of

A = [0, 1, 0, 0, 5, 5]
NOBODY = Loaders(of={}, names={}, roles={}, turn=0, limit_s=1.0)


def test_a_member_that_follows_others_takes_them_off_the_board_of_its_host(tmp_path, monkeypatch):
    monkeypatch.setattr(actors_module, "host_here", lambda: "here")
    board = FolderBoard(tmp_path)
    for name in ("constructor-0", "constructor-0+1", "constructor-1"):
        board.note(Progress(name=name, pid=7, beat_s=0.0, tasks=()))
    machine = DataConstructor(dp_ranks=[0], names=["web"], row_length=8)

    ConstructorActor(machine, NOBODY, "constructor-0+2", board, None)

    assert sorted(board.read()) == ["constructor-0+2", "constructor-1"]


def test_a_shadow_leaves_the_loader_beside_it_on_the_board(tmp_path, monkeypatch):
    monkeypatch.setattr(actors_module, "host_here", lambda: "here")
    board = FolderBoard(tmp_path)
    board.note(Progress(name="loader-0", pid=7, beat_s=0.0, tasks=()))

    LoaderActor("loader-0+1", board, None)

    assert sorted(board.read()) == ["loader-0", "loader-0+1"]


class Reading(LoaderActor):
    """A loader of which reads of some sources fail, and each takes so long."""

    def __init__(self, clock, took_s, failing=()):
        self.clock, self.took_s, self.failing = clock, took_s, failing

    def read_ahead(self, command):
        self.clock.sleep(self.took_s)
        if command.source in self.failing:
            raise IntegrityError(f"source {command.source} cannot be decoded")
        return command.source


@pytest.mark.parametrize(("took_s", "answered"), [(0.001, 9), (0.04, 3), (2.0, 1)])
def test_several_reads_are_answered_for_themselves_within_a_tenth_of_a_second_and_the_last_read(
    monkeypatch, took_s, answered
):
    clock = FakeClock()
    monkeypatch.setattr(actors_module, "time", SimpleNamespace(monotonic=clock.now_s))
    reads = [ReadAhead(source=s, start=0, stop=9) for s in range(9)]

    found = Reading(clock, took_s, failing=(1,)).read_several(reads)

    said = [str(each) if isinstance(each, IntegrityError) else each for each in found]
    assert said == [0, "source 1 cannot be decoded", *range(2, 9)][:answered]


@pytest.mark.parametrize(
    ("place", "where"),
    [({}, ""), ({"loaders": {"cpus": 1}}, r"; looked for on 10\.0\.0\.9, where runtime\.place")],
)
def test_a_loader_on_a_node_of_its_own_says_on_which_host_a_source_is_not(
    tmp_path, monkeypatch, place, where
):
    monkeypatch.setattr(actors_module, "host_here", lambda: "10.0.0.9")
    runtime = RuntimeConfig.model_validate({"kind": "ray", "address": "auto", "place": place})
    mix = a_mix().model_copy(update={"runtime": runtime})
    actor = LoaderActor("loader-0", FolderBoard(tmp_path), None)

    with pytest.raises(ConfigError, match=rf"sources\.code\.path: .*{where}") as told:
        actor.open(PlaneSpec(mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of()), (0,), 0)

    assert ("looked for on" in str(told.value)) == bool(where)


def test_a_constructor_builds_in_one_thread_in_whichever_it_is_called(tmp_path, monkeypatch):
    monkeypatch.setattr(actors_module, "host_here", lambda: "here")
    own = ColumnRanges.of([SampleColumns(tokens=Ragged.of([tokens_of(0, 1, 0, 5)]))])
    monkeypatch.setattr(LoaderHolders, "fetch", lambda _self, _requests: own)
    built_in = set()

    def rows(*what, **how):
        built_in.add(threading.get_ident())
        return build_rows(*what, **how)

    machine = DataConstructor(dp_ranks=[0], names=["web", "code"], row_length=8, rows=rows)
    actor = ConstructorActor(machine, NOBODY, "constructor-0", FolderBoard(tmp_path), None)
    called_in = set()
    meet = threading.Barrier(3, timeout=60)

    def build(step):
        meet.wait()
        called_in.add(threading.get_ident())
        return actor.build([a_plan([[A]], step=step)])

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(build, (3, 4, 5))) == [1, 1, 1]

    assert all(actor.has(step) for step in (3, 4, 5))
    assert len(called_in) == 3
    assert len(built_in) == 1


def test_other_ranks_and_what_is_let_go_are_known_while_every_window_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(actors_module, "host_here", lambda: "here")
    own = ColumnRanges.of([SampleColumns(tokens=Ragged.of([tokens_of(0, 1, 0, 5)]))])
    waiting, goes_on = threading.Semaphore(0), threading.Event()

    def fetch(_self, _requests):
        waiting.release()
        assert goes_on.wait(60)
        return own

    monkeypatch.setattr(LoaderHolders, "fetch", fetch)
    machine = DataConstructor(dp_ranks=[0], names=["web", "code"], row_length=8)
    actor = ConstructorActor(machine, NOBODY, "constructor-0", FolderBoard(tmp_path), None)
    before, now = RanksServed(dp_ranks=(0,)), RanksServed(dp_ranks=(0, 1), generation=1)

    def carry_out(step, served, released_to=0):
        plans = () if step is None else [a_plan([[A]], step=step)]
        order = BuildOrder(plans=plans, served=served, released_to=released_to, heard=-1)
        return actor.carry_out(order.packed())

    for step in range(4):
        carry_out(step, before)
        assert waiting.acquire(timeout=60)
    carry_out(None, now, released_to=2)

    assert (machine.generation, tuple(machine.dp_ranks)) == (1, (0, 1))
    assert machine.is_released(1)
    assert not machine.is_released(2)
    goes_on.set()


def test_ranks_that_wait_for_a_planner_that_takes_over_see_that_it_waits_for_room(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(actors_module, "host_here", lambda: "here")
    waits, told = "waits for room for the journal: 0 bytes (0 B) are free there", []
    actor = PlannerActor("planner+1", None, None, None)

    def make_successor(*_, room, **__):
        room.says(waits)
        told.extend(task["doing"] for role in actor.heartbeats()[1] for task in role["tasks"])
        raise StateError("it stays full")

    monkeypatch.setattr(planner_module, "make_successor", make_successor)
    with pytest.raises(StateError, match="it stays full"):
        actor.open(
            SimpleNamespace(
                spec=SimpleNamespace(passed_on={}), facts=[], folder=tmp_path, life=1, namespace=""
            )
        )

    assert told == [waits]


def test_who_asks_a_planner_that_could_not_take_over_is_told_why(tmp_path, monkeypatch):
    def make_successor(*_, **__):
        raise IntegrityError("line 7 is damaged")

    monkeypatch.setattr(planner_module, "make_successor", make_successor)
    opening = SimpleNamespace(
        spec=SimpleNamespace(passed_on={}), facts=[], folder=tmp_path, life=1, namespace=""
    )
    actor = PlannerActor("planner+1", None, None, opening)

    for ask in (
        lambda: actor.taken(3, WorldRank(0)),
        lambda: actor.state_at(3),
        lambda: actor.outstanding([0]),
        lambda: actor.resize(None),
        lambda: actor.replace_constructor(0, None, 1),
        actor.nodes_of_ranks,
        actor.first_step,
        actor.released_to,
        actor.check,
    ):
        with pytest.raises(IntegrityError, match="line 7 is damaged"):
            ask()
    actor.fail(StateError("it is told that the plane ends"))
    actor.close()


def test_ranks_that_wait_for_the_first_planner_see_that_it_opens_the_journal(tmp_path, monkeypatch):
    monkeypatch.setattr(actors_module, "host_here", lambda: "here")
    told = []
    actor = PlannerActor("planner", None, None, None)

    def open_journal(*_, **__):
        told.extend(task["doing"] for role in actor.heartbeats()[1] for task in role["tasks"])
        raise StateError("no such host")

    monkeypatch.setattr(planner_module, "make_planner", lambda *_: None)
    monkeypatch.setattr(planner_module, "open_journal", open_journal)
    spec = SimpleNamespace(run_dir=tmp_path, passed_on={})
    with pytest.raises(StateError, match="no such host"):
        actor.open(SimpleNamespace(spec=spec, facts=[], folder=tmp_path, life=0, namespace=""))

    assert told == ["opens the journal"]
