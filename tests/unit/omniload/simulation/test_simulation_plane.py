"""Results of simulated planes that can be computed by hand."""

from dataclasses import replace
from functools import cache

import pytest

from omniload.base.errors import ConfigError
from omniload.mix.schedule import weights_at
from omniload.simulation.figures import Waits, knee_of, limit_of
from omniload.simulation.job import steps_that_count
from omniload.simulation.plane import simulate
from omniload.simulation.preparing import even_roles
from omniload.simulation.profile import RoleCosts
from omniload.simulation.scale import original_of, with_sources, with_tokens
from tests.support.plane.builders import a_mix
from tests.support.plane.profiles import a_job, a_profile, planned, some_costs


def simulated(job, profile=None, **planning):
    return simulate(job, planned(profile or a_profile(), job, **planning))


QUICK_S, STEADY_S = 0.025, 0.2
"""Seconds of steps: a rank asks for eight of the first at once, and for one of the second.

In longer steps a rank is lent the step that it fetches.
"""


def a_windowed_mix():
    """Return a mix of windows of eight steps."""
    return a_mix(rows=16, runtime={"kind": "ray", "prefetch_steps": 16})


def test_a_planner_that_takes_longer_than_a_step_is_named_as_the_limit():
    job = a_job(ranks=4, step_s=0.05, cores=8.0)

    found = simulated(job, step_s=0.1)

    assert found.seconds / found.steps == pytest.approx(found.planner_step_s, rel=0.05)
    assert 0.1 < found.planner_step_s < 0.12
    assert "the limit is a planner" in limit_of(found)


def test_a_trainer_that_takes_longer_than_the_data_plane_hardly_waits():
    found = simulated(a_job(ranks=4, step_s=0.5))

    assert found.seconds / found.steps == pytest.approx(0.5, rel=0.02)
    assert found.waits.p99_s < 0.01
    assert "data is no limit" in limit_of(found)


def test_the_last_steps_are_of_a_job_that_goes_on():
    jobs = (a_job(a_windowed_mix(), steps=steps) for steps in (16, 128))

    few, many = map(simulated, jobs)

    # Two windows: in a job that ended with them, nothing later would be read or built.
    assert few.cpu_step_s == pytest.approx(many.cpu_step_s, rel=0.25)
    for role in few.roles:
        of_many = next(each for each in many.roles if each.role == role.role)
        assert role.messages_step == pytest.approx(of_many.messages_step, rel=0.35)


def test_what_was_read_while_buffers_filled_is_not_taken_for_speed():
    mix = a_windowed_mix()
    slow = a_profile(sources={name: some_costs(token_s=2e-4) for name in mix.names})

    found = simulated(a_job(mix, steps=steps_that_count(mix)), slow)

    # Tokens a second of the threads that read; before, samples that were read ahead came as fast as they are built.
    assert found.tokens_per_s == pytest.approx(slow.threads / 2e-4, rel=0.2)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_rank_that_trains_waits_as_long_as_it_takes_a_batch_that_is_at_hand(ranks):
    profile = with_messages(takes_s=((2e-3,),))

    trained, at_once = (
        # Cores to spare: ranks ask as others take.
        simulated(a_job(a_windowed_mix(), ranks=ranks, step_s=step_s, cores=16.0), profile)
        for step_s in (STEADY_S, 0.0)
    )

    assert trained.waits.p50_s == pytest.approx(2e-3, rel=0.01)
    assert at_once.waits.p50_s == 0
    spent = next(role for role in trained.roles if role.role == "rank")
    assert spent.cores * STEADY_S > 2e-3 * ranks


def test_a_rank_takes_its_batch_before_a_thread_beside_it_asks_for_more():
    roles = a_profile().messages["ray"].roles
    slow = {**roles, "rank": roles["rank"].model_copy(update={"end_s": 5e-3})}
    job = a_job(a_windowed_mix(), ranks=1, step_s=STEADY_S, cores=1.0)

    found = simulated(job, with_messages(takes_s=((2e-3,),), roles=slow))

    # In each step: both at once would share the core, and the batch took twice as long.
    assert found.waits.p99_s == pytest.approx(2e-3, rel=0.01)


def with_messages(**changes):
    """Return a profile whose messages on Ray differ."""
    messages = a_profile().messages["ray"].model_copy(update=changes)
    return a_profile(messages={"ray": messages})


