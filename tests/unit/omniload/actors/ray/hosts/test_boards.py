"""Heartbeats of other hosts: by this host's clock, and remembered where a host falls silent."""

from concurrent.futures import Future
from dataclasses import replace

import pytest

pytest.importorskip("ray")
from omniload.actors.ray.hosts import boards
from omniload.actors.ray.hosts.boards import HostsBoard
from omniload.machine.progress import Progress, Task, reason_of


class FakeRay:
    """Roles that answer, until their host falls silent."""

    def __init__(self, answers):
        self.answers, self.asked = answers, []

    def get_actor(self, name):
        if name not in self.answers:
            raise ValueError(name)
        role = type("Role", (), {})()
        role.heartbeats = type("Method", (), {"remote": lambda _: self.ask(name)})()
        return role

    def ask(self, name):
        self.asked.append(name)
        return self.answers[name]

    def wait(self, asked, *, num_returns, timeout):
        assert num_returns == len(asked)
        assert timeout <= 1
        return [answer for answer in asked if answer is not None], []

    def get(self, answer):
        return answer


class Here:
    def read(self):
        return {"rank dp=1": a_role("rank dp=1", 50.0)}


def a_role(name, beat_s):
    return Progress(
        name=name, pid=7, beat_s=beat_s, tasks=(Task(doing="waits", since_s=beat_s - 3),)
    )


@pytest.fixture
def away(monkeypatch):
    """Another host, whose clock is 1000 seconds behind ours; ours shows 50."""
    fake = FakeRay({"loader-0": (-950.0, [a_role("planner", -951.0).to_json()])})
    monkeypatch.setattr(boards, "ray", fake)
    monkeypatch.setattr(boards, "newest_of", lambda *_: None)
    monkeypatch.setattr(boards, "actor_named", lambda role, _: fake.get_actor(role))
    monkeypatch.setattr(boards, "where", lambda _: {})
    monkeypatch.setattr(boards.time, "monotonic", lambda: 50.0)
    return fake


def test_roles_of_another_host_are_read_by_this_hosts_clock(away):
    board = HostsBoard(Here(), "omniload-a", {"A": ("planner", "loader-0")})

    found = board.read()

    assert sorted(found) == ["planner", "rank dp=1"]
    assert found["planner"].beat_s == pytest.approx(49.0)
    assert found["planner"].tasks[0].since_s == pytest.approx(46.0)


def test_a_host_that_falls_silent_keeps_its_last_heartbeats_which_grow_old(away):
    board = HostsBoard(Here(), "omniload-a", {"A": ("loader-0",)})
    before = board.read()["planner"]
    away.answers["loader-0"] = None

    assert board.read()["planner"] == replace(before, is_cut_off=True)


def test_a_host_that_has_never_answered_has_the_roles_that_are_waited_for_cut_off(away):
    away.answers["loader-0"] = None
    board = HostsBoard(Here(), "omniload-a", {"A": ("loader-0",)}, {"A": ("constructor-0",)})

    said = reason_of("constructor-0", board.read(), 60.0)

    assert said == (
        "constructor-0 (no heartbeat of it was ever seen) cannot be reached: "
        "its host, or the network to it, does not answer"
    )


def test_a_role_that_has_ended_on_another_host_is_not_shown_any_more(away):
    board = HostsBoard(Here(), "omniload-a", {"A": ("planner", "loader-0")})
    told = [a_role("planner", -951.0), a_role("constructor-1", -952.0)]
    away.answers["planner"] = away.answers["loader-0"] = (-950.0, [r.to_json() for r in told])
    assert "constructor-1" in board.read()
    told[1] = a_role("constructor-1+1", -950.5)
    away.answers["planner"] = away.answers["loader-0"] = (-950.0, [r.to_json() for r in told])

    assert sorted(board.read()) == ["constructor-1+1", "planner", "rank dp=1"]


def test_of_what_two_roles_tell_of_one_the_later_heartbeat_counts(away):
    board = HostsBoard(Here(), "omniload-a", {"A": ("planner", "loader-0")})
    for teller, beat_s in (("planner", -950.5), ("loader-0", -960.0)):
        away.answers[teller] = (-950.0, [a_role("constructor-1", beat_s).to_json()])

    assert board.read()["constructor-1"].beat_s == pytest.approx(49.5)


def test_a_role_that_does_not_answer_is_asked_once(away):
    board = HostsBoard(Here(), "omniload-a", {"A": ("loader-0",)})
    away.answers["loader-0"] = None

    for _ in range(10):
        board.read()

    assert away.asked == ["loader-0"]


def test_who_took_the_place_of_a_role_tells_the_heartbeats_of_its_host(away, monkeypatch):
    away.answers["constructor-1+2"] = (-950.0, [a_role("constructor-1+2", -951.0).to_json()])
    monkeypatch.setattr(boards, "newest_of", lambda role, _: f"{role}+2")

    assert "constructor-1+2" in HostsBoard(Here(), "omniload-a", {"A": ("constructor-1",)}).read()


def test_a_head_that_is_out_of_reach_is_asked_once_and_keeps_nobody_who_reads(away, monkeypatch):
    asked = []
    monkeypatch.setattr(boards, "ask_head", lambda ask: asked.append(Future()) or asked[-1])
    monkeypatch.setattr(boards, "_ANSWER_S", 1e-9)
    board = HostsBoard(Here(), "omniload-a", {"A": ("loader-0",)})

    for _ in range(10):
        assert list(board.read()) == ["rank dp=1"]  # no role waits for others
    assert (len(asked), away.asked) == (1, [])
    asked[0].set_result(away.get_actor("loader-0"))
    assert list(board.read()) == ["planner", "rank dp=1"]
