"""The division of the work to make tokens ahead of a run."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omniload.source.token_cache.ahead import CachedUnits, stretches_of


@st.composite
def units_of_sources(draw):
    """Units of some shards, some without records between them, of which some are kept."""
    counts = draw(st.lists(st.integers(0, 40), max_size=6))
    gaps = draw(st.lists(st.integers(0, 2), min_size=sum(counts), max_size=sum(counts)))
    kept = draw(st.lists(st.booleans(), min_size=sum(counts), max_size=sum(counts)))
    return CachedUnits(
        source="web",
        units_U=np.cumsum(np.array(gaps, np.int64) + 1),
        shards_U=np.repeat(np.arange(len(counts)), counts),
        is_kept_U=np.array(kept, np.bool_),
    )


@given(units_of_sources(), st.integers(1, 5))
def test_shares_have_each_unit_that_is_not_kept_once_and_none_that_is(units, of):
    shares = [list(stretches_of(units, number, of)) for number in range(of)]

    found = [unit for share in shares for stretch in share for unit in stretch.units]
    assert sorted(found) == units.units_U[~units.is_kept_U].tolist()


@given(units_of_sources(), st.integers(1, 5))
def test_a_stretch_is_read_on_in_one_shard(units, of):
    shard_of = dict(zip(units.units_U.tolist(), units.shards_U.tolist(), strict=True))
    for number in range(of):
        for stretch in stretches_of(units, number, of):
            assert stretch.source == "web"
            assert list(stretch.units) == sorted(stretch.units)
            assert len({shard_of[unit] for unit in stretch.units}) == 1
            assert 1 <= len(stretch.units) <= 16


@given(units_of_sources(), st.integers(2, 5), st.data())
def test_hosts_that_look_at_different_moments_leave_none_out(units, of, data):
    """Units that are kept when a host looks are passed over, and move no unit from one share to another."""
    made = set(units.units_U[units.is_kept_U].tolist())
    for number in data.draw(st.permutations(range(of))):
        seen = CachedUnits(
            source="web",
            units_U=units.units_U,
            shards_U=units.shards_U,
            is_kept_U=np.isin(units.units_U, list(made)),
        )
        made.update(unit for each in stretches_of(seen, number, of) for unit in each.units)

    assert made == set(units.units_U.tolist())


def test_shares_of_many_units_are_about_alike():
    units = CachedUnits(
        source="web",
        units_U=np.arange(10_000),
        shards_U=np.repeat(np.arange(10), 1_000),
        is_kept_U=np.zeros(10_000, np.bool_),
    )

    counts = [sum(len(each.units) for each in stretches_of(units, n, 16)) for n in range(16)]

    assert max(counts) <= 1.2 * min(counts)
