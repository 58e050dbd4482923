"""What messages take at each role: what a small plane took beyond what was known of it."""

import pytest

from omniload.simulation.plane import simulate
from omniload.simulation.probing.messages import costs_by_role, even_roles
from omniload.simulation.profile import ROLES, MessageCosts, RoleCosts
from tests.support.plane.profiles import a_job, a_profile, planned

FREE = even_roles(0.0)
AT_REST = {"planner": 0.03, "loader": 0.02, "constructor": 0.01, "rank": 0.2, "node": 0.1}


def a_plane(roles):
    messages = a_profile().messages["ray"].model_copy(update={"roles": roles})
    job = a_job(ranks=1, steps=64)
    return simulate(job, planned(a_profile(messages={"ray": messages}), job))


def spent_in(simulated):
    return {role.role: role.cores * simulated.seconds / simulated.steps for role in simulated.roles}


def test_costs_that_a_plane_was_made_with_are_found_again_from_what_its_roles_took():
    made = {role: RoleCosts(end_s=1e-3 * (n + 1)) for n, role in enumerate(ROLES)}

    found = costs_by_role(spent_in(a_plane(made)), AT_REST, a_plane(FREE), FREE, 0.0)

    for role in ("planner", "loader", "constructor", "rank", "node"):
        assert found[role].end_s == pytest.approx(made[role].end_s, rel=0.15)
    assert found["reader"] == found["loader"]
    assert set(found) == set(ROLES)


def test_no_message_takes_less_than_in_a_loop_of_calls_though_ray_itself_may():
    free = a_plane(FREE)

    found = costs_by_role(spent_in(free), AT_REST, free, FREE, 2e-4)

    assert found["constructor"].end_s == 2e-4
    assert found["node"].end_s == pytest.approx(0, abs=1e-9)


def test_bytes_stay_as_they_were_measured():
    free = {role: RoleCosts(end_s=0, byte_s=1e-9 * (n + 1)) for n, role in enumerate(ROLES)}

    found = costs_by_role(spent_in(a_plane(free)), AT_REST, a_plane(free), free, 1e-4)

    assert found["rank"].byte_s == free["rank"].byte_s
    assert found["rank"].end_s == 1e-4


def test_what_the_plane_of_the_rank_does_by_the_clock_is_of_the_node_and_a_rank_does_the_least():
    found = costs_by_role(spent_in(a_plane(FREE)), AT_REST, a_plane(FREE), FREE, 0.0)

    assert found["node"].clock == pytest.approx(0.1 + 0.2)
    assert found["rank"].clock == found["constructor"].clock == 0.01


def test_a_role_that_a_profile_says_nothing_of_is_named():
    content = a_profile().messages["ray"].model_dump()
    del content["roles"]["rank"]

    with pytest.raises(ValueError, match="roles has no 'rank', only"):
        MessageCosts.model_validate(content)
