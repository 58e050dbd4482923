"""Documents of packed rows one by one: with their keys, without padding, and the caller's own."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import ConfigError
from omniload.batch.arrays import NumpyArrays
from omniload.batch.losses import losses_by_document
from omniload.batch.microbatch import IGNORE_LABEL, Batch
from omniload.batch.rows import pieces_of, work_of
from omniload.batch.slices import slice_for_cp
from omniload.batch.wire import from_bytes, to_bytes
from omniload.front.batches.rows import PackedRows
from omniload.front.batches.training_batch import TrainingBatch
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


def test_pieces_documents_and_tokens_lead_to_the_tags_of_their_source():
    tags = {"code": {"domain": "software"}}
    batch = Batch(
        step=0,
        microbatches=(some_rows(), some_rows()),
        loss_tokens=1,
        imbalance=1.0,
        bound=1.0,
        tokens_by_source={"web": 10, "code": 3},
        source_tags=tags,
    )
    rows = TrainingBatch(from_bytes(to_bytes(batch)), NumpyArrays(), "shifted")

    assert rows.source_tags == ({}, {"domain": "software"})
    assert rows.document_sources.tolist() == 2 * [0, 1, 0, -1]
    assert len(rows.document_sources) == len(rows.cu_seqlens) - 1
    assert [piece.source for piece in rows.pieces()] == 2 * [0, 1, 0]


def test_documents_that_cp_peers_share_have_their_sources():
    rows = PackedRows(slice_for_cp(some_rows(), 1, 2), NumpyArrays(), "shifted")

    assert rows.document_sources.tolist() == [0, 1, 0, -1]


def test_a_piece_outlives_its_batch():
    rows = some_rows()

    assert not any(np.shares_memory(piece.tokens, rows.tokens_RT) for piece in pieces_of(rows))


def test_rows_that_cp_peers_share_have_no_pieces():
    with pytest.raises(ConfigError, match=r"this one has 4 tokens of each: no document is whole"):
        pieces_of(slice_for_cp(some_rows(), 0, 2))


def rows_of(lengths):
    """Return rows of documents of these lengths; some are pieces of longer ones."""
    return a_microbatch(
        [
            [[0, 10 * r + i, 0, 0, length, length + i % 2] for i, length in enumerate(row)]
            for r, row in enumerate(lengths)
        ],
        length=8,
    )


@given(
    st.lists(
        st.lists(st.integers(1, 6), min_size=1, max_size=3).filter(lambda row: sum(row) <= 8),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 1 << 30),
)
def test_losses_are_those_of_the_labels_of_each_document(rows, seed):
    microbatch = rows_of(rows)
    rng = np.random.default_rng(seed)
    losses = rng.random(microbatch.labels_RT.shape).astype(np.float32)
    losses[microbatch.labels_RT == IGNORE_LABEL] = np.nan

    found = losses_by_document(microbatch, microbatch.labels_RT, losses)

    flat, labels = losses.reshape(-1), microbatch.labels_RT.reshape(-1)
    sources = microbatch.source_ids_RT.reshape(-1)
    due = []
    for begin, end in pairwise(microbatch.cu_seqlens.tolist()):
        if sources[begin] >= 0:
            here = [float(flat[i]) for i in range(begin, end) if labels[i] != IGNORE_LABEL]
            due.append((sum(here), len(here)))
    assert len(found.keys_K4) == len(due)
    assert found.sums_K.tolist() == pytest.approx([total for total, _ in due])
    assert found.labels_K.tolist() == [count for _, count in due]


def test_the_work_of_rows_is_that_of_their_documents_alone_without_padding():
    rows = rows_of([[3, 2], [5]])
    sliced = slice_for_cp(rows, 1, 2)

    assert work_of(rows) == work_of(sliced) == (10, 9 + 4 + 25)
    assert PackedRows(rows, NumpyArrays(), "shifted").work() == (10, 38)


@pytest.mark.parametrize("shape", [(3,), (8, 2), (1, 16), (2, 8, 1), (16, 1)])
def test_losses_of_another_shape_are_refused(shape):
    microbatch = rows_of([[3], [5]])

    with pytest.raises(ConfigError, match=r"have shape \[.*one loss for each label"):
        losses_by_document(microbatch, microbatch.labels_RT, np.zeros(shape))


def test_losses_of_all_rows_end_to_end_are_those_of_the_rows():
    microbatch = rows_of([[3, 2], [5]])
    losses = np.arange(16.0).reshape(2, 8)

    flat, rows = (
        losses_by_document(microbatch, microbatch.labels_RT, given).sums_K.tolist()
        for given in (losses.reshape(-1), losses)
    )

    assert flat == rows


drawn_rows = st.lists(
    st.lists(st.integers(1, 6), min_size=1, max_size=3).filter(lambda row: sum(row) <= 8),
    min_size=1,
    max_size=4,
)


@given(drawn_rows, st.integers(0, 1 << 30), st.sampled_from([1, 2, 4]))
def test_a_mean_counts_at_each_label_that_it_goes_over(rows, seed, peers):
    """Compared with every label of its own, also if cp peers report parts of them."""
    microbatch = rows_of(rows)
    rng = np.random.default_rng(seed)
    labels, of_all = microbatch.labels_RT, rng.random()
    by_row, by_document = rng.random(len(rows)), rng.random(len(microbatch.keys_K4))
    documents_D = np.full(len(microbatch.sources_D), np.nan)
    documents_D[microbatch.sources_D >= 0] = by_document
    of_each = np.repeat(documents_D, np.diff(microbatch.cu_seqlens)).reshape(labels.shape)
    forms = [
        ("row", {"losses": by_row}, by_row[:, None] + np.zeros(labels.shape)),
        ("rows", {"losses": of_all}, np.full(labels.shape, of_all)),
        ("document", {"document_losses": by_document.tolist()}, of_each),
    ]
    parts = [slice_for_cp(microbatch, peer, peers) for peer in range(peers)]

    for over, given_, each_label in forms:
        due = losses_by_document(microbatch, labels, each_label)
        found = losses_by_document(microbatch, labels, **given_)
        assert found.over == over
        assert found.sums_K.tolist() == pytest.approx(due.sums_K.tolist())
        assert found.labels_K.tolist() == due.labels_K.tolist()
        sums, counts = dict.fromkeys(map(tuple, due.keys_K4), 0.0), {}
        for part in parts:
            told = losses_by_document(part, part.labels_RC, each_label[:, part.indices_C])
            assert told.columns == (int(part.indices_C[0]), 8 // peers)
            for key, total, count in zip(
                map(tuple, told.keys_K4), told.sums_K, told.labels_K, strict=True
            ):
                sums[key], counts[key] = sums[key] + total, counts.get(key, 0) + count
        assert list(sums.values()) == pytest.approx(due.sums_K.tolist())
        assert [counts.get(key, 0) for key in sums] == due.labels_K.tolist()


def test_a_document_without_a_label_may_have_any_loss():
    microbatch = rows_of([[1, 3]])

    found = losses_by_document(
        microbatch, microbatch.labels_RT, document_losses=np.array([np.nan, 2.0])
    )

    assert found.labels_K.tolist() == [0, 3]
    assert found.sums_K.tolist() == [0.0, 6.0]
    assert found.of_source(0)[0] == 3
    assert found.of_source(1) == (0, None)


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"document_losses": [1.0]}, r"shape \[1\], and the rows hold 2 documents"),
        ({"document_losses": 1.0}, r"shape \[\], and the rows hold 2"),
        ({"losses": "much"}, "are of type <U4"),
        ({"losses": [True, False]}, "are of type bool"),
        ({"losses": np.zeros(2, [("a", "i4"), ("b", "i4")])}, "are of type "),
        ({"losses": [[1.0], [1.0, 2.0]]}, "are no table of numbers"),
    ],
)
def test_losses_that_are_none_are_refused(given_, said):
    microbatch = rows_of([[3], [5]])

    with pytest.raises(ConfigError, match=said):
        losses_by_document(microbatch, microbatch.labels_RT, **given_)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_losses_that_gradients_go_through_are_taken_one_by_one(dtype):
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, dtype)
    microbatch = rows_of([[3], [5]])
    losses = [torch.tensor(value, dtype=dtype, requires_grad=True) for value in (1.0, 2.0)]

    found = losses_by_document(microbatch, microbatch.labels_RT, document_losses=losses)

    assert (found.sums_K / found.labels_K).tolist() == [1.0, 2.0]
    with pytest.raises(ConfigError, match="are no table of numbers"):
        losses_by_document(microbatch, microbatch.labels_RT, losses=[[each] for each in losses])
