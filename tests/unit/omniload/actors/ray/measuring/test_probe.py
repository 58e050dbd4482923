"""What small planes took: of several turns, role by role, less what is done by the clock."""

import pytest

pytest.importorskip("ray")

from omniload.actors.ray.measuring.probe import Spent, by_role, medians_of

REST = Spent(seconds=2.0, steps=0, by_role={"loader": 0.2, "node": 0.1})


def a_turn(loader_s, node_s, *, seconds=0.5, steps=10):
    return Spent(seconds=seconds, steps=steps, by_role={"loader": loader_s, "node": node_s})


def test_a_turn_in_which_the_machine_was_slow_is_in_no_figure():
    usual = [a_turn(0.25, 0.125) for _ in range(4)]

    found = medians_of(REST, [a_turn(5.0, 0.125), *usual, a_turn(0.25, 9.0), a_turn(0.0, 0.0)])

    # A tenth of a core for half a second is done by the clock, and half as much by the node.
    assert found.step_s == pytest.approx({"loader": 0.02, "node": 0.01})
    assert found.clock == pytest.approx({"loader": 0.1, "node": 0.05})
    assert found.steps == 70


def test_a_turn_of_more_steps_weighs_what_its_steps_took():
    found = medians_of(REST, [a_turn(0.55, 0.025, steps=20)])

    assert found.step_s == pytest.approx({"loader": 0.025, "node": 0.0})


def test_a_worker_that_ended_meanwhile_takes_nothing_off_what_the_others_of_its_role_had():
    roles = {1: "loader", 2: "rank"}

    found = by_role({1: 5.0, 2: 1.0, 3: 2.0, 4: 7.0}, {1: 6.0, 2: 1.5, 3: 2.25, 5: 9.0}, roles)

    assert found == {"loader": 1.0, "rank": 0.5, "node": 0.25}
