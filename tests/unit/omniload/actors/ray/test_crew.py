"""The process that holds each role, looked up while one of them is lost."""

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from omniload.actors.address import PlaneAddress
from omniload.actors.gate import Gate
from omniload.actors.plane import PlaneSpec
from omniload.actors.ray import crew as module
from omniload.actors.ray.crew import Crew, pids_of
from omniload.actors.ray.environment import RayActorError
from omniload.base.errors import UnavailableError
from omniload.machine.roster.members import Member
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.builders import a_mix
from tests.support.plane.given.fake_actors import value_of

LOST, STOPPED = RayActorError(), None
FIRST, SECOND, PLANNER = Member("loader-0"), Member("loader-0", 1), Member("planner")


@pytest.fixture
def crew(monkeypatch):
    """Actors by their answers; no answer is waited for longer than a look."""

    def wait_for_ref(answer, _timeout_s, check):
        check()
        return answer is not STOPPED

    monkeypatch.setattr(module, "wait_for_ref", wait_for_ref)
    monkeypatch.setattr(module, "value_of", value_of)
    monkeypatch.setattr(module, "_TURN_S", 0.0)
    answers = {FIRST: LOST, SECOND: 8, PLANNER: 9}
    holders = {"loader-0": FIRST, "planner": PLANNER}
    return SimpleNamespace(
        actors={
            member: SimpleNamespace(pid=SimpleNamespace(remote=lambda m=member: answers[m]))
            for member in answers
        },
        answers=answers,
        holders=holders,
        roles=lambda: ["loader-0", "constructor-0", "planner"],
        changed=threading.Condition(),
    )


@pytest.mark.parametrize("becomes", [LOST, STOPPED])
def test_a_role_whose_holder_is_lost_has_the_process_of_whoever_follows(crew, becomes):
    crew.answers[FIRST], looks = becomes, []

    def look():
        looks.append(1)
        if len(looks) == 3:
            crew.holders["loader-0"] = SECOND

    assert pids_of(crew, look) == {"loader-0": 8, "planner": 9}


@pytest.mark.parametrize("becomes", [LOST, STOPPED])
def test_a_role_that_nobody_takes_over_in_time_is_left_out(crew, monkeypatch, becomes):
    crew.answers[FIRST] = becomes
    monkeypatch.setattr(module, "_FOLLOWS_S", 0.0)

    assert pids_of(crew, lambda: None) == {"planner": 9}


def test_a_role_that_is_retired_meanwhile_is_left_out(crew):
    assert pids_of(crew, lambda: crew.holders.pop("loader-0", None)) == {"planner": 9}


def test_nobody_is_waited_for_once_the_plane_is_closed(crew):
    gate = Gate()
    gate.close(0.0)

    with pytest.raises(UnavailableError, match="was closed"):
        pids_of(crew, gate.check)


def test_members_that_were_replaced_are_forgotten_but_one_whose_place_nobody_has_taken(
    tmp_path, monkeypatch
):
    killed = []
    ends = SimpleNamespace(kill=lambda actor, **_: killed.append(actor))
    monkeypatch.setattr(module, "ray", ends)
    spec = PlaneSpec(mix=a_mix(), base_dir=tmp_path, tree=ClientPlaceTree.of(dp=1))
    address = PlaneAddress(
        cluster="127.0.0.2:1", namespace="n", dp_ranks_of={}, board=tmp_path, batch_timeout_s=60.0
    )
    crew = Crew(spec, [], address, "node", SimpleNamespace())
    crew.holders, crew.serving = {"planner": PLANNER}, {0: FIRST}

    for member in (FIRST, PLANNER, *(Member("loader-1", life) for life in range(1_000))):
        crew.actors[member] = member.name
        crew.bury(member)

    assert len(killed) == 1_002
    assert len(crew.actors) < 100
    assert crew.holding("planner") == "planner"
    assert {FIRST, Member("loader-1", 999)} <= crew.actors.keys()


def test_a_planner_that_takes_over_has_its_variables_past_what_ray_keeps_of_its_start(
    tmp_path, monkeypatch
):
    put, started_with = [], []
    ends = SimpleNamespace(put=lambda value: put.append(value) or "a reference")
    starts = SimpleNamespace(remote=lambda *given: started_with.append(given))
    monkeypatch.setattr(module, "ray", ends)
    monkeypatch.setattr(module, "actor_of", lambda *_: starts)
    spec = PlaneSpec(
        mix=a_mix(),
        base_dir=tmp_path,
        tree=ClientPlaceTree.of(dp=1),
        passed_on={"A_SECRET": "hush"},
    )
    address = PlaneAddress(
        cluster="127.0.0.2:1", namespace="n", dp_ranks_of={}, board=tmp_path, batch_timeout_s=60.0
    )
    crew = Crew(spec, [], address, "node", SimpleNamespace())

    for number in (0, 1):
        crew.start(Member("planner", number))

    assert [opening for _, _, _, opening in started_with] == [None, "a reference"]
    assert [opening.spec.passed_on for opening in put] == [{"A_SECRET": "hush"}]
