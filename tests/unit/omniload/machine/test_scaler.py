"""The Scaler: how many loaders, and who shares one."""

import pytest

from omniload.machine.scaler import SourceCost, group_sources


def a_cost(busy=0.0, memory=0):
    return SourceCost(preprocess_s=busy * 0.75, transfer_s=busy * 0.25, memory_bytes=memory)


def sources_in(groups):
    return sorted(source for group in groups for source in group)


def test_light_sources_share_one_loader():
    assert group_sources([a_cost(0.001)] * 300) == (tuple(range(300)),)


def test_work_beyond_a_core_takes_more_loaders():
    groups = group_sources([a_cost(0.5)] * 4)

    assert len(groups) == 3
    assert sources_in(groups) == [0, 1, 2, 3]


def test_a_heavy_source_is_not_put_with_others():
    groups = group_sources([a_cost(0.6), *[a_cost(0.1)] * 6])

    assert (0,) in groups


def test_memory_takes_more_loaders_too():
    groups = group_sources([a_cost(memory=1 << 30)] * 4, memory_limit_bytes=2 << 30)

    assert [len(group) for group in groups] == [2, 2]


def test_a_free_number_stays_under_its_limit():
    assert len(group_sources([a_cost(5.0)] * 40, max_loaders=6)) == 6


@pytest.mark.parametrize(("asked", "given"), [(3, 3), (9, 5)])
def test_a_number_that_was_asked_for_is_kept_up_to_a_source_each(asked, given):
    groups = group_sources([a_cost(0.1)] * 5, num_loaders=asked)

    assert len(groups) == given
    assert sources_in(groups) == [0, 1, 2, 3, 4]


def test_sources_without_any_work_are_dealt_too():
    groups = group_sources([a_cost(0.0)] * 4, num_loaders=2)

    assert sorted(map(len, groups)) == [2, 2]


def test_the_busy_share_is_reading_and_handing_over():
    assert a_cost(0.5).busy == pytest.approx(0.5)


def test_no_sources_are_refused():
    with pytest.raises(ValueError, match="there are 0 sources"):
        group_sources([])
