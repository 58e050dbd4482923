"""Processor time and memory of processes: the costs of small planes, by role, minus work that depends on time alone."""

import time

import psutil
import pytest

from omniload.actors.ray.measuring.pauses import Paced, paced_step
from omniload.actors.ray.measuring.spent import (
    Spent,
    by_role,
    cores_at_rest,
    memory_of,
    spent_at_full_speed,
    spent_by,
)

CLOCK = {"loader": 0.1, "node": 0.05}


def test_a_process_has_spent_what_its_own_clock_says_at_most_and_more_as_it_works():
    own = psutil.Process()
    before_s, began_s = spent_by(own), time.process_time()

    while time.process_time() - began_s < 0.05:
        sum(range(1_000))

    assert 0 < before_s <= began_s + 0.02
    assert 0.04 < spent_by(own) - before_s < 0.5


def test_a_process_that_has_ended_has_nothing():
    ended = psutil.Popen(["true"])
    ended.wait()

    assert spent_by(ended) == 0
    assert memory_of(ended) == 0


def a_turn(loader_s, node_s, *, seconds=0.5, steps=10):
    return Spent(seconds=seconds, steps=steps, by_role={"loader": loader_s, "node": node_s})


def test_a_turn_in_which_the_machine_was_slow_is_in_no_figure():
    usual = [a_turn(0.25, 0.125) for _ in range(4)]

    found = spent_at_full_speed(
        [a_turn(5.0, 0.125), *usual, a_turn(0.25, 9.0), a_turn(0.0, 0.0)], CLOCK
    )

    # Work that depends on time alone takes a tenth of a core for half a second, and half as much at the node.
    assert found.step_s == pytest.approx({"loader": 0.02, "node": 0.01})
    assert found.steps == 70


def test_a_turn_of_more_steps_weighs_what_its_steps_took():
    found = spent_at_full_speed([a_turn(0.55, 0.025, steps=20)], CLOCK)

    assert found.step_s == pytest.approx({"loader": 0.025, "node": 0.0})


def test_what_comes_in_few_turns_is_in_the_mean_of_all_by_their_steps():
    usual = [a_turn(0.05, 0.025) for _ in range(2)]

    found = spent_at_full_speed([*usual, a_turn(1.05, 0.025, steps=20)], CLOCK)

    assert found.step_s["loader"] == pytest.approx(0.0)
    assert found.mean_s == pytest.approx({"loader": 1.0 / 40, "node": 0.0})


def test_a_rest_in_which_ray_starts_a_process_is_in_no_figure():
    rests = [a_turn(0.01, 1.0, seconds=2.0), a_turn(0.02, 0.04, seconds=2.0)]

    found = cores_at_rest([*rests, a_turn(0.02, 0.06, seconds=2.0)])

    assert found == pytest.approx({"loader": 0.01, "node": 0.03})


def test_where_ranks_rest_ranks_are_of_whiles_in_which_each_came_alone_and_all_else_of_the_others():
    def whiles(rank_s, node_s):
        spent = Spent(seconds=0.5, steps=10, by_role={"rank": rank_s, "node": node_s})
        return [Paced(spent=spent, takes_s=(), aside_s=0.1)] * 2

    found = paced_step(whiles(0.55, 0.95), whiles(0.25, 0.125), {"rank": 0.1, "node": 0.05})

    assert found == pytest.approx({"rank": 0.04, "node": 0.01})


def test_a_worker_that_ended_meanwhile_takes_nothing_off_what_the_others_of_its_role_had():
    roles = {1: "loader", 2: "rank"}

    found = by_role({1: 5.0, 2: 1.0, 3: 2.0, 4: 7.0}, {1: 6.0, 2: 1.5, 3: 2.25, 5: 9.0}, roles)

    assert found == {"loader": 1.0, "rank": 0.5, "node": 0.25}
