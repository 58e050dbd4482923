"""Promises of every simulation, whatever is measured and whatever the job."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.simulation.plane import simulate
from omniload.simulation.profile import ROLES, BuildCosts, MessageCosts, RoleCosts
from tests.support.plane.builders import a_mix
from tests.support.plane.profiles import a_job, a_profile, planned, some_costs

seconds = st.floats(1e-6, 5e-3)
clocks = st.sampled_from([0.0, 0.01])
"""Cores; sixteen ranks leave most of one core to others."""


@st.composite
def profiles(draw):
    builds = BuildCosts(
        slices_request_s=draw(seconds), slices_token_s=1e-8, rows_s=draw(seconds), rows_token_s=1e-8
    )
    messages = MessageCosts(
        latencies_s=tuple(draw(st.lists(seconds, min_size=1, max_size=4))),
        roles={
            role: RoleCosts(
                end_s=draw(seconds),
                byte_s=1e-9,
                clock=draw(clocks),
                rested=draw(st.floats(0.25, 4)),
            )
            for role in ROLES
        },
        takes_s=tuple(
            map(tuple, draw(st.lists(st.lists(seconds, min_size=1, max_size=3), max_size=3)))
        ),
        process_bytes=1 << 20,
        node_bytes=1 << 20,
    )
    sources = {
        name: some_costs(
            draw(st.integers(0, 9)),
            read_s=draw(seconds),
            block_s=draw(seconds),
            merge_s=draw(seconds),
            block_units=draw(st.integers(1, 5)),
        )
        for name in ("web", "code")
    }
    both = {"builds": {"local": builds, "ray": builds}}
    return a_profile(sources=sources, messages={"local": messages, "ray": messages}, **both)


@st.composite
def jobs(draw):
    mix = a_mix(
        rows=16,
        runtime={
            "kind": "ray",
            "prefetch_steps": draw(st.sampled_from([1, 4, 8])),
            "loaders": draw(st.integers(0, 2)),
        },
        # Set for both, because measured costs could ask for any other number.
        loader={"readers": {name: draw(st.integers(1, 3)) for name in ("code", "web")}},
    )
    ranks = draw(st.sampled_from([1, 2, 4, 16]))
    return a_job(
        mix,
        ranks=ranks,
        hosts=draw(st.integers(1, ranks)),
        cores=draw(st.sampled_from([1.0, 2.0, 8.0])),
        step_s=draw(st.sampled_from([0.0, 0.02])),
        steps=8,
        seed=draw(st.integers(0, 99)),
    )


@given(
    messages=st.lists(st.floats(1e-9, 0.1), min_size=1, max_size=4),
    builds=st.tuples(st.floats(1e-9, 0.1), st.floats(1e-9, 0.1)),
    read_s=st.floats(1e-9, 0.1),
    ahead=st.sampled_from([1, 4, 8]),
)
def test_a_rank_in_the_process_of_its_plane_takes_no_step_before_it_is_built(
    messages, builds, read_s, ahead
):
    """A rank is woken by every window that is built, and may have continued by the time it wakes."""
    profile = a_profile()
    slices_s, rows_s = builds
    job = a_job(a_mix(rows=16, runtime={"kind": "local", "prefetch_steps": ahead}), ranks=1)
    costs = {
        "messages": {"latencies_s": tuple(messages)},
        "builds": {"slices_request_s": slices_s, "rows_s": rows_s},
    }
    changed = {
        kind: {"local": getattr(profile, kind)["local"].model_copy(update=update)}
        for kind, update in costs.items()
    }
    sources = {name: some_costs(3, read_s=read_s, block_s=1e-4) for name in ("web", "code")}
    profile = planned(profile.model_copy(update={**changed, "sources": sources}), job)

    assert simulate(job, profile).seconds > 0


def slower(costs, times):
    """Return costs in which every second is ``times`` times as long."""

    def of(value):
        return tuple(map(of, value)) if isinstance(value, tuple) else value * times

    found = {name: of(value) for name, value in costs if name.endswith("_s")}
    if isinstance(costs, MessageCosts):
        found["roles"] = {role: slower(each, times) for role, each in costs.roles.items()}
    return costs.model_copy(update=found)


def times_slower(profile, times):
    """Return a profile in which every second is ``times`` times as long."""
    return profile.model_copy(
        update={
            "sources": {name: slower(costs, times) for name, costs in profile.sources.items()},
            "builds": {"ray": slower(profile.builds["ray"], times)},
            "messages": {"ray": slower(profile.messages["ray"], times)},
            "planners": tuple(slower(costs, times) for costs in profile.planners),
        }
    )


@settings(max_examples=6)
@given(jobs(), profiles())
def test_a_job_a_profile_and_a_seed_give_one_outcome(job, profile):
    profile = planned(profile, job)

    assert simulate(job, profile) == simulate(job, profile)


@settings(max_examples=6)
@given(jobs(), profiles())
def test_no_host_works_more_than_its_cores_and_no_step_is_shorter_than_it_takes(job, profile):
    found = simulate(job, planned(profile, job))

    assert found.memory.first_cores <= job.cores * 1.001
    assert found.memory.other_cores <= job.cores * 1.001
    steps_s = job.steps * (job.step_s + found.waits.mean_s)
    # Ranks that trained wake one after another if there are fewer cores than ranks; waits count from then.
    ranks = job.spec.tree.size_of("dp") if job.step_s else 1
    assert found.seconds >= steps_s * 0.99 - 1e-6
    assert found.seconds <= (steps_s + (ranks - 1) * job.steps * found.waits.longest_s) * 1.01


@settings(max_examples=5)
@given(jobs(), profiles(), st.sampled_from([2.0, 8.0]))
def test_where_everything_takes_longer_time_is_stretched_and_nothing_else(job, profile, times):
    # A network and a trainer have speeds of their own, and more work brings more loaders. Ranks fetch the steps of a
    # quarter of a second at once. All is quick enough for them to have whole windows.
    profile = times_slower(profile, 1 / 64)
    one = job.spec.mix.runtime.model_copy(update={"loaders": 1})
    spec = replace(job.spec, mix=job.spec.mix.model_copy(update={"runtime": one}))
    job = replace(job, spec=spec, hosts=1, step_s=0.0)
    profile = planned(profile, job)

    before, after = (simulate(job, each) for each in (profile, times_slower(profile, times)))

    assert after.seconds == pytest.approx(before.seconds * times, rel=0.02)
    assert after.connections == before.connections


@settings(max_examples=5)
@given(jobs(), profiles())
def test_more_ranks_or_sources_never_make_fewer_connections_or_other_steps(job, profile):
    more = replace(job, spec=a_job(job.spec.mix, ranks=16).spec)

    few, many = (simulate(each, planned(profile, each)) for each in (job, more))

    assert many.connections.total >= few.connections.total
    assert many.tokens_per_step == few.tokens_per_step
