"""The batches of a training loop: shapes, types, labels of both kinds, masks and joined microbatches."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from omniload.base.errors import ConfigError
from omniload.batch.arrays import NumpyArrays
from omniload.batch.microbatch import IGNORE_LABEL, Batch, Microbatch
from omniload.batch.slices import slice_for_cp
from omniload.front.batches.rows import PackedRows
from omniload.front.batches.training_batch import TrainingBatch
from trainer_integration.loader.torch_arrays import TorchArrays

FIRST = [[[1, 2, 3], [4, 5]], [[6, 7, 8, 9]]]
SECOND = [[[11, 12], [13]]]
LENGTH = 6


def a_microbatch(rows, *, length):
    """Lay documents, given as lists of tokens, into rows; a label is the next token of its document."""
    tokens, sources = [], []
    bounds = [0]
    for row in rows:
        free = length - sum(map(len, row))
        padding = [[0] * free] if free else []
        tokens.append([token for d in [*row, *padding] for token in d])
        sources += [0] * len(row) + [-1] * len(padding)
        for document in [*row, *padding]:
            bounds.append(bounds[-1] + len(document))
    return Microbatch(
        tokens_RT=np.array(tokens, np.int32).reshape(len(rows), length),
        cu_seqlens=np.array(bounds, np.int32),
        sources_D=np.array(sources, np.int16),
        next_D=np.full(len(sources), IGNORE_LABEL, np.int32),
        keys_K4=np.zeros((0, 4), np.int64),
    )


def rows_of(documents, arrays=None, labels="shifted"):
    return PackedRows(a_microbatch(documents, length=LENGTH), arrays or NumpyArrays(), labels)


def a_batch(*parts, arrays=None, labels="shifted"):
    batch = Batch(
        step=5,
        microbatches=tuple(a_microbatch(part, length=LENGTH) for part in parts),
        loss_tokens=9,
        imbalance=1.0,
        bound=1.0,
        tokens_by_source={"web": 12},
    )
    return TrainingBatch(batch, arrays or NumpyArrays(), labels)


@pytest.mark.parametrize("ask", [lambda b: b["tokens"], lambda b: "labels" in b, tuple])
def test_a_batch_that_is_asked_for_items_says_what_it_has(ask):
    with pytest.raises(TypeError, match=r"no items, found \[.*\]: read batch.tokens"):
        ask(a_batch(FIRST, SECOND))


def test_a_batch_is_moved_in_the_words_that_a_loop_over_tensors_has():
    batch = a_batch(FIRST, SECOND, arrays=TorchArrays())

    moved = batch.to("cpu", non_blocking=True)

    assert torch.equal(moved.tokens, batch.tokens)
    assert [rows.to("cpu", non_blocking=True).tokens.shape for rows in moved.microbatches] == [
        (2, LENGTH),
        (1, LENGTH),
    ]


def test_fields_have_the_types_that_torch_asks_for():
    rows = rows_of(FIRST, TorchArrays())

    types = {
        name: getattr(rows, name).dtype
        for name in ("tokens", "labels", "position_ids", "cu_seqlens")
    }

    assert types == {
        "tokens": torch.int64,
        "labels": torch.int64,
        "position_ids": torch.int64,
        "cu_seqlens": torch.int32,
    }
    assert rows.attention_mask.dtype == torch.bool


def test_a_tensor_may_be_written_to_and_the_plane_keeps_its_own():
    part = a_microbatch(FIRST, length=LENGTH)
    part.tokens_RT.setflags(write=False)
    rows = PackedRows(part, TorchArrays(), "shifted")

    rows.tokens[0, 0] = 99

    assert part.tokens_RT[0, 0] == 1


def test_microbatches_together_are_the_rows_of_the_batch():
    batch = a_batch(FIRST, SECOND)

    tokens = np.concatenate([part.tokens for part in batch.microbatches])

    assert batch.tokens.tolist() == tokens.tolist()
    assert batch.num_rows == 3
    # Every document keeps its tokens: the bounds of the second part follow those of the first.
    flat, bounds = batch.tokens.reshape(-1), batch.cu_seqlens
    documents = [flat[a:b].tolist() for a, b in itertools.pairwise(bounds)]
    assert [d for d in documents if any(d)] == [[1, 2, 3], [4, 5], [6, 7, 8, 9], [11, 12], [13]]
    assert batch.max_seqlen == 4


def test_unshifted_labels_give_a_model_that_shifts_the_same_loss():
    """The oracle is the shift that Hugging Face models do: logits[:, :-1] against labels[:, 1:]."""
    shifted, unshifted = rows_of(FIRST, TorchArrays()), rows_of(FIRST, TorchArrays(), "unshifted")
    logits = torch.randn(*shifted.tokens.shape, 20, generator=torch.Generator().manual_seed(0))

    in_place = cross_entropy(logits.flatten(0, 1), shifted.labels.flatten(), reduction="sum")
    moved = cross_entropy(
        logits[:, :-1].flatten(0, 1), unshifted.labels[:, 1:].flatten(), reduction="sum"
    )

    assert torch.equal(in_place, moved)
    assert int((shifted.labels != IGNORE_LABEL).sum()) == 6
    # A label is the token itself, and the first of a document is predicted by nothing.
    at = unshifted.labels != IGNORE_LABEL
    assert torch.equal(unshifted.labels[at], unshifted.tokens[at])


def test_the_mask_lets_a_token_see_its_document_and_nothing_later():
    rows = rows_of(FIRST)

    mask = rows.attention_mask

    document = np.array([[0, 0, 0, 1, 1, 2], [3, 3, 3, 3, 4, 4]])
    assert mask.shape == (2, 1, LENGTH, LENGTH)
    for row in range(2):
        for i in range(LENGTH):
            seen = [j for j in range(LENGTH) if document[row, j] == document[row, i] and j <= i]
            assert np.flatnonzero(mask[row, 0, i]).tolist() == seen


def test_the_padding_mask_is_true_where_a_row_holds_a_token():
    rows = rows_of([[[1, 2, 3, 4]], [[5]]])

    assert rows.padding_mask.tolist() == [[True] * 4 + [False] * 2, [True] + [False] * 5]


def test_a_batch_moves_to_a_device_with_its_microbatches():
    batch = a_batch(FIRST, SECOND, arrays=TorchArrays()).to("meta")

    assert batch.tokens.device.type == "meta"
    assert batch.microbatches[1].labels.device.type == "meta"
    assert batch.step == 5


def test_numpy_arrays_have_no_device():
    for movable in (rows_of(FIRST), a_batch(FIRST)):
        with pytest.raises(ConfigError, match="have no device 'cuda'"):
            movable.to("cuda")


@pytest.mark.parametrize("device", ["gpu", "cuda:-1", 1.5, "cuda:99", torch.device("cuda", 99)])
def test_a_device_that_is_not_there_is_refused_before_anything_moves(device):
    with pytest.raises(ConfigError, match=r"device .*; name"):
        a_batch(FIRST, arrays=TorchArrays()).to(device)


def test_slices_of_cp_peers_are_joined_and_carry_sources():
    part = a_microbatch([[[1, 2, 3, 4, 5, 6, 7]]], length=8)
    batch = Batch(
        step=0,
        microbatches=(slice_for_cp(part, 0, 2), slice_for_cp(part, 0, 2)),
        loss_tokens=7,
        imbalance=1.0,
        bound=1.0,
    )
    rows = TrainingBatch(batch, NumpyArrays(), "shifted")

    assert rows.tokens.tolist() == [[1, 2, 7, 0]] * 2
    assert rows.source_ids.tolist() == [[0, 0, 0, -1]] * 2
    assert rows.padding_mask.tolist() == [[True, True, True, False]] * 2
    assert rows.columns_in_row.tolist() == rows.microbatches[0].columns_in_row.tolist()
    assert rows.columns_in_row.tolist() == [0, 1, 6, 7]
    with pytest.raises(ConfigError, match="use cu_seqlens"):
        rows.attention_mask  # noqa: B018


def test_each_slice_of_cp_peers_has_the_sources_of_its_own_columns():
    part = a_microbatch([[[1, 2, 3], [4, 5]], [[6, 7, 8, 9, 10, 11, 12]]], length=8)
    part = replace(part, sources_D=np.array([2, 0, -1, 1, -1], np.int16))
    whole = PackedRows(part, NumpyArrays(), "shifted")
    slices = [PackedRows(slice_for_cp(part, i, 2), NumpyArrays(), "shifted") for i in range(2)]

    for rows in slices:
        at = rows.columns_in_row
        assert rows.source_ids.tolist() == whole.source_ids[:, at].tolist()
        assert rows.padding_mask.tolist() == whole.padding_mask[:, at].tolist()


def test_a_slice_without_rows_has_no_sources():
    part = a_microbatch([], length=8)

    rows = PackedRows(slice_for_cp(part, 1, 2), NumpyArrays(), "shifted")

    assert rows.source_ids.shape == rows.padding_mask.shape == (0, 4)


def test_whole_rows_hold_every_column():
    rows = a_batch(FIRST, SECOND, arrays=TorchArrays())

    assert rows.columns_in_row.dtype == torch.int64
    assert rows.columns_in_row.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_batch_shows_its_shape():
    assert (
        repr(a_batch(FIRST, SECOND))
        == "TrainingBatch(step=5, tokens=[3, 6], documents=5, microbatches=2)"
    )


def test_rows_show_their_documents_without_the_padding():
    sliced = PackedRows(
        slice_for_cp(a_microbatch([[[1, 2, 3, 4]]], length=4), 0, 2), NumpyArrays(), "shifted"
    )

    assert repr(rows_of(FIRST)) == "PackedRows(tokens=[2, 6], documents=3)"
    assert repr(sliced) == "PackedRows(tokens=[1, 2])"
