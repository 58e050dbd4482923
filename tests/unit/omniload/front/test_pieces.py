"""Documents of packed rows one by one: with their keys, without padding, and the caller's own."""

import numpy as np
import pytest

from omniload.base.errors import ConfigError
from omniload.batch.microbatch import Batch
from omniload.batch.slices import slice_for_cp
from omniload.front.pieces import pieces_of
from omniload.front.rows import NumpyArrays, TrainingBatch
from tests.support.plane.builders import a_microbatch, tokens_of


def some_rows():
    """Two rows of 8: one full, one of two pieces and padding."""
    rows = [[(0, 6, 0, 0, 8, 8)], [(1, 4, 0, 0, 3, 3), (0, 1, 2, 2, 4, 6)]]
    return a_microbatch(rows, length=8, scored=True)


def test_pieces_have_their_keys_tokens_and_columns():
    found = pieces_of(some_rows())

    assert [piece.key for piece in found] == [(0, 6, 0, 0), (1, 4, 0, 0), (0, 1, 2, 2)]
    assert [piece.tokens.tolist() for piece in found] == [
        tokens_of(0, 6, 0, 8).tolist(),
        tokens_of(1, 4, 0, 3).tolist(),
        tokens_of(0, 1, 2, 6)[2:4].tolist(),
    ]
    assert [piece.columns["scores"].tolist() for piece in found] == [[6], [4], []]


def test_a_batch_gives_the_pieces_of_all_its_microbatches():
    batch = Batch(
        step=0, microbatches=(some_rows(), some_rows()), loss_tokens=1, imbalance=1.0, bound=1.0
    )

    found = TrainingBatch(batch, NumpyArrays(), "shifted").pieces()

    assert [piece.key for piece in found] == 2 * [piece.key for piece in pieces_of(some_rows())]


def test_a_piece_outlives_its_batch():
    rows = some_rows()

    assert not any(np.shares_memory(piece.tokens, rows.tokens_RT) for piece in pieces_of(rows))


def test_rows_that_cp_peers_share_have_no_pieces():
    with pytest.raises(ConfigError, match=r"this one has 4 tokens of each: no document is whole"):
        pieces_of(slice_for_cp(some_rows(), 0, 2))