def test_cores_that_idle_beside_work_are_missed_where_all_are_wanted_and_nowhere_else():
    def speeds_of(**changes):
        found = [
            simulated(a_job(a_windowed_mix(), steps=32, **changes), with_messages(idle=idle))
            for idle in (0.0, 0.2)
        ]
        return [each.tokens_per_s for each in found]

    of_few, of_many = (speeds_of(ranks=4, cores=cores) for cores in (0.5, 64.0))

    assert of_few[1] == pytest.approx(0.8 * of_few[0], rel=0.05)
    assert of_many[1] == pytest.approx(of_many[0], rel=1e-9)


def test_ranks_of_a_host_wake_one_after_the_other_and_share_its_cores_with_all_that_runs_there():
    profile = with_messages(takes_s=((2e-3,),), roles=even_roles(0.0))
    busy = even_roles(0.0)
    busy["node"] = busy["node"].model_copy(update={"clock": 0.5})

    def found(profile, cores):
        job = a_job(a_windowed_mix(), ranks=4, step_s=STEADY_S, steps=64, cores=cores)
        return simulated(job, profile)

    alone, on_many, beside = (
        found(each, cores)
        for each, cores in (
            (profile, 1.0),
            (profile, 64.0),
            (with_messages(takes_s=((2e-3,),), roles=busy), 1.0),
        )
    )

    # Each rank counts its wait from its own wake-up; the step counts it from the first wake-up.
    assert alone.waits.p50_s == on_many.waits.p50_s == pytest.approx(2e-3)
    assert (alone.seconds - on_many.seconds) / 64 == pytest.approx(6e-3, rel=0.1)
    assert beside.waits.p50_s == pytest.approx(4e-3, rel=0.05)


def test_of_takes_that_differ_each_step_waits_for_the_longest_that_its_ranks_drew():
    profile = with_messages(takes_s=((1e-3, 3e-3),))

    one, many = (
        simulated(
            a_job(a_windowed_mix(), ranks=ranks, step_s=STEADY_S, steps=64, cores=64.0), profile
        )
        for ranks in (1, 16)
    )

    assert one.waits.mean_s == pytest.approx(2e-3, rel=0.3)
    assert many.waits.p50_s == pytest.approx(3e-3)


def test_messages_take_longer_where_ranks_train_and_as_long_as_ever_at_full_speed():
    messages = a_profile().messages["ray"]
    roles = {
        role: costs.model_copy(update={"rested": 3.0}) for role, costs in messages.roles.items()
    }

    def found(profile, step_s, cores=2.0):
        return simulated(a_job(a_windowed_mix(), steps=32, step_s=step_s, cores=cores), profile)

    rested, free = with_messages(roles=roles), with_messages(roles=even_roles(0.0))

    def times_of(step_s, cores):
        """Return the cost of messages relative to that at full speed, and the idle part of the cores."""
        with_rest, ever, none = (found(each, step_s, cores) for each in (rested, a_profile(), free))
        times = (with_rest.cpu_step_s - none.cpu_step_s) / (ever.cpu_step_s - none.cpu_step_s)
        return times, 1.0 - with_rest.cpu_step_s / (cores * with_rest.seconds / with_rest.steps)

    # A plane that has the cores to itself finds caches as others left them; next to a busy plane nothing rests.
    of_paces = [times_of(*pace) for pace in ((10.0, 2.0), (0.01, 0.5), (0.001, 0.5))]
    for times, idle in of_paces:
        assert times == pytest.approx(1.0 + 2.0 * idle, rel=0.05)
    assert of_paces[0][0] == pytest.approx(3.0, rel=0.02)
    assert of_paces[-1][0] < 1.2
    assert found(rested, 0.0).cpu_step_s == found(a_profile(), 0.0).cpu_step_s


@cache
def with_even_takes(ranks):
    """Return a job whose ranks train, and its results, also at full speed, if each batch takes the same time."""
    job = a_job(a_windowed_mix(), ranks=ranks, steps=64, step_s=QUICK_S, cores=64.0)
    even = with_messages(takes_s=((1e-3,),))
    return job, simulated(job, even), simulated(replace(job, step_s=0.0), even)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("place", [0, 1, 6])
def test_a_rank_that_has_trained_takes_a_batch_of_a_window_in_a_time_of_its_place(ranks, place):
    job, before, even_at_once = with_even_takes(ranks)
    takes_s = (*[(1e-3,)] * place, (0.04,), (1e-3,))
    slow = with_messages(takes_s=takes_s)

    found = simulated(job, slow)

    # Once for eight steps that come together, of which the first or the last are not all among the measured steps.
    assert found.waits.mean_s - before.waits.mean_s == pytest.approx(0.039 / 8, rel=1 / 7)
    assert found.waits.p99_s == pytest.approx(0.04)
    assert found.waits.p50_s == before.waits.p50_s == pytest.approx(1e-3)
    assert simulated(replace(job, step_s=0.0), slow) == even_at_once


