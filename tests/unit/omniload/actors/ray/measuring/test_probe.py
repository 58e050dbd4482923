"""What the roles of small planes had of processors meanwhile."""

import pytest

pytest.importorskip("ray")

from omniload.actors.ray.measuring.probe import by_role


def test_a_worker_that_ended_meanwhile_takes_nothing_off_what_the_others_of_its_role_had():
    roles = {1: "loader", 2: "rank"}

    found = by_role({1: 5.0, 2: 1.0, 3: 2.0, 4: 7.0}, {1: 6.0, 2: 1.5, 3: 2.25, 5: 9.0}, roles)

    assert found == {"loader": 1.0, "rank": 0.5, "node": 0.25}
