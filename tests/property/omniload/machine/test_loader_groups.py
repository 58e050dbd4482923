"""For any costs, every source is with one loader, and the load of the busiest loader is near the optimum."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.machine.loader_groups import SourceCost, partition

works = st.lists(st.floats(0, 3) | st.just(0.0), min_size=1, max_size=7)


def costs_of(works):
    return [SourceCost(preprocess_s=work, transfer_s=0.0, memory_bytes=1) for work in works]


def best(works, count):
    """Return the least load of the busiest of ``count`` loaders, found by trying every assignment."""
    dealings = product(range(count), repeat=len(works))
    return min(
        max(sum(w for w, b in zip(works, dealing, strict=True) if b == n) for n in range(count))
        for dealing in dealings
    )


@given(works, st.integers(0, 9), st.integers(1, 8))
def test_every_source_is_with_one_loader_and_no_loader_is_empty(works, asked, most):
    shares = partition(costs_of(works), num_loaders=asked, max_loaders=most)

    assert sorted(s for share in shares for s in share.sources) == list(range(len(works)))
    assert all(share.sources for share in shares)
    assert len(shares) <= min(asked or most, len(works))
    for share in shares:
        assert share.busy == pytest.approx(sum(works[s] for s in share.sources))
        assert share.memory_bytes == len(share.sources)
        assert share.threads >= 3


@given(works, st.integers(1, 3))
def test_the_busiest_loader_is_within_a_third_of_the_best_dealing(works, count):
    shares = partition(costs_of(works), num_loaders=count)

    bound = best(works, len(shares)) * (4 / 3 - 1 / (3 * len(shares)))
    assert max(share.busy for share in shares) <= bound + 1e-6
