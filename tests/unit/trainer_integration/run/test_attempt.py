from dataclasses import dataclass

import psutil

from trainer_integration.run.attempt import Attempt, pss_by_role


@dataclass
class Rank:
    pid: int
    stopped: bool = False
    killed: bool = False

    def is_stopped(self):
        return self.stopped

    def kill(self):
        self.killed = True


class Plane:
    ended = ""

    def ended_service(self):
        return self.ended


def test_a_rank_that_is_stopped_is_told_once_with_what_to_do_and_again_when_it_is_stopped_anew():
    attempt = Attempt(0, ranks={0: Rank(71), 1: Rank(72)})
    assert not list(attempt.newly_stopped())

    attempt.ranks[1].stopped = True
    (said,) = attempt.newly_stopped()
    assert "rank 1 (process 72) is stopped" in said
    assert "kill -CONT 72" in said
    assert "kill -9 72" in said
    assert not list(attempt.newly_stopped())

    attempt.ranks[1].stopped = False
    assert not list(attempt.newly_stopped())
    attempt.ranks[1].stopped = True
    assert list(attempt.newly_stopped()) == [said]


def test_ranks_end_once_a_server_of_their_ray_has_ended():
    plane = Plane()
    attempt = Attempt(0, plane=plane, ranks={0: Rank(71), 1: Rank(72)})
    assert attempt.end_without_ray() == ""
    assert not any(rank.killed for rank in attempt.ranks.values())

    plane.ended = "raylet ended with -9"
    said = "Ray's raylet ended with -9, and the data plane with it"
    assert attempt.without_ray() == said
    assert not any(rank.killed for rank in attempt.ranks.values())
    assert attempt.end_without_ray() == said
    assert all(rank.killed for rank in attempt.ranks.values())
    assert attempt.end_without_ray() == "", "it is told once"


def test_what_the_launcher_ends_itself_is_not_told_as_lost():
    plane = Plane()
    attempt = Attempt(0, plane=plane, ranks={0: Rank(71)}, is_ending=True)

    plane.ended = "raylet ended with -9"

    assert attempt.end_without_ray() == ""
    assert not attempt.ranks[0].killed


def test_ranks_without_a_plane_of_actors_are_left_alone():
    assert Attempt(0, ranks={0: Rank(71)}).end_without_ray() == ""


def test_processes_go_by_their_roles_and_those_that_ended_take_no_memory():
    attempt = Attempt(0, ranks={0: Rank(psutil.Process().pid)}, roles={"planner": 1 << 30})
    assert attempt.pids == {"rank 0": psutil.Process().pid, "planner": 1 << 30}
    sizes = pss_by_role(attempt.pids)
    assert sizes["rank 0"] > 0
    assert "planner" not in sizes
