"""Sources with several readers in a simulated plane: each reader's part of a block, and the result."""

import numpy as np
import pytest

from omniload.simulation.job import reads_of
from omniload.simulation.loaders import parts_of_blocks
from omniload.simulation.plane import simulate
from omniload.simulation.scale import with_sources
from omniload.source.parts.share import Part, Share
from tests.support.plane.builders import a_mix
from tests.support.plane.profiles import a_job, a_profile, planned, some_costs


@pytest.mark.parametrize("readers", [1, 2, 3, 5])
@pytest.mark.parametrize("units", [1, 2, 4, 7])
def test_a_reader_has_the_part_of_each_block_that_it_has_in_a_run(units, readers):
    blocks_B, rows = np.arange(6), 3
    counts_U, rows_N = np.full(units, rows), np.arange(units * rows)

    parts_RB = parts_of_blocks(blocks_B, units, readers)

    for reader in range(readers):
        for block in blocks_B.tolist():
            share = Share.of(Part(reader, readers), block, np.arange(units), counts_U, rows_N)
            assert parts_RB[reader, block] == pytest.approx(len(share.rows) / len(rows_N))


def a_heavy_job(kind="ray", *, cores=8.0, readers=None, rows=16, length=32, **changes):
    """Return a job whose tokens of web take more than a core, as fast as they come."""
    mix = a_mix(
        rows=rows,
        length=length,
        runtime={"kind": kind, "prefetch_steps": 4, "loaders": 1},
        loader={} if readers is None else {"readers": {"web": readers, "code": 1}},
    )
    return a_job(mix, cores=cores, **changes)


def simulated(job, *, token_s=1e-4, block_units=4, threads=1.0):
    web = some_costs(0, token_s=token_s, block_units=block_units)
    profile = a_profile(sources={"web": web, "code": some_costs(1)}, threads=threads)
    return simulate(job, planned(profile, job))


def test_two_readers_halve_what_a_heavy_source_takes_and_four_halve_it_again():
    alone, two, four = (simulated(a_heavy_job(readers=n, steps=96)) for n in (1, 2, 4))

    step_s = alone.seconds / alone.steps
    assert two.seconds / two.steps == pytest.approx(step_s / 2, rel=0.1)
    assert four.seconds / four.steps == pytest.approx(step_s / 4, rel=0.25)
    assert two.tokens_per_step == alone.tokens_per_step
    assert (alone.readers, two.readers, four.readers) == (0, 1, 3)


def test_readers_of_blocks_of_one_unit_take_turns_and_gain_nothing_within_a_block():
    alone, two = (simulated(a_heavy_job(readers=n), block_units=1) for n in (1, 2))

    assert two.seconds > 0.6 * alone.seconds


def test_readers_are_processes_that_speak_to_their_loader_and_have_their_part_of_its_blocks():
    roles = {role.role: role for role in simulated(a_heavy_job(readers=4)).roles}

    assert roles["reader"].count == 3
    assert roles["reader"].connections == 1
    assert roles["reader"].memory_bytes == (50 << 20) + 10_000 // 4
    assert roles["loader"].connections == 1 + 1 + 3  # the planner, the constructor, its readers


def test_readers_of_the_local_runtime_are_threads_that_get_the_cores_of_one_process():
    jobs = [a_heavy_job("local", readers=n, steps=96) for n in (1, 2)]
    one_core, two_cores = (
        [simulated(job, threads=threads) for job in jobs] for threads in (1.0, 2.0)
    )

    assert one_core[1].seconds == pytest.approx(one_core[0].seconds, rel=0.1)
    assert two_cores[1].seconds == pytest.approx(two_cores[0].seconds / 2, rel=0.15)
    assert [role.role for role in two_cores[1].roles] == ["process"]


def test_a_source_that_cannot_keep_up_gets_readers_as_its_job_goes_on():
    # One reader is enough for 100,000 tokens a second, the initial assumption of a job; this one takes whatever it
    # gets.
    long = {"lengths": [2_000] * 60, "token_s": 1e-5}
    sources = {"web": some_costs(**long), "code": some_costs(**long | {"token_s": 1e-8})}

    def found(readers):
        job = a_heavy_job(cores=4.0, rows=64, length=2_048, steps=150, readers=readers)
        return simulate(job, planned(a_profile(sources=sources), job))

    alone, followed = found(1), found(None)

    assert alone.readers == 0
    assert followed.readers >= 2
    assert followed.seconds < 0.7 * alone.seconds
    assert {role.role: role.count for role in followed.roles}["reader"] == followed.readers


def test_a_stage_of_the_mix_has_its_readers_before_it_begins():
    # Five steps in two seconds, of which web is a tenth, and all of each from a later step on.
    before = {"from_step": 0, "weights": {"web": 1, "code": 9}}
    long = {"lengths": [2_000] * 60, "token_s": 6.2e-6}
    sources = {"web": some_costs(**long), "code": some_costs(**long | {"token_s": 1e-8})}

    def found(steps, *, stage_at=150):
        stages = [before, {"from_step": stage_at, "weights": {"web": 1}}]
        mix = a_mix(
            rows=64,
            length=2_048,
            mix={"stages": stages},
            runtime={"kind": "ray", "prefetch_steps": 4, "loaders": 1},
        )
        job = a_job(mix, cores=8.0, step_s=0.4, steps=steps)
        return simulate(job, planned(a_profile(sources=sources), job))

    assert found(50).readers == 0  # half a minute has to pass first
    assert found(137).readers == 3
    assert found(137, stage_at=1_500).readers == 0
    assert found(175).waits.longest_s < 0.1  # eight seconds without foresight


@pytest.mark.parametrize(("cores", "readers"), [(2.0, 2), (4.0, 4), (16.0, 8)])
def test_by_default_as_many_read_a_source_as_its_measured_cost_asks_for(cores, readers):
    heavy = a_profile(sources={"web": some_costs(0, token_s=2e-4), "code": some_costs(1)})

    costs = reads_of(a_heavy_job(cores=cores), heavy)

    # web has half of 100,000 tokens a second, 10 cores of work; code takes a hundredth of one
    assert [cost.readers for cost in costs] == [1, readers]


def test_a_given_number_holds_for_the_copies_of_a_source_too():
    mix = with_sources(a_mix(loader={"readers": {"web": 3}}), 5)

    assert mix.loader.readers == {"web": 3, "web.2": 3}
