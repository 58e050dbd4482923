"""What messages take at each role: what small planes took beyond what was known of them. And how small they are."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from omniload.simulation.plane import simulate
from omniload.simulation.probing import (
    Reference,
    SmallPlane,
    costs_by_role,
    even_roles,
    lengths_of,
)
from omniload.simulation.profile import ROLES, MessageCosts, PlannerCosts, RoleCosts
from omniload.simulation.scale import with_sources
from tests.support.plane.builders import a_mix
from tests.support.plane.profiles import a_job, a_profile, some_costs

FREE = even_roles(0.0)
AT_REST = {"planner": 0.03, "loader": 0.02, "constructor": 0.01, "rank": 0.2, "node": 0.1}
_SIZES = {"few": (16, 16), "short": (16, 4), "many": (64, 16)}
"""Rows of a step, and steps ahead."""


@cache
def planned_job(rows, ahead):
    job = a_job(a_mix(rows=rows, runtime={"kind": "ray", "prefetch_steps": ahead}), steps=128)
    costs = {"report_s": 1e-4, "taken_s": 1e-5, "step_s": 1e-3, "part_s": 1e-4}
    planner = PlannerCosts(ranks=1, sources=2, tokens=job.spec.mix.batch.tokens, **costs)
    return job, a_profile(planners=(planner,))


def a_plane(roles, size):
    job, profile = planned_job(*size)
    messages = profile.messages["ray"].model_copy(update={"roles": roles})
    return simulate(job, profile.model_copy(update={"messages": {"ray": messages}}))


@cache
def a_free_plane(size):
    return a_plane(FREE, size)


def spent_in(simulated):
    return {role.role: role.cores * simulated.seconds / simulated.steps for role in simulated.roles}


def planes_of(roles):
    """Return the three planes with what they would take where messages cost so much."""
    return [
        SmallPlane(
            spent_s=spent_in(a_plane(roles, size)), clock=AT_REST, simulated=a_free_plane(size)
        )
        for size in _SIZES.values()
    ]


def test_costs_that_planes_were_made_with_are_found_again_from_what_their_roles_took():
    made = {
        role: RoleCosts(end_s=1e-3 * (n + 1), byte_s=1e-7, batch_s=5e-4 * (n % 3 + 1))
        for n, role in enumerate(ROLES)
    }

    found = costs_by_role(*planes_of(made), 0.0)

    for role in ("loader", "constructor", "rank", "node"):
        assert found[role].end_s == pytest.approx(made[role].end_s, rel=0.2)
        assert found[role].byte_s == pytest.approx(made[role].byte_s, rel=0.2)
    for role in ("constructor", "rank"):
        assert found[role].batch_s == pytest.approx(made[role].batch_s, rel=0.2)
    assert found["reader"] == found["loader"]
    assert set(found) == set(ROLES)


def test_what_large_messages_of_a_planner_take_more_is_not_laid_to_their_bytes_which_are_no_tokens():
    found = costs_by_role(*planes_of(even_roles(1e-3)), 0.0)

    assert found["planner"].byte_s == found["planner"].batch_s == 0
    assert found["planner"].end_s == pytest.approx(1e-3, rel=0.15)
    assert found["planner"].own == pytest.approx(1, abs=0.05)


def test_planning_that_takes_longer_in_a_plane_than_by_itself_is_found_and_taken_as_long_in_a_job():
    slow = even_roles(1e-3) | {"planner": RoleCosts(end_s=1e-3, own=1.5)}

    found = costs_by_role(*planes_of(slow), 0.0)

    assert found["planner"].own == pytest.approx(1.5, abs=0.05)
    assert spent_in(a_plane(found, (16, 16)))["planner"] == pytest.approx(
        spent_in(a_plane(slow, (16, 16)))["planner"], rel=0.05
    )


def test_no_message_takes_less_than_in_a_loop_of_calls_though_ray_itself_may():
    found = costs_by_role(*planes_of(FREE), 2e-4)

    assert found["constructor"] == RoleCosts(end_s=2e-4, clock=AT_REST["constructor"])
    assert found["node"].end_s == pytest.approx(0, abs=1e-9)


def test_a_plane_of_many_tokens_that_took_less_than_that_of_few_makes_no_byte_cost_less_than_nothing():
    few, short, many = planes_of(even_roles(1e-3))
    cheap = SmallPlane(
        spent_s=dict.fromkeys(many.spent_s, 0.0), clock=AT_REST, simulated=many.simulated
    )

    found = costs_by_role(few, short, cheap, 1e-4)

    assert all(costs.byte_s == 0 for costs in found.values())
    assert 1e-4 <= found["loader"].end_s <= 1e-3


def test_a_role_that_had_no_message_took_what_it_took_for_one_at_most():
    few, short, many = planes_of(even_roles(1e-3))
    idle = [
        replace(role, messages_step=0.0, message_bytes_step=0.0, batches_step=0.0)
        for role in few.simulated.roles
    ]
    busy = replace(few, simulated=replace(few.simulated, roles=tuple(idle)))

    found = costs_by_role(busy, short, many, 1e-4)

    assert all(0 <= costs.end_s < 1 for costs in found.values())


def test_what_the_plane_of_the_rank_does_by_the_clock_is_of_the_node_and_a_rank_does_the_least():
    found = costs_by_role(*planes_of(FREE), 0.0)

    assert found["node"].clock == pytest.approx(0.1 + 0.2)
    assert found["rank"].clock == found["constructor"].clock == 0.01


def test_a_role_that_a_profile_says_nothing_of_is_named():
    content = a_profile().messages["ray"].model_dump()
    del content["roles"]["rank"]

    with pytest.raises(ValueError, match="roles has no 'rank', only"):
        MessageCosts.model_validate(content)


def a_large_mix(tokens=1 << 20, length=1_024, sources=2):
    mix = a_mix(rows=tokens // length, length=length, mix={"stop": "never"})
    return with_sources(mix, sources)


@pytest.mark.parametrize(
    ("length", "ranks", "tokens"),
    [(1_024, 4, 8 << 10), (1 << 16, 1, 1 << 16), (1 << 15, 2, 1 << 16), (3_000, 4, 12_000)],
)
def test_a_step_is_small_in_whole_rows_of_the_job_and_of_fewer_ranks_where_rows_are_long(
    length, ranks, tokens
):
    reference = Reference.few(a_job(a_large_mix(1 << 20, length=length), ranks=4), a_profile())

    assert (reference.tokens, reference.row_length) == (tokens, length)
    assert reference.ranks == ranks


@pytest.mark.parametrize(("ranks", "expected"), [(1, 1), (6, 6), (64, 8)])
def test_it_has_the_ranks_of_a_constructor_of_the_job_up_to_some(tmp_path: Path, ranks, expected):
    spec = Reference.few(a_job(a_large_mix(), ranks=ranks), a_profile()).written(tmp_path)

    assert spec.tree.size_of("dp") == expected
    assert spec.mix.batch.tokens == expected * spec.mix.batch.micro_tokens


def test_one_has_many_tokens_a_step_and_one_few_steps_a_window(tmp_path: Path):
    job, profile = a_job(a_large_mix()), a_profile()
    few, short, many = (
        kind(job, profile).written(tmp_path).mix
        for kind in (Reference.few, Reference.short, Reference.many)
    )

    assert (few.batch.tokens, short.batch.tokens, many.batch.tokens) == (8 << 10, 8 << 10, 64 << 10)
    assert short.steps_at_once == few.steps_at_once / 4 == many.steps_at_once / 4


@pytest.mark.parametrize(("units", "rows"), [(1, 100), (4, 25)])
def test_its_units_have_as_many_samples_as_those_of_the_job(tmp_path: Path, units, rows):
    source = some_costs(block_positions=100, block_units=units)
    profile = a_profile(sources={"web": source, "code": source})

    Reference.few(a_job(a_large_mix()), profile).written(tmp_path)

    assert pq.ParquetFile(tmp_path / "samples.parquet").metadata.row_group(0).num_rows == rows


def test_sources_do_not_come_to_their_next_block_in_the_same_step(tmp_path: Path):
    spec = Reference.few(a_job(a_large_mix(sources=4)), a_profile()).written(tmp_path)

    assert len(set(spec.mix.mix.stages[0].weights.values())) == 4


@pytest.mark.parametrize(("sources", "expected"), [(2, 2), (7, 7), (200, 32)])
def test_it_has_as_many_sources_up_to_some(sources, expected):
    mix = a_large_mix(sources=sources)
    job = a_job(mix, originals=("web",) * sources)

    assert Reference.few(job, a_profile()).sources == expected


def test_its_samples_are_as_long_as_those_of_every_source_and_fit_a_row(tmp_path: Path):
    profile = a_profile(
        sources={
            "web": some_costs(counts=[1, 1], lengths=[5, 5_000]),
            "code": some_costs(counts=[1], lengths=[7]),
        }
    )
    reference = Reference.few(a_job(a_large_mix()), profile)

    spec = reference.written(tmp_path)

    assert lengths_of(profile, 1_024) == reference.lengths == (5, 1_024, 7)
    written = pq.read_table(tmp_path / "samples.parquet")["tokens"]
    assert [len(tokens) for tokens in written.slice(0, 6)] == [5, 1_024, 7] * 2
    assert spec.tree.size_of("dp") == 1
    assert spec.mix.batch.tokens == reference.tokens
    assert len(spec.mix.names) == 2
