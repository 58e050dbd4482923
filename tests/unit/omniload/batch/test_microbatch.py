"""Values that follow from the tokens of a microbatch and the bounds of its documents."""

import pickle

import numpy as np
import pytest

from omniload.batch.microbatch import IGNORE_LABEL, Microbatch

X = IGNORE_LABEL


def some_rows(**changes):
    """A full row of two documents, of which the second is cut, and a row of one and its padding."""
    return Microbatch(
        **{
            "tokens_RT": np.array([[1, 2, 3, 4], [5, 6, 0, 0]], np.int32),
            "cu_seqlens": np.array([0, 1, 4, 6, 8], np.int32),
            "sources_D": np.array([2, 0, 1, -1], np.int16),
            "next_D": np.array([X, 9, X, X], np.int32),
            "keys_K4": np.zeros((3, 4), np.int64),
        }
        | changes
    )


def test_labels_positions_and_sources_follow_from_tokens_and_bounds():
    rows = some_rows()

    assert rows.labels_RT.tolist() == [[X, 3, 4, 9], [6, X, X, X]]
    assert rows.positions_RT.tolist() == [[0, 0, 1, 2], [0, 1, 0, 0]]
    assert rows.source_ids_RT.tolist() == [[2, 0, 0, 0], [1, 1, -1, -1]]
    assert [a.dtype for a in (rows.labels_RT, rows.positions_RT)] == [np.int32, np.int32]
    assert rows.source_ids_RT.dtype == np.int16


def test_a_label_that_is_not_trained_on_is_left_out_also_behind_a_cut():
    trained = np.array([[True, False, True, False], [True, True, True, True]])

    assert some_rows(trained_RT=trained).labels_RT.tolist() == [[X, X, 4, X], [6, X, X, X]]


def test_rows_that_are_not_contiguous_have_their_labels():
    apart = np.asfortranarray(some_rows().tokens_RT)

    assert np.array_equal(some_rows(tokens_RT=apart).labels_RT, some_rows().labels_RT)


@pytest.mark.parametrize("name", ["labels_RT", "positions_RT", "source_ids_RT"])
def test_what_follows_is_made_once_and_never_for_rows_that_only_pass_through(name):
    rows = pickle.loads(pickle.dumps(some_rows()))

    assert name not in vars(rows)
    assert getattr(rows, name) is getattr(rows, name)


def test_rows_travel_as_tokens_and_what_is_known_of_documents():
    sent: list[pickle.PickleBuffer] = []
    tokens = np.zeros((64, 4096), np.int32)
    rows = some_rows(
        tokens_RT=tokens,
        cu_seqlens=np.arange(65, dtype=np.int32) * 4096,
        sources_D=np.zeros(64, np.int16),
        next_D=np.full(64, X, np.int32),
    )

    head = pickle.dumps(rows, protocol=5, buffer_callback=sent.append)

    size_bytes = len(head) + sum(buffer.raw().nbytes for buffer in sent)
    assert size_bytes < 1.01 * tokens.nbytes