@pytest.mark.parametrize(
    ("step_s", "at_once", "confirmed"),
    [(QUICK_S, 8, False), (0.06, 4, False), (STEADY_S, 1, False), (0.6, 1, True)],
)
def test_a_rank_asks_for_what_it_trains_on_in_a_quarter_of_a_second_and_has_what_it_is_lent_confirmed(
    step_s, at_once, confirmed
):
    profile = with_messages(latencies_s=(3e-3,), roles=even_roles(1e-3))

    found = simulated(a_job(a_windowed_mix(), steps=64, step_s=step_s, cores=8.0), profile)

    rank = next(role for role in found.roles if role.role == "rank")
    # The rank asks, is answered, and reports its last step; both ways of a confirmation are waited for, and both
    # ends.
    messages = 4 if confirmed else 3
    assert rank.messages_step == pytest.approx(messages / at_once, rel=1 / 7)
    assert found.waits.p50_s == pytest.approx(0.008 if confirmed else 0.0, abs=1e-4)


def in_training_and_at_full_speed(rank=None):
    """Return the results of one rank, by the cost of a message and of a batch; all else is free."""
    roles = even_roles(0.0) | ({"rank": rank} if rank else {})
    return [
        simulated(
            a_job(a_windowed_mix(), ranks=1, cores=8.0, steps=32, step_s=step_s),
            with_messages(roles=roles),
        )
        for step_s in (STEADY_S, 0.0)
    ]


@pytest.fixture(scope="module")
def of_a_free_rank():
    return in_training_and_at_full_speed()


@pytest.mark.parametrize("cost", [{"end_s": 0.01}, {"byte_s": 1e-5}, {"batch_s": 0.01}])
def test_what_a_rank_takes_in_is_waited_for_only_at_full_speed(cost, of_a_free_rank):
    rank = a_profile().messages["ray"].roles["rank"].model_copy(update={"end_s": 0.0, **cost})

    trained, at_once = in_training_and_at_full_speed(rank)

    free, free_at_once = of_a_free_rank
    assert trained.waits == free.waits
    assert trained.cpu_step_s > free.cpu_step_s + 1e-3
    assert at_once.waits.longest_s > free_at_once.waits.longest_s + 5e-3


def test_blocks_of_many_steps_are_decoded_among_those_that_count_as_often_as_on_average():
    names = tuple(f"s{number:02}" for number in range(16))
    readers = {"readers": dict.fromkeys(names, 1)}
    weights, kind = dict.fromkeys(names, 1), {"kind": "ray", "prefetch_steps": 4, "loaders": 1}
    mix = a_mix(sources=names, weights=weights, rows=16, runtime=kind, loader=readers)
    costs = {"read_s": 0.0, "token_s": 0.0, "positions_per_epoch": 10_000, "block_positions": 500}
    sources = {name: some_costs(block_s=1.0, **costs) for name in names}
    roles = even_roles(0.0)
    free = a_profile().messages["ray"].model_copy(update={"roles": roles})
    profile = a_profile(sources=sources, messages={"ray": free})

    def decoded(seed):
        found = simulated(a_job(mix, steps=96, seed=seed), profile)
        busy_s = sum(role.cores for role in found.roles if role.role == "loader") * found.seconds
        return busy_s, found.tokens_per_step

    busy_s, tokens = zip(*map(decoded, range(4)), strict=True)
    tokens_of_block = 500 * sum(sources["s00"].lengths) / len(sources["s00"].counts)
    assert sum(busy_s) == pytest.approx(96 * sum(tokens) / tokens_of_block, rel=0.3)


def test_at_full_speed_one_core_is_busy_all_the_time():
    # No time on the way: in windows of two steps, a rank waits for each of its answers.
    found = simulated(a_job(ranks=2, cores=1.0), with_messages(latencies_s=(0.0,)))

    assert found.memory.first_cores == pytest.approx(1.0, rel=0.02)
    assert found.cpu_step_s == pytest.approx(found.seconds / found.steps, rel=0.02)


