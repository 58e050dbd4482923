"""Costs of messages at each role: the costs of small planes, minus their known parts."""

from dataclasses import replace
from functools import cache

import pytest

from omniload.simulation.plane import simulate
from omniload.simulation.preparing import (
    SmallPlane,
    _some_that_were,
    costs_by_role,
    even_roles,
    spread,
    with_rest,
)
from omniload.simulation.profile import ROLES, MessageCosts, PlannerCosts, RoleCosts
from tests.support.plane.builders import a_mix
from tests.support.plane.profiles import a_job, a_profile, some_costs

FREE = even_roles(0.0)
AT_REST = {
    "planner": 0.03,
    "loader": 0.02,
    "constructor": 0.01,
    "rank": 0.005,
    "node": 0.1,
    "opener": 0.2,
}
_SIZES = {"few": (16, 16), "short": (16, 4), "many": (64, 16)}
"""Rows of a step, and steps ahead."""


@cache
def planned_job(rows, ahead):
    job = a_job(a_mix(rows=rows, runtime={"kind": "ray", "prefetch_steps": ahead}), steps=384)
    costs = {"report_s": 1e-4, "taken_s": 1e-5, "step_s": 1e-3, "part_s": 1e-4}
    planner = PlannerCosts(ranks=1, sources=2, tokens=job.spec.mix.batch.tokens, **costs)
    return job, a_profile(planners=(planner,))


def a_plane(roles, size):
    job, profile = planned_job(*size)
    messages = profile.messages["ray"].model_copy(update={"roles": roles})
    return simulate(job, profile.model_copy(update={"messages": {"ray": messages}}))


def a_free_plane(size):
    return a_plane_once(FREE, size)


def spent_in(simulated):
    return {role.role: role.cores * simulated.seconds / simulated.steps for role in simulated.roles}


_PLANES = {}


def a_plane_once(roles, size):
    """Return the result of ``a_plane``, cached, because several tests need the same one."""
    key = repr(sorted(roles.items())), size
    if key not in _PLANES:
        _PLANES[key] = a_plane(roles, size)
    return _PLANES[key]


def planes_of(roles):
    """Return the three planes with their costs if messages cost this much."""
    return [
        SmallPlane(spent_s=spent_in(a_plane_once(roles, size)), simulated=a_free_plane(size))
        for size in _SIZES.values()
    ]


def test_costs_that_planes_were_made_with_are_found_again_from_what_their_roles_took():
    made = {
        role: RoleCosts(end_s=1e-3 * (n + 1), byte_s=1e-7, batch_s=5e-4 * (n % 3 + 1))
        for n, role in enumerate(ROLES)
    }

    found = costs_by_role(*planes_of(made), clock=AT_REST, least_s=0.0)

    for role in ("loader", "constructor", "rank", "node"):
        assert found[role].end_s == pytest.approx(made[role].end_s, rel=0.05)
        assert found[role].byte_s == pytest.approx(made[role].byte_s, rel=0.2)
    for role in ("constructor", "rank"):
        assert found[role].batch_s == pytest.approx(made[role].batch_s, rel=0.1)
    assert found["reader"] == found["loader"]
    assert set(found) == set(ROLES)


def test_what_large_messages_of_a_planner_take_more_is_not_laid_to_their_bytes_which_are_no_tokens():
    found = costs_by_role(*planes_of(even_roles(1e-3)), clock=AT_REST, least_s=0.0)

    assert found["planner"].byte_s == found["planner"].batch_s == 0
    assert found["planner"].end_s == pytest.approx(1e-3, rel=0.15)
    assert found["planner"].own == pytest.approx(1, abs=0.05)


def test_planning_that_takes_longer_in_a_plane_than_by_itself_is_found_and_taken_as_long_in_a_job():
    slow = even_roles(1e-3) | {"planner": RoleCosts(end_s=1e-3, own=1.5)}

    found = costs_by_role(*planes_of(slow), clock=AT_REST, least_s=0.0)

    assert found["planner"].own == pytest.approx(1.5, abs=0.05)
    # Some windows are planned, or one more: the time of messages decides the step at which one is planned.
    assert spent_in(a_plane(found, (16, 16)))["planner"] == pytest.approx(
        spent_in(a_plane(slow, (16, 16)))["planner"], rel=1 / 15
    )


def test_no_message_takes_less_than_in_a_loop_of_calls_though_ray_itself_may():
    found = costs_by_role(*planes_of(FREE), clock=AT_REST, least_s=2e-4)

    assert found["constructor"] == RoleCosts(end_s=2e-4, clock=AT_REST["constructor"])
    assert found["node"].end_s == pytest.approx(0, abs=1e-9)


