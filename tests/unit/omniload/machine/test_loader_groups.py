"""The partition: the number of loaders, and the sources that share one."""

import pytest

from omniload.machine.loader_groups import (
    SourceCost,
    costs_of,
    part_of_loader,
    partition,
    readers_of,
)
from omniload.source.kept_profile import KeptProfile
from tests.support.plane.builders import a_mix


def a_cost(busy=0.0, memory=0):
    return SourceCost(preprocess_s=busy * 0.75, transfer_s=busy * 0.25, memory_bytes=memory)


def groups_of(costs, **options):
    return tuple(share.sources for share in partition(costs, **options))


def sources_in(groups):
    return sorted(source for group in groups for source in group)


def test_light_sources_share_one_loader():
    assert groups_of([a_cost(0.001)] * 300) == (tuple(range(300)),)


def test_work_beyond_a_core_takes_more_loaders():
    groups = groups_of([a_cost(0.5)] * 4)

    assert len(groups) == 3
    assert sources_in(groups) == [0, 1, 2, 3]


def test_a_heavy_source_is_not_put_with_others():
    groups = groups_of([a_cost(0.6), *[a_cost(0.1)] * 6])

    assert (0,) in groups


def test_a_free_number_stays_under_its_limit():
    assert len(groups_of([a_cost(5.0)] * 40, max_loaders=6)) == 6


@pytest.mark.parametrize(("asked", "given"), [(3, 3), (9, 5)])
def test_a_number_that_was_asked_for_is_kept_up_to_a_source_each(asked, given):
    groups = groups_of([a_cost(0.1)] * 5, num_loaders=asked)

    assert len(groups) == given
    assert sources_in(groups) == [0, 1, 2, 3, 4]


def test_sources_without_any_work_are_dealt_too():
    groups = groups_of([a_cost(0.0)] * 4, num_loaders=2)

    assert sorted(map(len, groups)) == [2, 2]


def test_the_busy_share_is_reading_and_handing_over():
    assert a_cost(0.5).busy == pytest.approx(0.5)


def test_no_sources_are_refused():
    with pytest.raises(ValueError, match="there are 0 sources"):
        groups_of([])


def test_a_loader_carries_what_its_sources_cost():
    (share,) = partition([a_cost(0.2, memory=3), a_cost(0.1, memory=4)])

    assert share.busy == pytest.approx(0.3)
    assert share.memory_bytes == 7


@pytest.mark.parametrize(
    ("costs", "asked", "why"),
    [
        ([1.5], 0, "one source that needs more than a core"),
        ([0.8], 0, "one source that needs a loader of its own"),
        ([0.1, 0.1], 2, "runtime.loaders says how many"),
        ([0.5] * 40, 0, "more work than loaders: set runtime.loaders"),
        ([0.1, 0.1], 0, "light enough to share a process"),
    ],
)
def test_a_loader_says_why_it_carries_its_sources(costs, asked, why):
    shares = partition([a_cost(busy) for busy in costs], num_loaders=asked)

    assert all(share.why.startswith(why) for share in shares)


@pytest.mark.parametrize(
    ("costs", "reads"), [([0.1], 4), ([0.01] * 300, 6), ([0.9, *[0.01] * 9], 4), ([1.0] * 9, 16)]
)
def test_a_loader_reads_as_much_at_once_as_its_work_asks_for_and_answers_beside_that(costs, reads):
    (share,) = partition([a_cost(busy) for busy in costs], max_loaders=1)

    assert (share.reads, share.threads) == (reads, reads + 4)


def test_costs_are_those_measured_where_there_are_any_and_else_of_the_kind():
    mix = a_mix(sources=("a", "b"), weights={"a": 3, "b": 1})
    measured = KeptProfile(preprocess_s_per_token=4e-6, block_bytes=5 << 20)

    a, b = costs_of(mix, {"a": measured}, tokens_per_s=1_000.0)

    assert (a.is_measured, b.is_measured) == (True, False)
    assert a.preprocess_s == pytest.approx(0.75 * 1_000 * 4e-6)
    assert (a.memory_bytes, b.memory_bytes) == (6 << 20, 1 << 20)


def test_a_source_that_grows_is_dealt_by_its_greatest_share():
    mix = a_mix(
        sources=("a", "b"),
        mix={
            "stages": [
                {"from_step": 0, "weights": {"a": 3, "b": 1}},
                {"from_step": 5, "weights": {"a": 0, "b": 1}},
            ]
        },
    )

    a, b = costs_of(mix, {}, tokens_per_s=1_000.0)

    assert b.busy == pytest.approx(a.busy / 0.75)


@pytest.mark.parametrize(
    ("cores_of_work", "cores", "readers"),
    [(0.1, 8, 1), (0.7, 8, 1), (1.5, 8, 3), (1.5, 2, 2), (9.0, 64, 8)],
)
def test_a_source_has_as_many_readers_as_its_work_asks_for_and_cores_allow(
    cores_of_work, cores, readers
):
    measured = KeptProfile(preprocess_s_per_token=cores_of_work / 1e6, block_bytes=0)
    mix = a_mix(sources=("a",))

    (cost,) = costs_of(mix, {"a": measured}, tokens_per_s=1e6, cores=cores)

    assert cost.readers == readers
    assert cost.of_loader == pytest.approx(cores_of_work / readers + 0.01)


def test_readers_that_were_asked_for_are_had_whatever_the_cost():
    mix = a_mix(sources=("a", "b", "c"), loader={"readers": {"a": 3, "b": 1}})
    heavy = KeptProfile(preprocess_s_per_token=1e-3, block_bytes=0)

    assert readers_of(mix, {"b": heavy}) == {"a": 3}


def test_a_loader_has_its_part_of_a_source_that_others_read_too_and_says_so():
    heavy = SourceCost(preprocess_s=1.8, transfer_s=0.0, memory_bytes=1, readers=3)

    alone, rest = partition([heavy, a_cost(0.2), a_cost(0.3)], max_loaders=2)

    assert (alone.sources, alone.readers, rest.readers) == ((0,), 2, 0)
    assert alone.busy == pytest.approx(0.6)
    assert (
        alone.why == "one source of 1.80 cores of work, which 3 read, each its units of every block"
    )


@pytest.mark.parametrize(
    ("busy_s", "took_s", "part_s"), [(0.5, 0.6, 0.5), (0.0, 0.4, 0.1), (0.1, 300.0, 0.5)]
)
def test_a_read_takes_of_its_loader_a_core_or_one_of_four_reads(busy_s, took_s, part_s):
    assert part_of_loader(busy_s, took_s) == part_s