def test_a_constructor_lays_out_one_window_after_the_other_whatever_cores_its_threads_get():
    job = a_job(ranks=2, cores=8.0)
    window = job.spec.mix.steps_at_once
    profile = a_profile()
    builds = {"ray": profile.builds["ray"].model_copy(update={"rows_s": 0.4})}

    found = simulated(job, profile.model_copy(update={"builds": builds, "threads": 4.0}))

    assert found.seconds / found.steps == pytest.approx(0.4 / window, rel=0.1)


def test_connections_are_those_of_the_drawing():
    found = simulated(a_job(ranks=16, hosts=4))

    # planner to a loader, four constructors and 16 ranks; constructors to the loader; ranks to their constructor
    assert (found.loaders, found.constructors) == (1, 4)
    assert found.connections.total == 1 + 4 + 16 + 4 + 16
    assert found.connections.without == 16 * 2


def test_a_slow_network_between_hosts_is_waited_for():
    quick = simulated(a_job(ranks=16, hosts=4))
    slow = simulated(a_job(ranks=16, hosts=4, network_bytes_per_s=1e4))

    # three hosts of four get their tokens, 4 bytes each, from the first one
    sent_s = 0.75 * 4 * quick.tokens_per_step / 1e4
    assert slow.seconds / slow.steps > sent_s
    assert quick.seconds / quick.steps < sent_s / 4


def test_memory_of_processes_is_what_they_hold_beside_what_they_begin_with():
    found = {role.role: role for role in simulated(a_job(ranks=4)).roles}

    assert found["node"].memory_bytes == 60 << 20
    # 100 KB at most: some steps of 512 tokens, two blocks
    assert (50 << 20) < found["loader"].memory_bytes < (50 << 20) + 100_000
    assert found["rank"].memory_bytes < 100_000


def test_the_local_runtime_is_one_process():
    mix = a_mix(rows=16, runtime={"kind": "local", "prefetch_steps": 4})

    found = simulated(a_job(mix))

    assert [(role.role, role.count) for role in found.roles] == [("process", 1)]
    assert found.connections.total == 0


def test_hybrid_is_refused_by_name():
    mix = a_mix(rows=16, balance={"strategy": "hybrid"})

    with pytest.raises(ConfigError, match=r"balance.strategy is 'hybrid'"):
        simulate(a_job(mix), a_profile())


def test_what_the_profile_lacks_is_named():
    job = a_job(ranks=2)

    with pytest.raises(ConfigError, match="no figures of planning for 2 ranks"):
        simulate(job, a_profile())
    with pytest.raises(ConfigError, match="no figures of the ray runtime"):
        simulate(job, a_profile(messages={}))
    with pytest.raises(ConfigError, match="has no source 'code'"):
        simulate(job, a_profile(("web",)))
    with pytest.raises(ConfigError, match=r"--hosts is 3, more than --ranks 2"):
        simulate(a_job(ranks=2, hosts=3), a_profile())


def test_so_few_steps_that_no_time_passes_are_refused():
    profile = a_profile()
    free = profile.messages["ray"].model_copy(update={"roles": even_roles(0.0)})
    profile = profile.model_copy(update={"messages": {"ray": free}})

    with pytest.raises(ConfigError, match=r"--steps is 1, .* as 2 come at once: simulate more"):
        simulated(a_job(steps=1), profile)


@pytest.mark.parametrize("records", [200, 3])
def test_data_that_ends_before_the_last_step_is_refused(records):
    costs = some_costs(positions_per_epoch=records)
    mix = a_mix(mix={"stop": "first_exhausted"})
    profile = a_profile(sources=dict.fromkeys(mix.names, costs))

    with pytest.raises(ConfigError, match=r"the data ends before step .*; lower --steps"):
        simulated(a_job(mix, steps=500), profile)


def test_a_source_that_is_called_like_a_copy_of_another_is_a_source_of_its_own():
    mix = a_mix(sources=("web", "web.2"), weights={"web": 3, "web.2": 1}, mix={"stop": "never"})

    more = with_sources(mix, 4)

    assert more.names == ("web", "web.2", "web.2.2", "web.3")
    assert weights_at(more.mix.stages, more.names, 0) == pytest.approx([3 / 8, 1 / 8, 1 / 8, 3 / 8])
    assert [original_of(name, mix) for name in more.names] == ["web", "web.2", "web.2", "web"]


def test_a_mix_of_amounts_has_no_copies_of_its_sources():
    mix = a_mix(version=2, mix={"amounts": {"web": {"epochs": 1}, "code": {"epochs": 1}}})

    with pytest.raises(ConfigError, match="--sources is 5, and the mix gives amounts"):
        with_sources(mix, 5)


