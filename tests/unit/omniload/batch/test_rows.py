"""Rows from pieces: tokens, labels, positions, boundaries, and refusals."""

import numpy as np
import pytest

from omniload.base.errors import IntegrityError
from omniload.base.ragged import Ragged, Ranges
from omniload.batch.microbatch import IGNORE_LABEL
from omniload.batch.rows import build_rows, stops_with_next
from omniload.mix.columns import name_inside
from tests.support.plane.builders import a_microbatch, pieces_of, tokens_of

X = IGNORE_LABEL
A = [0, 1, 0, 0, 3, 3]
B = [1, 5, 0, 0, 4, 4]
CUT = [0, 2, 0, 2, 5, 9]


def test_pieces_lie_end_to_end_and_the_row_is_padded():
    rows = a_microbatch([[A, B], [CUT]], length=8)

    first = [*tokens_of(0, 1, 0, 3), *tokens_of(1, 5, 0, 4), 0]
    second = [*tokens_of(0, 2, 0, 9)[2:5], 0, 0, 0, 0, 0]
    assert rows.tokens_RT.tolist() == [first, second]
    assert rows.tokens_RT.dtype == np.int32


def test_labels_are_the_next_tokens_and_never_cross_a_document():
    labels = a_microbatch([[A, B]], length=8).labels_RT[0].tolist()

    assert labels == [*tokens_of(0, 1, 0, 3)[1:], X, *tokens_of(1, 5, 0, 4)[1:], X, X]


def test_a_piece_that_was_cut_predicts_the_token_behind_the_cut():
    labels = a_microbatch([[CUT, A]], length=8).labels_RT[0].tolist()

    assert labels[:3] == tokens_of(0, 2, 0, 9)[3:6].tolist()
    assert labels[3:6] == [*tokens_of(0, 1, 0, 3)[1:], X]


def test_a_cut_at_the_end_of_a_full_row_still_has_its_label():
    labels = a_microbatch([[[0, 2, 0, 0, 8, 9]]], length=8).labels_RT[0].tolist()

    assert labels == tokens_of(0, 2, 0, 9)[1:].tolist()


def test_positions_start_at_zero_in_every_piece():
    assert a_microbatch([[A, CUT]], length=8).positions_RT.tolist() == [[0, 1, 2, 0, 1, 2, 0, 0]]


def test_padding_has_no_source():
    assert a_microbatch([[A, B], []], length=8).source_ids_RT.tolist() == [
        [0, 0, 0, 1, 1, 1, 1, -1],
        [-1] * 8,
    ]


def test_boundaries_cover_every_token_and_padding_is_a_document_of_its_own():
    rows = a_microbatch([[A, B], [], [[0, 7, 0, 0, 8, 8]], [A]], length=8)

    assert rows.cu_seqlens.tolist() == [0, 3, 7, 8, 16, 24, 27, 32]
    assert rows.cu_seqlens.dtype == np.int32
    assert rows.max_seqlen == 8


def test_the_loss_mask_marks_the_labels():
    rows = a_microbatch([[A, B]], length=8)

    assert rows.loss_mask_RT.tolist() == [[True, True, False, True, True, True, False, False]]


def test_keys_are_the_addresses_of_the_pieces():
    assert a_microbatch([[A], [CUT]], length=8).keys_K4.tolist() == [[0, 1, 0, 0], [0, 2, 0, 2]]


def test_no_rows_make_an_empty_microbatch():
    rows = a_microbatch([], length=8)

    assert rows.tokens_RT.shape == (0, 8)
    assert rows.cu_seqlens.tolist() == [0]
    assert rows.max_seqlen == 0


def test_one_token_more_is_read_where_the_sample_goes_on():
    assert stops_with_next(pieces_of(A, CUT)).tolist() == [3, 6]


@pytest.mark.parametrize("given", [2, 4])
def test_a_sample_of_another_length_than_planned_is_refused(given):
    pieces = pieces_of(B, A)
    fetched = Ranges.of([Ragged.of([np.arange(4), np.arange(given)])])

    with pytest.raises(
        IntegrityError,
        match=rf"sample \(source 0, position 1, sub 0\) gave {given} tokens where 3 were planned",
    ):
        build_rows(pieces, np.array([0, 2]), fetched, length=8)


def test_pieces_may_lie_anywhere_in_what_was_fetched():
    fetched = Ranges(
        columns=[np.array([9, 9, 7, 8, 9], np.int32), np.array([5, 6, 9], np.int32)],
        which_N=np.array([1, 0]),
        starts_N=np.array([0, 2]),
        stops_N=np.array([2, 4]),
    )

    rows = build_rows(
        pieces_of([0, 0, 0, 0, 2, 2], [0, 1, 0, 0, 2, 2]),
        np.array([0, 2]),
        fetched,
        length=4,
    )

    assert rows.tokens_RT.tolist() == [[5, 6, 7, 8]]


@pytest.mark.parametrize("dtype", ["int32", "int64", "float64"])
def test_a_column_of_tokens_lies_as_they_do_and_one_of_labels_as_those(dtype):
    own = [name_inside("at", dtype, 1.0), name_inside("ahead", dtype, None, of_labels=True)]

    rows = a_microbatch([[CUT, A], [B], [[0, 2, 0, 0, 8, 9]]], length=8, own=own)

    assert {each.dtype for each in rows.aligned_RT.values()} == {np.dtype(dtype)}
    assert np.array_equal(rows.aligned_RT["at"], rows.tokens_RT)
    labels = np.where(rows.labels_RT == X, 0, rows.labels_RT)
    assert np.array_equal(rows.aligned_RT["ahead"], labels)


def test_a_column_of_another_length_than_planned_is_refused():
    pieces, name = pieces_of(A), name_inside("at", "float32", None)
    short = Ranges.of([Ragged.of([np.ones(2)], np.float32)], np.float32)

    with pytest.raises(IntegrityError, match="gave 2 tokens where 3 were planned"):
        build_rows(
            pieces,
            np.array([0, 1]),
            Ranges.of([Ragged.of([tokens_of(0, 1, 0, 3)])]),
            length=4,
            others_K={name: short},
        )
