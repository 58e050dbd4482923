"""Slices for context parallelism: every column once, with its label."""

import dataclasses

import numpy as np
import pytest

from omniload.batch.slices import cp_indices, cp_places, slice_for_cp, whole_rows
from omniload.mix.columns import name_inside
from tests.support.plane.builders import a_microbatch

ROWS = [[[0, 1, 0, 0, 5, 5], [1, 5, 0, 0, 9, 12]], [[0, 2, 0, 0, 7, 7]]]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_the_peers_slices_together_are_the_row(cp_size):
    together = np.concatenate([cp_indices(16, rank, cp_size) for rank in range(cp_size)])

    assert sorted(together.tolist()) == list(range(16))


def test_an_early_part_is_paired_with_a_late_one():
    assert cp_indices(8, 0, 2).tolist() == [0, 1, 6, 7]
    assert cp_indices(8, 1, 2).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_every_column_is_found_in_the_slice_that_holds_it(cp_size):
    peers, places = cp_places(16, cp_size)

    found = [cp_indices(16, peers[column], cp_size)[places[column]] for column in range(16)]
    assert found == list(range(16))


@pytest.mark.parametrize("cp_size", [2, 4])
def test_peers_share_the_work_of_causal_attention_evenly(cp_size):
    work = [int((cp_indices(32, rank, cp_size) + 1).sum()) for rank in range(cp_size)]

    assert len(set(work)) == 1


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_slices_put_back_in_place_are_the_whole_microbatch(cp_size):
    whole = a_microbatch(ROWS, length=16)
    tokens, labels, positions = (np.full((2, 16), -1) for _ in range(3))

    for rank in range(cp_size):
        part = slice_for_cp(whole, rank, cp_size)
        tokens[:, part.indices_C] = part.tokens_RC
        labels[:, part.indices_C] = part.labels_RC
        positions[:, part.indices_C] = part.positions_RC

    assert np.array_equal(tokens, whole.tokens_RT)
    assert np.array_equal(labels, whole.labels_RT)
    assert np.array_equal(positions, whole.positions_RT)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_rows_made_whole_again_from_the_slices_of_all_peers_are_what_was_sliced(cp_size):
    whole = a_microbatch(ROWS, length=16, own=[name_inside("weight", "int64", 1)])
    parts = [slice_for_cp(whole, rank, cp_size) for rank in range(cp_size)]

    found = whole_rows(
        parts[-1],
        np.stack([part.tokens_RC for part in parts]),
        np.stack([part.labels_RC for part in parts]),
        {"weight": np.stack([part.aligned_RC["weight"] for part in parts])},
    )

    assert np.array_equal(found.aligned_RT["weight"], whole.tokens_RT)
    made = {"labels_RT", "positions_RT", "source_ids_RT"}
    for name in made | {field.name for field in dataclasses.fields(whole)} - {
        "trained_RT",
        "aligned_RT",
    }:
        assert np.array_equal(getattr(found, name), getattr(whole, name)), name


def test_a_slice_keeps_the_bounds_of_the_whole_rows():
    whole = a_microbatch(ROWS, length=16)

    assert np.array_equal(slice_for_cp(whole, 1, 2).cu_seqlens, whole.cu_seqlens)


@pytest.mark.parametrize(
    ("length", "rank", "size", "message"),
    [
        (10, 0, 4, "row length 10 is not a multiple of 2 \\* cp = 8"),
        (16, 2, 2, "cp_rank is 2, outside 0 to 1"),
        (16, -1, 2, "cp_rank is -1"),
    ],
)
def test_slices_that_cannot_be_even_are_refused(length, rank, size, message):
    with pytest.raises(ValueError, match=message):
        cp_indices(length, rank, size)