def test_copies_of_sources_share_the_weight_of_the_first():
    mix = a_mix(weights={"web": 3, "code": 1}, mix={"stop": "never"})

    more = with_sources(mix, 5)

    assert more.names == ("code", "code.2", "code.3", "web", "web.2")
    assert weights_at(more.mix.stages, more.names, 0) == pytest.approx([1 / 12] * 3 + [3 / 8] * 2)
    assert [original_of(name, mix) for name in more.names] == ["code"] * 3 + ["web"] * 2
    with pytest.raises(ConfigError, match="--sources is 1, and the mix has 2 already"):
        with_sources(mix, 1)


def test_a_step_has_whole_rows_of_the_tokens_that_are_asked_for():
    assert with_tokens(a_mix(length=32), 100).batch.tokens == 128


def test_the_knee_is_the_first_size_from_which_on_ranks_wait():
    def a_size(ranks, wait_s):
        found = simulated(a_job(ranks=1, step_s=1.0))
        return replace(found, ranks=ranks, waits=Waits.of([wait_s] * 24), seconds=24 * (1 + wait_s))

    quick, slow = a_size(4, 0.01), [a_size(8, 0.1), a_size(16, 1.0)]

    assert knee_of([a_size(2, 0.2), quick, *slow]) == 8
    assert knee_of([quick]) is None


def test_a_message_that_costs_more_at_one_role_makes_that_role_work_more_by_as_many_as_it_has():
    def with_end(end_s):
        messages = a_profile().messages["ray"]
        roles = {**messages.roles, "loader": RoleCosts(end_s=end_s)}
        dear = messages.model_copy(update={"roles": roles})
        found = simulated(a_job(ranks=4, cores=64.0), a_profile(messages={"ray": dear}))
        return found, {role.role: role for role in found.roles}

    (few, cheap), (many, dear) = with_end(1e-4), with_end(1e-3)

    def spent_s(found, role):
        return role.cores * found.seconds / found.steps

    beyond_s = spent_s(many, dear["loader"]) - spent_s(few, cheap["loader"])
    assert cheap["loader"].messages_step > 1
    assert beyond_s == pytest.approx(cheap["loader"].messages_step * 9e-4, rel=0.1)
    assert dear["planner"].messages_step == pytest.approx(cheap["planner"].messages_step, rel=0.1)


def with_shadows(shadows, *, step_s=1.0, **changes):
    """Return a plane whose sources reach another block of two records in most steps."""
    mix = a_mix(rows=16, runtime={"kind": "ray", "loaders": 2, "shadows": shadows})
    sources = {name: some_costs(s, block_positions=2) for s, name in enumerate(("web", "code"))}
    return simulated(a_job(mix, step_s=step_s, **changes), a_profile(sources=sources))


def test_shadows_are_processes_that_hold_what_their_loaders_have_decoded_on_the_one_host_there_is():
    without, found = with_shadows(0), with_shadows(1)

    roles = {role.role: role for role in found.roles}
    assert (roles["loader"].count, roles["shadow"].count) == (2, 2)
    assert roles["shadow"].connections == 0
    more = found.memory.first_memory_bytes - without.memory.first_memory_bytes
    # Two processes with two decoded blocks of a source each; the planner's knowledge depends on which read came
    # first.
    assert more == pytest.approx(2 * ((50 << 20) + 2 * 10_000), rel=0, abs=2_000)
    assert found.tokens_per_step == without.tokens_per_step


def test_shadows_are_on_another_host_than_their_loaders_where_there_is_one():
    one, two = (with_shadows(n, hosts=2, ranks=2) for n in (0, 1))

    assert two.memory.first_memory_bytes == one.memory.first_memory_bytes
    assert two.memory.other_memory_bytes == one.memory.other_memory_bytes + 2 * (
        (50 << 20) + 2 * 10_000
    )


def test_a_plane_without_shadows_has_no_such_role():
    assert "shadow" not in {role.role for role in with_shadows(0).roles}


def test_a_shadow_decodes_at_most_a_block_a_second_of_each_source_however_many_go_by():
    # More steps than come at once, because no time passes between those.
    slow, fast = (with_shadows(1, step_s=seconds, steps=64) for seconds in (1.0, 0.0))

    def busy_s(found):
        return sum(role.cores for role in found.roles if role.role == "shadow") * found.seconds

    assert fast.seconds < 1
    assert busy_s(fast) <= 2 * 1e-3 + 1e-9  # two sources, whose block takes 1 ms
    assert 0 < busy_s(slow) <= 2 * 1e-3 * (slow.seconds + 1)