def test_a_plane_of_many_tokens_that_took_less_than_that_of_few_makes_no_byte_cost_less_than_nothing():
    few, short, many = planes_of(even_roles(1e-3))
    cheap = SmallPlane(spent_s=dict.fromkeys(many.spent_s, 0.0), simulated=many.simulated)

    found = costs_by_role(few, short, cheap, clock=AT_REST, least_s=1e-4)

    assert all(costs.byte_s == 0 for costs in found.values())
    assert 1e-4 <= found["loader"].end_s <= 1e-3


def test_a_role_that_had_no_message_took_what_it_took_for_one_at_most():
    few, short, many = planes_of(even_roles(1e-3))
    idle = [
        replace(role, messages_step=0.0, message_bytes_step=0.0, batches_step=0.0)
        for role in few.simulated.roles
    ]
    busy = replace(few, simulated=replace(few.simulated, roles=tuple(idle)))

    found = costs_by_role(busy, short, many, clock=AT_REST, least_s=1e-4)

    assert all(0 <= costs.end_s < 1 for costs in found.values())


def test_what_the_opener_of_a_plane_does_by_the_clock_is_of_the_node():
    found = costs_by_role(*planes_of(FREE), clock=AT_REST, least_s=0.0)

    assert found["node"].clock == pytest.approx(0.1 + 0.2)
    assert found["rank"].clock == 0.005


def test_of_several_ranks_one_is_measured_and_stands_for_all():
    few = planes_of(even_roles(1e-3))[0]
    rank, *others = sorted(few.simulated.roles, key=lambda of: of.role != "rank")
    figures = ("cores", "messages_step", "message_bytes_step", "batches_step")
    four = replace(rank, count=4, **{name: 4 * getattr(rank, name) for name in figures})

    found = replace(few, simulated=replace(few.simulated, roles=(four, *others)))

    assert found.message_of("rank") == few.message_of("rank")


@pytest.mark.parametrize(
    ("times", "found_times"), [(1.5, 1.5), (0.5, 0.5), (30.0, 4.0), (0.1, 0.25)]
)
def test_how_many_times_as_long_messages_take_after_a_rest_is_found_again_within_bounds(
    times, found_times
):
    quick = even_roles(1e-3)
    few = planes_of(quick)[0]
    slow = a_plane_once(even_roles(times * 1e-3), _SIZES["few"])

    found = with_rest(quick, replace(few, spent_s=spent_in(slow)), least_s=1e-4)

    assert {role: costs.rested for role, costs in found.items()} == pytest.approx(
        dict.fromkeys((*few.spent_s, "reader"), found_times) | {"process": 1.0}, rel=0.1
    )
    assert all(costs.end_s == 1e-3 for costs in found.values())


def test_a_profile_that_was_kept_before_rests_were_measured_is_read_and_has_none():
    content = a_profile().messages["ray"].model_dump()
    del content["takes_s"]
    for costs in content["roles"].values():
        del costs["rested"]

    assert MessageCosts.model_validate(content) == a_profile().messages["ray"]


def test_decoding_that_is_spread_takes_as_much_over_many_blocks():
    source = some_costs(
        token_s=1e-9,
        block_s=0.01,
        block_positions=100,
        positions_per_epoch=1_000,
        counts=(2, 0, 1, 1),
        lengths=(300, 100, 500, 100),
    )

    found = spread(source)

    tokens = 250 * 1_000
    assert found.block_s == 0
    assert tokens * found.token_s == pytest.approx(tokens * source.token_s + 10 * source.block_s)


def test_the_only_block_of_a_source_is_decoded_before_anything_is_measured():
    source = some_costs(block_s=0.01, block_positions=1_000, positions_per_epoch=1_000)

    assert spread(source) == source.model_copy(update={"block_s": 0.0})


def test_a_role_that_a_profile_says_nothing_of_is_named():
    content = a_profile().messages["ray"].model_dump()
    del content["roles"]["rank"]

    with pytest.raises(ValueError, match="roles has no 'rank', only"):
        MessageCosts.model_validate(content)


def test_the_longest_take_of_a_place_is_drawn_as_often_as_it_occurred():
    takes_s = [1e-4] * 95 + [1e-2]

    kept_s = _some_that_were(takes_s)

    assert sum(kept_s) / len(kept_s) == pytest.approx(sum(takes_s) / len(takes_s))
