"""Hollow samples and rows are as large as real ones."""

import numpy as np
import pytest

from omniload.base.ragged import Ranges
from omniload.batch.microbatch import Batch
from omniload.batch.rows import build_rows
from omniload.simulation.hollow import HollowSource, hollow, hollow_rows, size_of_batch
from tests.support.plane.builders import pieces_of
from tests.support.plane.profiles import some_costs

ROWS = [
    [(0, 0, 0, 0, 10, 10), (1, 3, 0, 0, 6, 9)],
    [(1, 3, 0, 6, 9, 9), (0, 1, 0, 0, 12, 12), (0, 2, 1, 0, 1, 1)],
    [(1, 4, 0, 0, 16, 40)],
]


def a_batch(rows):
    return Batch(step=0, microbatches=(rows,), loss_tokens=1, imbalance=1.0, bound=1.0)


def test_hollow_rows_have_the_bounds_and_the_size_of_rows_that_are_built():
    pieces = pieces_of(*[piece for row in ROWS for piece in row])
    offsets = np.cumsum([0, *map(len, ROWS)])
    lengths = np.minimum(pieces.stops_P + 1, pieces.sizes_P) - pieces.starts_P
    fetched = Ranges(
        columns=[np.zeros(64, np.int32)],
        which_N=np.zeros(len(pieces), np.int64),
        starts_N=np.zeros(len(pieces), np.int64),
        stops_N=lengths.astype(np.int64),
    )

    made = hollow_rows(pieces, offsets, fetched, length=16, others_K={})

    real = build_rows(pieces, offsets, fetched, length=16)
    assert made.cu_seqlens.tolist() == real.cu_seqlens.tolist()
    assert size_of_batch(a_batch(made)) == size_of_batch(a_batch(real))


def test_hollow_tokens_take_no_memory_and_say_what_they_would_take():
    tokens = hollow(1 << 40)

    assert tokens.nbytes == 4 << 40
    assert tokens[7:9].tolist() == [0, 0]


@pytest.mark.parametrize("cut", [1, 17, 60, 61, 149])
def test_a_hollow_source_gives_the_same_samples_however_a_range_is_cut(cut):
    source = HollowSource(0, some_costs())

    whole, parts = source.table(0, 150), [source.table(0, cut), source.table(cut, 150)]

    for name in ("positions_N", "subs_N", "lengths_N"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        assert joined.tolist() == getattr(whole, name).tolist()


def test_a_hollow_source_repeats_what_was_measured_records_without_a_sample_too():
    costs = some_costs(counts=[1, 0, 2], lengths=[7, 8, 9])

    table = HollowSource(0, costs).table(2, 7)

    assert table.positions_N.tolist() == [2, 2, 3, 5, 5, 6]
    assert table.subs_N.tolist() == [0, 1, 0, 0, 1, 0]
    assert table.lengths_N.tolist() == [8, 9, 7, 8, 9, 7]


@pytest.mark.parametrize("rounds", [1, 1 << 70])
def test_a_hollow_source_that_begins_whole_rounds_later_is_the_same_one(rounds):
    costs = some_costs(counts=[1, 0, 2], lengths=[7, 8, 9])

    first, later = (HollowSource(0, costs, shift=1 + 3 * n).table(0, 6) for n in (0, rounds))

    assert later.lengths_N.tolist() == first.lengths_N.tolist() == [8, 9, 7, 8, 9, 7]
