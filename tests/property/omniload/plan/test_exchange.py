"""Bins as lists and as arrays make the same exchanges; buckets dealt together end as if dealt one by one."""

from itertools import islice

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omniload.plan import exchange
from omniload.plan.balance_methods import balance
from omniload.plan.exchange import exchanged
from omniload.plan.placement import Distribution, place


@st.composite
def dealings(draw):
    """Costs, the bin of each, and counts that the bins keep."""
    num_bins, each = draw(st.integers(2, 30)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    costs = rng.integers(0, 5_000, num_bins * each).astype(float)
    bins_N = np.repeat(np.arange(num_bins), each)
    if draw(st.booleans()):
        bins_N = rng.integers(0, num_bins, len(costs))
    sizes = np.bincount(bins_N, minlength=num_bins)
    return costs, bins_N, num_bins, (int(sizes.min()), int(sizes.max()) + draw(st.integers(0, 2)))


@given(dealings())
def test_balance_methods_of_few_items_and_of_many_make_the_same_exchanges(dealing):
    costs, bins_N, num_bins, counts = dealing
    found = []
    for kind in (exchange._ListBins, exchange._ArrayBins):
        loads_B = np.bincount(bins_N, costs, num_bins)
        bins = kind.of(costs, bins_N, loads_B, counts)
        for _ in range(40):
            heavy, light = int(loads_B.argmax()), int(loads_B.argmin())
            best = bins.best_exchange(heavy, light)
            found.append((kind, heavy, light, best))
            if best is None:
                break
            bins.exchange(heavy, light, *best)
        found.append((kind, bins.of_N.tolist(), loads_B.tolist()))
    half = len(found) // 2
    assert [f[1:] for f in found[:half]] == [f[1:] for f in found[half:]]


@given(dealings())
def test_exchanges_keep_the_counts_and_never_load_the_heaviest_bin_more(dealing):
    costs, bins_N, num_bins, counts = dealing
    after_N = exchanged(costs, bins_N, num_bins, counts, costs.sum() / num_bins)
    sizes = np.bincount(after_N, minlength=num_bins)
    assert counts[0] <= sizes.min() <= sizes.max() <= counts[1]
    assert np.bincount(after_N, costs).max() <= np.bincount(bins_N, costs).max()


@given(
    st.integers(1, 400),
    st.sampled_from([1, 2, 90]),
    st.integers(0, 999),
    st.lists(st.integers(0, 1 << 20), max_size=9),
)
def test_balance_methods_come_lightest_first_and_the_earlier_of_ties_however_loads_have_moved(
    num_bins, heaviest, seed, looks
):
    rng = np.random.default_rng(seed)
    loads_B = rng.integers(0, heaviest, num_bins).astype(float)
    lightest = exchange._Lightest.of(loads_B)
    for look in looks:
        heavy = int(loads_B.argmax())
        rising = sorted(set(range(num_bins)) - {heavy}, key=lambda b: (loads_B[b], b))
        seen = num_bins if look % 3 else look % num_bins
        assert list(islice(lightest.others(heavy), seen)) == rising[:seen]
        if num_bins > 1:
            light = rising[look % len(rising)]
            before = float(loads_B[heavy]), float(loads_B[light])
            loads_B[[heavy, light]] = rng.integers(0, heaviest, 2)
            lightest.move((heavy, light), before)


@given(
    st.lists(st.just(0) | st.integers(0, 300), min_size=1, max_size=40),
    st.integers(1, 9),
    st.integers(1, 6),
    st.none() | st.integers(1, 3),
)
def test_a_microbatch_of_one_is_the_one_that_its_bucket_balanced_alone_gives(
    costs, buckets, microbatches, max_count
):
    costs_N = np.array(costs[: buckets * microbatches], float)
    deal = Distribution(microbatches=microbatches, max_count=max_count)
    over, microbatches_N = place(costs_N, buckets, deal)
    for bucket in range(buckets):
        members = np.flatnonzero(over.bins_N == bucket)
        alone = balance(
            costs_N[members],
            microbatches,
            max_count=max_count,
            min_count=min(1, len(members) // microbatches),
        )
        assert microbatches_N[members].tolist() == alone.bins_N.tolist()


@given(
    st.lists(st.just(0) | st.integers(0, 300), min_size=1, max_size=90),
    st.integers(1, 9),
    st.integers(2, 6),
    st.none() | st.integers(2, 4),
)
def test_microbatches_of_several_leave_buckets_as_even_as_buckets_alone_are(
    costs, buckets, microbatches, max_count
):
    num = buckets * microbatches
    costs_N = np.array(costs[: num * (max_count or len(costs))], float)
    deal = Distribution(microbatches=microbatches, max_count=max_count)
    over, microbatches_N = place(costs_N, buckets, deal)
    counts = np.bincount(over.bins_N * microbatches + microbatches_N, minlength=num)
    assert counts.max() <= (max_count or len(costs))
    assert counts.min() >= min(1, len(costs_N) // num)
    assert over.loads_B.tolist() == np.bincount(over.bins_N, costs_N, buckets).tolist()
    least, most = min(microbatches, len(costs_N) // buckets), max_count and max_count * microbatches
    alone = balance(costs_N, buckets, max_count=most, min_count=least)
    assert over.bound == alone.bound
    assert over.loads_B.max() <= max(alone.loads_B.max(), alone.bound * 1.002)
