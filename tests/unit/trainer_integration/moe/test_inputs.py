"""The model's inputs from rows that the data plane built, not from a test's own."""

from dataclasses import replace

import numpy as np

from omniload.base.ragged import Ragged, Ranges
from omniload.batch.microbatch import IGNORE_LABEL, Batch
from omniload.batch.rows import build_rows, stops_with_next
from omniload.batch.slices import slice_for_cp
from omniload.mix.columns import DOCUMENT_STARTS
from omniload.plan.records import PieceTable
from tests.support.trainer.moe_builders import a_model, all_close
from trainer_integration.moe.inputs import ModelInputs
from trainer_integration.moe.parallel.collectives import Peers
from trainer_integration.training.throughput import token_pairs


def built_rows(pieces, row_offsets, samples, *, length):
    """Build rows of ``(sample, start, stop)`` pieces."""
    table = PieceTable.from_rows(
        [[0, i, 0, start, stop, len(samples[i])] for i, start, stop in pieces]
    )
    read = [
        samples[i][start:stop]
        for (i, start, _), stop in zip(pieces, stops_with_next(table), strict=True)
    ]
    offsets = np.array(row_offsets, np.int64)
    return build_rows(table, offsets, Ranges.of([Ragged.of(read)]), length=length)


SAMPLES = [np.arange(10, 15, dtype=np.int32), np.arange(20, 32, dtype=np.int32)]


def test_whole_documents_arrive_without_the_padding_between_them():
    microbatch = built_rows([(0, 0, 5), (1, 0, 12)], [0, 1, 2], SAMPLES, length=16)

    inputs = ModelInputs.of(microbatch)

    assert inputs.tokens_N.tolist() == [*range(10, 15), *range(20, 32)]
    assert inputs.rows_N.tolist() == [0] * 5 + [1] * 12
    assert inputs.labels_N.tolist() == [11, 12, 13, 14, -100, *range(21, 32), -100]
    assert inputs.labels_in_rows_R().tolist() == [4.0, 11.0]


def test_a_cut_document_predicts_across_the_cut_and_attends_only_within_its_piece():
    microbatch = built_rows([(0, 0, 5), (1, 0, 3), (1, 3, 11)], [0, 2, 3], SAMPLES, length=8)

    inputs = ModelInputs.of(microbatch)

    assert inputs.labels_N.tolist()[7] == 23
    assert IGNORE_LABEL not in inputs.labels_N.tolist()[8:]
    assert inputs.positions_N.tolist() == [*range(5), *range(3), *range(8)]
    assert sorted(count for count, _ in inputs.documents.groups) == [3]


def test_joined_documents_that_stay_apart_attend_each_to_itself_on_sequence_peers_too():
    rows = built_rows([(0, 0, 5), (1, 0, 12)], [0, 1, 2], SAMPLES, length=16)
    starts = Ragged.of([np.array([], np.int32), np.array([2, 9], np.int32)])
    microbatch = replace(rows, columns_K={DOCUMENT_STARTS: starts})

    inputs = ModelInputs.of(microbatch)
    peer = ModelInputs.of(slice_for_cp(microbatch, 0, 2), Peers(rank=0, size=2))

    expected = [*range(5), *range(2), *range(7), *range(3)]
    assert inputs.positions_N.tolist() == expected
    assert inputs.documents.cu_seqlens.tolist() == [0, 5, 5, 7, 14, 17, 17]
    assert peer.documents.cu_seqlens.tolist() == inputs.documents.cu_seqlens.tolist()
    assert inputs.labels_N.tolist()[5:] == [21, -100, *range(23, 29), -100, 30, 31, -100]
    # Padding is none of the model's work: 11 tokens of the first row, 4 of the second.
    batch = Batch(step=0, microbatches=(microbatch,), loss_tokens=1, imbalance=1.0, bound=1.0)
    assert token_pairs(batch) == 25 + 4 + 49 + 9


def test_rows_of_the_data_plane_give_each_document_its_own_logits():
    model = a_model()
    together = built_rows([(0, 0, 5), (1, 0, 12)], [0, 2], SAMPLES, length=20)
    alone = built_rows([(1, 0, 12)], [0, 1], SAMPLES, length=12)

    packed = model.logits(ModelInputs.of(together))

    assert all_close(packed[5:], model.logits(ModelInputs.of(alone)))


def test_the_inputs_do_not_share_memory_with_the_microbatch():
    microbatch = built_rows([(1, 0, 12)], [0, 1], SAMPLES, length=12)
    inputs = ModelInputs.of(microbatch)

    microbatch.tokens_RT[:] = 0

    assert inputs.tokens_N.tolist() == list(range(20, 32))
